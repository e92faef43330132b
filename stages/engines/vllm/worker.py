"""What nanoskyrl adds to a vLLM server: copied beside the server and loaded there by its name; on our
side only its sums are used.

The worker keeps the digest of the policy it holds, counts what was loaded, and sums the bits of its weights; on a
CPU it also fixes what vLLM leaves stale after a reload. The middleware asks for the key on every path: vLLM's own
asks only below /v1, and the paths that change weights lie elsewhere.
"""

import hmac
import importlib
import math
import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS_AT_ONCE = 1 << 20
READERS, READ_AHEAD = 8, 1 << 29
"""Threads that read weights, and bytes that lie on the GPU before they are taken."""
RECORD = "_skyrl_packed"
"""Sums of the weight that a layer's packed copy was made from, on the layer."""
EXPERTS = "_skyrl_experts"
"""On a layer of experts that were packed in place: what packs them, and by name their sums before and after."""


def bit_sums(tensor: torch.Tensor) -> list[int]:
    """Return two sums, modulo 2^64, over a tensor's bits as 64-bit words; zeros count for nothing.

    They do not depend on the order of the words, so tensors that were joined give the sum of what their parts give.
    The second sum is of squares: bits moved from one word to another change it.
    """
    if tensor.is_cuda:
        return read_sums(cuda_sums(tensor))
    totals = [0, 0]
    # Several times faster than torch's, which has no dot product of integers that pays; and lets threads run.
    words = as_words(tensor).numpy().view(np.uint64)
    for part in np.array_split(words, -(-len(words) // WORDS_AT_ONCE) or 1):
        totals[0] += int(part.sum(dtype=np.uint64))
        totals[1] += int(np.dot(part, part))
    return [total % (1 << 64) for total in totals]


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as 64-bit words, filled up with zeros."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() * flat.element_size() % 8:
        flat = torch.nn.functional.pad(flat, (0, 8 // flat.element_size() - flat.numel() % (8 // flat.element_size())))
    return flat.view(torch.int64)


def cuda_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return `bit_sums` where the tensor is: nothing waits for them until `read_sums`."""
    totals = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for part in as_words(tensor).split(WORDS_AT_ONCE << 4):
        totals += torch.stack([part.sum(), (part * part).sum()])
    return totals


def read_sums(totals: torch.Tensor) -> list[int]:
    """Return sums of 64-bit words as numbers from 0 on."""
    return [total % (1 << 64) for total in totals.tolist()]


def bucket_of(name: str) -> str:
    """Return the part of the model that a weight is summed in: its layer, or the rest."""
    found = re.search(r"layers\.(\d+)\.", name)
    return f"layer {found.group(1)}" if found else "rest"


def plus(held: list[int], sums: list[int]) -> list[int]:
    """Return the sums of two weights together."""
    return [(a + b) % (1 << 64) for a, b in zip(held, sums, strict=True)]


def add(buckets: dict[str, list[int]], name: str, sums: list[int]) -> None:
    """Add a weight's sums to its bucket."""
    place = bucket_of(name)
    buckets[place] = plus(buckets.get(place, [0, 0]), sums)


def _watch_packing() -> None:
    """On a CPU, vLLM drops linear weights once they are packed: sum them just before."""
    try:
        utils = importlib.import_module("vllm.model_executor.layers.utils")
        pack = utils.dispatch_cpu_unquantized_gemm
    except (ImportError, AttributeError):  # no such thing in this version: then nothing is packed
        return
    if getattr(pack, "_skyrl", False):
        return

    def packed(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not layer.weight.is_meta and layer.weight.numel():
            setattr(layer, RECORD, bit_sums(layer.weight))
        return pack(layer, *args, **kwargs)

    packed._skyrl = True  # type: ignore[attr-defined]
    setattr(utils, "dispatch_cpu_unquantized_gemm", packed)  # noqa: B010 - a type checker knows no vLLM


def _watch_experts() -> None:
    """On a CPU, vLLM packs experts in place when it loads them first, and leaves that out when it loads them again."""
    try:
        kernels = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts
    except (ImportError, AttributeError):
        return
    pack = kernels.process_weights_after_loading
    if getattr(pack, "_skyrl", False):
        return

    def packed(self: Any, layer: Any) -> None:
        names = ("w13_weight", "w2_weight")
        before = {name: bit_sums(getattr(layer, name)) for name in names}
        pack(self, layer)
        setattr(layer, EXPERTS, (self, {name: (before[name], bit_sums(getattr(layer, name))) for name in names}))

    packed._skyrl = True  # type: ignore[attr-defined]
    kernels.process_weights_after_loading = packed


if os.environ.get("SKYRL_VLLM_CPU"):
    _watch_packing()
    _watch_experts()


def read_ahead(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a directory on the GPU, a little ahead of who takes them.

    Several threads read, into pinned memory, which torch keeps for the next time: one thread that copies from a file's
    pages is several times slower than files and bus are.
    """
    open_file = importlib.import_module("safetensors").safe_open
    device = torch.cuda.current_device()

    def read(file: Any, name: str) -> torch.Tensor:
        with torch.cuda.device(device):
            tensor = file.get_tensor(name).pin_memory().to(device, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return tensor

    reading: deque[tuple[str, Future[torch.Tensor], int]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        for place in sorted(Path(path).glob("*.safetensors")):
            with open_file(place, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no dictionary
                    size = math.prod(file.get_slice(name).get_shape()) * 4
                    while reading and sum(each[2] for each in reading) + size > READ_AHEAD:
                        yield _taken(reading)
                    reading.append((name, pool.submit(read, file, name), size))
                while reading:
                    yield _taken(reading)


def _taken(reading: "deque[tuple[str, Future[torch.Tensor], int]]") -> tuple[str, torch.Tensor]:
    name, found, _ = reading.popleft()
    tensor = found.result()
    # Made on another stream: its memory is not given away before this one is done with it.
    tensor.record_stream(torch.cuda.current_stream())
    return name, tensor


class Extension:
    """Methods that the server's workers gain, called by their names."""

    def skyrl_state(self) -> dict[str, Any]:
        """Return which policy is held, and how often weights were loaded since the start."""
        return {
            "digest": getattr(self, "_skyrl_digest", None),
            "loads": getattr(self, "_skyrl_loads", 0),
            "dtype": str(next(self._skyrl_model().parameters()).dtype).removeprefix("torch."),
            "pid": os.getpid(),
        }

    def skyrl_hold(self, digest: str) -> dict[str, Any]:
        """Take note of the policy that the server was started with."""
        self._skyrl_digest = digest
        return self.skyrl_state()

    def skyrl_load(self, path: str, digest: str) -> dict[str, Any]:
        """Load weights from a directory, and say how many layers vLLM had left stale.

        Args:
            path: A whole model, in Hugging Face format.
            digest: Of the policy; None is held meanwhile.
        """
        self._skyrl_digest = None
        if type(self._skyrl_model()).__name__ == "GptOssForCausalLM":
            self._skyrl_load_gpt_oss(path)
        elif next(self._skyrl_model().parameters()).is_cuda:
            self.reload_weights(weights_iterator=read_ahead(path))  # type: ignore[attr-defined]
        else:
            self.reload_weights(weights_path=path)  # type: ignore[attr-defined]
        stale = self._skyrl_rebuild()
        self._skyrl_digest = digest
        self._skyrl_loads = getattr(self, "_skyrl_loads", 0) + 1
        return {**self.skyrl_state(), "stale": stale}

    def skyrl_checksum(self) -> dict[str, Any]:
        """Return the sums of the weights that compute, by layer, and the layers whose packed copy is stale."""
        buckets: dict[str, list[int]] = {}
        stale, on_gpu = [], []
        seen = set()
        for name, module in self._skyrl_model().named_modules():
            record, experts = getattr(module, RECORD, None), getattr(module, EXPERTS, (None, {}))[1]
            for short, parameter in module.named_parameters(recurse=False):
                if parameter.is_cuda and id(parameter) not in seen:  # nothing is packed there
                    seen.add(id(parameter))
                    on_gpu.append((f"{name}.{short}", cuda_sums(parameter)))
                if parameter.is_cuda:
                    continue
                packed = record if short == "weight" else None
                sums = bit_sums(parameter) if parameter.numel() else packed or [0, 0]
                if short in experts:
                    packed, after = experts[short]
                    sums = packed if sums == after else sums
                if packed is not None and sums != packed:
                    stale.append(f"{name}.{short}")  # also where the parameter is shared, and was counted elsewhere
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    add(buckets, f"{name}.{short}", sums)
        # One wait for all: there are hundreds of weights.
        if on_gpu:
            names, sums = zip(*on_gpu, strict=True)
            for name, found in zip(names, torch.stack(sums).cpu(), strict=True):
                add(buckets, name, read_sums(found))
        return {"sums": {name: [str(s) for s in sums] for name, sums in buckets.items()}, "stale": stale}

    def skyrl_adapter_checksum(self) -> dict[str, Any]:
        """Return the sums of each adapter that is ready to compute; None where this vLLM keeps them in another way."""
        try:
            manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
            slots = [slot for slot, held in enumerate(manager.lora_index_to_id) if held is not None]
            found = []
            for slot in slots:
                totals = [0, 0]
                for module in {id(module): module for module in manager.modules.values()}.values():
                    # One tensor for each weight that was joined; of embeddings, the tensor itself.
                    held = (module.lora_a_stacked, module.lora_b_stacked)
                    tensors = [part for one in held for part in ([one] if isinstance(one, torch.Tensor) else one)]
                    for tensor in tensors:
                        totals = plus(totals, bit_sums(tensor[slot]))
                found.append([str(total) for total in totals])
        except (AttributeError, TypeError):
            return {"sums": None}
        return {"sums": found}

    def _skyrl_model(self) -> Any:
        return self.model_runner.get_model()  # type: ignore[attr-defined]

    def _skyrl_load_gpt_oss(self, path: str) -> None:
        """Load expert by expert, and the sinks after all else: what vLLM's loader of this family copies by itself, the
        experts of a layer as one and the sinks, is lost in a reload."""
        opened = importlib.import_module("safetensors").safe_open
        sinks = {}

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for file in sorted(Path(path).glob("*.safetensors")):
                with opened(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - no dictionary
                        tensor = tensors.get_tensor(name)
                        if name.endswith(".sinks"):
                            sinks[name.replace(".self_attn.", ".attn.")] = tensor
                        elif ".experts." in name:
                            for number, expert in enumerate(tensor):
                                yield name.replace(".experts.", f".experts.{number}."), expert
                        else:
                            yield name, tensor

        self.reload_weights(weights_iterator=weights())  # type: ignore[attr-defined]
        rank = importlib.import_module("vllm.distributed").get_tensor_model_parallel_rank()
        for name, tensor in sinks.items():
            held = self._skyrl_model().get_parameter(name).data
            held.copy_(tensor[rank * len(held) : (rank + 1) * len(held)])

    def _skyrl_rebuild(self) -> int:
        """Pack again what a reload left unpacked or packed from old weights: on a CPU, experts and a tied lm_head."""
        if not os.environ.get("SKYRL_VLLM_CPU"):
            return 0
        utils = importlib.import_module("vllm.model_executor.layers.utils")
        stale = 0
        for module in self._skyrl_model().modules():
            kernel, experts = getattr(module, EXPERTS, (None, {}))
            if kernel is not None and any(
                bit_sums(getattr(module, name)) != after for name, (_, after) in experts.items()
            ):
                stale += 1
                kernel.process_weights_after_loading(module)
            record, weight = getattr(module, RECORD, None), getattr(module, "weight", None)
            if record is None or weight is None or weight.ndim != 2 or not weight.numel():
                continue
            if bit_sums(weight) != record:
                stale += 1
                utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        return stale


class KeyOnEveryPath:
    """ASGI middleware that asks for the key everywhere but on /health."""

    def __init__(self, app: Any) -> None:
        """Take the key from where vLLM takes it."""
        self.app = app
        self.wanted = f"Bearer {os.environ.get('VLLM_API_KEY', '')}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and scope["path"] != "/health":
            found = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(found, self.wanted):
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
                return
        await self.app(scope, receive, send)
