"""Tests of the forwarder: how it sends, what it costs, and its hooks in the real vLLM-Omni where that is installed.

    python -m unittest discover -s integrations
"""

import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import omnitap_forwarder as subject  # noqa: E402

HAS_OMNI = importlib.util.find_spec("vllm_omni") is not None


class Agent:
    """What an agent's socket takes."""

    def __init__(self, path, reads=True):
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(path)
        self.server.listen()
        self.path = path
        self.lines = []
        self.peers = []
        self.reads = reads
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                peer, _ = self.server.accept()
            except OSError:
                return
            self.peers.append(peer)
            if self.reads:
                threading.Thread(target=self.read, args=(peer,), daemon=True).start()

    def read(self, peer):
        with peer.makefile("rb") as lines:
            try:
                for line in lines:
                    self.lines.append(json.loads(line))
            except OSError:
                pass

    def wait(self, count):
        until = time.monotonic() + 20
        while len(self.lines) < count:
            if time.monotonic() > until:
                raise AssertionError(f"only {self.lines} of {count} events")
            time.sleep(0.01)
        return self.lines

    def close(self):
        self.server.close()
        for peer in self.peers:
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            peer.close()
        os.unlink(self.path)


class Sending(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "stats.sock")

    def forwarder(self):
        forwarder = subject.Forwarder(self.path)
        self.addCleanup(forwarder.stop)
        return forwarder

    def test_events_come_in_order_and_whole(self):
        agent = Agent(self.path)
        forwarder = self.forwarder()
        for number in range(3000):
            forwarder.emit("added", request_id=f"r{number}", arrival=None)
        lines = agent.wait(3000)
        self.assertEqual([line["request_id"] for line in lines], [f"r{number}" for number in range(3000)])
        self.assertEqual({(line["v"], line["event"]) for line in lines}, {(1, "added")})
        self.assertNotIn("arrival", lines[0])
        self.assertAlmostEqual(lines[0]["t"], time.time(), delta=20)

    def test_an_agent_that_comes_later_and_goes_and_comes_back(self):
        forwarder = self.forwarder()
        forwarder.emit("added", request_id="nobody hears")
        self.until(lambda: forwarder.away)
        for _ in range(2):
            agent = Agent(self.path)
            self.until(lambda: not forwarder.away)
            agent.lines.clear()
            forwarder.emit("failed", request_id="heard")
            heard = [line for line in agent.wait(1) if line["event"] != "lost"] or agent.wait(2)
            self.assertEqual(heard[-1]["request_id"], "heard")
            agent.close()
            self.until(lambda: forwarder.away)

    def test_a_slow_agent_costs_events_and_no_time(self):
        Agent(self.path, reads=False)
        forwarder = self.forwarder()
        fields = {"request_id": "r" * 200}
        slowest = 0.0
        for _ in range(10 * subject.MAX_QUEUE):
            start = time.perf_counter()
            forwarder.emit("added", **fields)
            slowest = max(slowest, time.perf_counter() - start)
        self.assertLessEqual(len(forwarder.queue), subject.MAX_QUEUE + 1)
        self.assertGreater(forwarder.lost, 0)
        # Far below the time-out of a send, even where the interpreter switches threads.
        self.assertLess(slowest, subject.SEND_TIMEOUT / 2)

    def test_what_was_dropped_is_told(self):
        agent = Agent(self.path)
        forwarder = self.forwarder()
        forwarder.emit("added", request_id="a")
        agent.wait(1)
        forwarder.lost = 7
        forwarder.emit("added", request_id="b")
        self.assertIn(("lost", 7), [(line["event"], line.get("events")) for line in agent.wait(3)])

    def test_what_cannot_be_sent_is_left_out(self):
        agent = Agent(self.path)
        forwarder = self.forwarder()
        forwarder.emit("kv_wait", kv_wait_s=float("nan"))
        forwarder.emit("added", request_id="x" * subject.MAX_EVENT)
        forwarder.emit("added", request_id="good")
        self.assertEqual(agent.wait(1)[0]["request_id"], "good")

    def test_a_forked_process_has_its_own_connection(self):
        agent = Agent(self.path)
        forwarder = self.forwarder()
        forwarder.emit("added", request_id="parent")
        agent.wait(1)
        pid = os.fork()
        if pid == 0:
            forwarder.emit("added", request_id="child")
            forwarder.stop(5)
            os._exit(0)
        os.waitpid(pid, 0)
        agent.wait(2)
        self.assertEqual(len(agent.peers), 2)

    def test_a_hook_that_fails_harms_nobody(self):
        class Metrics:
            def observe(self, value):
                return value + 1

        def broken(*_args):
            raise RuntimeError("broken")

        subject.before(Metrics, "observe", broken)
        subject.before(Metrics, "observe", broken)
        subject.around(Metrics, "absent", broken, broken)
        self.assertEqual(Metrics().observe(1), 2)

    def until(self, condition):
        until = time.monotonic() + 20
        while not condition():
            self.assertLess(time.monotonic(), until)
            time.sleep(0.01)


class Modules(unittest.TestCase):
    """Hooks get into modules that are imported before the plug-in and after it."""

    def test_modules_are_hooked_into_as_they_are_imported(self):
        code = (
            "import sys, vllm_omni.metrics.prometheus as early, omnitap_forwarder as f; f.install(); f.install()\n"
            "import vllm_omni.metrics.realtime as late\n"
            "assert hasattr(early.OmniPrometheusMetrics.observe_kv_wait, 'omnitap')\n"
            "assert hasattr(late.RealtimeVADMetrics.error, 'omnitap')\n"
            "assert sum(isinstance(finder, f.Finder) for finder in sys.meta_path) == 1\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            metrics = pathlib.Path(folder, "vllm_omni", "metrics")
            metrics.mkdir(parents=True)
            for package in (metrics.parent, metrics):
                (package / "__init__.py").touch()
            (metrics / "prometheus.py").write_text(
                "class OmniPrometheusMetrics:\n    def observe_kv_wait(self, connector_type, kv_wait_s): pass\n"
            )
            (metrics / "realtime.py").write_text(
                "class RealtimeVADMetrics:\n    def error(self, reason): pass\n"
            )
            path = os.pathsep.join([folder, str(pathlib.Path(__file__).parent)])
            subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


@unittest.skipUnless(HAS_OMNI, "vLLM-Omni is not installed")
class Hooks(unittest.TestCase):
    """The real classes of vLLM-Omni, with their own statistics off."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        path = os.path.join(cls.folder.name, "stats.sock")
        os.environ["OMNITAP_STAT_SOCKET"] = path
        os.environ["OMNITAP_STAT_TRANSFERS"] = "1"
        subject.install()
        cls.agent = Agent(path)

    def tell(self, count, act):
        self.agent.lines.clear()
        act()
        lines = self.agent.wait(count)
        time.sleep(0.2)
        self.assertEqual(len(lines), count, lines)
        for line in lines:
            del line["v"], line["t"]
        return lines

    def test_metrics(self):
        from vllm_omni.metrics.modality import OmniModalityMetrics
        from vllm_omni.metrics.prometheus import OmniPrometheusMetrics
        from vllm_omni.metrics.realtime import RealtimeVADMetrics
        from vllm_omni.metrics.transfer import OmniTransferMetrics

        prom, vad = OmniPrometheusMetrics("m", log_stats=False), RealtimeVADMetrics("m", log_stats=False)
        mod, transfer = OmniModalityMetrics("m", log_stats=False), OmniTransferMetrics("m", log_stats=False)

        def act():
            subject.writing.set(None)
            prom.observe_kv_wait("shm", 0.5)
            mod.observe_audio_ttfp("1", "0", 0.25)
            mod.observe_audio_underrun("1", "0", 0.0)
            mod.inc_speech_stream_completed()
            mod.inc_speech_stream_aborted("closed")
            transfer.observe_size(0, 0, 1, 2, 10)
            transfer.observe_tx_time(0, 0, 1, 2, 0.5)
            transfer.observe_rx_time(0, 0, 1, 2, 0.25)
            transfer.observe_in_flight_time(0, 0, 1, 2, 0.125)
            vad.session_started()
            vad.session_finished()
            vad.session_finished()
            vad.observe_inference(3.0)
            vad.observe_endpoint_delay(400)
            vad.error("overflow")

        edge = {"from_stage": 0, "from_replica": 0, "to_stage": 1, "to_replica": 2}
        self.assertEqual(
            self.tell(13, act),
            [
                {"event": "kv_wait", "connector_type": "shm", "kv_wait_s": 0.5},
                {"event": "first_packet", "stage_id": 1, "replica_id": 0, "ttfp_s": 0.25},
                {"event": "stream_end", "outcome": "completed", "stage_id": 1, "replica_id": 0, "underrun_s": 0.0},
                {"event": "stream_end", "outcome": "completed", "speech": True},
                {"event": "stream_end", "outcome": "closed", "speech": True},
                {"event": "transfer_sent", "size_bytes": 10, "tx_time_ms": 500.0, **edge},
                {"event": "transfer_received", "rx_decode_time_ms": 250.0, "in_flight_time_ms": 125.0, **edge},
                {"event": "vad", "active_sessions": 1},
                {"event": "vad", "active_sessions": 0},
                {"event": "vad", "active_sessions": 0},
                {"event": "vad", "inference_ms": 3.0},
                {"event": "vad", "endpoint_delay_ms": 400},
                {"event": "vad", "error": "overflow"},
            ],
        )

    def test_an_answer_names_its_request(self):
        import asyncio

        from vllm_omni.entrypoints.client_request_state import ClientRequestState
        from vllm_omni.metrics.modality import OmniModalityMetrics

        mod = OmniModalityMetrics("m", log_stats=False)

        async def generate(request_id):
            ClientRequestState(request_id=request_id)
            await asyncio.sleep(0.01)
            yield b"audio"

        async def answer(request_id):
            async for _ in generate(request_id):
                mod.observe_audio_ttfp("1", "0", 0.25)
            mod.inc_speech_stream_completed()

        async def both():
            await asyncio.gather(answer("a"), answer("b"))

        told = [(line["event"], line["request_id"]) for line in self.tell(6, lambda: asyncio.run(both()))]
        self.assertEqual(
            sorted(told), [(event, request) for event in ("added", "first_packet", "stream_end") for request in "ab"]
        )

    def test_every_hook_finds_its_method(self):
        """A release that renames one must not go unnoticed."""
        import vllm_omni.engine.orchestrator as orchestrator
        from vllm_omni.entrypoints.client_request_state import ClientRequestState
        from vllm_omni.entrypoints.omni_base import OmniBase
        from vllm_omni.metrics.prometheus import OmniPrometheusMetrics

        names = {
            OmniBase: ["_process_single_result", "_record_request_failure_once"],
            ClientRequestState: ["__init__"],
            OmniPrometheusMetrics: [
                "observe_stage_gen_time",
                "set_peak_memory",
                "request_succeeded",
                "observe_tokens",
                "inc_requests_failed",
            ],
        }
        for cls, methods in names.items():
            for method in methods:
                self.assertTrue(hasattr(getattr(cls, method), "omnitap"), f"{cls.__name__}.{method}")
        hooked = {
            name
            for cls in vars(orchestrator).values()
            if isinstance(cls, type)
            for name, method in vars(cls).items()
            if hasattr(method, "omnitap")
        }
        self.assertEqual(
            hooked,
            {"_register_running_request", "_update_stage_replica_waiting", "_remove_stage_replica_waiting"},
        )

    def test_a_failure_counts_once(self):
        from vllm_omni.entrypoints.client_request_state import ClientRequestState
        from vllm_omni.entrypoints.omni_base import OmniBase
        from vllm_omni.metrics.prometheus import OmniPrometheusMetrics
        from vllm_omni.metrics.stats import OrchestratorAggregator

        base = object.__new__(OmniBase)
        base.prom_metrics = OmniPrometheusMetrics("m", log_stats=False)

        def act():
            state = ClientRequestState(request_id="r1")
            state.metrics = OrchestratorAggregator(1, False, 0.0, 0)
            base.request_states = {"r1": state}
            base._record_request_failure_once("r1", reason="client_abort")
            base._record_request_failure_once("r1", reason="stage_error")

        self.assertEqual(
            self.tell(2, act),
            [
                {"event": "added", "request_id": "r1"},
                {"event": "failed", "request_id": "r1", "reason": "client_abort"},
            ],
        )


if __name__ == "__main__":
    unittest.main()
