"""Hands segments of shared memory on by the file protocol of SharedMemoryConnector (docs/wire.md).

Times are of CLOCK_MONOTONIC in ns, taken around the calls that an observer sees.
"""

import contextlib
import fcntl
import os
import time
from multiprocessing import shared_memory

FOLDER = "/dev/shm"


def lock_file(key: str) -> str:
    """Where the lock of a key is."""
    return f"{FOLDER}/shm_{key}_lockfile.lock"


def put(key: str, size: int, delay: float = 0) -> tuple[int, int]:
    """Makes and fills a segment, over an old one of this key too; returns begin and end."""
    data = bytes(size)
    with open(lock_file(key), "wb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic_ns()
        try:
            segment = shared_memory.SharedMemory(create=True, size=size, name=key)
        except FileExistsError:
            shared_memory.SharedMemory(name=key).unlink()
            segment = shared_memory.SharedMemory(create=True, size=size, name=key)
        segment.buf[:size] = data
        time.sleep(delay)
        segment.close()
        fcntl.flock(lock, fcntl.LOCK_UN)
        return start, time.monotonic_ns()


def get(key: str, delay: float = 0) -> tuple[int, int, int] | None:
    """Takes a segment; returns its size, begin and end. None: it is not there, or not free yet."""
    start = time.monotonic_ns()
    try:
        first = shared_memory.SharedMemory(name=key)
    except (FileNotFoundError, ValueError):
        # Not there, or made and not sized yet.
        return None
    try:
        with open(lock_file(key), "rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            segment = shared_memory.SharedMemory(name=key)
            data = bytes(segment.buf)
            time.sleep(delay)
            segment.close()
            segment.unlink()
            fcntl.flock(lock, fcntl.LOCK_UN)
            done = time.monotonic_ns()
        with contextlib.suppress(FileNotFoundError):
            os.remove(lock_file(key))
        return len(data), start, done
    except (BlockingIOError, FileNotFoundError):
        # The sender is not done, or has removed it.
        return None
    finally:
        first.close()


def clean_up(key: str) -> None:
    """Removes the segment and the lock file of a key, where they are still there."""
    try:
        segment = shared_memory.SharedMemory(name=key)
        segment.close()
        segment.unlink()
    except FileNotFoundError:
        pass
    except ValueError:
        # Its maker was killed before it had a size: it can't be mapped.
        os.remove(f"{FOLDER}/{key}")
    with contextlib.suppress(FileNotFoundError):
        os.remove(lock_file(key))
