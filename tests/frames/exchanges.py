"""Writes the connections that the tests of `wire::http` read: what a real server does with them, call by call.

  exchanges.py FILE   needs vLLM and vLLM-Omni 0.30. Their own routes, handlers and answers under their own uvicorn, with
                      engines that give audio and images made up here.

A line has: name, and entries as a recording has them (agent/src/record.rs), 10 ms apart. Of each call as much is kept
as the tap captures.
"""

import asyncio
import json
import sys
import types

import numpy as np
import torch
import uvicorn
import websockets
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from PIL import Image
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from vllm_omni.entrypoints.openai import api_server
from vllm_omni.entrypoints.openai.audio_utils_mixin import AudioMixin
from vllm_omni.entrypoints.openai.protocol.audio import CreateAudio
from vllm_omni.entrypoints.openai.serving_chat import OmniChatCompletionStreamResponse, OmniOpenAIServingChat
from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech
from vllm_omni.entrypoints.openai.serving_speech_stream import OmniStreamingSpeechHandler

PID = 100
FD = 7
RATE = 24000
# What the tap captures of a call: first and last bytes.
RECEIVED = (2048, 512)
SENT = (1024, 1024)


class Log:
    """The calls on one connection."""

    def __init__(self) -> None:
        self.entries = []

    def add(self, what: str, data: bytes | None = None, limits: tuple[int, int] = (0, 0)) -> None:
        http = {"pid": PID, "tid": PID, "fd": FD, "what": what}
        if data is not None:
            first, last = limits
            http["size"] = len(data)
            http["head"] = data[:first].hex()
            http["tail"] = data[max(first, len(data) - last) :].hex()
        self.entries.append({"t": 10_000_000 * (1 + len(self.entries)), "http": http})


LOG = Log()


class Tap:
    """A transport that tells of what is written."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str):
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if data and not self._transport.is_closing():
            LOG.add("sent", bytes(data), SENT)
        self._transport.write(data)

    def set_protocol(self, protocol) -> None:
        listen(protocol)
        self._transport.set_protocol(protocol)


def listen(protocol) -> None:
    """Tells of what a protocol is given."""
    received, ended, lost = protocol.data_received, protocol.eof_received, protocol.connection_lost

    def data_received(data: bytes) -> None:
        LOG.add("received", bytes(data), RECEIVED)
        received(data)

    def eof_received():
        LOG.add("received", b"", RECEIVED)
        return ended()

    def connection_lost(exc) -> None:
        if exc is not None:
            LOG.add("failed")
            LOG.entries[-1]["http"]["errno"] = getattr(exc, "errno", None) or 104
        LOG.add("closed")
        lost(exc)

    protocol.data_received, protocol.eof_received, protocol.connection_lost = data_received, eof_received, connection_lost


class Protocol(HttpToolsProtocol):
    """uvicorn's own, tapped."""

    def connection_made(self, transport) -> None:
        LOG.add("accepted")
        listen(self)
        super().connection_made(Tap(transport))


# --- engines ----------------------------------------------------------------------------------------------------


async def outputs(plan):
    """Outputs of an audio stage: numbers of samples, or an exception."""
    for part in plan:
        await asyncio.sleep(0.01)
        if isinstance(part, Exception):
            raise part
        audio = {"audio": torch.from_numpy(np.linspace(-0.5, 0.5, part, dtype=np.float32)), "sr": RATE}
        yield types.SimpleNamespace(multimodal_output=audio, stage_id=1, replica_id=0, final_output_type="audio")


class Speech(OmniOpenAIServingSpeech):
    """The real one without an engine: what it would generate is in the input, as JSON."""

    def __init__(self) -> None:
        self.engine_client = types.SimpleNamespace(mod_metrics=None, request_states={}, abort=self._abort)
        self._tts_model_type = "x"
        self._request_ref_audio_artifact_keys = {}

    async def _abort(self, _id) -> None:
        return None

    @property
    def forced_aligner_enabled(self) -> bool:
        return False

    def _get_available_speakers(self, *_):
        return []

    def _validate_speech_sample_rate(self, _request):
        return None

    async def _check_model(self, _request):
        return None

    def _get_tts_adapter(self):
        return None

    def _uses_native_speed_control(self) -> bool:
        return False

    def _build_speech_usage(self, *_):
        return types.SimpleNamespace(model_dump=lambda: {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7})

    def _build_speech_usage_headers(self, _usage) -> dict:
        return {}

    def _validate_tts_generation(self, *_) -> None:
        return None

    def create_error_response(self, message, **_):
        return OmniOpenAIServingSpeech._diffusion_error_response(str(message), status_code=400)

    async def _prepare_speech_generation(self, request, request_id=None, arrival_time=None):
        plan = [RuntimeError("broken") if n < 0 else n for n in json.loads(request.input)]
        return request_id or "speech-0", outputs(plan), {}

    async def _generate_audio_bytes(self, request, **_):
        samples = np.zeros(json.loads(request.input)[0], dtype=np.float32)
        audio = CreateAudio(
            audio_tensor=samples,
            sample_rate=RATE,
            response_format=request.response_format or "wav",
            speed=1.0,
            base64_encode=False,
        )
        answer = self.create_audio(audio)
        return answer.audio_data, answer.media_type


async def chat(request):
    """A streamed chat with text and audio: the real chunks."""
    real = object.__new__(OmniOpenAIServingChat)
    body = await request.json()
    asked = types.SimpleNamespace(return_token_ids=False, audio=None, modalities=["text", "audio"])
    real._resolve_audio_format = lambda _request: "wav"

    async def chunks():
        name = f"chatcmpl-{request.headers.get('x-request-id', 'abc')}"
        for number, samples in enumerate(json.loads(body["messages"][0]["content"])):
            await asyncio.sleep(0.01)
            audio = torch.zeros(samples) if samples else None
            part = types.SimpleNamespace(
                index=0, multimodal_output={"audio": audio, "sr": RATE}, finish_reason=None, stop_reason=None
            )
            result = types.SimpleNamespace(outputs=[part])
            choices = real._create_audio_choice(result, "assistant", asked, stream=True)
            chunk = OmniChatCompletionStreamResponse(
                id=name, object="chat.completion.chunk", created=1, choices=choices, model="m", modality="audio",
                metrics=None,
            )
            yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
            assert number >= 0
        yield "data: [DONE]\n\n"

    return StreamingResponse(content=chunks(), media_type="text/event-stream")


async def chat_image(_request):
    """The answer of a chat with an image: its real choice."""
    image = types.SimpleNamespace(
        images=[picture(64, 32)],
        stage_durations={"queue_wait_ms": 0.5, "preprocess_ms": 2.0, "stage_0_gen_ms": 40.0},
        peak_memory_mb=12.5,
        outputs=[],
    )
    real = object.__new__(OmniOpenAIServingChat)
    choices = real._create_image_choice(image, "assistant", types.SimpleNamespace(), stream=False)
    content = [choice.model_dump(mode="json", serialize_as_any=True, warnings="none") for choice in choices]
    answer = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion", "created": 1, "choices": content}
    return api_server.JSONResponse(content=answer)


def picture(width: int, height: int) -> Image.Image:
    """An image that does not compress."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


async def generate(**kwargs):
    """The diffusion stage's result: its prompt says how large it is, and whether it fails."""
    prompt = kwargs["prompt"]["prompt"]
    if prompt == "fail":
        raise RuntimeError("no image")
    width, height = (int(side) for side in prompt.split("x"))
    count = kwargs["gen_params"].num_outputs_per_prompt or 1
    return types.SimpleNamespace(
        images=[picture(width, height)] * count,
        stage_durations={"queue_wait_ms": 0.25, "preprocess_ms": 1.5, "stage_0_gen_ms": 120.75},
        peak_memory_mb=4096.5,
        metrics={"stage_metrics": {"0": {"stage_gen_time_ms": 120.75, "image_time_to_first_output_ms": 118.5}}},
    )


def application() -> FastAPI:
    """The real routes."""
    app = FastAPI()
    stages = [types.SimpleNamespace(stage_type="diffusion")]
    api_server._get_engine_and_model = lambda _request: (None, "m", stages)
    api_server._generate_with_async_omni = generate
    api_server.get_stage_type = lambda stage: stage.stage_type
    api_server._get_max_edit_input_images = lambda *_: None

    async def check_health() -> None:
        return None

    speech = Speech()
    app.state.openai_serving_speech = speech
    app.state.openai_streaming_speech = OmniStreamingSpeechHandler(speech)
    app.state.engine_client = types.SimpleNamespace(check_health=check_health)
    app.state.enable_server_load_tracking = False
    app.state.args = types.SimpleNamespace(default_sampling_params=None, max_generated_image_size=None)
    wanted = {
        "/v1/audio/speech", "/v1/audio/speech/stream", "/v1/images/generations", "/v1/images/edits", "/health",
    }
    app.router.routes.extend(route for route in api_server.router.routes if getattr(route, "path", None) in wanted)
    app.add_route("/v1/chat/completions", chat, methods=["POST"])
    app.add_route("/image/v1/chat/completions", chat_image, methods=["POST"])
    return app


# --- clients ----------------------------------------------------------------------------------------------------


async def talk(port: int, *requests: bytes, until: bytes = b"", hang_up: bool = False) -> None:
    """Sends requests on one connection, each after the answer to the one before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for request in requests:
        writer.write(request)
        if until:
            await asyncio.wait_for(reader.readuntil(until), 20)
        else:
            await asyncio.wait_for(answer(reader), 20)
    if hang_up:
        writer.transport.abort()
    writer.close()
    await asyncio.sleep(0.1)


async def answer(reader: asyncio.StreamReader) -> None:
    """Reads one answer to its end."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"chunked" in head:
        try:
            while (size := int(await reader.readline(), 16)) > 0:
                await reader.readexactly(size + 2)
            await reader.readline()
        except (ValueError, asyncio.IncompleteReadError):
            return
    else:
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)


def post(path: str, body: dict, **headers: str) -> bytes:
    """A request with JSON."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def speech(plan: list[int], **more) -> bytes:
    """A request for speech."""
    return post("/v1/audio/speech", {"input": json.dumps(plan), **more})


def edit() -> bytes:
    """A request for an edited image, as a form."""
    import io

    with io.BytesIO() as file:
        picture(40, 40).save(file, format="PNG")
        image = file.getvalue()
    parts = [
        b'Content-Disposition: form-data; name="image"; filename="i.png"\r\nContent-Type: image/png\r\n\r\n' + image
    ]
    for name, value in (("prompt", "48x24"), ("n", "1"), ("size", "48x24"), ("num_inference_steps", "7")):
        parts.append(f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode())
    body = b"".join(b"--b0\r\n" + part + b"\r\n" for part in parts) + b"--b0--\r\n"
    head = (
        "POST /v1/images/edits HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b0\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def socket(port: int, *texts: list[int], compression=None, hang_up: bool = False, stream: bool = True) -> None:
    """A session on the speech WebSocket; each text is an utterance."""
    uri = f"ws://127.0.0.1:{port}/v1/audio/speech/stream"
    async with websockets.connect(uri, compression=compression, max_size=None) as client:
        kind = {"response_format": "pcm", "stream_audio": True} if stream else {"response_format": "wav"}
        await client.send(json.dumps({"type": "session.config", **kind}))
        for text in texts:
            await client.send(json.dumps({"type": "input.text", "text": json.dumps(text)}))
            await client.send(json.dumps({"type": "input.done"}))
            async for message in client:
                if hang_up and isinstance(message, bytes):
                    client.transport.abort()
                    break
                if isinstance(message, str) and json.loads(message)["type"] == "session.done":
                    break
    await asyncio.sleep(0.2)


async def main() -> None:
    """Runs all cases."""
    server = uvicorn.Server(
        uvicorn.Config(application(), port=0, http=Protocol, loop="asyncio", log_level="error", lifespan="off")
    )
    task = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    image = {"prompt": "512x256", "n": 1, "num_inference_steps": 20, "size": "512x256"}
    messages = [{"role": "user", "content": "[0, 2400, 4800]"}]
    raw = {"stream_format": "audio", "response_format": "pcm"}
    cases = {
        "health_three_times": lambda: talk(port, health, health, health),
        "health_pipelined": lambda: talk(port, health + health, until=b"healthy\"}"),
        "not_found": lambda: talk(port, post("/v1/what", {})),
        "speech_pcm": lambda: talk(port, speech([2400, 0, 4800, 1200], **raw)),
        "speech_pcm_at_8000": lambda: talk(port, speech([2400, 2400], sample_rate=8000, **raw)),
        "speech_wav": lambda: talk(port, speech([2400, 4800], stream_format="audio", response_format="wav")),
        "speech_events": lambda: talk(port, speech([2400, 4800, 1200], stream_format="sse", response_format="pcm")),
        "speech_events_wav": lambda: talk(port, speech([2400, 4800], stream=True, response_format="wav")),
        "speech_events_failed": lambda: talk(port, speech([2400, -1], stream=True, response_format="pcm")),
        "speech_whole": lambda: talk(port, speech([24000], response_format="wav")),
        "speech_cut_by_the_server": lambda: talk(port, speech([2400, -1], **raw)),
        "speech_client_left": lambda: talk(
            port, speech([2400, *[240] * 20], **raw), until=b"\r\n12c0\r\n", hang_up=True
        ),
        "speech_client_left_gently": lambda: talk(port, speech([2400, *[240] * 20], **raw), until=b"\r\n12c0\r\n"),
        "speech_refused": lambda: talk(port, speech([1], stream=True, response_format="mp3")),
        "socket_two_utterances": lambda: socket(port, [2400, 4800], [1200]),
        "socket_failed": lambda: socket(port, [2400, -1]),
        "socket_client_left": lambda: socket(port, [2400, *[240] * 30], hang_up=True),
        "socket_whole_file": lambda: socket(port, [2400], stream=False),
        "socket_compressed": lambda: socket(port, [2400], compression="deflate"),
        "chat_audio": lambda: talk(port, post("/v1/chat/completions", {"messages": messages, "stream": True})),
        "chat_image": lambda: talk(port, post("/image/v1/chat/completions", {"messages": messages})),
        "image": lambda: talk(port, post("/v1/images/generations", image)),
        "image_small": lambda: talk(port, post("/v1/images/generations", {"prompt": "8x8"})),
        "image_with_stage_metrics": lambda: talk(
            port, post("/v1/images/generations", {**image, "n": 2, "return_stage_metrics": True})
        ),
        "image_failed": lambda: talk(port, post("/v1/images/generations", {"prompt": "fail"})),
        "image_refused": lambda: talk(port, post("/v1/images/generations", {"prompt": "1x1", "model": "other"})),
        "image_edit": lambda: talk(port, edit()),
        "image_file": lambda: talk(
            port, post("/v1/images/generations", {**image, "response_format": "file"})
        ),
    }
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        for name, case in cases.items():
            global LOG
            LOG = Log()
            await case()
            file.write(json.dumps({"name": name, "entries": LOG.entries}, separators=(",", ":")) + "\n")
    server.should_exit = True
    await task


assert issubclass(OmniOpenAIServingSpeech, AudioMixin)
asyncio.run(main())
