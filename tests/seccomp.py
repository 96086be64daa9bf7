"""Runs a command under a seccomp filter that allows what systemd's SystemCallFilter= would, by libseccomp.

    seccomp.py '@system-service bpf' COMMAND [ARGUMENT ...]

Anything else fails with EPERM, as SystemCallErrorNumber= has it in our unit.
"""

import ctypes
import errno
import os
import subprocess
import sys

ALLOW = 0x7FFF0000
ERRNO = 0x00050000


def expand(names, seen):
    """The system calls of a list; a name with @ is a set of systemd's."""
    for name in names:
        if not name.startswith("@"):
            yield name
        elif name not in seen:
            seen.add(name)
            text = subprocess.run(
                ["systemd-analyze", "syscall-filter", name], check=True, capture_output=True, text=True
            ).stdout
            members = [line.strip() for line in text.splitlines()[1:]]
            yield from expand([m for m in members if m and not m.startswith("#")], seen)


def main():
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ERRNO | errno.EPERM)))
    # Always allowed by systemd as well.
    for name in sorted(set(expand([*sys.argv[1].split(), "@default", "execve"], set()))):
        number = library.seccomp_syscall_resolve_name(name.encode())
        # Calls that this libseccomp or this architecture doesn't have.
        if number < 0:
            continue
        if library.seccomp_rule_add(context, ctypes.c_uint32(ALLOW), ctypes.c_int(number), ctypes.c_uint(0)):
            sys.exit(f"no rule for {name}")
    if library.seccomp_load(context):
        sys.exit("the filter can't be loaded")
    os.execvp(sys.argv[2], sys.argv[2:])


main()
