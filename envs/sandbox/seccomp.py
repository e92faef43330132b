"""A filter of system calls for `bwrap`, which refuses what namespaces and limits leave open to whoever has no rights.

That is: every socket but pairs, memory that no limit counts, watching what other processes do with shared files,
namespaces of its own, set-user-ID bits, and whatever came after Linux 5.0 (io_uring, pidfd, the calls for mounts),
which programs do without where a kernel does not know it. As classic BPF (linux/filter.h, linux/seccomp.h).
"""

import errno
import platform
import struct
from collections.abc import Iterator

ARCHITECTURES = {
    # AUDIT_ARCH, and the numbers of what is refused, or looked at; calls that an architecture lacks are left out.
    "x86_64": (0xC000003E, {
        "socket": 41, "bind": 49, "listen": 50, "connect": 42, "accept": 43, "accept4": 288,
        "memfd_create": 319, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "vmsplice": 278, "io_setup": 206,
        "inotify_init": 253, "inotify_init1": 294, "fanotify_init": 300, "perf_event_open": 298, "syslog": 103,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "userfaultfd": 323,
        "bpf": 321, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "setns": 308,
        "clone": 56, "chmod": 90, "fchmod": 91, "fchmodat": 268, "mknod": 133, "mknodat": 259, "creat": 85, "open": 2,
        "openat": 257, "fcntl": 72, "setsockopt": 54, "socketpair": 53, "mmap": 9, "ioctl": 16,
    }),
    "aarch64": (0xC00000B7, {
        "socket": 198, "bind": 200, "listen": 201, "connect": 203, "accept": 202, "accept4": 242,
        "memfd_create": 279, "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "vmsplice": 75, "io_setup": 0,
        "inotify_init1": 26, "fanotify_init": 262, "perf_event_open": 241, "syslog": 116,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "userfaultfd": 282,
        "bpf": 280, "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97, "setns": 268,
        "clone": 220, "fchmod": 52, "fchmodat": 53, "mknodat": 33,
        "openat": 56, "fcntl": 25, "setsockopt": 208, "socketpair": 199, "mmap": 222, "ioctl": 29,
    }),
}  # fmt: skip
NEWER = 424
"""The first call after Linux 5.0; from here on every architecture has the same numbers."""
SET_ID = 0o6000
NEW_NAMESPACES = 0x7E02_0000
"""CLONE_NEWUSER and its kin."""
HUGE_PAGES = 0x40000
"""MAP_HUGETLB takes from the machine's own store."""
CREATES = 0o100 | 0o20000000
"""O_CREAT and O_TMPFILE: without them an open's mode is whatever was in the register."""
BITS = {
    "clone": ((0, NEW_NAMESPACES),), "chmod": ((1, SET_ID),), "fchmod": ((1, SET_ID),), "fchmodat": ((2, SET_ID),),
    "mknod": ((1, SET_ID),), "mknodat": ((2, SET_ID),), "creat": ((1, SET_ID),), "mmap": ((3, HUGE_PAGES),),
    "open": ((1, CREATES), (2, SET_ID)), "openat": ((2, CREATES), (3, SET_ID)),
}  # fmt: skip
"""Calls that are refused where each of these arguments has any of these bits."""
VALUES = {
    "fcntl": (1, (1024, 1026, 1031)),  # F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
    "setsockopt": (2, (7, 8, 32, 33)),  # SO_SNDBUF, SO_RCVBUF and both by force: memory that no limit counts
    "socketpair": (0, (2, 10, 16, 30, 40)),  # all but AF_UNIX have none, in today's kernels
    "ioctl": (1, (0x5412, 0x541C, 0x5423)),  # TIOCSTI and TIOCLINUX type into a terminal, TIOCSETD loads drivers
}
"""Calls that are refused where this argument is one of these."""
REFUSED, ALLOWED, UNKNOWN = "refused", "allowed", "unknown"
"""Where the filter ends: the call fails with EPERM, is done, or fails with ENOSYS."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ENDS = {REFUSED: 0x0005_0000 | errno.EPERM, ALLOWED: 0x7FFF_0000, UNKNOWN: 0x0005_0000 | errno.ENOSYS}

Line = tuple[int, int, str | int, str | int]
"""Code, constant, and where to go if so and if not: an end, or how many lines to skip."""


def missing() -> str | None:
    """Return why there is no filter for this machine, or None."""
    machine = platform.machine()
    return None if machine in ARCHITECTURES else f"there is no filter of system calls for {machine}"


def program() -> bytes:
    """Return the filter: what it does not know it allows, up to Linux 5.0."""
    lines = list(_lines())
    ends = {name: len(lines) + place for place, name in enumerate(_ENDS)}
    packed = [
        struct.pack("<HBBI", code, *(ends[to] - at - 1 if isinstance(to, str) else to for to in where), constant)
        for at, (code, constant, *where) in enumerate(lines)
    ]
    return b"".join([*packed, *(struct.pack("<HBBI", _RETURN, 0, 0, value) for value in _ENDS.values())])


def _lines() -> Iterator[Line]:
    architecture, numbers = ARCHITECTURES[platform.machine()]
    yield (_LOAD, 4, 0, 0)
    yield (_EQUAL, architecture, 0, REFUSED)
    yield (_LOAD, 0, 0, 0)
    yield (_AT_LEAST, NEWER, UNKNOWN, 0)  # calls of x86_64's other interface are above it, too
    for name, number in numbers.items():
        if name not in BITS and name not in VALUES:
            yield (_EQUAL, number, REFUSED, 0)
    for name, number in numbers.items():
        if name in BITS:
            yield (_EQUAL, number, 0, 2 * len(BITS[name]))
            for place, (argument, bits) in enumerate(BITS[name], 1):
                yield (_LOAD, 16 + 8 * argument, 0, 0)
                yield (_ANY_BIT, bits, REFUSED if place == len(BITS[name]) else 0, ALLOWED)
        elif name in VALUES:
            argument, values = VALUES[name]
            yield (_EQUAL, number, 0, 1 + len(values))
            yield (_LOAD, 16 + 8 * argument, 0, 0)
            for place, value in enumerate(values, 1):
                yield (_EQUAL, value, REFUSED, ALLOWED if place == len(values) else 0)
    yield (_EQUAL, 0xFFFF_FFFF, ALLOWED, ALLOWED)
