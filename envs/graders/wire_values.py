"""Values on the wire between tests and program, above whose two scripts this text is put: never imported.

Only what is listed here is ever made of the other process's bytes: plain values, exact in type, and names of things
that stay where they are. They travel as JSON, lists with a tag in front for what JSON does not have. A text is never
evaluated, and no class of the other process's is made, looked up or filled, but classes of errors.
"""

import builtins
import collections
import datetime
import decimal
import fractions
from collections.abc import Callable
from functools import cache
from typing import Any

ATOMS = {type(None), bool, int, float, str}
"""What JSON has."""
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
TABLES: dict[str, type] = {"dict": dict, "Counter": collections.Counter, "OrderedDict": collections.OrderedDict}
DATES: dict[str, Any] = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}
PLAIN: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        bool, int, float, complex, str, bytes, bytearray, range, collections.deque, collections.defaultdict,
        decimal.Decimal, fractions.Fraction, datetime.timedelta,
        *SEQUENCES.values(), *TABLES.values(), *DATES.values(),
    )
}  # fmt: skip
"""Classes whose values are plain; the classes themselves are, too."""
BASES: tuple[Any, ...] = (int, float, str, bytes, list, tuple, dict, set, frozenset)
"""What a subclass of these holds goes along with it, and is what it is compared by."""
MUTABLE = (list, dict, set, bytearray, collections.deque)


def encode(value: Any, refer: Callable[[Any], list[Any]]) -> Any:
    """Return a value as JSON has it.

    Args:
        value: Anything.
        refer: Returns a tagged list that names what is not plain.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    name = kind.__name__
    if PLAIN.get(name) is not kind:
        if isinstance(value, type) and PLAIN.get(value.__name__) is value:
            return ["type", value.__name__]
        return refer(value)
    if name in SEQUENCES:
        items = list(value)
        return [name, *(items if set(map(type, items)) <= ATOMS else [encode(item, refer) for item in items])]
    if name in TABLES or name == "defaultdict":
        pairs = [[encode(key, refer), encode(item, refer)] for key, item in value.items()]
        return [name, *([encode(value.default_factory, refer)] if name == "defaultdict" else ()), *pairs]
    if name == "deque":
        return [name, value.maxlen, *(encode(item, refer) for item in value)]
    if name in DATES:
        return [name, value.isoformat()]
    return [name, *PARTS[name](value)]


PARTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "complex": lambda value: (value.real, value.imag),
    "bytes": lambda value: (value.hex(),),
    "bytearray": lambda value: (value.hex(),),
    "range": lambda value: (value.start, value.stop, value.step),
    "Decimal": lambda value: (str(value),),
    "Fraction": lambda value: (value.numerator, value.denominator),
    "timedelta": lambda value: (value.days, value.seconds, value.microseconds),
}
MADE: dict[str, Callable[..., Any]] = {
    "complex": complex, "bytes": bytes.fromhex, "bytearray": bytearray.fromhex, "range": range,
    "Decimal": decimal.Decimal, "Fraction": fractions.Fraction, "timedelta": datetime.timedelta,
}  # fmt: skip


def decode(value: Any, referred: Callable[..., Any]) -> Any:
    """Return the value that `encode` wrote.

    Args:
        value: What JSON gave; anything may be in it.
        referred: Takes a tag and what stands behind it, and returns what that names.

    Raises:
        Exception: it is none that `encode` writes.
    """
    if type(value) in ATOMS:
        return value
    tag, *rest = value
    if tag in SEQUENCES:
        plain = set(map(type, rest)) <= ATOMS
        return SEQUENCES[tag](rest if plain else [decode(item, referred) for item in rest])
    if tag in TABLES or tag == "defaultdict":
        made = TABLES[tag]() if tag in TABLES else collections.defaultdict(decode(rest.pop(0), referred))
        for key, item in rest:
            made[decode(key, referred)] = decode(item, referred)
        return made
    if tag == "deque":
        return collections.deque((decode(item, referred) for item in rest[1:]), rest[0])
    if tag in DATES:
        return DATES[tag].fromisoformat(*rest)
    if tag in MADE:
        if not set(map(type, rest)) <= ATOMS:
            raise ValueError(tag)
        return MADE[tag](*rest)
    if tag == "type":
        return PLAIN[rest[0]]
    return referred(tag, *[part if type(part) in ATOMS else decode(part, referred) for part in rest])


def builtin_error(name: str) -> type[BaseException]:
    """Return a builtin error's class."""
    found = vars(builtins)[name]
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise TypeError(name)
    return found


@cache
def error_of_program(kind: type[BaseException]) -> type[BaseException]:
    """Return the class under which the judge knows a builtin error of the program's.

    A subclass of it and of nothing else that the judge raises: `except NAME`, where NAME is the program's, would
    otherwise catch the judge's own failed asserts whenever the program says that NAME is AssertionError.
    """
    above = kind.__bases__[0]
    bases = (kind,) if kind is BaseException else (error_of_program(above), kind)
    return type(kind.__name__, bases, {"__module__": "builtins"})


def replace(old: Any, new: Any) -> None:
    """Put a container's new content into it."""
    if type(old) is not type(new) or not isinstance(old, MUTABLE):
        return
    if isinstance(old, list | bytearray):
        old[:] = new
    else:
        old.clear()
        (old.extend if isinstance(old, collections.deque) else old.update)(new)
