"""Checks the pipeline by itself: frames byte for byte as real servers send them, and a run against its scenario."""

import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import unittest

import msgspec

import diffusion
import scenario as sc
import wire

HERE = os.path.dirname(os.path.abspath(__file__))


class Frames(unittest.TestCase):
    """Frames captured from a real vLLM-Omni 0.30.0."""

    def test_decode_token(self) -> None:
        output = wire.OmniOutput("chatcmpl-abc-1234abcd", [43], num_generation_tokens=2)
        frames = wire.Encoder().encode(wire.Outputs(outputs=[output], timestamp=1000.6))
        self.assertEqual(
            frames[0].hex(),
            "980091dc0016b563686174636d706c2d6162632d3132333461626364912bc0c0c0c0c0c0c0c0c0c0c000c0c0c0c0c0c2c002"
            "c0cb408f44cccccccccdc0c0c0c0",
        )

    def test_synthetic_abort(self) -> None:
        output = wire.Output("r-1", [], finish_reason=wire.FinishReason.ABORT)
        frames = wire.Encoder().encode(wire.Outputs(outputs=[output], timestamp=1.0, finished_requests=["r-1"]))
        self.assertEqual(
            frames[0].hex(),
            "980091dc0011a3722d3190c0c0c002c0c0c0c0c0c0c000c0c0c0c0cb3ff0000000000000c091a3722d31c0c0",
        )

    def test_large_tensors_travel_apart(self) -> None:
        output = wire.OmniOutput("r", [])
        output.multimodal_output = {
            "model_outputs": wire.Tensor("float32", [64], bytes(256)),
            "sr": wire.Tensor("int32", [], bytes(4)),
        }
        frames = wire.Encoder().encode(wire.Outputs(outputs=[output]))
        self.assertEqual([len(frame) for frame in frames[1:]], [256])
        decoded = wire.decode_outputs(frames[0]).outputs[0].multimodal_output
        self.assertEqual(decoded["model_outputs"], ["float32", [64], 1])
        self.assertEqual(decoded["sr"][2].code, wire.RAW_VIEW)

    def test_element_counts(self) -> None:
        for kind, count in ((wire.Request, 21), (wire.OmniRequest, 24), (wire.Output, 17), (wire.OmniOutput, 22)):
            self.assertEqual(len(kind.__struct_fields__), count)

    def test_diffusion_results_have_the_keys_of_real_ones(self) -> None:
        path = os.path.join(HERE, "../frames/diffusion.jsonl")
        with open(path, encoding="utf-8") as file:
            frames = {row["name"]: row["parts"] for row in map(json.loads, file)}

        def decode(name: str) -> dict:
            parts = (bytes.fromhex(part) if isinstance(part, str) else bytes(part) for part in frames[name])
            return msgspec.msgpack.decode(b"".join(parts))

        def keys(message: dict) -> list:
            return [(key, keys(value) if key in ("output", "metrics") else None) for key, value in message.items()]

        metrics = decode("result with profile")["output"]["metrics"]
        ours = msgspec.msgpack.decode(diffusion.result("r", sc.Picture(), metrics))
        self.assertEqual(keys(ours), keys(decode("result with profile")))
        ours = msgspec.msgpack.decode(diffusion.request("r", 4))
        real = decode("request")
        self.assertEqual(list(ours), list(real))
        self.assertLessEqual(ours["sampling_params"].keys(), real["sampling_params"].keys())
        ours = msgspec.msgpack.decode(diffusion.abort(["r"]))
        self.assertEqual(list(ours), list(decode("abort")))


class Run(unittest.TestCase):
    """The truth of a run is what the scenario says."""

    def test_speech(self) -> None:
        scenario = os.path.join(HERE, "scenarios/speech.json")
        counters, counts = self.run_pipeline(scenario, ["--omni"])
        request = sc.load(scenario).phases[0].requests[0]
        talk, speak = request.stages
        frames = sum(chunk.frames for chunk in speak.chunks)
        at0 = (("replica", "0"), ("stage", "0"))
        self.assertEqual(counters["vllm:generation_tokens_total", at0], request.repeat * talk.tokens)
        self.assertEqual(counters["vllm:prompt_tokens_total", at0], request.repeat * talk.prompt)
        self.assertEqual(counts["vllm:inter_token_latency_seconds", at0], request.repeat * (talk.tokens - 1))
        self.assertEqual(counts["vllm_omni:e2e_request_latency_s", ()], request.repeat)
        for replica in "01":
            at1 = (("replica", replica), ("stage", "1"))
            self.assertEqual(counters["vllm_omni:audio_frames_total", at1], frames * request.repeat // 2)

    def test_every_payload_is_handed_on(self) -> None:
        payloads = [{"bytes": size, "put_delay": 0.01, "get_delay": 0.01} for size in (1, 5000)]
        payloads.append({"bytes": 70, "taken": False, "foreign": True})
        request = {"repeat": 4, "stages": [{"tokens": 2, "payloads": payloads}, {"chunks": [{"frames": 240}] * 2}]}
        scenario = {"forward": "prewarm", "stages": [{}, {"kind": "generation", "replicas": 2}]}
        scenario["phases"] = [{"requests": [request]}]
        before = set(os.listdir("/dev/shm"))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "scenario.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(scenario, file)
            self.run_pipeline(path, ["--omni"], os.path.join(folder, "truth"))
            sizes = collections.defaultdict(dict)
            for place in ("0-0", "1-0", "1-1"):
                with open(os.path.join(folder, f"truth.hops-{place}"), encoding="utf-8") as file:
                    for row in map(json.loads, file):
                        sizes[row["side"]][row["key"]] = row["size"]
        left = {key: size for key, size in sizes["put"].items() if key not in sizes["get"]}
        self.assertEqual(collections.Counter(sizes["get"].values()), {1: 4, 5000: 4})
        self.assertEqual(collections.Counter(left.values()), {70: 4})
        self.assertTrue(sizes["get"].items() <= sizes["put"].items())
        self.assertEqual([name for name in set(os.listdir("/dev/shm")) - before if "speech" in name], [])

    def run_pipeline(self, scenario: str, flags: list[str], log: str | None = None) -> tuple[dict, dict]:
        """Runs one phase; returns counters and histogram counts by family and labels."""
        with contextlib.ExitStack() as stack:
            truth = stack.enter_context(open(log, "w+b") if log else tempfile.NamedTemporaryFile())
            command = [sys.executable, os.path.join(HERE, "vllm-omni"), "serve", "some/model", *flags]
            command += ["--scenario", scenario, "--truth", truth.name, "--control"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as pipeline:
                pipeline.stdin.write("go\n")
                pipeline.stdin.flush()
                while json.loads(pipeline.stdout.readline())["event"] != "ended":
                    pass
                pipeline.stdin.close()
                self.assertEqual(pipeline.wait(10), 0)
            counters, counts = collections.Counter(), collections.Counter()
            for line in truth:
                row = json.loads(line)
                key = (row["family"], tuple(sorted(row["labels"].items())))
                if "times" in row:
                    counts[key] += row["times"]
                else:
                    counters[key] += row["value"]
            return counters, counts


if __name__ == "__main__":
    unittest.main()
