"""A pipeline of two stages that no released model has in a tiny size: a language model, then Stable Diffusion.

The diffusion stage runs in a process of its own, as it does behind any other stage.
"""

SIDE = 64
NAME = "tiny_picture"


def describe(source_outputs, prompt=None, _needs_multimodal=False, _streaming=None):
    """What the diffusion stage is asked for: the user's prompt, and how much the language model had to say."""
    if not source_outputs:
        return None
    asked = prompt[0] if isinstance(prompt, list) else prompt
    text = asked.get("prompt") if isinstance(asked, dict) else getattr(asked, "prompt", None)
    tokens = source_outputs[0].outputs[0].cumulative_token_ids
    return {"prompt": f"{text or 'nothing'} ({len(tokens)} tokens)"[:60], "height": SIDE, "width": SIDE}


def register():
    """Makes the pipeline known to the API server."""
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, register_pipeline
    from vllm_omni.config.stage_config import PipelineConfig, StageExecutionType, StagePipelineConfig

    if NAME in OMNI_PIPELINES:
        return
    words = StagePipelineConfig(
        stage_id=0,
        model_stage="words",
        execution_type=StageExecutionType.LLM_AR,
        input_sources=(),
        owns_tokenizer=True,
        engine_output_type="token_ids",
        model_subdir="words",
        tokenizer_subdir="words",
    )
    picture = StagePipelineConfig(
        stage_id=1,
        model_stage="picture",
        execution_type=StageExecutionType.DIFFUSION,
        input_sources=(0,),
        final_output=True,
        final_output_type="image",
        model_subdir="picture",
        model_arch="StableDiffusionPipeline",
        custom_process_input_func=f"{__name__}.describe",
        omni_kv_config={"need_recv_cache": False},
    )
    register_pipeline(PipelineConfig(model_type=NAME, stages=(words, picture)))
