"""Makes the tiny models of `cargo xtask real`: real architectures, toy sizes, random weights.

usage: make_models.py llama|audex|picture FOLDER
"""

import json
import pathlib
import shutil
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, NemotronConfig, PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]
# Where Audex keeps its speech codes; vLLM-Omni's pipeline has this place built in.
CODE_OFFSET = 131077
CODES = 1024


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: prompt lengths are then known from the text."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def llama(folder: pathlib.Path) -> None:
    """Configuration and tokenizer only: the server makes the weights up (`--load-format dummy`)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = tokenizer()
    tokens.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    tokens.save_pretrained(folder)
    LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    # Last: its presence says that the model is whole.
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


def nemotron(language: pathlib.Path) -> None:
    """The language model of Audex, which vLLM-Omni can run as a stage of any pipeline."""
    from safetensors.torch import save_file

    language.mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(language)
    vocabulary, hidden, inner, heads, head = CODE_OFFSET + CODES, 64, 128, 2, 32
    config = NemotronConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head,
        max_position_embeddings=8192,
        norm_eps=1e-5,
        hidden_act="relu2",
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        architectures=["NemotronDenseForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(language)
    random = torch.Generator().manual_seed(0)

    def weight(*shape: int, scale: float = 0.05) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * scale).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    # Only the rows of speech codes are filled, so that nothing else is ever sampled.
    output = torch.zeros(vocabulary, hidden, dtype=torch.bfloat16)
    output[CODE_OFFSET:] = weight(CODES, hidden, scale=1.0)
    weights = {
        "model.embed_tokens.weight": weight(vocabulary, hidden, scale=1.0),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": output,
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{prefix}self_attn.{name}.weight"] = weight(heads * head, hidden)
        weights[f"{prefix}self_attn.o_proj.weight"] = weight(hidden, heads * head)
        weights[f"{prefix}mlp.up_proj.weight"] = weight(inner, hidden)
        weights[f"{prefix}mlp.down_proj.weight"] = weight(hidden, inner)
        weights[f"{prefix}input_layernorm.weight"] = ones.clone()
        weights[f"{prefix}post_attention_layernorm.weight"] = ones.clone()
    save_file(weights, language / "model.safetensors", metadata={"format": "pt"})


def audex(folder: pathlib.Path) -> None:
    """A speech model of two parts, laid out as the pipeline `audex_tts` expects them."""
    from safetensors.torch import save_file
    from vllm_omni.model_executor.models.audex import speech_decoder

    nemotron(folder / "checkpoint_folder_audiogen")
    decoder = folder / "audex_causal_speech_decoder"
    decoder.mkdir(parents=True, exist_ok=True)
    shape = speech_decoder.AudexCausalSpeechDecoderConfig(
        hidden_dim=64, depth=2, heads=2, pos_meb_dim=32, hop_length=320, vq_dim=64
    )
    module = "configuration_audex_causal_speech_decoder"
    shape.architectures = ["AudexCausalSpeechDecoderModel"]
    shape.auto_map = {"AutoConfig": f"{module}.AudexCausalSpeechDecoderConfig"}
    shape.save_pretrained(decoder)
    shutil.copy(pathlib.Path(speech_decoder.__file__).with_name(f"{module}.py"), decoder)
    torch.manual_seed(0)
    state = speech_decoder.AudexCausalSpeechDecoderModel(shape).state_dict()
    save_file({k: v.contiguous() for k, v in state.items()}, decoder / "model.safetensors", metadata={"format": "pt"})
    # Last: its presence says that the model is whole.
    (folder / "config.json").write_text(json.dumps({"model_type": "nemotron_labs_audex"}))


def stable_diffusion(folder: pathlib.Path) -> None:
    """Stable Diffusion 1 with all its parts, a few megabytes large."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    width = 32
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    files = folder.with_name(f"{folder.name}-tokenizer")
    files.mkdir(parents=True, exist_ok=True)
    (files / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (files / "merges.txt").write_text("#version: 0.2\n")
    tokens = CLIPTokenizer.from_pretrained(files, model_max_length=77)
    shutil.rmtree(files)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(vocabulary),
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    denoiser = UNet2DConditionModel(
        sample_size=width,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(width, 2 * width),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=width,
        norm_num_groups=8,
    )
    decoder = AutoencoderKL(
        latent_channels=4,
        block_out_channels=[width, 2 * width],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        norm_num_groups=8,
    )
    StableDiffusionPipeline(
        vae=decoder,
        text_encoder=text,
        tokenizer=tokens,
        unet=denoiser,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


def picture(folder: pathlib.Path) -> None:
    """A language model and Stable Diffusion, as the plug-in's pipeline `tiny_picture` expects them."""
    nemotron(folder / "words")
    stable_diffusion(folder / "picture")
    # Last: its presence says that the model is whole.
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny_picture", "architectures": ["TinyPicture"]}))


if __name__ == "__main__":
    {"llama": llama, "audex": audex, "picture": picture}[sys.argv[1]](pathlib.Path(sys.argv[2]))
