"""A diffusion stage in a process of its own: scheduler and sockets, with the messages of vLLM-Omni 0.30.0."""

import asyncio
import os
import signal
import time
from typing import Any

import msgspec
import setproctitle
import zmq
import zmq.asyncio

import lifetime
import scenario as sc
import wire

DEAD = b"DIFFUSION_PROC_DEAD"
# A stage with one device takes the title of the worker that it then is.
TITLE = "vLLM-Omni::DiffusionWorker"
# Seconds between steps, which is how soon an abort is noticed.
PATIENCE = 0.005

encode = msgspec.msgpack.encode


def request(request_id: str, steps: int) -> bytes:
    """What a stage is given."""
    params = {
        "do_classifier_free_guidance": False,
        "num_outputs_per_prompt": 1,
        "seed": 1,
        "height": 64,
        "width": 64,
        "num_inference_steps": steps,
        "guidance_scale": 1.5,
        "extra_args": {},
    }
    message = {
        "type": "add_request",
        "request_id": request_id,
        "prompt": {"prompt": "a lighthouse"},
        "sampling_params": params,
        "kv_sender_info": None,
        "kv_transfer_params": None,
        "payload_sender_info": None,
    }
    return encode(message)


def abort(request_ids: list[str]) -> bytes:
    """What it is told of requests that nobody waits for."""
    return encode({"type": "abort", "request_ids": request_ids})


def result(request_id: str, picture: sc.Picture, metrics: dict[str, Any]) -> bytes:
    """What it gives: keys and order of OmniRequestOutput."""
    image = {
        "__pil_image__": True,
        "mode": "RGB",
        "shape": [picture.height, picture.width, 3],
        "data": bytes(picture.height * picture.width * 3),
    }
    output = {
        "request_id": request_id,
        "prompt": {"prompt": "a lighthouse"},
        "prompt_token_ids": None,
        "prompt_logprobs": None,
        "outputs": [],
        "finished": True,
        "metrics": metrics,
        "lora_request": None,
        "encoder_prompt": None,
        "encoder_prompt_token_ids": None,
        "num_cached_tokens": None,
        "num_cache_creation_tokens": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "stage_id": None,
        "replica_id": None,
        "final_output_type": picture.kind,
        "images": [image] * picture.count,
        "latents": None,
        "trajectory_latents": None,
        "trajectory_timesteps": None,
        "trajectory_log_probs": None,
        "trajectory_decoded": None,
        "_multimodal_output": {},
        "_custom_output": {},
        # Free for any figure: the time of sending lets the API process know what an observer sees.
        "stage_durations": {"sent": time.monotonic()},
        "peak_memory_mb": picture.peak_memory_mb,
        "error": None,
        "error_status_code": None,
        "error_type": None,
    }
    return encode({"type": "result", "output": output})


class Stage:
    """Scheduler and sockets of one replica."""

    def __init__(self, scenario: sc.Scenario, part: wire.Part) -> None:
        self.scenario = scenario
        self.part = part
        self.turns = asyncio.Semaphore(scenario.stages[part.stage].max_num_seqs)
        self.waiting = 0
        self.aborted: set[str] = set()
        self.ends = asyncio.Event()
        self.crash = False

    async def run(self) -> None:
        """Serves until it is to end."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 5000
            dealer.identity = (0).to_bytes(2, "little")
            dealer.connect(self.part.handshake)
            await dealer.send(encode({"status": "HELLO", "local": True, "headless": False}))
            addresses = msgspec.msgpack.decode(await dealer.recv())["addresses"]
            setproctitle.setproctitle(TITLE)
            await dealer.send(encode({"status": "READY", "local": True, "headless": False}))
        pull, self.push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.connect(addresses["inputs"][0])
        self.push.linger = 4000
        self.push.connect(addresses["outputs"][0])
        receiving = asyncio.ensure_future(self._receive(pull))
        living = asyncio.ensure_future(self._watch())
        await self.ends.wait()
        for task in (receiving, living):
            task.cancel()
        if self.crash:
            await self.push.send(DEAD)
        pull.close()
        self.push.close()
        context.term()

    def _on_signal(self, number: int) -> None:
        self.crash = number == signal.SIGUSR1
        self.ends.set()

    async def _watch(self) -> None:
        while lifetime.parent_lives():
            await asyncio.sleep(0.25)
        self.ends.set()

    async def _receive(self, pull: zmq.asyncio.Socket) -> None:
        tasks = set()
        while True:
            message = msgspec.msgpack.decode(await pull.recv())
            if message["type"] == "abort":
                self.aborted.update(message["request_ids"])
                continue
            task = asyncio.ensure_future(self._serve(message["request_id"], time.monotonic()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _serve(self, request_id: str, start: float) -> None:
        work = sc.plan(self.scenario, *sc.position(request_id), self.part.stage)
        picture = work.picture
        # In front of the scheduler.
        await asyncio.sleep(picture.preprocess_ms / 1000)
        queued = time.monotonic()
        self.waiting += 1
        async with self.turns:
            self.waiting -= 1
            queue_wait = time.monotonic() - queued
            steps = 0
            while steps < picture.steps or work.stall_at is not None:
                await asyncio.sleep(max(picture.step_ms / 1000, PATIENCE))
                steps += 1
                if request_id in self.aborted:
                    await self._send({"type": "metrics", "metrics": self._snapshot()})
                    return
                if work.error_at is not None and steps > work.error_at:
                    await self._send(
                        {
                            "type": "error",
                            "request_id": request_id,
                            "error": "out of memory",
                            "status_code": None,
                            "error_type": None,
                            "metrics": self._snapshot(),
                        }
                    )
                    return
        done = time.monotonic()
        await asyncio.sleep(picture.postprocess_ms / 1000)
        metrics = {
            "image_num": picture.count,
            "resolution": None,
            "width": picture.width,
            "height": picture.height,
            "num_inference_steps": picture.steps,
            "preprocess_time_ms": picture.preprocess_ms,
            "diffusion_engine_exec_time_ms": (done - queued) * 1000,
            "output_ready_wait_time_ms": 0.0,
            "postprocess_time_ms": picture.postprocess_ms,
            **self._snapshot(),
            "scheduler_queue_wait_ms": queue_wait * 1000,
        }
        if picture.profile:
            metrics["vae_decode_time_ms"] = picture.step_ms
            metrics["forward_time_ms"] = (done - queued - queue_wait) * 1000
        if picture.kv_recv_ms > 0:
            metrics["kv_recv_time_ms"] = picture.kv_recv_ms
        await self.push.send(result(request_id, picture, metrics))

    def _snapshot(self) -> dict[str, int]:
        return {"scheduler_num_waiting_reqs": self.waiting}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.push.send(encode(message))


def main(scenario: Any, part: Any) -> None:
    """Entry point of the process."""
    lifetime.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def run() -> int:
        stage = Stage(msgspec.convert(scenario, sc.Scenario), msgspec.convert(part, wire.Part))
        await stage.run()
        return 1 if stage.crash else 0

    os._exit(asyncio.run(run()))
