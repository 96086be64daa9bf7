"""Writes diffusion.jsonl: messages of a diffusion stage's sockets, encoded by vLLM-Omni's own classes.

Needs an environment with vllm-omni 0.30.0. Each frame is a list of parts: hex digits, or the number of bytes of an
image or tensor, which the reader makes up. Results carry real pictures of 1024 x 1024 pixels.
"""

import json
import pathlib

import numpy as np
import torch
from PIL import Image
from vllm_omni.diffusion import data
from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniMsgpackEncoder
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.outputs import OmniRequestOutput

ID = "img_gen-0123456789abcdef-1a2b3c4d"
RANDOM = np.random.default_rng(0)
# What was drawn, to cut it out of the frames again.
DRAWN: list[bytes] = []


def pixels(*shape: int) -> np.ndarray:
    array = RANDOM.integers(0, 256, shape, dtype=np.uint8)
    DRAWN.append(array.tobytes())
    return array


def picture(side: int = 1024) -> Image.Image:
    return Image.fromarray(pixels(side, side, 3), mode="RGB")


def result(images: list, prompt=None, metrics: dict | None = None, peak_memory_mb: float = 20480.5, **more) -> dict:
    """A result with the keys and the order of `DiffusionEngine.step_streaming`."""
    timings = {
        "image_num": len(images),
        "resolution": None,
        "width": 1024,
        "height": 1024,
        "num_inference_steps": 28,
        "preprocess_time_ms": 0.0,
        "diffusion_engine_exec_time_ms": 5600.0,
        "output_ready_wait_time_ms": 0.0,
        "postprocess_time_ms": 12.5,
        "scheduler_num_waiting_reqs": 3,
        **(metrics or {}),
    }
    output = OmniRequestOutput.from_diffusion(
        ID, images, prompt or {"prompt": "a lighthouse"}, timings, peak_memory_mb=peak_memory_mb, **more
    )
    return {"type": "result", "output": output}


def request(prompt, **params) -> dict:
    sampling = StageDiffusionClient._sampling_params_to_dict(OmniDiffusionSamplingParams(**params))
    return {
        "type": "add_request",
        "request_id": ID,
        "prompt": prompt,
        "sampling_params": sampling,
        "kv_sender_info": None,
        "kv_transfer_params": None,
        "payload_sender_info": None,
    }


def edit() -> dict:
    return {"prompt": "a lighthouse, at night", "multi_modal_data": {"image": picture()}}


profiled = {
    "scheduler_queue_wait_ms": 0.0,
    "vae_decode_time_ms": 250.0,
    "forward_time_ms": 5040.0,
    "kv_recv_time_ms": 40.0,
}
started = {data.DIFFUSION_REQUEST_LIFECYCLE_KEY: data.DIFFUSION_REQUEST_STARTED}
messages = {
    "request": request({"prompt": "a lighthouse"}, num_inference_steps=28, height=1024, width=1024, seed=1),
    "request with default steps": request({"prompt": "a lighthouse"}),
    "request to edit": request(edit(), num_inference_steps=28),
    "abort": {"type": "abort", "request_ids": [ID, "img_gen-2"]},
    "call": {"type": "collective_rpc", "rpc_id": "1", "method": "profile", "timeout": None, "args": [], "kwargs": {}},
    "shutdown": {"type": "shutdown"},
    "result": result([picture()], metrics={"scheduler_queue_wait_ms": 1250.0}),
    "result with profile": result([picture()], metrics=profiled, stage_durations={"picture.vae.decode": 0.25}),
    "four images": result([picture() for _ in range(4)]),
    "three small images": result([picture(32), picture(48), picture(64)]),
    "result of an edit": result([picture()], prompt=edit()),
    "tensor of images": result([torch.from_numpy(pixels(2, 3, 512, 768))]),
    "video": result([pixels(8, 480, 640, 3)], final_output_type="video"),
    "part of a stream": result([picture()], finished=False),
    "with custom output": result([picture()], custom_output={"prompt_embeds": torch.zeros(4, 4)}),
    "without memory figure": result([picture()], peak_memory_mb=0.0),
    "started": {
        "type": "result",
        "output": OmniRequestOutput.from_diffusion(ID, [], {"prompt": "x"}, {}, custom_output=started, finished=False),
    },
    "result that is an error": {"type": "result", "output": OmniRequestOutput.from_error(ID, "out of memory")},
    "metrics": {"type": "metrics", "metrics": {"scheduler_num_waiting_reqs": 2}},
    "error": {
        "type": "error",
        "request_id": ID,
        "error": "out of memory",
        "status_code": None,
        "error_type": None,
        "metrics": {"scheduler_num_waiting_reqs": 1},
    },
    "error of a call": {"type": "error", "rpc_id": "1", "error": "no such method"},
    "return of a call": {"type": "rpc_result", "rpc_id": "1", "result": [True]},
}


def parts(payload: bytes) -> list[str | int]:
    """Hex digits, and lengths of what was drawn."""
    found = sorted((payload.index(drawn), len(drawn)) for drawn in DRAWN if drawn in payload)
    at, out = 0, []
    for start, length in found:
        out += [payload[at:start].hex(), length]
        at = start + length
    return [*out, payload[at:].hex()]


encoder = OmniMsgpackEncoder()
with (pathlib.Path(__file__).parent / "diffusion.jsonl").open("w") as file:
    for name, message in messages.items():
        file.write(json.dumps({"name": name, "parts": parts(encoder.encode(message))}) + "\n")
