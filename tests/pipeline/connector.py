"""The connector: hands payloads to the next stage by the file protocol of SharedMemoryConnector (docs/wire.md).

Puts run in one thread and gets in another, as in vLLM-Omni; the receiver polls about once a millisecond. What each
call took by this process's own clock is written down for who compares (`Times`).
"""

import fcntl
import json
import os
import queue
import threading
import time
from collections import deque
from multiprocessing import shared_memory
from typing import Any, TextIO

import scenario as sc
import shm

POLL = 0.001
# A sender that was held up puts faster until it is back at its pace, but for no more than this many seconds.
CATCH_UP = 0.02


class Times:
    """The file of transfers: one JSON object a line, a line for each end of a hop, times in ns of CLOCK_MONOTONIC."""

    def __init__(self, path: str | None, stage: int, replica: int) -> None:
        self._file: TextIO | None = open(path, "a", buffering=1, encoding="utf-8") if path else None
        self._place = {"stage": stage, "replica": replica}

    def add(self, side: str, key: str, size: int, start: int, done: int) -> None:
        """Adds one end."""
        if self._file is not None:
            row = {"side": side, "key": key, "size": size, "start": start, "done": done, **self._place}
            self._file.write(json.dumps(row) + "\n")


class Connector:
    """Both ends of one engine: toward the next stage and from the one before."""

    def __init__(self, stage: int, replica: int, times: str | None) -> None:
        self._stage = stage
        self._times = Times(times, stage, replica)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # What each request is still to be given, in order: number and payload.
        self._awaited: dict[str, deque[tuple[int, sc.Payload]]] = {}
        self._some = threading.Event()
        for target in (self._save, self._load):
            threading.Thread(target=target, daemon=True).start()

    def send(self, request_id: str, number: int, payload: sc.Payload) -> None:
        """Puts a payload, some time soon."""
        self._jobs.put((f"{request_id}_{self._stage}_{number}", payload))

    def clean_up(self, request_id: str, payloads: int) -> None:
        """Removes what was put for a request and not taken."""
        for number in range(payloads):
            self._jobs.put((f"{request_id}_{self._stage}_{number}", None))

    def expect(self, request_id: str, payloads: list[sc.Payload]) -> None:
        """Takes these as soon as they are there."""
        self._awaited[request_id] = deque((n, payload) for n, payload in enumerate(payloads) if payload.taken)
        self._some.set()

    def forget(self, request_id: str) -> None:
        """Takes nothing more for a request."""
        self._awaited.pop(request_id, None)

    def allows(self, request_id: str, output: int, is_last: bool) -> bool:
        """Whether the payloads are there that this output of a request is made of."""
        # A copy: the receiving thread takes from it.
        awaited = list(self._awaited.get(request_id, ()))
        return not awaited or (awaited[0][0] > output and not is_last)

    def _save(self) -> None:
        due = 0.0
        while True:
            key, payload = self._jobs.get()
            if payload is None:
                shm.clean_up(key)
                continue
            now = time.monotonic()
            due = max(due + payload.every, now - CATCH_UP)
            time.sleep(max(due - now, 0))
            if payload.foreign:
                make_foreign()
            self._put(key, payload)
            if not payload.taken:
                shm.clean_up(key)

    def _put(self, key: str, payload: sc.Payload) -> None:
        start, done = shm.put(key, payload.bytes, payload.put_delay)
        self._times.add("put", key, payload.bytes, start, done)

    def _load(self) -> None:
        while True:
            nothing = True
            for request_id, awaited in list(self._awaited.items()):
                number, payload = awaited[0] if awaited else (0, None)
                if payload is None:
                    self.forget(request_id)
                elif self._get(f"{request_id}_{self._stage - 1}_{number}", payload):
                    awaited.popleft()
                    nothing = False
            if not self._awaited:
                self._some.wait(1)
                self._some.clear()
            elif nothing:
                time.sleep(POLL)

    def _get(self, key: str, payload: sc.Payload) -> bool:
        taken = shm.get(key, payload.get_delay)
        if taken is not None:
            self._times.add("get", key, *taken)
        return taken is not None


def clean_up_all(request_ids: list[str]) -> None:
    """Removes what killed processes left behind for these requests."""
    known = tuple(request_ids)
    for name in os.listdir(shm.FOLDER):
        key = name.removeprefix("shm_").removesuffix("_lockfile.lock")
        if known and key.startswith(known):
            shm.clean_up(key)


def make_foreign() -> None:
    """What other software does with shared memory in a stage's process: nothing of it is a transfer."""
    number = threading.get_native_id()
    for name in (None, f"torch_{number}_1", f"torch_{number}_0_0", f"cache-of-{number}"):
        segment = shared_memory.SharedMemory(create=True, size=5000, name=name)
        segment.close()
        segment.unlink()
    # With a lock held, too.
    path = f"{shm.FOLDER}/shm_other_{number}.lock"
    with open(path, "wb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in (f"torch_{number}_2", f"cache-of-{number}"):
            segment = shared_memory.SharedMemory(create=True, size=5000, name=name)
            segment.close()
            segment.unlink()
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.remove(path)
