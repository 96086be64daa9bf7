"""Hands segments on by the file protocol of vLLM-Omni's SharedMemoryConnector: one JSON command a line."""

import fcntl
import json
import os
import sys
import threading
import time
from multiprocessing import shared_memory


def lock_file(key):
    return f"/dev/shm/shm_{key}_lockfile.lock"


def write(payload, key):
    try:
        segment = shared_memory.SharedMemory(create=True, size=len(payload), name=key)
    except FileExistsError:
        shared_memory.SharedMemory(name=key).unlink()
        segment = shared_memory.SharedMemory(create=True, size=len(payload), name=key)
    segment.buf[: len(payload)] = payload
    segment.close()


def put(key, size):
    with open(lock_file(key), "wb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write(bytes(size), key)
        fcntl.flock(file, fcntl.LOCK_UN)


def read(key):
    segment = shared_memory.SharedMemory(name=key)
    data = bytes(segment.buf)
    segment.close()
    segment.unlink()
    return data


def get(key):
    try:
        segment = shared_memory.SharedMemory(name=key)
    except FileNotFoundError:
        return None
    except ValueError:
        # Made, but not sized yet.
        return None
    try:
        with open(lock_file(key), "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = read(key)
            fcntl.flock(file, fcntl.LOCK_UN)
        os.remove(lock_file(key))
        return data
    except BlockingIOError:
        return None
    finally:
        segment.close()


def poll(key):
    while get(key) is None:
        time.sleep(0.001)


def cleanup(key):
    segment = shared_memory.SharedMemory(name=key)
    segment.close()
    segment.unlink()
    os.remove(lock_file(key))


def main():
    threads = []
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "put" in command:
            put(command["put"], command["size"])
        elif "poll" in command:
            threads.append(threading.Thread(target=poll, args=(command["poll"],)))
            threads[-1].start()
        elif "join" in command:
            while threads:
                threads.pop().join()
        elif "cleanup" in command:
            cleanup(command["cleanup"])
        elif "unnamed" in command:
            segment = shared_memory.SharedMemory(create=True, size=command["unnamed"])
            segment.close()
            segment.unlink()
        print("ok", flush=True)


main()
