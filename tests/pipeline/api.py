"""The API process: starts the engines, plays the users, and runs the orchestrator thread that owns the sockets."""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import uuid
from typing import Any

import msgspec
import setproctitle
import uvloop
import zmq
import zmq.asyncio

import connector
import diffusion
import engine
import lifetime
import scenario as sc
import truth
import web
import wire

SPAWN = multiprocessing.get_context("spawn")


def say(**event: Any) -> None:
    """Tells the one who started the pipeline what happens: one JSON object a line."""
    print(json.dumps(event), flush=True)


class Client:
    """The socket pair toward one engine, or toward all data-parallel engines of a plain vLLM."""

    def __init__(self, folder: str) -> None:
        self.input = f"ipc://{folder}/{uuid.uuid4()}"
        self.output = f"ipc://{folder}/{uuid.uuid4()}"
        # Created in the process that uses them.
        self.router: zmq.asyncio.Socket | None = None
        self.pull: zmq.asyncio.Socket | None = None

    def bind(self, context: zmq.asyncio.Context) -> None:
        """Binds both sockets."""
        self.router = context.socket(zmq.ROUTER)
        self.pull = context.socket(zmq.PULL)
        for socket, address in ((self.router, self.input), (self.pull, self.output)):
            socket.linger = 0
            socket.set_hwm(0)
            socket.bind(address)

    async def ready(self, engines: int) -> None:
        """Waits for the first message of each engine."""
        for _ in range(engines):
            _identity, payload = await self.router.recv_multipart()
            msgspec.msgpack.decode(payload, type=wire.Ready)

    async def send(self, rank: int, tag: bytes, frames: list[bytes]) -> None:
        """Sends one message to an engine."""
        await self.router.send_multipart([struct.pack("<H", rank), tag, *frames])

    def close(self) -> None:
        """Closes both sockets."""
        for socket in (self.router, self.pull):
            if socket is not None:
                socket.close()


class PictureClient(Client):
    """The socket pair toward one diffusion stage."""

    def bind(self, context: zmq.asyncio.Context) -> None:
        """Binds both sockets."""
        self.push = context.socket(zmq.PUSH)
        self.pull = context.socket(zmq.PULL)
        for socket, address in ((self.push, self.input), (self.pull, self.output)):
            socket.linger = 0
            socket.bind(address)

    async def ready(self, engines: int) -> None:
        """A diffusion stage says nothing of itself."""

    def close(self) -> None:
        """Closes both sockets."""
        self.push.close()
        self.pull.close()


class Launcher:
    """Starts engines and answers their handshake."""

    def __init__(self, scenario: sc.Scenario, folder: str, log: str | None) -> None:
        self.scenario = scenario
        self.folder = folder
        self.log = log
        self.processes: dict[tuple[int, int], multiprocessing.Process] = {}

    def spawn(self, stage: int, replica: int, rank: int, handshake: str) -> None:
        """Starts the process of one engine."""
        is_diffusion = self.scenario.stages[stage].kind == "diffusion"
        if is_diffusion:
            title = ""
        elif self.scenario.flavor == "omni":
            title = f"VLLM::StageEngineCoreProc_stage{stage}_replica{replica}_DP0"
        else:
            title = "VLLM::EngineCore" + (f"_DP{rank}" if self.scenario.data_parallel > 1 else "")
        times = f"{self.log}.hops-{stage}-{replica}" if self.log else None
        part = wire.Part(stage, replica, title, rank, handshake, times)
        target = diffusion.main if is_diffusion else engine.main
        process = SPAWN.Process(target=target, args=(sc.to_json(self.scenario), msgspec.to_builtins(part)))
        process.start()
        self.processes[(stage, replica)] = process
        say(event="engine", stage=stage, replica=replica, pid=process.pid)

    async def start(self, engines: list[tuple[int, int, int]], clients: list[Client], coordinator: str | None) -> None:
        """Starts engines, each (stage, replica, rank), that serve these clients; returns when all are ready."""
        address = f"ipc://{self.folder}/{uuid.uuid4()}"
        with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as router:
            router.bind(address)
            for stage, replica, rank in engines:
                self.spawn(stage, replica, rank, address)
            ready = 0
            while ready < len(engines):
                identity, payload = await asyncio.wait_for(router.recv_multipart(), 60)
                if msgspec.msgpack.decode(payload)["status"] == "READY":
                    ready += 1
                    continue
                metadata = {
                    "addresses": {
                        "inputs": [client.input for client in clients],
                        "outputs": [client.output for client in clients],
                        "coordinator_input": None,
                        "coordinator_output": coordinator,
                        "frontend_stats_publish_address": None,
                    },
                    "parallel_config": {},
                }
                await router.send_multipart([identity, msgspec.msgpack.encode(metadata)], copy=False)

    def end(self) -> None:
        """Ends all engines, gently first."""
        for process in self.processes.values():
            if process.is_alive():
                process.terminate()
        for process in self.processes.values():
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join(2)


class Orchestrator:
    """Plays the users of the scenario and moves their requests from stage to stage."""

    def __init__(self, scenario: sc.Scenario, log: truth.Log, worker: int) -> None:
        self.scenario = scenario
        self.worker = worker
        self.truth = truth.Truth(scenario, log)
        self.omni = scenario.flavor == "omni"
        self.encoder = wire.Encoder()
        # Engines that take requests: (stage, replica) -> socket pair and ZMQ identity.
        self.engines: dict[tuple[int, int], tuple[Client, int]] = {}
        self.requests: dict[str, truth.Request] = {}
        # All requests so far, where they may leave payloads behind.
        self.ids: list[str] = []
        self.turn = [0] * len(scenario.stages)
        self.number = 0
        # The server of those who come over HTTP.
        self.web: "web.Web | None" = None
        # Frames on all sockets between the API process and the engines, but for 1-byte wake-ups.
        self.frames = 0

    def attach(self, client: Client, engines: list[tuple[int, int, int]]) -> asyncio.Task[None]:
        """Takes engines into service and reads what they send."""
        for stage, replica, rank in engines:
            self.engines[(stage, replica)] = (client, rank)
        if isinstance(client, PictureClient):
            stage, replica, _ = engines[0]
            return asyncio.ensure_future(self._read_pictures(client, stage, replica))
        return asyncio.ensure_future(self._read(client, engines))

    async def _read_pictures(self, client: PictureClient, stage: int, replica: int) -> None:
        while True:
            frame = await client.pull.recv()
            self.frames += 1
            if frame == diffusion.DEAD:
                await self.lose(stage, replica, client)
                return
            message = msgspec.msgpack.decode(frame)
            output = message.get("output") or message
            request = self.requests.get(output.get("request_id"))
            if request is None or stage not in request.stages or request.stages[stage].finished:
                continue
            self.truth.handed_on(request, stage)
            if message["type"] == "result":
                self.truth.picture(request, stage, output)
                await self._go_on(request, stage, "stop")
            elif message["type"] == "error":
                await self._go_on(request, stage, "error")

    async def _read(self, client: Client, engines: list[tuple[int, int, int]]) -> None:
        by_rank = {rank: (stage, replica) for stage, replica, rank in engines}
        while True:
            frames = await client.pull.recv_multipart()
            self.frames += len(frames)
            if frames[0] == wire.ENGINE_CORE_DEAD:
                for where in by_rank.values():
                    await self.lose(*where, client)
                return
            message = wire.decode_outputs(frames[0])
            await self._take(*by_rank[message.engine_index], message)

    async def _take(self, stage: int, replica: int, message: wire.Outputs) -> None:
        if message.scheduler_stats is not None:
            self.truth.stats(stage, replica, message.scheduler_stats)
        if message.outputs:
            self.truth.iteration(stage, replica, message.outputs, self.requests)
        for output in message.outputs:
            if output.kv_transfer_params:
                self.truth.kv_wait(output.kv_transfer_params)
                continue
            request = self.requests.get(output.request_id)
            if request is None or stage not in request.stages or request.stages[stage].finished:
                continue
            self.truth.output(request, stage, output, message.timestamp)
            if output.finish_reason is not None:
                await self._finish(request, stage, wire.FinishReason(output.finish_reason).name.lower())

    async def _finish(self, request: truth.Request, stage: int, reason: str) -> None:
        self.truth.finished(request, stage, reason)
        await self._go_on(request, stage, reason)

    async def _go_on(self, request: truth.Request, stage: int, reason: str) -> None:
        last = len(self.scenario.stages) - 1
        if reason == "error":
            self.truth.failed(request, "stage_error")
        elif stage < last and self._goes_on_when_finished(stage + 1):
            await self._submit(request, stage + 1)
            return
        elif stage == last:
            self.truth.complete(request, reason)
        if request.over:
            await self._abort_rest(request)
            self._forget(request)

    def _goes_on_when_finished(self, stage: int) -> bool:
        return self.scenario.forward == "finished" or self.scenario.stages[stage].kind == "diffusion"

    async def _submit(self, request: truth.Request, stage: int) -> None:
        phase, index = sc.position(request.id)
        work = sc.plan(self.scenario, phase, index, stage)
        replicas = sorted(r for s, r in self.engines if s == stage)
        if not replicas:
            self.truth.failed(request, "stage_error")
            await self._abort_rest(request)
            self._forget(request)
            return
        replica = replicas[self.turn[stage] % len(replicas)]
        self.turn[stage] += 1
        client, rank = self.engines[(stage, replica)]
        if isinstance(client, PictureClient):
            steps = work.picture.steps
            at = truth.AtStage(replica, request.arrival, time.monotonic(), None, 0, steps=steps)
            message = diffusion.request(request.id, steps)
            if self._carries(request, stage):
                at.carried = len(message)
            request.stages[stage] = at
            await self._send_picture(client, message)
            return
        max_tokens = self.scenario.phases[phase].requests[index].max_tokens
        kind = wire.OutputKind.DELTA if request.stream else wire.OutputKind.FINAL_ONLY
        params = wire.SamplingParams(
            temperature=0.8, seed=0, max_tokens=max_tokens, logprobs=work.logprobs, output_kind=kind
        )
        arrival = request.arrival if stage == 0 else time.time()
        kind = wire.OmniRequest if self.omni else wire.Request
        add = kind(request.id, list(range(work.prompt)), None, params, None, arrival)
        add.client_index = self.worker
        add.external_req_id = request.id
        if self.omni and stage > 0:
            entry = {
                "tensor_data": bytes(64),
                "tensor_shape": [4, 4],
                "tensor_dtype": "float32",
                "list_data": None,
                "scalar_data": None,
            }
            add.additional_information = {"entries": {"hidden": entry}}
        frames = self.encoder.encode(add)
        at = truth.AtStage(replica, arrival, time.monotonic(), max_tokens, work.prompt)
        if self._carries(request, stage):
            at.carried = sum(memoryview(frame).nbytes for frame in frames)
        request.stages[stage] = at
        await self._send(client, rank, wire.ADD, frames)

    def _carries(self, request: truth.Request, stage: int) -> bool:
        """Whether the request to this stage has the output of the one before with it."""
        return stage > 0 and request.stages[stage - 1].finished and not sc.has_payloads(self.scenario)

    async def user(self, phase: int, index: int) -> None:
        """One user's request, from its arrival to its end or abort."""
        plan = self.scenario.phases[phase].requests[index]
        if plan.web is not None:
            await self.web.use(phase, index)
            return
        request = await self.begin(phase, index, time.time())
        if plan.abort_after is not None:
            await asyncio.sleep(plan.abort_after)
            await self.give_up(request)

    async def give_up(self, request: truth.Request) -> None:
        """The user of a request goes away."""
        if not request.over:
            self.truth.failed(request, "client_disconnect")
            await self._abort_rest(request)
            self._forget(request)

    async def begin(
        self, phase: int, index: int, wall: float, heard: "asyncio.Queue[Any] | None" = None
    ) -> truth.Request:
        """A request that arrived at this time is given to the pipeline."""
        plan = self.scenario.phases[phase].requests[index]
        self.number += 1
        name = sc.external_id(plan.prefix, phase, index, self.number)
        request = truth.Request(f"{name}-{random.getrandbits(32):08x}", wall, {}, plan.stream, heard=heard)
        self.requests[request.id] = request
        if sc.has_payloads(self.scenario):
            self.ids.append(request.id)
        stages = len(self.scenario.stages) if self.scenario.forward == "prewarm" else 1
        for stage in range(stages):
            if stage > 0 and self._goes_on_when_finished(stage):
                break
            # An engine may be lost in between. A later stage would wait for its payloads for ever.
            if not request.over:
                await self._submit(request, stage)
        return request

    async def _abort_rest(self, request: truth.Request) -> None:
        for stage, at in request.stages.items():
            if not at.finished and (stage, at.replica) in self.engines:
                client, rank = self.engines[(stage, at.replica)]
                if isinstance(client, PictureClient):
                    await self._send_picture(client, diffusion.abort([request.id]))
                else:
                    await self._send(client, rank, wire.ABORT, self.encoder.encode([request.id]))

    async def _send(self, client: Client, rank: int, tag: bytes, frames: list[bytes]) -> None:
        self.frames += 2 + len(frames)
        await client.send(rank, tag, frames)

    async def _send_picture(self, client: PictureClient, message: bytes) -> None:
        self.frames += 1
        await client.push.send(message)

    def _forget(self, request: truth.Request) -> None:
        self.requests.pop(request.id, None)

    async def lose(self, stage: int, replica: int, client: Client | None = None) -> None:
        """An engine is gone: so are its requests. Its last word may come after a new one has its place."""
        current = self.engines.get((stage, replica))
        if current is None or client not in (None, current[0]):
            return
        del self.engines[(stage, replica)]
        for request in list(self.requests.values()):
            at = request.stages.get(stage)
            if at is not None and at.replica == replica and (not at.finished or self._owes(request, stage)):
                self.truth.failed(request, "stage_error")
                at.finished = True
                await self._abort_rest(request)
                self._forget(request)

    def _owes(self, request: truth.Request, stage: int) -> bool:
        """Whether a stage that has finished a request may still have payloads of it that the next one waits for."""
        following = request.stages.get(stage + 1)
        payloads = sc.plan(self.scenario, *sc.position(request.id), stage).payloads
        return bool(payloads) and following is not None and not following.finished

    async def phase(self, number: int) -> None:
        """One phase; returns when its requests have ended."""
        users = []
        for index, request in enumerate(self.scenario.phases[number].requests):
            for i in range(request.repeat):
                if (index + i) % self.scenario.api_servers == self.worker:
                    users.append((request.at + i * request.every, index))
        start = time.monotonic()
        tasks = []
        for at, index in sorted(users):
            await asyncio.sleep(max(start + at - time.monotonic(), 0))
            tasks.append(asyncio.ensure_future(self.user(number, index)))
        await asyncio.gather(*tasks)
        while self.requests:
            await asyncio.sleep(0.02)


class Api:
    """A whole pipeline, seen from its root process."""

    def __init__(self, scenario: sc.Scenario, log: str | None) -> None:
        self.scenario = scenario
        self.folder = tempfile.mkdtemp(prefix="pipeline-")
        self.launcher = Launcher(scenario, self.folder, log)
        self.log = log
        self.orchestrator: Orchestrator | None = None
        self.workers: list[tuple[multiprocessing.Process, Any]] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.go: asyncio.Queue[None] | None = None
        self.main_task: asyncio.Task[None] | None = None
        self.readers: list[asyncio.Task[None]] = []
        self.ended_well = False

    def run(self, started: threading.Event) -> None:
        """The orchestrator thread."""
        try:
            # As the real server.
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main(started))
        except asyncio.CancelledError:
            self.ended_well = True
        finally:
            for process, pipe in self.workers:
                pipe.close()
                process.join(5)
            self.launcher.end()
            if self.orchestrator is not None:
                connector.clean_up_all(self.orchestrator.ids)
            shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """Ends the orchestrator thread; for any thread."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.main_task.cancel)

    def next_phase(self) -> None:
        """Starts the next phase; for any thread."""
        self.loop.call_soon_threadsafe(self.go.put_nowait, None)

    async def _main(self, started: threading.Event) -> None:
        self.loop = asyncio.get_running_loop()
        self.go = asyncio.Queue()
        self.main_task = asyncio.current_task()
        started.set()
        orchestrator = None
        if self.scenario.api_servers > 1:
            await self._start_workers()
        else:
            self.orchestrator = orchestrator = Orchestrator(self.scenario, truth.Log(self.log), 0)
            await self._start_engines(orchestrator)
            if web.is_used(self.scenario):
                orchestrator.web = web.Web(orchestrator)
                await orchestrator.web.start()
        port = orchestrator.web.port if orchestrator is not None and orchestrator.web is not None else None
        say(event="ready", pid=os.getpid(), port=port)
        number = 0
        while True:
            await self.go.get()
            if number >= len(self.scenario.phases):
                raise ValueError("no further phase")
            frames = orchestrator.frames if orchestrator else 0
            say(event="started", phase=number, time=time.monotonic())
            if orchestrator is None:
                await self._phase_of_workers(number)
            else:
                acts = asyncio.ensure_future(self._acts(orchestrator, number))
                await asyncio.gather(orchestrator.phase(number), acts)
            frames = orchestrator.frames - frames if orchestrator else None
            say(event="ended", phase=number, time=time.monotonic(), frames=frames)
            if number + 1 == len(self.scenario.phases) and self.scenario.forever:
                self.go.put_nowait(None)
            else:
                number += 1

    async def _start_engines(self, orchestrator: Orchestrator) -> None:
        if self.scenario.flavor == "omni":
            for stage, config in enumerate(self.scenario.stages):
                for replica in range(config.replicas):
                    await self._start_replica(orchestrator, stage, replica)
            return
        client = Client(self.folder)
        client.bind(zmq.asyncio.Context.instance())
        ranks = [(0, rank, rank) for rank in range(self.scenario.data_parallel)]
        await self.launcher.start(ranks, [client], self._start_coordinator())
        await client.ready(len(ranks))
        self.readers.append(orchestrator.attach(client, ranks))

    async def _start_replica(self, orchestrator: Orchestrator, stage: int, replica: int) -> None:
        kind = PictureClient if self.scenario.stages[stage].kind == "diffusion" else Client
        client = kind(self.folder)
        client.bind(zmq.asyncio.Context.instance())
        await self.launcher.start([(stage, replica, 0)], [client], None)
        await client.ready(1)
        self.readers.append(orchestrator.attach(client, [(stage, replica, 0)]))

    def _start_coordinator(self) -> str | None:
        if self.scenario.data_parallel == 1:
            return None
        address = f"ipc://{self.folder}/{uuid.uuid4()}"
        process = SPAWN.Process(target=coordinator_main, args=(address,), daemon=True)
        process.start()
        return address

    async def _start_workers(self) -> None:
        clients = [Client(self.folder) for _ in range(self.scenario.api_servers)]
        ranks = [(0, rank, rank) for rank in range(self.scenario.data_parallel)]
        for index, client in enumerate(clients):
            ours, theirs = SPAWN.Pipe()
            log = f"{self.log}.{index}" if self.log else None
            args = (sc.to_json(self.scenario), index, client.input, client.output, ranks, log, theirs)
            process = SPAWN.Process(target=worker_main, args=args)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        await self.launcher.start(ranks, clients, self._start_coordinator())
        for _, pipe in self.workers:
            await asyncio.to_thread(pipe.recv)

    async def _phase_of_workers(self, number: int) -> None:
        for _, pipe in self.workers:
            pipe.send(number)
        for _, pipe in self.workers:
            await asyncio.to_thread(pipe.recv)

    async def _acts(self, orchestrator: Orchestrator, number: int) -> None:
        start = time.monotonic()
        for act in sorted(self.scenario.phases[number].acts, key=lambda act: act.at):
            await asyncio.sleep(max(start + act.at - time.monotonic(), 0))
            where = (act.stage, act.replica)
            if act.do == "start":
                await self._start_replica(orchestrator, *where)
                continue
            process = self.launcher.processes[where]
            signals = {"crash": signal.SIGUSR1, "flood": signal.SIGUSR2, "kill": signal.SIGKILL}
            os.kill(process.pid, signals[act.do])
            if act.do == "flood":
                await self._quiet(orchestrator)
            else:
                await asyncio.to_thread(process.join)
                await orchestrator.lose(*where)
            say(event="acted", do=act.do, stage=act.stage, replica=act.replica)

    async def _quiet(self, orchestrator: Orchestrator) -> None:
        """Waits until nothing has come for a second."""
        frames = -1
        while frames != orchestrator.frames:
            frames = orchestrator.frames
            await asyncio.sleep(1)


def coordinator_main(address: str) -> None:
    """The data-parallel coordinator: takes the engines' counts."""
    lifetime.end_with_parent()
    setproctitle.setproctitle("VLLM::DPCoordinator")
    pull = zmq.Context.instance().socket(zmq.PULL)
    pull.bind(address)
    while True:
        pull.recv_multipart()


def worker_main(
    scenario: Any, index: int, input_: str, output: str, ranks: list[Any], log: str | None, pipe: Any
) -> None:
    """One of several API workers of a plain vLLM."""
    lifetime.end_with_parent()
    setproctitle.setproctitle(f"VLLM::APIServer_{index}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> None:
        orchestrator = Orchestrator(msgspec.convert(scenario, sc.Scenario), truth.Log(log), index)
        client = Client("")
        client.input, client.output = input_, output
        client.bind(zmq.asyncio.Context.instance())
        await client.ready(len(ranks))
        reader = orchestrator.attach(client, [tuple(rank) for rank in ranks])
        pipe.send("ready")
        while True:
            try:
                number = await asyncio.to_thread(pipe.recv)
            except EOFError:
                break
            await orchestrator.phase(number)
            pipe.send("ended")
        reader.cancel()

    asyncio.run(main())
    os._exit(0)


def main() -> None:
    """`serve MODEL ...`, with the flags of vLLM that an observer reads and two of our own."""
    parser = argparse.ArgumentParser(prog=os.path.basename(sys.argv[0]))
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--omni", action="store_true")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--data-parallel-size", type=int)
    parser.add_argument("--api-server-count", type=int)
    parser.add_argument("--disable-log-stats", action="store_true")
    parser.add_argument("--scenario", required=True, help="what happens, a JSON file (scenario.py)")
    parser.add_argument("--truth", help="where to write what the agent should say (truth.py)")
    parser.add_argument(
        "--control",
        action="store_true",
        help="wait for a line `go` on standard input before each phase; end of input ends the pipeline",
    )
    args = parser.parse_args()

    scenario = sc.load(args.scenario)
    scenario.flavor = "omni" if args.omni else "vllm"
    scenario.data_parallel = args.data_parallel_size or 1
    scenario.api_servers = args.api_server_count or 1
    scenario.log_stats = not args.disable_log_stats
    api = Api(scenario, args.truth)
    started = threading.Event()
    # Engines die with the thread that starts them, so this one lives until they have ended.
    thread = threading.Thread(target=api.run, args=(started,), name="orchestrator")
    thread.start()
    started.wait()

    def on_signal(_number: int, _frame: Any) -> None:
        api.stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    if args.control:
        threading.Thread(target=read_commands, args=(api,), daemon=True).start()
    else:
        for _ in scenario.phases:
            api.next_phase()
    while thread.is_alive():
        thread.join(0.5)
    sys.exit(0 if api.ended_well else 1)


def read_commands(api: Api) -> None:
    """Follows the lines on standard input."""
    for line in sys.stdin:
        if line.strip() == "go":
            api.next_phase()
    api.stop()
