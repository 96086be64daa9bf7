"""The scenario file: what a pipeline is and what happens in it, so that every expected value is known."""

import json
from typing import Any

import msgspec


class Chunk(msgspec.Struct, forbid_unknown_fields=True):
    """One piece of audio."""

    # Samples; 0 is an output with an empty tensor.
    frames: int
    # Steps since the request's last output.
    steps: int = 1


class Payload(msgspec.Struct, forbid_unknown_fields=True):
    """What a stage hands to the next one through shared memory (connector.py)."""

    bytes: int
    # Seconds that it takes the sender longer to write it, and the receiver to read it.
    put_delay: float = 0.0
    get_delay: float = 0.0
    # Seconds between this put and the one before, where they come faster.
    every: float = 0.0
    # Else the receiver leaves it there, and the sender removes it.
    taken: bool = True
    # Segments that are no transfer are made just before.
    foreign: bool = False


class Picture(msgspec.Struct, forbid_unknown_fields=True):
    """What a diffusion stage makes, and what it reports of it."""

    width: int = 64
    height: int = 64
    count: int = 1
    # "image" or "video".
    kind: str = "image"
    steps: int = 4
    step_ms: float = 20.0
    preprocess_ms: float = 0.0
    postprocess_ms: float = 2.0
    # Timings that only the pipeline profiler gives.
    profile: bool = False
    kv_recv_ms: float = 0.0
    peak_memory_mb: float = 1024.5


class Work(msgspec.Struct, forbid_unknown_fields=True):
    """What one stage does for one request."""

    # Tokens to generate, one a step. An audio stage makes `chunks` instead.
    tokens: int = 0
    chunks: list[Chunk] = []
    sample_rate: int = 24000
    # Tokens of the prompt and how many of them the prefix cache holds.
    prompt: int = 16
    cached: int = 0
    external_cached: int = 0
    # Steps until the first output.
    prefill_steps: int = 1
    finish: str = "length"
    # The request is preempted once, for two steps, before this token.
    preempt_at: int | None = None
    # Nothing more comes from here on. An abort then meets no token under way, so that counts are exact.
    stall_at: int | None = None
    # The engine reports an error instead of this token.
    error_at: int | None = None
    # A finished wait for a KV transfer is reported after the end.
    kv_wait_ms: float | None = None
    logprobs: int | None = None
    # One goes to the next stage with each output, what is left with the last. The next stage makes as many outputs as
    # it has payloads, and its last one when it has all.
    payloads: list[Payload] = []
    # In a diffusion stage, in place of tokens; `stall_at` and `error_at` then count steps.
    picture: Picture | None = None


class Image(msgspec.Struct, forbid_unknown_fields=True):
    """What a diffusion stage inside the API process makes of a request."""

    width: int = 64
    height: int = 64
    n: int = 1
    steps: int = 20
    # How long it takes.
    ms: float = 50.0
    peak_memory_mb: float | None = None
    # It fails instead.
    fails: bool = False


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A request of a user."""

    # One entry a stage.
    stages: list[Work]
    prefix: str = "speech"
    max_tokens: int | None = None
    # A streamed response: the stages are asked for what is new, else for the whole in the end.
    stream: bool = True
    # It comes over HTTP (web.py): "pcm", "wav", "events", "socket" (streamed speech), "whole" (with `stream` false),
    # "refused", or "image". Else the API process makes it up.
    web: str | None = None
    image: Image | None = None
    # Seconds from the start of the phase.
    at: float = 0.0
    # The user goes away this many seconds later.
    abort_after: float | None = None
    # This many requests, `every` seconds apart.
    repeat: int = 1
    every: float = 0.0


class Act(msgspec.Struct, forbid_unknown_fields=True):
    """Something that happens to the pipeline itself."""

    # crash: the engine reports its death and ends; kill: SIGKILL; start: a new process for a stage and replica;
    # flood: the stage sends `flood_frames` frames as fast as it can.
    do: str
    stage: int = 0
    replica: int = 0
    at: float = 0.0


class Phase(msgspec.Struct, forbid_unknown_fields=True):
    """What happens after one `go`."""

    requests: list[Request] = []
    acts: list[Act] = []


class Stage(msgspec.Struct, forbid_unknown_fields=True):
    """A stage and how it works."""

    # "ar" (autoregressive, answers aborts with an output), "generation" (does not), or "diffusion", which is given a
    # request when the stage before has finished.
    kind: str = "ar"
    replicas: int = 1
    step_ms: float = 20.0
    max_num_seqs: int = 8
    max_model_len: int = 4096
    # 1-byte wake-up frames a second while a step is under way.
    wakeups_hz: float = 10.0
    flood_frames: int = 0
    flood_bytes: int = 0


class Scenario(msgspec.Struct, forbid_unknown_fields=True):
    """A whole scenario."""

    stages: list[Stage]
    phases: list[Phase]
    # These four come from the command line.
    flavor: str = "omni"
    log_stats: bool = True
    data_parallel: int = 1
    api_servers: int = 1
    # When a later stage gets a request: "finished" (the stage before has finished) or "prewarm" (at once).
    forward: str = "finished"
    # Start the last phase again when it has ended, for ever.
    forever: bool = False


def load(path: str) -> Scenario:
    """Reads a scenario; an unknown key is an error."""
    with open(path, encoding="utf-8") as file:
        scenario = msgspec.convert(json.load(file), Scenario)
    for phase in scenario.phases:
        for request in phase.requests:
            if len(request.stages) != len(scenario.stages):
                raise ValueError(f"{path}: a request has one entry in `stages` for each stage")
            for stage, work in zip(scenario.stages, request.stages, strict=True):
                if stage.kind == "diffusion" and work.picture is None:
                    work.picture = Picture()
            if request.stages and request.stages[-1].payloads:
                raise ValueError(f"{path}: the last stage has nobody to hand payloads to")
    return scenario


def plan(scenario: Scenario, phase: int, request: int, stage: int) -> Work:
    """What a stage does for a request of a phase."""
    return scenario.phases[phase].requests[request].stages[stage]


def has_payloads(scenario: Scenario) -> bool:
    """Whether anything goes from stage to stage through a connector."""
    requests = (request for phase in scenario.phases for request in phase.requests)
    return any(work.payloads for request in requests for work in request.stages)


def external_id(prefix: str, phase: int, request: int, number: int) -> str:
    """The id that a user sees. It carries the position in the scenario, which is how an engine knows its part."""
    return f"{prefix}-{phase:02x}{request:04x}{number:010x}"


def position(request_id: str) -> tuple[int, int]:
    """Phase and request of an internal id."""
    digits = request_id.split("-")[-2]
    return int(digits[:2], 16), int(digits[2:6], 16)


def to_json(scenario: Scenario) -> Any:
    """For handing it to another process."""
    return msgspec.to_builtins(scenario)
