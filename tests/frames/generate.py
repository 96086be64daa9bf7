"""Writes the frames that the tests of `wire` decode, with the values that they must give.

Two sources, one format (a JSON object a line):

  generate.py rows FILE   needs msgspec. The structs of every known release, rebuilt from their field order
                          (docs/wire.md section "Versions") and encoded by msgspec as vLLM does.
  generate.py real FILE   needs vLLM and vLLM-Omni 0.30. Their own classes, encoded by their own encoder.

A line has: name, type (outputs, add, abort, utility, wave, ready), flavor, versions, hex (the payload frame), aux
(sizes of the frames that follow it) and want (what the decoder must say; see agent/tests/wire_frames.rs).
"""

import json
import sys

import msgspec

TIMESTAMP = 5021.25
ARRIVAL = 1700000000.5
ID = "chatcmpl-9f3c51d2a7b84e60-0a1b2c3d"

# --- field order by release -------------------------------------------------------------------------------------

OUTPUT_COMMON = [
    "request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "finish_reason",
    "stop_reason", "events", "kv_transfer_params",
]
OUTPUT = {
    "0.18": ["trace_headers", "num_cached_tokens", "num_external_computed_tokens", "routed_experts",
             "num_nans_in_logits"],
    "0.20": ["trace_headers", "prefill_stats", "routed_experts", "num_nans_in_logits"],
    "0.26": ["ec_transfer_params", "trace_headers", "prefill_stats", "routed_experts", "num_nans_in_logits"],
}
OUTPUT["0.28"] = OUTPUT["0.26"] + ["mm_cache_miss_hashes", "new_sampling_mask"]
OUTPUT["0.29"] = OUTPUT["0.28"] + ["spec_decode_metrics"]
OUTPUT["0.31"] = OUTPUT["0.29"] + ["prompt_token_id_logprobs"]
OUTPUT["0.33"] = OUTPUT["0.31"] + ["error"]

OMNI_OUTPUT = {
    "0.18": [],
    "0.20": ["is_segment_finished", "new_prompt_len_snapshot"],
    "0.24": ["multimodal_output", "is_segment_finished", "new_prompt_len_snapshot"],
    "0.30": ["multimodal_output", "pooling_output_payload", "is_segment_finished", "new_prompt_len_snapshot",
             "num_generation_tokens"],
}

ADD_COMMON = [
    "request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "arrival_time",
    "lora_request", "cache_salt", "data_parallel_rank", "prompt_embeds",
]
ADD = {
    "0.18": ["client_index", "current_wave", "priority", "trace_headers", "resumable", "external_req_id",
             "reasoning_ended"],
}
ADD["0.20.1"] = ADD["0.18"] + ["reasoning_parser_kwargs"]
ADD["0.21"] = ["prompt_is_token_ids"] + ADD["0.20.1"] + ["abort_immediately"]
ADD["0.28"] = ADD["0.21"] + ["session_id"]
ADD["0.31"] = ADD["0.28"] + ["kv_hints"]

OMNI_ADD = {
    "0.18": ["additional_information"],
    "0.26": ["additional_information", "model_intermediate_buffer"],
    "0.30": ["additional_information", "model_intermediate_buffer", "payload_sender_info"],
}

# What an element has where nothing is said of it. All others have None.
DEFAULTS = {
    "new_token_ids": [], "num_cached_tokens": 0, "num_external_computed_tokens": 0, "num_nans_in_logits": 0,
    "is_segment_finished": False, "client_index": 0, "current_wave": 0, "priority": 0, "resumable": False,
    "abort_immediately": False,
}

RELEASES = [
    ("0.18.1", None), ("0.19.0", None), ("0.20.0", None), ("0.20.2", None), ("0.21.0", None), ("0.22.1", None),
    ("0.23.0", None), ("0.24.0", None), ("0.25.1", None), ("0.26.0", None), ("0.27.1", None), ("0.28.0", None),
    ("0.29.0", None), ("0.30.0", None), ("0.31.0", None), ("0.32.0", None), ("0.33.0", None),
    ("0.18.1", "0.18.0"), ("0.20.0", "0.20.0"), ("0.20.1", "0.20.0"), ("0.22.0", "0.22.0"), ("0.24.0", "0.24.0"),
    ("0.26.0", "0.26.0"), ("0.28.0", "0.28.0"), ("0.30.0", "0.30.0"),
    # A pair that does not belong together: vLLM's struct with what vLLM-Omni appends.
    ("0.29.0", "0.28.0"),
]


def key(version):
    return tuple(int(part) for part in version.split("."))


def row(table, version):
    """The newest row that is not newer than this version."""
    return table[max((name for name in table if key(name) <= key(version)), key=key)]


def struct(name, fields):
    pairs = [(field, object, DEFAULTS.get(field)) if field not in ("request_id",) else field for field in fields]
    return msgspec.defstruct(name, pairs, array_like=True, omit_defaults=True, gc=False)


class Event(msgspec.Struct):
    type: int
    timestamp: float


class Release:
    """The structs of one pair of releases."""

    def __init__(self, vllm, omni):
        self.vllm, self.omni = vllm, omni
        base = OUTPUT_COMMON + row(OUTPUT, vllm)
        tail = row(OMNI_OUTPUT, omni) if omni else []
        self.output_fields = base + tail
        self.Output = struct("EngineCoreOutput", base + tail)
        self.BaseOutput = struct("EngineCoreOutput", base)
        add = ADD_COMMON + row(ADD, vllm) + (row(OMNI_ADD, omni) if omni else [])
        self.add_fields = add
        self.Add = struct("EngineCoreRequest", add)

    def outputs(self, outputs, **more):
        values = [more.get("engine_index", 0), outputs, more.get("scheduler_stats"), TIMESTAMP,
                  more.get("utility_output"), more.get("finished_requests"), None, None]
        if key(self.vllm) >= (0, 32):
            values.append(None if more.get("utility_output") else "default")
        return values

    def stats(self, running, waiting, skipped, usage, **more):
        """SchedulerStats as this release writes it: a dataclass, so a map with every key."""
        version = key(self.vllm)
        cache = dict(reset=False, requests=3, queries=900, hits=300, preempted_requests=0, preempted_queries=0,
                     preempted_hits=0)
        if version >= (0, 32):
            cache["hits_by_source"] = {"device": 300}
        spec = dict(num_spec_tokens=3, num_drafts=7, num_draft_tokens=21, num_accepted_tokens=12,
                    num_accepted_tokens_per_pos=[6, 4, 2])
        if version >= (0, 24):
            spec["num_draft_tokens_per_pos"] = [7, 7, 7]
        stats = dict(num_running_reqs=running, num_waiting_reqs=waiting)
        if version >= (0, 20):
            stats["num_skipped_waiting_reqs"] = skipped
        if version >= (0, 32):
            stats["num_kv_fetch_reqs_by_stage"] = {"0": 1}
        stats.update(step_counter=4, current_wave=1, kv_cache_usage=usage)
        if version < (0, 20):
            stats["encoder_cache_usage"] = 0.0
        if version >= (0, 26):
            stats["iteration_details"] = None
        stats.update(
            prefix_cache_stats=cache, connector_prefix_cache_stats=dict(cache, queries=50, hits=20),
            kv_cache_eviction_events=[dict(lifetime_seconds=12.5, idle_seconds=3.25, reuse_gaps_seconds=(1.5, 0.25))],
            spec_decoding_stats=spec, kv_connector_stats={"data": [1, 2]},
            waiting_lora_adapters={"sql": 1}, running_lora_adapters={"sql": 2, "chat": 1}, cudagraph_stats=None,
            perf_stats=dict(num_flops_per_gpu=2 * 10**15, num_read_bytes_per_gpu=10**10, num_write_bytes_per_gpu=10**9,
                            debug_stats=None))
        if version >= (0, 31):
            stats["ec_connector_stats"] = None
        want = dict(
            running=running, waiting=waiting, skipped_waiting=skipped if version >= (0, 20) else None,
            kv_cache_usage=usage, prefix_cache=[900, 300], external_prefix_cache=[50, 20],
            kv_evictions=[[12.5, 3.25, [1.5, 0.25]]], spec_decode=[7, 21, 12, [6, 4, 2]], waiting_lora=["sql"],
            running_lora=["sql", "chat"], perf=[2e15, 1e10, 1e9])
        return stats, want


def ext(data):
    return msgspec.msgpack.Ext(3, data)


def tensor(dtype, shape, data):
    return [dtype, shape, data]


def sparse(want):
    """Without the fields that have nothing to say: None, and 0 or nothing where the field can't be None."""
    plain = ("new_tokens", "nans", "segment_finished", "engine_index", "outputs", "finished", "utility_reply",
             "resumable", "pooling", "waiting_lora", "running_lora", "kv_evictions")
    return {name: value for name, value in want.items() if value is not None and not (name in plain and not value)}


def want_output(request_id=ID, **more):
    return sparse(dict(request_id=request_id, **more))


def want_outputs(outputs, **more):
    if more.get("stats"):
        more["stats"] = sparse(more["stats"])
    return sparse(dict(timestamp=TIMESTAMP, outputs=outputs, **more))


def want_request(**more):
    return sparse(dict(dict(request_id=ID, arrival=ARRIVAL, n=1, client_index=0), **more))


def rows():
    for vllm, omni in RELEASES:
        yield from release_cases(Release(vllm, omni))


def release_cases(r):
    def case(name, kind, value, want):
        label = f"vllm {r.vllm}" + (f" omni {r.omni}" if r.omni else "")
        return dict(name=f"{label}: {name}", type=kind, flavor="omni" if r.omni else "vllm", vllm=r.vllm, omni=r.omni,
                    hex=msgspec.msgpack.encode(value).hex(), aux=[], want=want)

    def out(request_id=ID, **more):
        return r.Output(request_id, **{name: value for name, value in more.items() if name in r.output_fields})

    has = r.output_fields.__contains__

    # Three requests get a token each.
    counts = [2, 300, 70000] if has("num_generation_tokens") else [None] * 3
    ids = [f"{ID}{i}" for i in range(3)]
    yield case(
        "decode tokens", "outputs",
        r.outputs([out(i, new_token_ids=[7 + n * 40000], num_generation_tokens=counts[n]) for n, i in enumerate(ids)],
                  engine_index=1),
        want_outputs([want_output(i, new_tokens=1, num_generation_tokens=counts[n]) for n, i in enumerate(ids)],
                     engine_index=1))

    # First token with prompt accounting, events and statistics.
    stats, want_stats = r.stats(2, 5, 1, 0.125)
    prefill = dict(num_prompt_tokens=400, num_computed_tokens=100, num_cached_tokens=300, num_local_cached_tokens=256,
                   num_external_cached_tokens=44)
    if key(r.vllm) >= (0, 26):
        prefill["num_cache_creation_tokens"] = 0
    events = [Event(1, 5020.5), Event(2, 5020.75), Event(3, 5020.875), Event(1, 5020.9), Event(2, 5021.0)]
    want_events = [5020.9, 5020.75, 1]
    first = out(new_token_ids=[151644], events=events, prefill_stats=prefill, num_cached_tokens=300,
                num_external_computed_tokens=44, trace_headers={"traceparent": "00-4bf9-01"},
                routed_experts=["<i4", [1, 2], ext(b"\1\0\0\0\2\0\0\0")], stop_reason="</s>",
                new_logprobs=[["<i8", [1, 1], ext(bytes(8))], ["<f4", [1, 1], ext(bytes(4))], ["<i8", [1], ext(bytes(8))],
                              None],
                spec_decode_metrics=dict(num_spec_tokens=3, histogram=[1, 2], num_draft_tokens=3, per_step_accepted=[1],
                                         per_step_drafted=[3]),
                prompt_token_id_logprobs=None, num_nans_in_logits=2, is_segment_finished=False)
    yield case(
        "first token with statistics", "outputs",
        r.outputs([first], scheduler_stats=stats, finished_requests={ID}),
        want_outputs(
            [want_output(new_tokens=1, events=want_events, nans=2,
                         prefill=[400, 100, 300, 256, 44] if has("prefill_stats") else None)],
            stats=want_stats, finished=[ID]))

    # Finish, with everything that may stand in the last output.
    last = out(finish_reason=1, kv_transfer_params={"kv_wait_s": 0.375, "connector_type": "NixlConnector", "kv": [1]},
               mm_cache_miss_hashes=["a1"], error=dict(code=500, message="m", retryable=True), is_segment_finished=True)
    yield case(
        "finish with kv wait", "outputs", r.outputs([last], finished_requests={ID}),
        want_outputs([want_output(finish="length", kv_wait=[0.375, "NixlConnector"],
                                  segment_finished=has("is_segment_finished"))], finished=[ID]))

    if r.omni:
        audio = {"sr": [tensor("int64", [], ext((24000).to_bytes(8, "little")))],
                 "audio": tensor("float32", [2, 1920], 1), "codes": tensor("int64", [1, 3], ext(bytes(24)))}
        where = "multimodal_output" if has("multimodal_output") else "pooling_output"
        chunks = {"model_outputs": [tensor("float32", [480], 1), tensor("float32", [1, 240], {"oob": 7})],
                  "sample_rate": 16000}
        rate = {"sampling_rate": 8000, "output_sample_rate": tensor("float32", [1], ext(bytes.fromhex("0080bb46"))),
                "audio": tensor("float32", [0], ext(b""))}
        yield case(
            "audio", "outputs",
            r.outputs([out(ids[0], **{where: audio}), out(ids[1], **{where: chunks}), out(ids[2], **{where: rate})]),
            want_outputs([want_output(ids[0], audio=[1920, 24000]), want_output(ids[1], audio=[720, 16000]),
                          want_output(ids[2], audio=[0, 24000])]))
        yield case(
            "abort of vLLM's own length among vLLM-Omni's", "outputs",
            r.outputs([r.BaseOutput(ids[0], finish_reason=2), out(ids[1], new_token_ids=[1]),
                       r.BaseOutput(ids[2], finish_reason=2)]),
            want_outputs([want_output(ids[0], finish="abort"), want_output(ids[1], new_tokens=1),
                          want_output(ids[2], finish="abort")]))

    stats, want_stats = r.stats(0, 0, 0, 0.0)
    yield case("statistics alone", "outputs", r.outputs([], scheduler_stats=stats), want_outputs([], stats=want_stats))
    yield case("utility reply", "outputs", r.outputs([], utility_output=[12, None, [None, True]]),
               want_outputs([], utility_reply=True))

    def add(**more):
        return r.Add(ID, **{name: value for name, value in more.items() if name in r.add_fields})

    yield case(
        "request", "add",
        add(prompt_token_ids=list(range(100, 150)), sampling_params=dict(temperature=0.0, max_tokens=512, n=2,
                                                                      output_kind=2, stop="END", _all_stop_token_ids=[2],
                                                                      extra_args={"a": {}}),
            arrival_time=ARRIVAL, client_index=3, resumable=True, external_req_id="chatcmpl-9f3c51d2a7b84e60",
            trace_headers={}, additional_information=None, payload_sender_info=None),
        want_request(prompt_tokens=50, max_tokens=512, n=2, client_index=3, resumable=True, output_kind="final_only", stop=True,
                 external_req_id="chatcmpl-9f3c51d2a7b84e60"))
    yield case(
        "request of embeddings with default and with unlimited length", "add",
        add(sampling_params={"max_tokens": None}, arrival_time=ARRIVAL, prompt_embeds=tensor("bfloat16", [9, 64], 1)),
        want_request())
    yield case("request with default length", "add",
               add(prompt_token_ids=[], sampling_params={}, arrival_time=ARRIVAL), want_request(prompt_tokens=0, max_tokens=16))
    yield case(
        "pooling request", "add",
        add(prompt_token_ids=[1, 2], pooling_params=["embed", None], arrival_time=ARRIVAL),
        want_request(prompt_tokens=2, pooling=True))


def real():
    """Frames of the real classes and the real encoder."""
    import numpy as np
    import torch
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import (EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs,
                                EngineCoreReadyResponse, EngineCoreRequest, FinishReason, UtilityOutput)
    from vllm.v1.metrics.stats import KVCacheEvictionEvent, PrefillStats, PrefixCacheStats, SchedulerStats
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackEncoder, UtilityResult
    from vllm.v1.spec_decode.metrics import SpecDecodingStats
    from vllm_omni.engine import OmniEngineCoreOutput, OmniEngineCoreOutputs, OmniEngineCoreRequest

    # vLLM-Omni replaces the names that it imports: the classes below it are its bases.
    BaseOutput = OmniEngineCoreOutput.__mro__[1]
    BaseOutputs = OmniEngineCoreOutputs.__mro__[1]
    BaseRequest = OmniEngineCoreRequest.__mro__[1]
    del EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

    def case(flavor, name, kind, value, want):
        frames = [bytes(frame) for frame in MsgpackEncoder().encode(value)]
        omni = "0.30.0" if flavor == "omni" else None
        return dict(name=f"real {flavor} 0.30.0: {name}", type=kind, flavor=flavor, vllm="0.30.0", omni=omni,
                    hex=frames[0].hex(), aux=[len(frame) for frame in frames[1:]], want=want)

    for flavor, Outputs, Output, Request in (("vllm", BaseOutputs, BaseOutput, BaseRequest),
                                             ("omni", OmniEngineCoreOutputs, OmniEngineCoreOutput,
                                              OmniEngineCoreRequest)):
        omni = flavor == "omni"
        count = {"num_generation_tokens": 5} if omni else {}
        ngen = 5 if omni else None
        yield case(flavor, "decode token", "outputs",
                   Outputs(outputs=[Output(request_id=ID, new_token_ids=[42], **count)], timestamp=TIMESTAMP),
                   want_outputs([want_output(new_tokens=1, num_generation_tokens=ngen)]))
        ids = [f"{ID[:-2]}{i:02d}" for i in range(64)]
        yield case(flavor, "64 decode tokens", "outputs",
                   Outputs(outputs=[Output(request_id=i, new_token_ids=[1000 + n], **count)
                                    for n, i in enumerate(ids)], timestamp=TIMESTAMP),
                   want_outputs([want_output(i, new_tokens=1, num_generation_tokens=ngen) for i in ids]))
        logprobs = LogprobsLists(np.zeros((1, 6), np.int32), np.zeros((1, 6), np.float32), np.zeros(1, np.int32), None)
        prefill = PrefillStats(num_prompt_tokens=400, num_computed_tokens=100, num_cached_tokens=300,
                               num_local_cached_tokens=256, num_external_cached_tokens=44)
        events = [EngineCoreEvent(EngineCoreEventType.QUEUED, 5020.5),
                  EngineCoreEvent(EngineCoreEventType.SCHEDULED, 5020.75)]
        first = dict(request_id=ID, new_token_ids=[151644], new_logprobs=logprobs, events=events,
                     prefill_stats=prefill)
        want_first = want_output(new_tokens=1, events=[5020.5, 5020.75, 0], prefill=[400, 100, 300, 256, 44])
        yield case(flavor, "first token", "outputs", Outputs(outputs=[Output(**first)], timestamp=TIMESTAMP),
                   want_outputs([want_first]))
        stats = SchedulerStats(
            num_running_reqs=2, num_waiting_reqs=5, num_skipped_waiting_reqs=1, kv_cache_usage=0.125,
            prefix_cache_stats=PrefixCacheStats(requests=3, queries=900, hits=300),
            kv_cache_eviction_events=[KVCacheEvictionEvent(12.5, 3.25, (1.5, 0.25))],
            spec_decoding_stats=SpecDecodingStats(3, 7, 21, 12, [6, 4, 2], [7, 7, 7]),
            running_lora_adapters={"sql": 2})
        want_stats = dict(
            running=2, waiting=5, skipped_waiting=1, kv_cache_usage=0.125, prefix_cache=[900, 300],
            external_prefix_cache=None, kv_evictions=[[12.5, 3.25, [1.5, 0.25]]], spec_decode=[7, 21, 12, [6, 4, 2]],
            waiting_lora=[], running_lora=["sql"], perf=None)
        yield case(flavor, "first token with statistics", "outputs",
                   Outputs(outputs=[Output(**first)], timestamp=TIMESTAMP, scheduler_stats=stats),
                   want_outputs([want_first], stats=want_stats))
        yield case(flavor, "statistics alone", "outputs", Outputs(timestamp=TIMESTAMP, scheduler_stats=stats),
                   want_outputs([], stats=want_stats))
        yield case(flavor, "finish", "outputs",
                   Outputs(outputs=[Output(request_id=ID, new_token_ids=[2], finish_reason=FinishReason.STOP,
                                           stop_reason=2, **count)], timestamp=TIMESTAMP, finished_requests={ID}),
                   want_outputs([want_output(new_tokens=1, finish="stop", num_generation_tokens=ngen)], finished=[ID]))
        yield case(flavor, "abort of vLLM's own length", "outputs",
                   Outputs(outputs=[BaseOutput(request_id=ID, new_token_ids=[], finish_reason=FinishReason.ABORT)],
                           timestamp=TIMESTAMP, finished_requests={ID}),
                   want_outputs([want_output(finish="abort")], finished=[ID]))
        yield case(flavor, "pooling output", "outputs",
                   Outputs(outputs=[Output(request_id=ID, new_token_ids=[], pooling_output=torch.zeros(1024),
                                           finish_reason=FinishReason.STOP)], timestamp=TIMESTAMP),
                   want_outputs([want_output(finish="stop")]))
        yield case(flavor, "utility reply", "outputs",
                   Outputs(timestamp=TIMESTAMP, utility_output=UtilityOutput(7, result=UtilityResult(True))),
                   want_outputs([], utility_reply=True))
        params = SamplingParams(temperature=0.7, max_tokens=128, n=1, stop=["User:"],
                                output_kind=RequestOutputKind.DELTA, logit_bias={42: 1.5})
        want = want_request(prompt_tokens=100, max_tokens=128, external_req_id=ID, output_kind="delta", stop=True)
        base = dict(request_id=ID, prompt_token_ids=list(range(200, 300)), mm_features=None, sampling_params=params,
                    pooling_params=None, arrival_time=ARRIVAL, lora_request=None, cache_salt=None,
                    data_parallel_rank=None, external_req_id=ID)
        yield case(flavor, "request", "add", Request(**base), want)
        yield case(flavor, "request with default length", "add",
                   Request(**dict(base, sampling_params=SamplingParams(), client_index=1)),
                   want_request(prompt_tokens=100, max_tokens=16, client_index=1, external_req_id=ID))
        yield case(flavor, "request without a limit", "add",
                   Request(**dict(base, sampling_params=SamplingParams(max_tokens=None, n=3), resumable=True)),
                   want_request(prompt_tokens=100, n=3, resumable=True, external_req_id=ID))
        yield case(flavor, "request of embeddings", "add",
                   Request(**dict(base, prompt_token_ids=None, prompt_embeds=torch.zeros(9, 64))),
                   want_request(max_tokens=128, external_req_id=ID, output_kind="delta", stop=True))
        yield case(flavor, "abort", "abort", [ID, ID + "x"], [ID, ID + "x"])
        yield case(flavor, "sleep", "utility", (0, 99, "sleep", (2, "abort")), ["sleep", 2])
        yield case(flavor, "wake up", "utility", (0, 100, "wake_up", (None,)), ["wake_up", None])
        yield case(flavor, "wave", "wave", (3, 0), None)
        ready = EngineCoreReadyResponse(
            max_model_len=8192, num_gpu_blocks=4096, block_size=16, dp_stats_address=None, dtype="bfloat16",
            vllm_version="0.30.0", world_size=1, data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1,
            decode_context_parallel_size=1, data_parallel_rank=0, max_num_seqs=256, max_num_batched_tokens=8192,
            instance_id="a1", supports_lora=False, max_loras=0)
        yield case(flavor, "ready", "ready", ready, [8192, "0.30.0"])

    audio = {"audio": torch.zeros(1, 1920), "sr": torch.tensor(24000)}
    yield case("omni", "audio chunk", "outputs",
               OmniEngineCoreOutputs(outputs=[OmniEngineCoreOutput(request_id=ID, new_token_ids=[],
                                                                   multimodal_output=audio)], timestamp=TIMESTAMP),
               want_outputs([want_output(audio=[1920, 24000])]))
    yield case("omni", "audio chunks in a list, rates in several types", "outputs",
               OmniEngineCoreOutputs(outputs=[
                   OmniEngineCoreOutput(request_id=ID, new_token_ids=[], multimodal_output={
                       "model_outputs": [torch.zeros(30), torch.zeros(1, 40)], "sr": [torch.tensor([16000.0])]}),
                   OmniEngineCoreOutput(request_id=ID, new_token_ids=[], multimodal_output={
                       "audio": np.zeros((2, 8), np.int16), "sr": np.array(22050, np.int32), "sample_rate": 44100},
                       finish_reason=FinishReason.STOP, is_segment_finished=True)], timestamp=TIMESTAMP),
               want_outputs([want_output(audio=[70, 16000]),
                             want_output(audio=[8, 44100], finish="stop", segment_finished=True)]))
    yield case("omni", "kv wait", "outputs",
               OmniEngineCoreOutputs(outputs=[OmniEngineCoreOutput(request_id=ID, new_token_ids=[], kv_transfer_params={
                   "kv_wait_s": 0.375, "connector_type": "NixlConnector"})], timestamp=TIMESTAMP),
               want_outputs([want_output(kv_wait=[0.375, "NixlConnector"])]))


def main():
    source, path = sys.argv[1:]
    cases = {"rows": rows, "real": real}[source]()
    with open(path, "w", encoding="utf-8") as file:
        for case in cases:
            file.write(json.dumps(case, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
