"""What to type on each of several hosts, so that they train together, or form a Ray cluster; nothing is started."""

import shlex
from collections.abc import Sequence

from nanoskyrl.stages.core.config import Settings, stage_config
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import is_local

PORT, RAY_PORT = 29500, 6379


def host_commands(run: Run, settings: Settings, hosts: Sequence[str]) -> dict[str, str]:
    """Return, by what it is for, the command of each host.

    Args:
        run: Its directory; every host must see it under this name.
        settings: Its `loop.gpus_train` says how many processes each host trains with; none: one, on the CPU.
        hosts: Names or addresses by which they reach each other; the first one leads.

    Raises:
        SettingsError: a host is named twice, or none is.
    """
    if not hosts or len(set(hosts)) != len(hosts) or not all(hosts):
        raise SettingsError("`--hosts` must name each host once", hint="Write, for instance, `--hosts node1,node2`")
    place, first = stage_config(settings, "loop").placement, hosts[0]
    each = max(1, len(place.train)) if place is not None else 1
    root = shlex.quote(str(run.root.absolute() if is_local(run.root) else run.root))
    train = "nanoskyrl_cli.main train --follow"
    found = {"hosts see the run at": f"{root}, " + ("a folder that all must share" if is_local(run.root) else "a URL")}
    for rank, host in enumerate(hosts):
        if place is not None and place.train:
            launcher = (
                f"accelerate launch --multi_gpu --mixed_precision no --dynamo_backend no --num_machines {len(hosts)} "
                f"--num_processes {each * len(hosts)} --machine_rank {rank} --main_process_ip {first} "
                f"--main_process_port {PORT} -m"
            )
        else:  # accelerate starts groups on CPUs by MPI alone, and on GPUs by torchrun
            launcher = (
                f"torchrun --nnodes {len(hosts)} --nproc_per_node {each} --node_rank {rank} --master_addr {first} "
                f"--master_port {PORT} -m"
            )
        # torchrun takes `--run` for the beginning of an option of its own.
        found[f"train on {host}"] = f"SKYRL_RUN={root} {launcher} {train}"
    for host in hosts:
        how = f"--head --port {RAY_PORT}" if host == first else f"--address {first}:{RAY_PORT}"
        found[f"Ray on {host}"] = f"ray start {how}"
    found[f"loop on {first}"] = f"skyrl loop --executor ray --set ray.address={first}:{RAY_PORT} --run {root}"
    return found
