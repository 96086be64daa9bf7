"""Sends frames through a libzmq that a shared module of any name carries: its path is the argument."""

import ctypes
import sys

zmq = ctypes.CDLL(sys.argv[1])
for name in ("zmq_ctx_new", "zmq_socket", "zmq_msg_data"):
    getattr(zmq, name).restype = ctypes.c_void_p
PUSH, PULL = 8, 7
context = ctypes.c_void_p(zmq.zmq_ctx_new())
pull = ctypes.c_void_p(zmq.zmq_socket(context, PULL))
push = ctypes.c_void_p(zmq.zmq_socket(context, PUSH))
assert zmq.zmq_bind(pull, b"inproc://frames") == 0
assert zmq.zmq_connect(push, b"inproc://frames") == 0
print("ready", flush=True)
for line in sys.stdin:
    size = int(line)
    message = ctypes.create_string_buffer(64)
    assert zmq.zmq_msg_init_size(message, ctypes.c_size_t(size)) == 0
    data = bytes((i * 7) & 255 for i in range(size))
    ctypes.memmove(ctypes.c_void_p(zmq.zmq_msg_data(message)), data, size)
    assert zmq.zmq_msg_send(message, push, 0) == size
    print("ok", flush=True)
