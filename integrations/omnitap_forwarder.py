"""Tells a host's omnitap agent what happens inside vLLM-Omni's orchestrator: requests, stages, audio, sessions.

A plug-in of vLLM, in one file and without dependencies. Put its folder on PYTHONPATH of the server, with the folder
`omnitap_forwarder-1.dist-info` beside this file, and mount the agent's socket; nothing of the server is changed:

    PYTHONPATH=/opt/omnitap/integrations vllm-omni serve ...

Where VLLM_PLUGINS is set, add `omnitap_forwarder` to it. The format is docs/stat-events.md of omnitap. The values are
those that vLLM-Omni hands to its own metrics, also where `--disable-log-stats` keeps it from counting them.

It never blocks or fails the pipeline. An event is put into a bounded queue; a thread of its own sends what is there
every 20 ms. Without an agent an event costs about a microsecond and is dropped.

    OMNITAP_STAT_SOCKET     path of the agent's socket, /run/omnitap/stats.sock by default; empty: off
    OMNITAP_STAT_TRANSFERS  1: also vLLM-Omni's own figures of transfers. They tell of the orchestrator's hand-over to the
                            next stage, without sizes, and would replace what the agent sees of the payloads themselves.
"""

import atexit
import collections
import contextvars
import functools
import importlib.abc
import importlib.util
import itertools
import json
import os
import socket
import sys
import threading
import time

VERSION = 1
DEFAULT_PATH = "/run/omnitap/stats.sock"
# Events that wait to be sent; what exceeds it is dropped and counted.
MAX_QUEUE = 20_000
# Seconds between two looks at the queue: events go in batches.
SEND_INTERVAL = 0.02
# Seconds between attempts to reach the agent.
CONNECT_INTERVAL = 1.0
# Seconds that the agent may take no byte before the connection counts as dead.
SEND_TIMEOUT = 5.0
# Longest event in bytes that the agent takes.
MAX_EVENT = 64 << 10

# Fields of StageRequestStats that the agent reads.
STAGE_FIELDS = (
    "num_tokens_in",
    "num_tokens_out",
    "stage_gen_time_ms",
    "final_output_type",
    "audio_generated_frames",
    "audio_sample_rate",
    "image_pixels",
    "num_inference_steps",
    "output_unit_type",
    "output_unit_count",
    "image_time_to_first_output_ms",
    "diffusion_metrics",
    "pipeline_timings",
)


class Forwarder:
    """A queue, and the thread that sends it."""

    def __init__(self, path):
        self.path = path
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self):
        """Starts anew: threads and connections do not survive a fork."""
        self.queue = collections.deque()
        self.wake = threading.Event()
        self.lock = threading.Lock()
        self.thread = None
        self.away = False
        self.stopping = False
        self.lost = 0

    def emit(self, event, **fields):
        """Queues an event. Cheap, and never raises."""
        if self.away:
            return
        if self.thread is None:
            self.start()
        if len(self.queue) >= MAX_QUEUE:
            self.lost += 1
            return
        self.queue.append((time.time(), event, fields))
        if not self.wake.is_set():
            self.wake.set()

    def start(self):
        """Starts the thread, with the first event: most processes of a pipeline never have one."""
        with self.lock:
            if self.thread is None:
                try:
                    thread = threading.Thread(target=self.run, name="omnitap-forwarder", daemon=True)
                    thread.start()
                    self.thread = thread
                    atexit.register(self.stop)
                except RuntimeError:
                    # The interpreter is on its way out.
                    self.away = True

    def stop(self, patience=0.2):
        """Sends what is queued, at the end of the process."""
        self.stopping = True
        self.wake.set()
        if self.thread is not None:
            self.thread.join(patience)

    def run(self):
        """The thread: connects, and sends batches for as long as the agent is there."""
        while not self.stopping:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connected = False
            try:
                sock.settimeout(SEND_TIMEOUT)
                sock.connect(self.path)
                connected = True
                if self.away:
                    # What slipped in while nobody was there is of another time.
                    self.queue.clear()
                    self.away = False
                self.send_all(sock)
            except OSError:
                pass
            finally:
                self.away = True
                # Without an agent there is nobody to lose them.
                self.lost += len(self.queue) if connected else 0
                self.queue.clear()
                sock.close()
            self.wake.clear()
            self.wake.wait(CONNECT_INTERVAL)

    def send_all(self, sock):
        """Sends until the connection ends."""
        while True:
            # An agent that is gone is noticed at once, and not with the next event.
            if not self.wake.wait(1.0):
                sock.setblocking(False)
                try:
                    if sock.recv(1) == b"":
                        return
                except BlockingIOError:
                    pass
                finally:
                    sock.settimeout(SEND_TIMEOUT)
                continue
            self.wake.clear()
            stopping = self.stopping
            lost, self.lost = self.lost, 0
            if lost:
                self.queue.append((time.time(), "lost", {"events": lost}))
            lines = []
            while self.queue:
                line = encode(*self.queue.popleft())
                self.lost += not line
                lines.append(line)
                if len(lines) == 256:
                    sock.sendall(b"".join(lines))
                    lines.clear()
            sock.sendall(b"".join(lines))
            if stopping:
                return
            time.sleep(SEND_INTERVAL)


def encode(at, event, fields):
    """An event as a line; nothing where it can't be one."""
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        line = json.dumps({"v": VERSION, "t": at, "event": event, **fields}, allow_nan=False, default=plain)
    except (TypeError, ValueError):
        return b""
    line = line.encode() + b"\n"
    return line if len(line) <= MAX_EVENT else b""


def plain(value):
    """Numbers of other libraries as Python's."""
    return value.item() if hasattr(value, "item") else str(value)


forwarder = Forwarder("")
# vLLM-Omni counts a result once; its number keeps two results of one stage apart.
results = itertools.count(1)


class Current(threading.local):
    """What the samples are about that vLLM-Omni gives its metrics in this thread."""

    result = None
    failing = None
    size = None
    rx = None


current = Current()


# The request that an answer is written for: the task that writes it is the one that gave it to the pipeline.
writing = contextvars.ContextVar("omnitap_request", default=None)


def before(cls, name, hook):
    """Has `hook` called with the arguments of a method before it runs; what the hook raises stays here."""
    method = cls.__dict__.get(name)
    if method is None or hasattr(method, "omnitap"):
        return

    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        try:
            hook(*args, **kwargs)
        except Exception:  # noqa: BLE001 - the pipeline comes first
            pass
        return method(*args, **kwargs)

    wrapped.omnitap = True
    setattr(cls, name, wrapped)


def around(cls, name, enter, leave):
    """Has `enter` called before a method and `leave` with what it gave behind it."""
    method = cls.__dict__.get(name)
    if method is None or hasattr(method, "omnitap"):
        return

    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        state = None
        try:
            state = enter(*args, **kwargs)
        except Exception:  # noqa: BLE001
            pass
        try:
            return method(*args, **kwargs)
        finally:
            try:
                leave(state)
            except Exception:  # noqa: BLE001
                pass

    wrapped.omnitap = True
    setattr(cls, name, wrapped)


# ---- requests and stages: OmniBase._process_single_result and what it gives the metrics ----


class Result:
    """A stage's result, while vLLM-Omni takes it."""

    def __init__(self, request_id, stage_id, replica_id, stats):
        self.request_id = request_id
        self.stage_id = stage_id
        self.replica_id = replica_id
        self.stats = stats
        self.stage_type = None
        self.peak_memory_mb = None
        # Frames and seconds of audio, of the request's last stage alone.
        self.frames = None
        self.duration_s = None
        self.finished = None


def enter_result(_base, result, stage_id, *_args, **_kwargs):
    current.result = Result(result.request_id, stage_id, getattr(result, "replica_id", None), result.metrics)
    return current.result


def leave_result(result):
    current.result = None
    if result is None:
        return
    stats = result.stats
    # Only results that vLLM-Omni counts: a message that it has seen already gives no generation time.
    if result.stage_type is not None and stats is not None:
        fields = {name: getattr(stats, name, None) for name in STAGE_FIELDS}
        if result.frames is not None:
            fields["final_output_type"] = "audio"
            fields["audio_generated_frames"] = result.frames
            if result.duration_s:
                fields["audio_sample_rate"] = round(result.frames / result.duration_s)
        elif fields["final_output_type"] == "audio":
            # Not the request's last stage: its audio is not counted.
            fields["final_output_type"] = None
        forwarder.emit(
            "stage",
            request_id=result.request_id,
            stage_id=result.stage_id,
            replica_id=result.replica_id,
            batch_id=next(results),
            stage_type=result.stage_type,
            peak_memory_mb=result.peak_memory_mb,
            **fields,
        )
    if result.finished is not None:
        forwarder.emit("finished", request_id=result.request_id, **result.finished)


def stage_gen_time(_metrics, _stage, stage_type, _gen_time_s):
    if current.result is not None:
        current.result.stage_type = "diffusion" if stage_type == "diffusion" else "llm"


def peak_memory(_metrics, _stage, peak_memory_mb):
    if current.result is not None:
        current.result.peak_memory_mb = peak_memory_mb


def succeeded(_metrics, e2e_seconds, finished_reason="stop"):
    if current.result is not None:
        current.result.finished = {"e2e_s": e2e_seconds, "finish_reason": finished_reason}


def tokens(_metrics, prompt_tokens, generation_tokens):
    if current.result is not None and current.result.finished is not None:
        current.result.finished.update(prompt_tokens=prompt_tokens, generation_tokens=generation_tokens)


def audio_frames(_metrics, _stage, _replica, n_frames):
    if current.result is not None:
        current.result.frames = int(n_frames)


def audio_duration(_metrics, _stage, _replica, duration_s):
    if current.result is not None:
        current.result.duration_s = duration_s


def enter_failure(_base, request_id, *_args, **_kwargs):
    current.failing = request_id
    return request_id


def leave_failure(_request_id):
    current.failing = None


def failed(_metrics, reason):
    # Called once a request, where it is to be counted.
    if current.failing is not None:
        forwarder.emit("failed", request_id=current.failing, reason=reason)


def added(_state, request_id, *_args, **_kwargs):
    writing.set(request_id)
    forwarder.emit("added", request_id=request_id)


def dispatched(orchestrator, state):
    if not state.running_counter_registered and orchestrator._running_counter is not None:
        forwarder.emit("dispatched", request_id=state.request_id, stage_id=0)


def waiting(_orchestrator, stage_id, replica_id, n_waiting):
    forwarder.emit("scheduler", stage_id=stage_id, replica_id=replica_id, num_waiting_reqs=max(int(n_waiting), 0))


def replica_gone(_orchestrator, stage_id, replica_id):
    forwarder.emit("replica_gone", stage_id=stage_id, replica_id=replica_id)


def kv_wait(_metrics, connector_type, kv_wait_s):
    forwarder.emit("kv_wait", connector_type=connector_type, kv_wait_s=kv_wait_s)


# ---- streams, transfers, sessions ----


def first_packet(_metrics, stage, replica, ttfp_seconds):
    forwarder.emit(
        "first_packet", request_id=writing.get(), stage_id=int(stage), replica_id=int(replica), ttfp_s=ttfp_seconds
    )


def underrun(_metrics, stage, replica, underrun_s):
    forwarder.emit(
        "stream_end",
        request_id=writing.get(),
        outcome="completed",
        stage_id=int(stage),
        replica_id=int(replica),
        underrun_s=max(underrun_s, 0.0),
    )


def speech_completed(_metrics):
    forwarder.emit("stream_end", request_id=writing.get(), outcome="completed", speech=True)


def speech_aborted(_metrics, reason):
    forwarder.emit("stream_end", request_id=writing.get(), outcome=reason, speech=True)


def edge(from_stage, from_replica, to_stage, to_replica):
    return {
        "from_stage": int(from_stage),
        "from_replica": int(from_replica),
        "to_stage": int(to_stage),
        "to_replica": int(to_replica),
    }


def transfer_size(_metrics, *args):
    current.size = int(args[4])


def transfer_tx(_metrics, *args):
    size, current.size = current.size, None
    forwarder.emit("transfer_sent", size_bytes=size, tx_time_ms=args[4] * 1000.0, **edge(*args[:4]))


def transfer_rx(_metrics, *args):
    current.rx = args[4]


def transfer_in_flight(_metrics, *args):
    rx, current.rx = current.rx, None
    forwarder.emit(
        "transfer_received",
        rx_decode_time_ms=None if rx is None else rx * 1000.0,
        in_flight_time_ms=args[4] * 1000.0,
        **edge(*args[:4]),
    )


class Sessions:
    """Realtime sessions with voice activity detection."""

    def __init__(self):
        self.lock = threading.Lock()
        self.open = 0

    def change(self, by):
        with self.lock:
            self.open = max(self.open + by, 0)
            forwarder.emit("vad", active_sessions=self.open)


sessions = Sessions()


def patch_base(module):
    around(module.OmniBase, "_process_single_result", enter_result, leave_result)
    around(module.OmniBase, "_record_request_failure_once", enter_failure, leave_failure)


def patch_state(module):
    before(module.ClientRequestState, "__init__", added)


def patch_orchestrator(module):
    # The methods moved between classes of this module from release to release.
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            before(cls, "_register_running_request", dispatched)
            before(cls, "_update_stage_replica_waiting", waiting)
            before(cls, "_remove_stage_replica_waiting", replica_gone)


def patch_prometheus(module):
    metrics = module.OmniPrometheusMetrics
    before(metrics, "observe_stage_gen_time", stage_gen_time)
    before(metrics, "set_peak_memory", peak_memory)
    before(metrics, "request_succeeded", succeeded)
    before(metrics, "observe_tokens", tokens)
    before(metrics, "inc_requests_failed", failed)
    before(metrics, "observe_kv_wait", kv_wait)


def patch_modality(module):
    metrics = module.OmniModalityMetrics
    before(metrics, "inc_audio_frames", audio_frames)
    before(metrics, "observe_audio_duration", audio_duration)
    before(metrics, "observe_audio_ttfp", first_packet)
    before(metrics, "observe_audio_underrun", underrun)
    before(metrics, "inc_speech_stream_completed", speech_completed)
    before(metrics, "inc_speech_stream_aborted", speech_aborted)


def patch_transfer(module):
    metrics = module.OmniTransferMetrics
    before(metrics, "observe_size", transfer_size)
    before(metrics, "observe_tx_time", transfer_tx)
    before(metrics, "observe_rx_time", transfer_rx)
    before(metrics, "observe_in_flight_time", transfer_in_flight)


def patch_realtime(module):
    metrics = module.RealtimeVADMetrics
    before(metrics, "session_started", lambda _metrics: sessions.change(1))
    before(metrics, "session_finished", lambda _metrics: sessions.change(-1))
    before(metrics, "observe_inference", lambda _metrics, ms: forwarder.emit("vad", inference_ms=ms))
    before(metrics, "observe_endpoint_delay", lambda _metrics, ms: forwarder.emit("vad", endpoint_delay_ms=ms))
    before(metrics, "error", lambda _metrics, reason: forwarder.emit("vad", error=reason))


PATCHES = {
    "vllm_omni.entrypoints.omni_base": patch_base,
    "vllm_omni.entrypoints.client_request_state": patch_state,
    "vllm_omni.engine.orchestrator": patch_orchestrator,
    "vllm_omni.metrics.prometheus": patch_prometheus,
    "vllm_omni.metrics.modality": patch_modality,
    "vllm_omni.metrics.realtime": patch_realtime,
}


def patch(module):
    """Hooks into a module of vLLM-Omni; one that has other classes is left as it is."""
    try:
        PATCHES[module.__name__](module)
    except AttributeError:
        pass


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are yet to be imported."""

    def __init__(self):
        self.finding = threading.local()

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES or getattr(self.finding, "name", None) == name:
            return None
        self.finding.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.finding.name = None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                patch(module)

            spec.loader.exec_module = exec_module
        return spec


def install():
    """The plug-in's entry point. vLLM calls it in each of its processes, perhaps more than once."""
    global forwarder
    path = os.environ.get("OMNITAP_STAT_SOCKET", DEFAULT_PATH)
    if not path or any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    forwarder = Forwarder(path)
    if os.environ.get("OMNITAP_STAT_TRANSFERS") == "1":
        PATCHES["vllm_omni.metrics.transfer"] = patch_transfer
    sys.meta_path.insert(0, Finder())
    for name in PATCHES:
        if name in sys.modules:
            patch(sys.modules[name])
