"""Forward passes that go on from a key-value cache, under either name transformers gave the argument."""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch


def without_wrapper(model: Any) -> Any:
    """Return the model inside a PeftModel, its adapters still in place; any other model as it is."""
    return getattr(model, "get_base_model", lambda: model)()


@cache
def _argument(model_class: type) -> str:
    # Renamed within transformers 5; the old name warns on every call and then goes.
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"


def empty_cache(model: Any) -> Any:
    """Return a cache with nothing in it."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def forward(model: Any, kv: Any, **inputs: Any) -> Any:
    """Run the model, reading from and adding to `kv`, and return its output."""
    # A cache argument that is not None is used and extended in place, so the output's own field does not matter.
    return model(**inputs, **{_argument(type(without_wrapper(model))): kv}, use_cache=True)


def select_rows(kv: Any, rows: Sequence[int] | torch.Tensor) -> None:
    """Keep these rows of the cache, in this order; a row may come more than once."""
    kv.batch_select_indices(torch.as_tensor(rows))
