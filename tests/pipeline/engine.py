"""One engine: the core process of a stage replica (vLLM-Omni) or of a data-parallel rank (vLLM)."""

import os
import queue
import signal
import struct
import threading
import time
import uuid
from collections import deque
from typing import Any

import msgspec
import setproctitle
import zmq

import connector
import lifetime
import scenario as sc
import wire

# The client index under which the data-parallel coordinator gets its messages.
COORDINATOR = -1


class Running:
    """A request inside the scheduler."""

    def __init__(self, request: wire.Request, work: sc.Work) -> None:
        self.id = request.request_id
        self.client = request.client_index
        self.work = work
        self.prompt = len(request.prompt_token_ids or [])
        self.steps_left = max(work.prefill_steps, work.chunks[0].steps if work.chunks else 1)
        self.done = 0
        self.started = False
        self.paused = 0
        self.preempted = False
        self.events = [wire.Event(wire.EventType.QUEUED, time.monotonic())]

    def total(self) -> int:
        """Number of outputs that carry something."""
        return len(self.work.chunks) if self.work.chunks else self.work.tokens


class Engine:
    """Scheduler and sockets of one engine."""

    def __init__(self, scenario: sc.Scenario, part: wire.Part) -> None:
        self.scenario = scenario
        self.part = part
        self.stage = scenario.stages[part.stage]
        self.omni = scenario.flavor == "omni"
        # Not a SimpleQueue: a signal near the end of its timeout makes CPython 3.11 wait without end.
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.kv_waits: list[tuple[float, Running]] = []
        self.finished: dict[int, list[str]] = {}
        self.cache = wire.PrefixCacheStats()
        self.stats_sent = 0.0
        self.counts_sent = (0, 0)
        # Only where there is something to move: its receiving thread costs time.
        self.connector: connector.Connector | None = None
        if sc.has_payloads(scenario):
            self.connector = connector.Connector(part.stage, part.replica, part.times)
        self.steps = 0
        self.crash = False
        self.flood = False
        self.wakeups = zmq.Context.instance().socket(zmq.PUB)
        self.wakeups.bind(f"inproc://{uuid.uuid4()}")
        self.wakeup_due = 0.0

    def start(self) -> None:
        """Registers with the API process and starts the socket threads."""
        context = zmq.Context.instance()
        identity = struct.pack("<H", self.part.rank)
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 5000
            dealer.identity = identity
            dealer.connect(self.part.handshake)
            dealer.send(msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": False}))
            reply = msgspec.msgpack.decode(dealer.recv())
            addresses = reply["addresses"]
            dealer.send(msgspec.msgpack.encode({"status": "READY", "local": True, "headless": False}))
        for target, args in (
            (self._receive, (addresses["inputs"], identity)),
            (self._send, (addresses["outputs"], addresses["coordinator_output"])),
        ):
            threading.Thread(target=target, args=args, daemon=True).start()

    def _receive(self, addresses: list[str], identity: bytes) -> None:
        context = zmq.Context()
        poller = zmq.Poller()
        kind = wire.OmniRequest if self.omni else wire.Request
        decoder = msgspec.msgpack.Decoder(kind)
        for address in addresses:
            dealer = context.socket(zmq.DEALER)
            dealer.set_hwm(0)
            dealer.identity = identity
            dealer.connect(address)
            ready = wire.Ready(
                max_model_len=self.stage.max_model_len,
                max_num_seqs=self.stage.max_num_seqs,
                instance_id=uuid.uuid4().hex[:8],
                data_parallel_size=self.scenario.data_parallel,
                data_parallel_rank=self.part.rank,
            )
            dealer.send(msgspec.msgpack.encode(ready))
            poller.register(dealer, zmq.POLLIN)
        while True:
            for dealer, _ in poller.poll():
                tag, *data = dealer.recv_multipart(copy=False)
                tag = bytes(tag.buffer)
                if tag == wire.ADD:
                    self.inbox.put((tag, decoder.decode(data[0].buffer)))
                else:
                    self.inbox.put((tag, msgspec.msgpack.decode(data[0].buffer)))

    def _send(self, addresses: list[str], coordinator: str | None) -> None:
        context = zmq.Context()
        encoder = wire.Encoder()

        def push(address: str) -> zmq.Socket:
            socket = context.socket(zmq.PUSH)
            socket.linger = 4000
            socket.set_hwm(0)
            socket.connect(address)
            return socket

        sockets = [push(address) for address in addresses]
        to_coordinator = push(coordinator) if coordinator else None
        while True:
            client, message = self.outbox.get()
            if client is None:
                for socket in sockets:
                    if message:
                        socket.send(message)
                    socket.close()
                if to_coordinator:
                    to_coordinator.close()
                context.term()
                return
            message.engine_index = self.part.rank
            socket = to_coordinator if client == COORDINATOR else sockets[client]
            socket.send_multipart(encoder.encode(message), copy=False)

    def run(self) -> None:
        """The busy loop."""
        step = self.stage.step_ms / 1000
        due = time.monotonic() + step
        while True:
            if self.crash:
                self.close(wire.ENGINE_CORE_DEAD)
                return
            if self.flood:
                self.flood = False
                self._flood()
            idle = not (self.running or self.waiting or self.kv_waits)
            now = time.monotonic()
            if idle:
                due = now + step
            try:
                while True:
                    timeout = 0.25 if idle else min(max(due - time.monotonic(), 0), 1 / self.stage.wakeups_hz)
                    tag, data = self.inbox.get(timeout=timeout)
                    if idle:
                        idle, due = False, time.monotonic() + step
                    self._take(tag, data)
            except queue.Empty:
                pass
            if not lifetime.parent_lives():
                return
            now = time.monotonic()
            if not idle and now >= self.wakeup_due:
                self.wakeups.send(b"\x00")
                self.wakeup_due = now + 1 / self.stage.wakeups_hz
            if not idle and now >= due:
                due = max(due + step, now)
                self._step()

    def close(self, message: bytes | None = None) -> None:
        """Sends what is queued, and a last message."""
        self.outbox.put((None, message))
        for thread in threading.enumerate():
            if thread.name.endswith("(_send)"):
                thread.join(5)

    def _take(self, tag: bytes, data: Any) -> None:
        if tag == wire.ADD:
            phase, request = sc.position(data.request_id)
            self.waiting.append(Running(data, sc.plan(self.scenario, phase, request, self.part.stage)))
            if self.connector and self.part.stage > 0:
                payloads = sc.plan(self.scenario, phase, request, self.part.stage - 1).payloads
                self.connector.expect(data.request_id, payloads)
        elif tag == wire.ABORT:
            gone = set(data)
            for request in [*self.waiting, *self.running]:
                if request.id in gone:
                    self.finished.setdefault(request.client, []).append(request.id)
                    if self.connector:
                        self.connector.forget(request.id)
                        self.connector.clean_up(request.id, len(request.work.payloads))
            self.waiting = deque(r for r in self.waiting if r.id not in gone)
            self.running = [r for r in self.running if r.id not in gone]
            if self.finished and not (self.running or self.waiting):
                self._emit({})
        elif tag == wire.UTILITY:
            client, call, _method, _args = data
            self.outbox.put((client, wire.Outputs(utility_output=[call, None, None])))

    def _schedule(self, now: float) -> None:
        while self.waiting and len(self.running) < self.stage.max_num_seqs:
            request = self.waiting.popleft()
            request.events.append(wire.Event(wire.EventType.SCHEDULED, now))
            self.running.append(request)
            self.cache.requests += 1
            self.cache.queries += request.prompt
            self.cache.hits += request.work.cached

    def _step(self) -> None:
        self.steps += 1
        now = time.monotonic()
        self._schedule(now)
        outputs: dict[int, list[wire.Output]] = {}
        for request in list(self.running):
            output = self._advance(request, now)
            if output is not None:
                outputs.setdefault(request.client, []).append(output)
        for due, request in list(self.kv_waits):
            if now >= due:
                self.kv_waits.remove((due, request))
                output = self._output(request, [])
                output.kv_transfer_params = {
                    "kv_wait_s": request.work.kv_wait_ms / 1000,
                    "connector_type": "SharedMemoryConnector",
                }
                outputs.setdefault(request.client, []).append(output)
        self._emit(outputs)

    def _advance(self, request: Running, now: float) -> wire.Output | None:
        work = request.work
        if request.paused:
            request.paused -= 1
            if request.paused == 0:
                request.events.append(wire.Event(wire.EventType.SCHEDULED, now))
            return None
        if work.stall_at == request.done:
            return None
        is_last = request.done + 1 == request.total()
        if self.connector and not self.connector.allows(request.id, request.done, is_last):
            return None
        if work.preempt_at == request.done and not request.preempted:
            request.preempted = True
            request.paused = 2
            request.events.append(wire.Event(wire.EventType.PREEMPTED, now))
            return None
        request.steps_left -= 1
        if request.steps_left > 0:
            return None
        failed = work.error_at == request.done
        output = self._output(request, [] if failed or work.chunks else [1000 + request.done])
        if work.chunks and not failed:
            chunk = work.chunks[request.done]
            output.multimodal_output = {
                "model_outputs": wire.Tensor("float32", [chunk.frames], bytes(4 * chunk.frames)),
                "sr": wire.Tensor("int32", [], struct.pack("<i", work.sample_rate)),
            }
        elif work.logprobs is not None and not failed:
            width = work.logprobs + 1
            output.new_logprobs = [
                ["<i4", [1, width], msgspec.msgpack.Ext(wire.RAW_VIEW, bytes(4 * width))],
                ["<f4", [1, width], msgspec.msgpack.Ext(wire.RAW_VIEW, bytes(4 * width))],
                ["<i4", [1], msgspec.msgpack.Ext(wire.RAW_VIEW, bytes(4))],
                None,
            ]
        if self.connector and not failed:
            end = len(work.payloads) if is_last else request.done + 1
            for number, payload in enumerate(work.payloads[request.done : end], request.done):
                self.connector.send(request.id, number, payload)
        request.done += 1
        if self.omni and self.stage.kind == "ar" and not failed:
            output.num_generation_tokens = request.done
        if failed:
            output.finish_reason = wire.FinishReason.ERROR
        elif request.done == request.total():
            output.finish_reason = wire.FinishReason[work.finish.upper()]
        else:
            request.steps_left = work.chunks[request.done].steps if work.chunks else 1
        if output.finish_reason is not None:
            self.running.remove(request)
            self.finished.setdefault(request.client, []).append(request.id)
            if work.kv_wait_ms is not None:
                self.kv_waits.append((now + work.kv_wait_ms / 1000, request))
        return output

    def _output(self, request: Running, tokens: list[int]) -> wire.Output:
        output = (wire.OmniOutput if self.omni else wire.Output)(request.id, tokens)
        if self.scenario.log_stats and request.events:
            output.events = request.events
        request.events = []
        if not request.started:
            request.started = True
            work = request.work
            cached = work.cached + work.external_cached
            output.prefill_stats = wire.PrefillStats(
                num_prompt_tokens=request.prompt,
                num_computed_tokens=request.prompt - cached,
                num_cached_tokens=cached,
                num_local_cached_tokens=work.cached,
                num_external_cached_tokens=work.external_cached,
            )
        return output

    def _emit(self, outputs: dict[int, list[wire.Output]]) -> None:
        messages = {client: wire.Outputs(outputs=items) for client, items in outputs.items()}
        # Which requests have ended is told by vLLM-Omni always, by vLLM only where several engines share the load.
        if self.omni or self.scenario.data_parallel > 1:
            for client, ids in self.finished.items():
                message = messages.setdefault(client, wire.Outputs())
                message.finished_requests = ids
                if self.omni and self.stage.kind == "ar":
                    # The autoregressive scheduler answers an abort with an output in the layout of plain vLLM.
                    told = {output.request_id for output in message.outputs}
                    message.outputs += [
                        wire.Output(i, [], finish_reason=wire.FinishReason.ABORT) for i in ids if i not in told
                    ]
        self.finished = {}
        now = time.monotonic()
        if self.scenario.log_stats and now - self.stats_sent >= 1:
            self.stats_sent = now
            client = next(iter(messages), 0)
            messages.setdefault(client, wire.Outputs()).scheduler_stats = self._stats()
        for client, message in messages.items():
            self.outbox.put((client, message))
        counts = (len(self.running), len(self.waiting))
        if self.scenario.data_parallel > 1 and counts != self.counts_sent:
            self.counts_sent = counts
            stats = wire.SchedulerStats(*counts, step_counter=self.steps)
            self.outbox.put((COORDINATOR, wire.Outputs(scheduler_stats=stats)))

    def _stats(self) -> wire.SchedulerStats:
        cache, self.cache = self.cache, wire.PrefixCacheStats()
        return wire.SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            step_counter=self.steps,
            kv_cache_usage=len(self.running) / (4 * self.stage.max_num_seqs),
            prefix_cache_stats=cache,
        )

    def _flood(self) -> None:
        filler = "x" * self.stage.flood_bytes
        for _ in range(self.stage.flood_frames):
            self.outbox.put((0, wire.Outputs(utility_output=[0, None, filler])))


def main(scenario: Any, part: Any) -> None:
    """Entry point of the process."""
    lifetime.end_with_parent()
    part = msgspec.convert(part, wire.Part)
    setproctitle.setproctitle(part.title)
    engine = Engine(msgspec.convert(scenario, sc.Scenario), part)

    def on_signal(number: int, _frame: Any) -> None:
        if number == signal.SIGUSR1:
            engine.crash = True
        elif number == signal.SIGUSR2:
            engine.flood = True
        else:
            os._exit(0)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine.start()
    engine.run()
    # Not through the interpreter's end, which would wait for the receiving thread's sockets.
    os._exit(1)
