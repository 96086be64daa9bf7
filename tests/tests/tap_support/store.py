"""Calls a store's client library: one JSON command a line."""

import ctypes
import json
import sys

library = ctypes.CDLL(sys.argv[1])
library.store_put.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
library.store_get.argtypes = [ctypes.c_char_p]
print("ready", flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if "put" in command:
        library.store_put(command["put"].encode(), command["size"])
    elif "get" in command:
        library.store_get(command["get"].encode())
    print("ok", flush=True)
