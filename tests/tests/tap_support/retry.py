"""Sends with pyzmq.asyncio while no peer is there: the first try fails, and a later one succeeds."""

import asyncio
import sys

import zmq.asyncio


async def main():
    context = zmq.asyncio.Context()
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        copy, delay = line.split()
        push = context.socket(zmq.PUSH)
        push.bind(f"inproc://{number}")
        pull = context.socket(zmq.PULL)
        sending = push.send(b"%d" % number * 200, copy=bool(int(copy)))
        await asyncio.sleep(float(delay))
        pull.connect(f"inproc://{number}")
        await sending
        await pull.recv()
        push.close()
        pull.close()
        print("ok", flush=True)


asyncio.run(main())
