"""What tokens cost, from a table that the user gives: prices change, so none are built in."""

import json
import tomllib
from typing import Any

from nanoskyrl.stages.core.errors import InputError, did_you_mean, told_as
from nanoskyrl.stages.core.storage import read_named


def read_prices(table: str | None, model: str | None) -> dict[str, float] | None:
    """Return what a million prompt and completion tokens of a model cost; None without a table or a model.

    Args:
        table: A TOML or JSON file such as `["my-model"]`, `prompt = 0.15`, `completion = 0.6`, in any one currency.
        model: The model's name in it; None: no model is at work, and the table is only read.

    Raises:
        InputError: the file is missing, cannot be read, or has no prices of the model.
    """
    if table is None:
        return None
    hint = 'Write, for instance, ["my-model"] with prompt = 0.15 and completion = 0.6'
    with told_as(InputError, f"`{table}` is neither TOML nor JSON", ValueError, UnicodeDecodeError, hint=hint):
        text = read_named(table, "table of prices", hint)
        prices: Any = json.loads(text) if table.endswith(".json") else tomllib.loads(text)
    if model is None:
        return None
    if not isinstance(prices, dict) or not isinstance(prices.get(model), dict):
        known = prices if isinstance(prices, dict) else {}
        raise InputError(f"`{table}` has no prices of `{model}`", hint=did_you_mean(model, known) or hint)
    found = {name: prices[model].get(name) for name in ("prompt", "completion")}
    for name, price in found.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not price >= 0:
            raise InputError(f"`{name}` of `{model}` in `{table}` is {price!r}, no price", hint=hint)
    return {name: float(price) for name, price in found.items()}
