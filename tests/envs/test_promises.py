"""What the sandboxes promise, tried: no attack succeeds on any of them, and each does where nothing holds it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from running import ROOT

from nanoskyrl.envs.sandbox import trial
from nanoskyrl.envs.sandbox.base import BACKENDS, FULL_PYTHON, available
from nanoskyrl.envs.sandbox.bwrap import bwrap
from nanoskyrl.envs.sandbox.promises import PROMISES, few
from nanoskyrl.envs.sandbox.trial import NONE, Scene, attempt
from nanoskyrl.stages.core.errors import SandboxError
from nanoskyrl.stages.looking import doctor

SHARE = 5
"""Of so many attacks the quick tests try one."""
READABLE = tuple(dict.fromkeys((sys.base_prefix, sys.prefix, sysconfig.get_paths()["purelib"], str(ROOT))))


def ordinary_user() -> list[str]:
    """Return a command that starts another as a user without rights, where root's home may hold what it needs."""
    binds = [word for path in READABLE for word in ("--ro-bind", path, path)]
    above = dict.fromkeys(folder for path in READABLE for folder in reversed(Path(path).parents))
    folders = [w for f in above if f.is_relative_to("/root/") and f != Path("/root") for w in ("--dir", str(f))]
    opened = [word for folder in folders[1::2] for word in ("--chmod", "0755", folder)]
    return [
        str(bwrap()), "--bind", "/", "/", "--dev-bind", "/dev", "/dev", "--tmpfs", "/root", *folders, *opened, *binds,
        "--setenv", "HOME", "/tmp", "--",
        "setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "--inh-caps=-all",
    ]  # fmt: skip


def sacrificial() -> list[str]:
    """Return a command that starts another with rights over namespaces made for it, and over nothing else."""
    empty = [word for path in ("/dev/shm", "/tmp", "/var/tmp", "/mnt", "/run") for word in ("--tmpfs", path)]
    binds = [word for path in READABLE for word in ("--ro-bind", path, path)]
    return [
        str(bwrap()), "--unshare-user", "--uid", "0", "--gid", "0", "--unshare-all", "--die-with-parent",
        "--cap-add", "ALL", "--ro-bind", "/", "/",
        "--dev-bind", "/dev", "/dev", *empty, *binds, "--proc", "/proc", "--",
        "prlimit", "--as=8589934592:", "--nproc=400:", "sh", "-c", 'trap "" USR1; "$@"; exit $?', "sh",
    ]  # fmt: skip


STARTS = {"as we are": list, "as an ordinary user": ordinary_user, "sacrificed": sacrificial}


@cache
def outcomes(backend: str, who: str, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return what became of each attack by its name."""
    return {row["attack"]: row for row in trial.tried(backend, names, before=STARTS[who]())}


def a_share() -> tuple[str, ...]:
    return tuple(name for promise in PROMISES.values() for name in list(promise.attacks)[::SHARE])


def need(backend: str) -> None:
    if why := available()[backend]:
        pytest.skip(f"{backend}: {why}")


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_share_of_the_attacks_fails(backend, promise):
    need(backend)
    rows = [row for row in outcomes(backend, "as we are", a_share()).values() if row["promise"] == promise]
    assert len(rows) == len(list(PROMISES[promise].attacks)[::SHARE])
    assert [row for row in rows if row["breach"] is not None] == []


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize(
    "who",
    [pytest.param("as we are", marks=pytest.mark.slow), pytest.param("as an ordinary user", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_attack_succeeds(backend, who, promise):
    need(backend)
    if who == "as an ordinary user":
        if os.geteuid() != 0:
            pytest.skip("that is what we are")
        need(FULL_PYTHON)  # bwrap makes the ordinary user
    found = outcomes(backend, who)
    assert [found[name] for name in PROMISES[promise].attacks if found[name]["breach"] is not None] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_the_ordinary_user_is_one():
    need(FULL_PYTHON)
    code = (
        "import os; print(os.getuid(), os.getgroups(), open('/proc/self/status').read().split('CapEff:')[1].split()[0])"
    )
    ran = subprocess.run([*ordinary_user(), sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == (f"54321 [] {'0' * 16}\n", "")


@pytest.mark.long
@pytest.mark.parametrize("promise", PROMISES)
def test_every_attack_succeeds_where_nothing_holds_it(promise):
    need(FULL_PYTHON)
    found = outcomes(NONE, "sacrificed")
    failed = {name for name in PROMISES[promise].attacks if found[name]["breach"] is None}
    assert failed <= set(PROMISES[promise].may_lack)


@pytest.mark.long
def test_a_hundred_and_fifty_attacks_prove_something_here():
    need(FULL_PYTHON)
    assert sum(row["breach"] is not None for row in outcomes(NONE, "sacrificed").values()) >= 150


def test_attacks_have_one_name_and_are_programs():
    names = [name for promise in PROMISES.values() for name in promise.attacks]
    assert len(names) == len(set(names)) >= 380
    for promise in PROMISES.values():
        assert set(promise.may_lack) <= set(promise.attacks)
        for name, code in promise.attacks.items():
            compile(code, name, "exec")


def test_the_trial_itself_notices_every_kind_of_harm(tmp_path, monkeypatch):
    """Without a sandbox: what a program says, changes, prints and leaves running is found, and nothing else."""
    from dataclasses import replace

    harmless = {
        "says it": "print('BREACH')",
        "writes": "open(out, 'w').write('x')",
        "changes a mode": "import os\nos.chmod(secret, 0o600)",
        "signals": "import os\nos.kill(pid, 10)",
        "prints": "print('x' * 200000)",
        "leaves a process": "import subprocess\nsubprocess.Popen(['sleep', mark])",
        "continues": "while True: pass",
        "does nothing": "print('fine')",
    }
    promise = replace(PROMISES["time"], attacks=harmless)
    monkeypatch.setenv(trial.VARIABLE, "secret")
    with trial.scene() as at:
        assert isinstance(at, Scene)
        found = {name: attempt(name, promise, NONE, at) for name in harmless}
    assert [name for name, how in found.items() if how is None] == ["does nothing"]


def test_doctor_says_which_promises_hold(monkeypatch):
    monkeypatch.setattr("nanoskyrl.envs.sandbox.base.available", lambda: {"monty": None, "bwrap": "no namespaces"})
    rows = [{"promise": name, "attack": attacks[0], "breach": None} for name, attacks in few().items()]
    monkeypatch.setattr(trial, "tried", lambda backend, names: rows)
    held, missing = doctor._sandboxes()
    assert held.ok
    assert held.found == f"runs a program; hold: {', '.join(PROMISES)}"
    assert (missing.ok, missing.found) == (False, "no namespaces")
    rows[2]["breach"] = "it says so"
    broken = doctor._sandboxes()[0]
    assert not broken.ok
    assert "DO NOT HOLD: network (`reach tcp`)" in broken.found


@pytest.mark.skipif(shutil.which("false") is None, reason="no `false`")
def test_a_trial_that_ends_early_is_an_error_and_no_promise_kept():
    with pytest.raises(SandboxError, match="after 0 of 1 attacks"):
        trial.tried("monty", ["read passwd"], before=["false"])
