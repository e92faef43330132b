"""What the sandboxes promise, each promise with the attacks by which it is tried. Nothing else is promised."""

from collections.abc import Mapping
from dataclasses import dataclass

from nanoskyrl.envs.sandbox.attacks import callers, devices, ends, files, memory, modes, network, processes
from nanoskyrl.envs.sandbox.base import Limits

ROOMY = Limits(seconds=20.0, memory_mb=256)
"""Under which attacks are tried, but those on the time."""
QUICK = Limits(seconds=0.5, memory_mb=256)
FEW = 3
"""Attacks of each promise that `skyrl doctor` tries."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise."""

    text: str
    attacks: Mapping[str, str]
    """Programs by name. Each prints BREACH where it succeeds, does the caller some harm, or goes past a limit."""
    may_lack: tuple[str, ...] = ()
    """Attacks that a machine may give nobody the means for: there they prove nothing."""
    limits: Limits = ROOMY


PROMISES = {
    "files": Promise(
        "Of the machine's files it sees the system's libraries and the interpreter, and can change none. It writes to "
        "memory that is thrown away, `file_mb` in all and 1 MB in /dev/shm, 10,000 files in each; a command also to "
        "its directory.",
        files.ATTACKS, files.MAY_LACK,
    ),
    "modes": Promise(
        "It changes no mode, owner, time or attribute of a file that is not its own, and gives none a set-user-ID "
        "bit or a capability.",
        modes.ATTACKS, modes.MAY_LACK,
    ),
    "network": Promise(
        "It has no socket but pairs of its own, so it reaches nothing and listens nowhere.",
        network.ATTACKS, network.MAY_LACK,
    ),
    "processes": Promise(
        "It runs at most `processes` processes and threads at once, gets no right that it did not begin with, and "
        "leaves none of them running.",
        processes.ATTACKS, processes.MAY_LACK,
    ),
    "callers": Promise(
        "It does not see, signal, trace, limit or read its caller, the caller's variables, or any process not its own.",
        callers.ATTACKS, callers.MAY_LACK,
    ),
    "memory": Promise(
        "All its processes together hold `memory_mb`, swapped or not, with the tables of their pages, and are ended "
        "within a moment of holding more. Beside it there are the files, and at most 14 MB a process in pipes and "
        "pairs of sockets.",
        memory.ATTACKS, memory.MAY_LACK,
    ),
    "time": Promise("It ends after `seconds`, whatever it does.", ends.TIME_ATTACKS, limits=QUICK),
    "output": Promise("It is stopped when it has written more than `output_bytes`.", ends.OUTPUT_ATTACKS),
    "devices": Promise(
        "It sees no device but null, zero, full, random, urandom and terminals of its own.",
        devices.ATTACKS, devices.MAY_LACK,
    ),
}  # fmt: skip


def few() -> dict[str, list[str]]:
    """Return the attacks of each promise that `skyrl doctor` tries, of those that a machine has the means for."""
    proving = {
        name: [attack for attack in promise.attacks if attack not in promise.may_lack]
        for name, promise in PROMISES.items()
    }
    return {name: attacks[:: max(1, len(attacks) // FEW)][:FEW] for name, attacks in proving.items()}
