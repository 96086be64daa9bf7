"""Sends frames with known bytes through real pyzmq: one JSON command a line, one answer a line."""

import json
import subprocess
import sys
import threading

import zmq


def content(seed, size):
    return bytes((seed * 31 + i * 7 + (i >> 8)) & 255 for i in range(size))


def main():
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    push = context.socket(zmq.PUSH)
    pull.rcvhwm = push.sndhwm = 0
    pull.bind("inproc://frames")
    push.connect("inproc://frames")

    def receive():
        while True:
            pull.recv_multipart(copy=False)

    threading.Thread(target=receive, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "parts" in command:
            parts = [content(command["seed"] + i, size) for i, size in enumerate(command["parts"])]
            push.send_multipart(parts, copy=command["copy"])
        elif "flood" in command:
            rest = content(1, command["size"] - 8)
            for i in range(command["flood"]):
                push.send(i.to_bytes(8, "little") + rest)
        elif "spawn" in command:
            subprocess.run(["true"], check=True)
        print("ok", flush=True)


main()
