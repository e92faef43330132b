"""Where two files of weights differ: which tensors, and by how much."""

from collections.abc import Iterator
from pathlib import Path

from nanoskyrl.stages.core.errors import InputError, told_as


def compare_weights(ours: Path, theirs: Path, tolerance: float) -> Iterator[tuple[str, str]]:
    """Yield which tensors of two safetensors files differ, and how; one tensor is in memory at a time.

    Args:
        ours: The one file.
        theirs: The other.
        tolerance: Largest difference of a weight that counts as none.

    Raises:
        InputError: one is no safetensors file.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    with (
        told_as(InputError, f"`{ours}` or `{theirs}` cannot be read", SafetensorError, hint="Run `skyrl verify`"),
        safe_open(ours, framework="pt") as a,
        safe_open(theirs, framework="pt") as b,
    ):
        names = [set(file.keys()) for file in (a, b)]
        for name in sorted(names[0] ^ names[1]):
            yield name, f"in the {'first' if name in names[0] else 'second'} alone"
        largest: tuple[float, str] | None = None
        count, shared = 0, sorted(names[0] & names[1])
        for name in shared:
            x, y = a.get_tensor(name), b.get_tensor(name)
            if x.shape != y.shape or x.dtype != y.dtype:
                yield name, f"{x.dtype} {list(x.shape)} -> {y.dtype} {list(y.shape)}"
                continue
            if torch.equal(x, y):
                continue
            apart = float((x.double() - y.double()).abs().nan_to_num(torch.inf).max())
            if apart > tolerance:
                count += 1
                largest = max(largest or (apart, name), (apart, name))
        if largest is not None:
            yield "", f"{count} of {len(shared)} tensors, by up to {largest[0]:.4g} in `{largest[1]}`"
        elif not tolerance and names[0] == names[1]:
            yield "", "the same tensors in other bytes"
