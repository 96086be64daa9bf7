"""What the agent should say: every observation, computed from the messages that the API process sent and got.

Times are those of sending, as an observer of the sockets has them: an engine's own time stamp, and the clock just
before a send. Where the API process is late to read a message (a busy machine), that changes nothing here.

One JSON object a line: `t` CLOCK_MONOTONIC seconds, `family`, `labels` without the model name, `value`, and `times`
for histograms (absent for counters). A reader adds them up, from a point in time on where it likes.
"""

import asyncio
import json
import time
from typing import Any, TextIO

import msgspec

import scenario as sc
import wire


class Log:
    """The file of observations."""

    def __init__(self, path: str | None) -> None:
        # Line-buffered, so that a killed pipeline leaves whole lines.
        self._file: TextIO | None = open(path, "w", buffering=1, encoding="utf-8") if path else None

    def add(self, family: str, labels: dict[str, Any], value: float = 1) -> None:
        """Adds to a counter."""
        self._write({"family": family, "labels": labels, "value": value})

    def observe(self, family: str, labels: dict[str, Any], value: float) -> None:
        """Observes in a histogram."""
        self._write({"family": family, "labels": labels, "value": value, "times": 1})

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        row["t"] = time.monotonic()
        row["labels"] = {name: str(value) for name, value in row["labels"].items()}
        self._file.write(json.dumps(row) + "\n")


class AtStage(msgspec.Struct):
    """One request at one stage."""

    replica: int
    # When the API process handed it over: wall clock as in the request, and monotonic.
    arrival: float
    submitted: float
    max_tokens: int | None
    prompt: int
    # Bytes of the message that handed over the output of the stage before; None: it comes by another way.
    carried: int | None = None
    queued: float | None = None
    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    preemptions: int = 0
    computed: int = 0
    finished: bool = False
    # Audio: samples, rate, and (monotonic time, bytes of 16-bit PCM) of each non-empty chunk.
    has_audio: bool = False
    frames: int = 0
    rate: int = 24000
    chunks: list[tuple[float, int]] = []
    # Denoising steps that a diffusion stage was asked for.
    steps: int = 0


class Request(msgspec.Struct):
    """One request of a user."""

    id: str
    arrival: float
    stages: dict[int, AtStage]
    stream: bool
    over: bool = False
    # Of a request over HTTP: samples as they come, None at the end, or what went wrong. It is told there when audio
    # is written.
    heard: asyncio.Queue[int | Exception | None] | None = None


class Truth:
    """Applies the formulas of vLLM and of the vLLM-Omni metrics document to what the API process saw."""

    def __init__(self, scenario: sc.Scenario, log: Log) -> None:
        self.log = log
        self.omni = scenario.flavor == "omni"
        self.last_stage = len(scenario.stages) - 1

    def iteration(self, stage: int, replica: int, outputs: list[wire.Output], known: dict[str, Request]) -> None:
        """One message of an engine with at least one output."""
        computed = sum(
            o.prefill_stats.num_computed_tokens for o in outputs if o.prefill_stats and o.request_id in known
        )
        tokens = sum(len(o.new_token_ids) for o in outputs if o.request_id in known)
        self._observe("iteration_tokens_total", stage, replica, computed + tokens)

    def stats(self, stage: int, replica: int, stats: wire.SchedulerStats) -> None:
        """A scheduler snapshot."""
        self._add("prefix_cache_queries_total", stage, replica, stats.prefix_cache_stats.queries)
        self._add("prefix_cache_hits_total", stage, replica, stats.prefix_cache_stats.hits)

    def output(self, request: Request, stage: int, output: wire.Output, timestamp: float) -> None:
        """An output of a request that is open at this stage."""
        at = request.stages[stage]
        replica = at.replica
        at.tokens += len(output.new_token_ids)
        self._add("generation_tokens_total", stage, replica, len(output.new_token_ids))
        for event in output.events or []:
            if event.type == wire.EventType.QUEUED:
                at.queued = event.timestamp
            elif event.type == wire.EventType.SCHEDULED:
                at.scheduled = at.scheduled or event.timestamp
            else:
                at.preemptions += 1
                self._add("num_preemptions_total", stage, replica, 1)
        if at.first is None:
            at.first = timestamp
            if self.omni:
                self.handed_on(request, stage)
            self._observe("time_to_first_token_seconds", stage, replica, wall(timestamp) - at.arrival)
            self._prefill(stage, at, output.prefill_stats)
        else:
            self._observe("inter_token_latency_seconds", stage, replica, timestamp - at.last)
        at.last = timestamp
        if isinstance(output, wire.OmniOutput) and output.multimodal_output:
            self._audio(request, stage, at, output.multimodal_output, timestamp)

    def handed_on(self, request: Request, stage: int) -> None:
        """A stage answers: the output of the stage before may have come with the request itself."""
        at = request.stages[stage]
        carried, at.carried = at.carried, None
        if carried is None:
            return
        before = request.stages[stage - 1]
        edge = {
            "from_stage": stage - 1,
            "from_replica": before.replica,
            "to_stage": stage,
            "to_replica": at.replica,
        }
        self.log.observe("vllm_omni:transfer_size_bytes", edge, carried)
        self.log.observe("vllm_omni:transfer_tx_s", edge, at.submitted - before.last)
        if at.queued is not None:
            self.log.observe("vllm_omni:transfer_in_flight_s", edge, at.queued - at.submitted)

    def _prefill(self, stage: int, at: AtStage, stats: wire.PrefillStats | None) -> None:
        if stats is None:
            return
        at.computed = stats.num_prompt_tokens - stats.num_cached_tokens
        self._add("prompt_tokens_total", stage, at.replica, stats.num_prompt_tokens)
        self._add("prompt_tokens_cached_total", stage, at.replica, stats.num_cached_tokens)
        for source, tokens in (
            ("local_compute", stats.num_computed_tokens),
            ("local_cache_hit", stats.num_local_cached_tokens),
            ("external_kv_transfer", stats.num_external_cached_tokens),
        ):
            self._add("prompt_tokens_by_source_total", stage, at.replica, tokens, source=source)

    def _audio(
        self, request: Request, stage: int, at: AtStage, tensors: dict[str, object], timestamp: float
    ) -> None:
        at.has_audio = True
        _, shape, _ = tensors["model_outputs"]
        frames = shape[-1]
        _, _, rate = tensors["sr"]
        at.rate = int.from_bytes(rate.data, "little")
        if request.heard is not None:
            request.heard.put_nowait(frames)
        elif frames and not at.frames and request.stream:
            labels = {"stage": stage, "replica": at.replica}
            self.log.observe("vllm_omni:audio_ttfp_s", labels, wall(timestamp) - request.arrival)
        at.frames += frames
        if frames:
            at.chunks.append((timestamp, 2 * frames))

    def finished(self, request: Request, stage: int, reason: str) -> None:
        """The last output of a request at a stage."""
        at = request.stages[stage]
        replica = at.replica
        at.finished = True
        self._add("request_success_total", stage, replica, 1, finished_reason=reason)
        self._observe("e2e_request_latency_seconds", stage, replica, wall(at.last) - at.arrival)
        self._observe("request_prompt_tokens", stage, replica, at.prompt)
        self._observe("request_generation_tokens", stage, replica, at.tokens)
        self._observe("request_prefill_kv_computed_tokens", stage, replica, at.computed)
        if at.max_tokens is not None:
            self._observe("request_params_max_tokens", stage, replica, at.max_tokens)
        decode = at.last - at.first
        self._observe("request_decode_time_seconds", stage, replica, decode)
        per_token = decode / (at.tokens - 1) if at.tokens > 1 else 0
        self._observe("request_time_per_output_token_seconds", stage, replica, per_token)
        if at.scheduled is not None and at.queued is not None:
            self._observe("request_queue_time_seconds", stage, replica, at.scheduled - at.queued)
            self._observe("request_prefill_time_seconds", stage, replica, at.first - at.scheduled)
            self._observe("request_inference_time_seconds", stage, replica, at.last - at.scheduled)
            self._observe("request_num_preemptions", stage, replica, at.preemptions)
        if not self.omni:
            # vLLM-Omni leaves these two out.
            self._observe("request_params_n", stage, replica, 1)
            self._observe("request_max_num_generation_tokens", stage, replica, at.tokens)
        if self.omni and reason not in ("abort", "error"):
            generation = at.last - at.submitted
            self.log.observe("vllm_omni:stage_gen_time_s", {"stage": stage, "stage_type": "llm"}, generation)

    def picture(self, request: Request, stage: int, result: dict[str, Any]) -> None:
        """The result of a diffusion stage."""
        at = request.stages[stage]
        at.finished = True
        at.last = result["stage_durations"]["sent"]
        generation = at.last - at.submitted
        place = {"stage": stage, "replica": at.replica}
        metrics = result["metrics"]
        is_image = result["final_output_type"] == "image"

        def seconds(family: str, key: str, divisor: float = 1, labels: dict[str, Any] = place) -> None:
            if key in metrics:
                self.log.observe(f"vllm_omni:{family}", labels, metrics[key] / 1000 / divisor)

        self.log.observe("vllm_omni:stage_gen_time_s", {"stage": stage, "stage_type": "diffusion"}, generation)
        self.log.observe("vllm_omni:num_inference_steps", {}, at.steps)
        seconds("stage_in_queue_s", "scheduler_queue_wait_ms", labels={"stage": stage})
        seconds("diffusion_exec_s", "diffusion_engine_exec_time_ms")
        seconds("diffusion_exec_per_step_s", "diffusion_engine_exec_time_ms", at.steps)
        seconds("diffusion_preprocess_s", "preprocess_time_ms")
        seconds("diffusion_postprocess_s", "postprocess_time_ms")
        seconds("vae_decode_s", "vae_decode_time_ms")
        seconds("diffusion_forward_s", "forward_time_ms")
        seconds("diffusion_kv_load_s", "kv_recv_time_ms")
        if not is_image:
            return
        seconds("denoise_step_latency_s", "forward_time_ms", at.steps)
        images = [image["shape"] for image in result["images"]]
        self.log.add("vllm_omni:image_count_total", {}, len(images))
        self.log.observe("vllm_omni:image_pixels", {}, sum(height * width for height, width, _ in images))
        self.log.observe("vllm_omni:image_ttfp_s", place, generation)

    def complete(self, request: Request, reason: str) -> None:
        """The request has ended at its last stage, with a result."""
        request.over = True
        if request.heard is not None:
            request.heard.put_nowait(None)
        if not self.omni:
            return
        at = request.stages[self.last_stage]
        self.log.add("vllm_omni:requests_success_total", {"finished_reason": reason})
        self.log.observe("vllm_omni:e2e_request_latency_s", {}, wall(at.last) - request.arrival)
        # Told once a request, when it is complete: what aborted requests made is in no sum of the pipeline.
        self.log.add("vllm_omni:prompt_tokens_total", {}, request.stages[0].prompt)
        tokens = sum(at.tokens for at in request.stages.values())
        self.log.add("vllm_omni:generation_tokens_total", {}, tokens)
        if not at.has_audio:
            return
        labels = {"stage": self.last_stage, "replica": at.replica}
        if at.frames == 0:
            self.log.add("vllm_omni:audio_skipped_requests_total", labels | {"reason": "no_audio_data"})
            return
        duration = at.frames / at.rate
        generation = at.last - at.submitted
        self.log.add("vllm_omni:audio_frames_total", labels, at.frames)
        self.log.observe("vllm_omni:audio_duration_s", labels, duration)
        self.log.observe("vllm_omni:audio_rtf", labels, generation / duration)
        if not request.stream or request.heard is not None:
            return
        underrun = worst_underrun(at.chunks, at.rate)
        self.log.observe("vllm_omni:audio_underrun_s", labels, underrun)
        if underrun <= 0.1:
            self.log.add("vllm_omni:audio_continuity_ok_total", labels | {"threshold_ms": 100})

    def failed(self, request: Request, reason: str) -> None:
        """The request has ended without a result."""
        request.over = True
        if request.heard is not None:
            request.heard.put_nowait(RuntimeError(reason))
        if self.omni:
            self.log.add("vllm_omni:requests_failed_total", {"reason": reason})
            self.log.add("vllm_omni:requests_success_total", {"finished_reason": "abort"})

    def kv_wait(self, params: dict[str, object]) -> None:
        """A finished wait for a KV transfer."""
        labels = {"connector_type": params["connector_type"]}
        self.log.observe("vllm_omni:kv_wait_s", labels, params["kv_wait_s"])

    def _add(self, name: str, stage: int, replica: int, value: float, **extra: str) -> None:
        self.log.add(f"vllm:{name}", {"stage": stage, "replica": replica} | extra, value)

    def _observe(self, name: str, stage: int, replica: int, value: float) -> None:
        self.log.observe(f"vllm:{name}", {"stage": stage, "replica": replica}, value)


def wall(monotonic: float) -> float:
    """Wall clock at a time of CLOCK_MONOTONIC."""
    return monotonic - time.monotonic() + time.time()


def worst_underrun(chunks: list[tuple[float, int]], rate: int) -> float:
    """How far a player that starts at the first chunk falls behind, in seconds."""
    bytes_a_second = rate * 2
    start, received = chunks[0]
    worst = 0.0
    for time_, size in chunks[1:]:
        worst = max(worst, ((time_ - start) * bytes_a_second - received) / bytes_a_second)
        received += size
    return worst
