"""Hands segments on by the file protocol of vLLM-Omni's SharedMemoryConnector: one JSON command a line."""

import json
import pathlib
import sys
import threading
import time
from multiprocessing import shared_memory

sys.path.append(str(pathlib.Path(__file__).parents[2] / "pipeline"))
import shm


def poll(key):
    while shm.get(key) is None:
        time.sleep(0.001)


def main():
    threads = []
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "put" in command:
            shm.put(command["put"], command["size"])
        elif "poll" in command:
            threads.append(threading.Thread(target=poll, args=(command["poll"],)))
            threads[-1].start()
        elif "join" in command:
            while threads:
                threads.pop().join()
        elif "cleanup" in command:
            shm.clean_up(command["cleanup"])
        elif "unnamed" in command:
            segment = shared_memory.SharedMemory(create=True, size=command["unnamed"])
            segment.close()
            segment.unlink()
        print("ok", flush=True)


main()
