"""A uvicorn server with an event loop and HTTP parser of choice: `uvicorn_server.py LOOP HTTP [CERTIFICATE KEY]`.

Prints "ready PORT" once it listens, and ends when its standard input does.

    GET /health          200 without a body
    GET /bytes/N         N bytes, with their length in front
    GET /stream/N/SIZE   N chunks of SIZE bytes
    GET /slow/N          N chunks of 100 bytes, one every 20 ms
    POST /count          the number of bytes of the request's body
"""

import asyncio
import contextlib
import sys
import threading

import uvicorn


def content(size):
    return bytes((7 * at + 13 * (at // 256)) % 256 for at in range(min(size, 65536))) * (size // 65536 + 1)


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    parts = scope["path"].strip("/").split("/")
    headers = [(b"content-type", b"application/octet-stream")]
    start = {"type": "http.response.start", "status": 200, "headers": headers}

    async def body(data, more=False):
        await send({"type": "http.response.body", "body": data, "more_body": more})

    if parts[0] == "bytes":
        size = int(parts[1])
        headers.append((b"content-length", b"%d" % size))
        await send(start)
        await body(content(size)[:size])
    elif parts[0] == "stream":
        count, size = int(parts[1]), int(parts[2])
        await send(start)
        chunk = content(size)[:size]
        for _ in range(count):
            await body(chunk, more=True)
        await body(b"")
    elif parts[0] == "slow":
        await send(start)
        for _ in range(int(parts[1])):
            await body(b"x" * 100, more=True)
            await asyncio.sleep(0.02)
        await body(b"")
    elif parts[0] == "count":
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False) and message["type"] == "http.request"
        text = b"%d" % size
        headers.append((b"content-length", b"%d" % len(text)))
        await send(start)
        await body(text)
    else:
        headers.append((b"content-length", b"0"))
        await send(start)
        await body(b"")


class Server(uvicorn.Server):
    """Says when it listens."""

    async def startup(self, sockets=None):
        await super().startup(sockets=sockets)
        print("ready", self.servers[0].sockets[0].getsockname()[1], flush=True)


def main():
    loop, http, *tls = sys.argv[1:]
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        loop=loop,
        http=http,
        log_level="warning",
        ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=tls[1] if tls else None,
        timeout_keep_alive=60,
    )
    server = Server(config)

    def until_told():
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=until_told, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run()


if __name__ == "__main__":
    main()
