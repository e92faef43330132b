"""A filter of system calls for `bwrap`, which leaves open what namespaces do not part: sockets to the machine's host,
the kernel's keyrings, io_uring. As classic BPF (linux/filter.h, linux/seccomp.h), for bwrap's `--seccomp`.
"""

import errno
import platform
import struct

ARCHITECTURES = {
    # AUDIT_ARCH, socket, and what is refused: add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd.
    "x86_64": (0xC000003E, 41, (248, 249, 250, 321, 298, 323)),
    "aarch64": (0xC00000B7, 198, (217, 218, 219, 280, 241, 282)),
}
IO_URING = (425, 426, 427)
"""Has the same numbers everywhere; it would make sockets without the call that is filtered."""
FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: the network's namespace holds nothing to reach with them."""
X32 = 0x4000_0000
"""Calls of x86_64's other interface have this bit."""

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF_0000, 0x0005_0000 | errno.EPERM


def missing() -> str | None:
    """Return why there is no filter for this machine, or None."""
    machine = platform.machine()
    return None if machine in ARCHITECTURES else f"there is no filter of system calls for {machine}"


def program() -> bytes:
    """Return the filter: what it does not know it allows, and what it refuses fails with EPERM."""
    arch, socket, refused = ARCHITECTURES[platform.machine()]
    calls = (*refused, *IO_URING)
    # Jumps count instructions past the next; the last two are ALLOW and REFUSE.
    length = 4 + len(calls) + 2 + len(FAMILIES) + 2
    refuse, allow = length - 1, length - 2
    code: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, 4), (_EQUAL, 0, refuse - 2, arch), (_LOAD, 0, 0, 0)]
    code.append((_AT_LEAST, refuse - len(code) - 1, 0, X32))
    for number in calls:
        code.append((_EQUAL, refuse - len(code) - 1, 0, number))
    code.append((_EQUAL, 0, allow - len(code) - 1, socket))
    code.append((_LOAD, 0, 0, 16))  # the first argument
    for place, family in enumerate(FAMILIES):
        last = place == len(FAMILIES) - 1
        code.append((_EQUAL, allow - len(code) - 1, refuse - len(code) - 1 if last else 0, family))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    assert len(code) == length
    return b"".join(struct.pack("<HBBI", *line) for line in code)
