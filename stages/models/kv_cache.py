"""Forward passes from a cache: keys and values, states of recurrences and convolutions, or a model's own."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

CACHES = ("cache", "past_key_values", "cache_params", "state")
"""Names of the argument and of the output's field: the first since transformers 5.2x, the last is RWKV's."""


def without_wrapper(model: Any) -> Any:
    """Return the model inside a PeftModel, its adapters still in place; any other model as it is."""
    return getattr(model, "get_base_model", lambda: model)()


@cache
def arguments(model_class: type) -> frozenset[str]:
    """Return what a model's forward pass takes by name."""
    return frozenset(inspect.signature(model_class.forward).parameters)


def accepted(model: Any, **inputs: Any) -> dict[str, Any]:
    """Return those inputs that a model's forward pass takes by name; a recurrence has no positions, for instance."""
    return {name: value for name, value in inputs.items() if name in arguments(type(without_wrapper(model)))}


def forward(model: Any, kv: Any, **inputs: Any) -> tuple[Any, Any]:
    """Run the model from a cache and return its output and the cache, extended.

    Args:
        model: Of transformers.
        kv: What came back from the call before; None: the model makes a cache of its own kind.
        inputs: Those that it does not take by name are left out.

    Returns:
        The cache is None where the model keeps none.
    """
    names = [name for name in CACHES if name in arguments(type(without_wrapper(model)))]
    held = {} if kv is None else {names[0]: kv}
    output = model(**accepted(model, use_cache=True, **inputs), **held)
    # A cache that is extended in place need not come back.
    kv = next((output[name] for name in CACHES if output.get(name) is not None), kv)
    if kv is None and names:  # it makes none, but takes one
        from transformers import DynamicCache

        return forward(model, DynamicCache(config=model.config), **inputs)
    return output, kv


def select_rows(kv: Any, rows: Tensor) -> Any:
    """Return a cache with these rows, in this order; a row may come more than once.

    Args:
        kv: Changed in place where it is one of transformers' own.
        rows: Indices, on the cache's device.
    """
    if hasattr(kv, "reorder_cache"):
        kv.reorder_cache(rows)
        return kv
    return _selected(kv, rows)


def _selected(value: Any, rows: Tensor) -> Any:
    """Return the rows of every tensor of numbers in a model's own cache; what counts tokens belongs to all rows."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows) if torch.is_floating_point(value) else value
    if isinstance(value, Mapping):
        return {name: _selected(each, rows) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_selected(each, rows) for each in value)
    if hasattr(value, "rnn_state"):  # xLSTM's
        value.rnn_state = _selected(value.rnn_state, rows)
    return value
