"""The frames of vLLM 0.30.0 and vLLM-Omni 0.30.0: message layouts and their encoding (docs/wire.md)."""

import enum
import time
from typing import Any

import msgspec

# A tensor of at least this many bytes travels in a frame of its own behind the payload.
AUX_THRESHOLD = 256
# The msgpack extension type of raw tensor bytes inside the payload.
RAW_VIEW = 3

ADD = b"\x00"
ABORT = b"\x01"
UTILITY = b"\x03"
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"


class FinishReason(enum.IntEnum):
    """Why a request ended, as on the wire."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class EventType(enum.IntEnum):
    """What happened to a request in the scheduler."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class Event(msgspec.Struct):
    """A scheduler event; the timestamp is CLOCK_MONOTONIC of the engine, in seconds."""

    type: int
    timestamp: float


class OutputKind(enum.IntEnum):
    """What the API process wants to get of a request."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """A map that leaves out what has its default."""

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    output_kind: int = OutputKind.CUMULATIVE


class Request(msgspec.Struct, array_like=True):
    """What an engine of plain vLLM is given: 21 elements."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any] | None
    sampling_params: SamplingParams | None
    pooling_params: Any
    arrival_time: float
    lora_request: Any = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None


class OmniRequest(Request, array_like=True):
    """What a stage of vLLM-Omni is given: 24 elements."""

    additional_information: dict[str, Any] | None = None
    model_intermediate_buffer: dict[str, Any] | None = None
    payload_sender_info: dict[str, Any] | None = None


class PrefillStats(msgspec.Struct):
    """Where the tokens of a prompt came from."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class Output(msgspec.Struct, array_like=True):
    """What one request got in one step of plain vLLM: 17 elements."""

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


class OmniOutput(Output, array_like=True):
    """What one request got in one step of vLLM-Omni: 22 elements."""

    multimodal_output: dict[str, Any] | None = None
    pooling_output_payload: Any = None
    is_segment_finished: bool | None = False
    new_prompt_len_snapshot: int | None = None
    num_generation_tokens: int | None = None


class PrefixCacheStats(msgspec.Struct):
    """Prefix-cache look-ups since the last emission."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class SchedulerStats(msgspec.Struct):
    """The scheduler's gauges at this moment and its counters since the last emission."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: Any = None
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[Any] = []
    spec_decoding_stats: Any = None
    kv_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, int] = {}
    running_lora_adapters: dict[str, int] = {}
    cudagraph_stats: Any = None
    perf_stats: Any = None


class Outputs(msgspec.Struct, array_like=True):
    """One message of an engine: 8 elements."""

    engine_index: int = 0
    # Each element is an Output or an OmniOutput; both lengths occur in one message.
    outputs: list[Any] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = msgspec.field(default_factory=time.monotonic)
    utility_output: list[Any] | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None


class Ready(msgspec.Struct, kw_only=True):
    """An engine's first message on its input socket, a map."""

    max_model_len: int
    num_gpu_blocks: int = 1024
    block_size: int = 16
    dp_stats_address: str | None = None
    dtype: str = "bfloat16"
    vllm_version: str = "0.30.0"
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int = 0
    max_num_seqs: int
    max_num_batched_tokens: int = 2048
    instance_id: str
    supports_lora: bool = False
    max_loras: int = 0
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = 16384
    kv_cache_max_concurrency: float | None = 16.0
    kv_events_config: Any = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False


class Part(msgspec.Struct):
    """Which engine a process is, and how it finds the one that started it."""

    stage: int
    replica: int
    # Empty: the process gives itself one.
    title: str
    # Data-parallel rank: the ZMQ identity.
    rank: int
    handshake: str
    # Where the times of its transfers go.
    times: str | None


class Tensor:
    """Bytes with a type and a shape."""

    def __init__(self, dtype: str, shape: list[int], data: bytes) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data


class Encoder:
    """Encodes a message into its payload frame and the frames of its large tensors."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._tensor)
        self._aux: list[bytes] = []

    def encode(self, message: Any) -> list[bytes]:
        """The frames of a message."""
        # Index 0 is the payload itself, so that the first large tensor has index 1.
        self._aux = [b""]
        self._aux[0] = self._encoder.encode(message)
        return self._aux

    def _tensor(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise TypeError(f"cannot encode {type(value)}")
        if len(value.data) < AUX_THRESHOLD:
            return [value.dtype, value.shape, msgspec.msgpack.Ext(RAW_VIEW, value.data)]
        self._aux.append(value.data)
        return [value.dtype, value.shape, len(self._aux) - 1]


_OUTPUTS = msgspec.msgpack.Decoder(Outputs)


def decode_outputs(payload: bytes | memoryview) -> Outputs:
    """A typed message; an element of another length than 17 or 22 is an error."""
    message = _OUTPUTS.decode(payload)
    kinds = {17: Output, 22: OmniOutput}
    message.outputs = [msgspec.convert(item, kinds[len(item)]) for item in message.outputs]
    return message
