"""Decodes the frames of `wire.rs` as an engine's client does: msgspec, into the typed structs.

Needs msgspec and nothing else. Prints a JSON object a line: {"name", "outputs", "ns"}; ns is the best of many short
rounds, in nanoseconds a frame. Options: --frames FILE (default tests/frames/real-0.30.jsonl), --seconds S a frame.
"""

import argparse
import json
import pathlib
import time
from typing import Any

import msgspec

FRAMES = [f"real {flavor} 0.30.0: {name}" for flavor in ("vllm", "omni")
          for name in ("decode token", "64 decode tokens", "first token", "first token with statistics")]


class Event(msgspec.Struct):
    type: int
    timestamp: float


class PrefillStats(msgspec.Struct):
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_local_cached_tokens: int
    num_external_cached_tokens: int
    num_cache_creation_tokens: int = 0


class CacheStats(msgspec.Struct):
    reset: bool
    requests: int
    queries: int
    hits: int
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class Eviction(msgspec.Struct):
    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]


class SchedulerStats(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_skipped_waiting_reqs: int
    step_counter: int
    current_wave: int
    kv_cache_usage: float
    iteration_details: Any
    prefix_cache_stats: CacheStats
    connector_prefix_cache_stats: CacheStats | None
    kv_cache_eviction_events: list[Eviction]
    spec_decoding_stats: dict[str, Any] | None
    kv_connector_stats: dict[str, Any] | None
    waiting_lora_adapters: dict[str, int]
    running_lora_adapters: dict[str, int]
    cudagraph_stats: Any
    perf_stats: Any


class Output(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[Event] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None


class OmniOutput(Output):
    multimodal_output: dict[str, Any] | None = None
    pooling_output_payload: Any = None
    is_segment_finished: bool | None = False
    new_prompt_len_snapshot: int | None = None
    num_generation_tokens: int | None = None


class Outputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: Any = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None


class OmniOutputs(Outputs):
    outputs: list[OmniOutput] = []


def measure(decode, frame, seconds):
    """Nanoseconds a decode: the least disturbed of many short rounds, each well below a scheduler's time slice."""
    number = 1
    best = float("inf")
    end = time.perf_counter_ns() + seconds * 1e9
    while True:
        start = time.perf_counter_ns()
        for _ in range(number):
            decode(frame)
        now = time.perf_counter_ns()
        if now - start < 200_000:
            number *= 2
        else:
            best = min(best, (now - start) / number)
            if now > end:
                return best


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", default=root / "tests/frames/real-0.30.jsonl", type=pathlib.Path)
    parser.add_argument("--seconds", default=1.0, type=float)
    args = parser.parse_args()
    cases = {case["name"]: case for case in map(json.loads, args.frames.read_text().splitlines())}
    for name in FRAMES:
        frame = bytes.fromhex(cases[name]["hex"])
        decoder = msgspec.msgpack.Decoder(OmniOutputs if "omni" in name else Outputs)
        outputs = len(decoder.decode(frame).outputs)
        ns = measure(decoder.decode, frame, args.seconds)
        print(json.dumps({"name": name, "outputs": outputs, "ns": round(ns, 1)}), flush=True)


if __name__ == "__main__":
    main()
