"""HTTP: the server that the users of a scenario talk to, in the byte formats of vLLM-Omni's, and those users.

Answers are written as the outputs of the stages come in, so that what the agent measures at the write is what happens
here. Times of the truth are those just before a write.
"""

import asyncio
import base64
import json
import os
import struct
import time
import zlib
from typing import Any

import uvicorn
import websockets

import scenario as sc
import truth

EVENTS = "text/event-stream; charset=utf-8"


class Left(Exception):
    """The client has hung up."""


class Stream:
    """A stream of speech: what is written and when, and how it ends."""

    def __init__(self, log: truth.Log, request: truth.Request, arrival: float) -> None:
        self.log = log
        self.request = request
        self.arrival = arrival
        self.chunks: list[tuple[float, int]] = []

    def chunk(self, size: int) -> None:
        """So many bytes of samples are about to be written."""
        now = time.monotonic()
        if not self.chunks:
            self.log.observe("vllm_omni:audio_ttfp_s", self._labels(), now - self.arrival)
        self.chunks.append((now, size))

    def complete(self) -> None:
        """It has been written to its end."""
        self.log.add("vllm_omni:speech_stream_completed_total", {})
        if not self.chunks:
            return
        underrun = truth.worst_underrun(self.chunks, self._at().rate)
        self.log.observe("vllm_omni:audio_underrun_s", self._labels(), underrun)
        if underrun <= 0.1:
            self.log.add("vllm_omni:audio_continuity_ok_total", self._labels() | {"threshold_ms": 100})

    def aborted(self, reason: str) -> None:
        """It has ended before its end."""
        self.log.add("vllm_omni:speech_stream_aborted_total", {"reason": reason})

    def _at(self) -> truth.AtStage:
        return self.request.stages[max(self.request.stages)]

    def _labels(self) -> dict[str, Any]:
        return {"stage": max(self.request.stages), "replica": self._at().replica}


class Web:
    """The server and its users."""

    def __init__(self, orchestrator: Any) -> None:
        self.orchestrator = orchestrator
        self.port = 0
        config = uvicorn.Config(
            self._app, port=0, loop="none", http="httptools", ws="websockets-sansio", log_level="critical",
            lifespan="off", interface="asgi3", timeout_keep_alive=60,
        )
        self.server = uvicorn.Server(config)
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the server takes connections."""
        self.task = asyncio.ensure_future(self.server._serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Ends the server."""
        self.server.should_exit = True
        if self.task is not None:
            await self.task

    # ---- server ----

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        arrival, wall = time.monotonic(), time.time()
        if scope["type"] == "websocket":
            await self._socket(receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        if path == "/health":
            await answer(send, b'{"status":"healthy"}')
        elif path == "/v1/audio/speech":
            await self._speech(json.loads(body), (arrival, wall), receive, send)
        elif path == "/v1/images/generations":
            await self._image(json.loads(body), send)
        else:
            await answer(send, b'{"detail":"Not Found"}', status=404)

    async def _speech(self, asked: dict[str, Any], arrival: tuple[float, float], receive: Any, send: Any) -> None:
        if asked["response_format"] == "mp3":
            await answer(send, b'{"detail":"no such format"}', status=422)
            return
        request = await self.orchestrator.begin(*json.loads(asked["input"]), wall=arrival[1], heard=asyncio.Queue())
        if "stream_format" not in asked:
            frames = 0
            while (part := await request.heard.get()) is not None:
                if isinstance(part, Exception):
                    await answer(send, b'{"error":{"message":"failed"}}', status=500)
                    return
                frames += part
            await answer(send, wav_header(24000, 2 * frames) + bytes(2 * frames), "audio/wav")
            return
        is_events, is_wav = asked["stream_format"] == "sse", asked["response_format"] == "wav"
        media = EVENTS if is_events else "audio/wav" if is_wav else "audio/pcm"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", media.encode())]})

        async def write(data: bytes) -> None:
            if is_events:
                delta = {
                    "type": "speech.audio.delta",
                    "audio": base64.b64encode(data).decode(),
                    "response_format": asked["response_format"],
                }
                data = event("speech.audio.delta", delta)
            await send({"type": "http.response.body", "body": data, "more_body": True})

        stream = Stream(self.orchestrator.truth.log, request, arrival[0])
        try:
            async for samples in self._heard(request, receive):
                if is_wav and not stream.chunks:
                    await write(wav_header(24000, 0xFFFFFFFF))
                stream.chunk(len(samples))
                await write(samples)
        except Left:
            stream.aborted("cancelled")
            await self.orchestrator.give_up(request)
            return
        except RuntimeError as error:
            stream.aborted("error")
            if not is_events:
                # The server closes the connection.
                raise
            failure = {"type": "speech.audio.error", "error": {"message": str(error), "type": "server_error"}}
            await send({"type": "http.response.body", "body": event("speech.audio.error", failure)})
            return
        stream.complete()
        if is_events:
            done = event("speech.audio.done", {"type": "speech.audio.done", "usage": {"total_tokens": 7}})
            await send({"type": "http.response.body", "body": done, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _heard(self, request: truth.Request, receive: Any) -> Any:
        """Samples as they come."""
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            while True:
                part = asyncio.ensure_future(request.heard.get())
                await asyncio.wait({part, gone}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    part.cancel()
                    raise Left
                if part.result() is None:
                    return
                if isinstance(part.result(), Exception):
                    raise part.result()
                if part.result() > 0:
                    yield os.urandom(2 * part.result())
        finally:
            gone.cancel()

    async def _socket(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})

        async def say(**message: Any) -> None:
            await send({"type": "websocket.send", "text": json.dumps(message, separators=(",", ":"))})

        number = 0
        while (message := await receive())["type"] == "websocket.receive":
            asked = json.loads(message["text"])
            if asked["type"] != "input.text":
                continue
            arrival, wall = time.monotonic(), time.time()
            place = {"utterance_index": number, "sentence_index": 0}
            await say(type="audio.start", **place, sentence_text=asked["text"], format="pcm", sample_rate=24000)
            request = await self.orchestrator.begin(*json.loads(asked["text"]), wall=wall, heard=asyncio.Queue())
            stream = Stream(self.orchestrator.truth.log, request, arrival)
            total, failed = 0, False
            try:
                while (part := await request.heard.get()) is not None:
                    if isinstance(part, Exception):
                        failed = True
                        break
                    if part > 0:
                        stream.chunk(2 * part)
                        await send({"type": "websocket.send", "bytes": os.urandom(2 * part)})
                        total += 2 * part
            except Exception:
                # The client has left, which the first write after it tells.
                stream.chunks.pop()
                stream.aborted("closed")
                await self.orchestrator.give_up(request)
                return
            if failed:
                stream.aborted("error")
                await say(type="error", message="failed", partial_audio=total > 0)
            else:
                stream.complete()
            await say(type="audio.done", **place, total_bytes=total, error=failed)
            await say(type="session.done", utterance_index=number, total_sentences=1)
            number += 1

    async def _image(self, asked: dict[str, Any], send: Any) -> None:
        """A diffusion stage inside this process."""
        phase, index = json.loads(asked["prompt"])
        plan = self.orchestrator.scenario.phases[phase].requests[index].image
        log = self.orchestrator.truth.log
        start = time.monotonic()
        await asyncio.sleep(plan.ms / 1000)
        generation = time.monotonic() - start
        if plan.fails:
            log.add("vllm_omni:requests_failed_total", {"reason": "stage_error"})
            log.add("vllm_omni:requests_success_total", {"finished_reason": "abort"})
            await answer(send, b'{"detail":"Image generation failed"}', status=500)
            return
        log.observe("vllm_omni:stage_gen_time_s", {"stage": 0, "stage_type": "diffusion"}, generation)
        log.observe("vllm_omni:image_ttfp_s", {"stage": 0, "replica": 0}, generation)
        log.observe("vllm_omni:request_queue_wait_s", {}, 0.00025)
        log.observe("vllm_omni:e2e_request_latency_s", {}, generation + 0.00175)
        log.add("vllm_omni:requests_success_total", {"finished_reason": "stop"})
        log.add("vllm_omni:image_count_total", {}, asked["n"])
        log.observe("vllm_omni:image_pixels", {}, plan.width * plan.height * asked["n"])
        log.observe("vllm_omni:num_inference_steps", {}, asked["num_inference_steps"])
        picture = {"b64_json": base64.b64encode(png(plan.width, plan.height)).decode(), "url": None}
        times = {"queue_wait_ms": 0.25, "preprocess_ms": 1.5, "stage_0_gen_ms": 1000 * generation}
        body = {
            "created": int(time.time()),
            "data": [picture | {"revised_prompt": None}] * asked["n"],
            "output_format": "png",
            "size": f"{plan.width}x{plan.height}",
            "cot_output": None,
            "metrics": {"stage_durations": times, "peak_memory_mb": plan.peak_memory_mb},
        }
        await answer(send, json.dumps(body, separators=(",", ":")).encode())

    # ---- users ----

    async def use(self, phase: int, index: int) -> None:
        """One user's request, and what they do with the answer."""
        plan = self.orchestrator.scenario.phases[phase].requests[index]
        place = json.dumps([phase, index])
        if plan.web == "socket":
            await self._listen(place, plan.abort_after)
            return
        if plan.web == "image":
            image = plan.image
            asked = {"prompt": place, "n": image.n, "num_inference_steps": image.steps}
            await self._post("/v1/images/generations", asked, plan.abort_after)
            return
        asked = {"input": place, "response_format": "pcm"} | {
            "pcm": {"stream_format": "audio"},
            "wav": {"stream_format": "audio", "response_format": "wav"},
            "events": {"stream_format": "sse"},
            "whole": {"response_format": "wav"},
            "refused": {"stream_format": "audio", "response_format": "mp3"},
        }[plan.web]
        await self._post("/v1/audio/speech", asked, plan.abort_after)

    async def _post(self, path: str, asked: dict[str, Any], leave_after: float | None) -> None:
        body = json.dumps(asked).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode() + body)
        try:
            async with asyncio.timeout(leave_after):
                while await reader.read(65536):
                    pass
        except TimeoutError:
            pass
        writer.close()

    async def _listen(self, place: str, leave_after: float | None) -> None:
        uri = f"ws://127.0.0.1:{self.port}/v1/audio/speech/stream"
        async with websockets.connect(uri, compression=None, max_size=None, close_timeout=1) as client:
            await client.send(json.dumps({"type": "session.config", "stream_audio": True}))
            await client.send(json.dumps({"type": "input.text", "text": place}))
            await client.send(json.dumps({"type": "input.done"}))
            try:
                async with asyncio.timeout(leave_after):
                    async for message in client:
                        if isinstance(message, str) and json.loads(message)["type"] == "session.done":
                            break
            except TimeoutError:
                client.transport.abort()


async def answer(send: Any, body: bytes, media: str = "application/json", status: int = 200) -> None:
    """A whole answer, head and body in a write each."""
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", media.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def disconnected(receive: Any) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def event(name: str, data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def wav_header(rate: int, size: int) -> bytes:
    """The header of a file of mono 16-bit samples; `size` in bytes."""
    riff = struct.pack("<4sI4s", b"RIFF", min(36 + size, 0xFFFFFFFF), b"WAVE")
    return riff + struct.pack("<4sIHHIIHH4sI", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", size)


def png(width: int, height: int) -> bytes:
    """An image that does not compress."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + os.urandom(3 * width) for _ in range(height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def is_used(scenario: sc.Scenario) -> bool:
    """Whether any user comes over HTTP."""
    return any(request.web for phase in scenario.phases for request in phase.requests)
