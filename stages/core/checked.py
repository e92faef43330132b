"""Settings that are checked by their types, and what their fields say of themselves.

A field's type holds its range, as msgspec has it: `Annotated[float, Meta(ge=0, le=1)]`, `Literal["cpu", "cuda"]`.
Messages, `skyrl init` and `docs/settings.md` put the same types into words. What else the code must know of a
field is its metadata: one of `PLACE`, `FILE`, `PATH`, ... below, or several joined by `|`. With `of_run`, a hint,
every command fills the field in by itself, and no file can.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import re
import sys
import textwrap
import types
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from nanoskyrl.stages.core.errors import SettingsError, did_you_mean

LARGEST = sys.float_info.max
"""At most this: a finite number."""
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
FiniteNonNegative = Annotated[float, Meta(ge=0, le=LARGEST)]
FinitePositive = Annotated[float, Meta(gt=0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Coefficient = Annotated[float, Meta(ge=0, le=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
NonEmptyText = Annotated[str, Meta(min_length=1, description="at least 1 character, not an empty text")]
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", description="auto, cpu, cuda or cuda:N")]

PLACE = {"place": True}
"""Says where or how to run and changes no row: it is in no manifest."""
FILE = {"file": True, "path": "file"}
"""Names a file or folder of input. A manifest holds its digest; run.toml its whole path."""
PATH = {"path": "file"}
"""Names a file or folder; run.toml holds its whole path."""
PATH_OR_NAME = {"path": "name"}
"""Names a file or folder if there is one, else something else, such as a model on a hub or a program."""
COMMAND = {"path": "command", "command": True}
"""A command, or its arguments: those that are files are kept as whole paths; a manifest holds their names."""
ARGUMENTS = {"path": "arguments"}
"""A table whose values may name files, as in a command."""
MODULE = {"path": "module"}
"""Names a module, without an attribute behind a colon."""
ONCE = {"once": True}
"""Holds for the command that it is given to: a run does not keep it."""


class Checked:
    """A dataclass of settings: values outside the types of its fields are refused when it is made."""

    __slots__ = ()
    table: ClassVar[str]
    """The table of these settings, for messages; without it the class's name tells: SapoConfig's is sapo."""

    def __post_init__(self) -> None:
        """Refuse what the types do not allow, then what `check` does not."""
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__.removesuffix("Config")).lower()
        table = vars(type(self)).get("table", name)
        for name in hints_of(type(self)):
            checked(type(self), name, getattr(self, name), table)
        self.check()

    def check(self) -> None:
        """Refuse values that do not go together; the types have been checked."""


@functools.cache
def hints_of(config: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, constraints included."""
    hints = get_type_hints(config, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


@functools.cache
def metadata_of(config: type, name: str) -> frozenset[str]:
    """Return the fields of a settings dataclass whose metadata has this name."""
    return frozenset(field.name for field in dataclasses.fields(config) if name in field.metadata)


@functools.cache
def path_kinds(config: type) -> dict[str, str]:
    """Return which fields of a settings dataclass name paths or modules, and how."""
    return {field.name: field.metadata["path"] for field in dataclasses.fields(config) if "path" in field.metadata}


def checked(config: type, key: str, value: Any, table: str) -> Any:
    """Return a value as the type of a field has it: lists become tuples, whole numbers floats.

    Raises:
        SettingsError: names the key, the type or range that it must have, and what was found.
    """
    of = hints_of(config)[key]
    is_nan = any(isinstance(item, float) and math.isnan(item) for item in _items(value))
    try:
        if not is_nan:
            return msgspec.convert(value, of)
    except (msgspec.ValidationError, UnicodeEncodeError):  # a lone surrogate is no text
        try:
            msgspec.convert(value, bare(of))
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise SettingsError(
                f"`{table}.{key}` must be {type_text(of)}, not {value!r}", hint=str(error).split(" - ")[0]
            ) from error
    wanted = range_text(of)
    if is_nan and not wanted:
        raise SettingsError(f"`{table}.{key}` must be a number, not nan")
    close = did_you_mean(value, words_of(of)) if isinstance(value, str) else None
    raise SettingsError(f"`{table}.{key}` must be {wanted}, not {value!r}", hint=close or _remedy(config, key))


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)


def _remedy(config: type, key: str) -> str | None:
    """Return the default of a setting and what it is for; None where there is neither to say."""
    default = next(field.default for field in dataclasses.fields(config) if field.name == key)
    usual = "" if default in (None, (), dataclasses.MISSING) else f"The default is {default}. "
    return usual + field_docs(config).get(key, "") or None


def bare(of: Any) -> Any:
    """Return a type without its constraints; a Literal becomes the type of its words."""
    origin, inside = get_origin(of), get_args(of)
    if origin is Annotated:
        return bare(inside[0])
    if origin is Literal:
        return functools.reduce(operator.or_, {type(word): None for word in inside})
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(bare, inside))
    return origin[tuple(map(bare, inside))] if origin else of


def type_text(of: Any) -> str:
    """Return a type in Python's words, without its constraints: `str | None`."""
    of = bare(of)
    text = of.__name__ if isinstance(of, type) and not get_args(of) else str(of)
    return text.replace("typing.", "").replace("collections.abc.", "")


def words_of(of: Any) -> list[str]:
    """Return the words that a type allows; none where it allows any text."""
    if get_origin(of) is Literal:
        return [str(word) for word in get_args(of)]
    return [word for inner in get_args(of) if get_origin(of) is not Annotated or inner is get_args(of)[0]
            for word in words_of(inner)]  # fmt: skip


def range_text(of: Any) -> str:
    """Return the constraints of a type in words, `at least 0 and at most 1`; empty where it has none."""
    origin, inside = get_origin(of), get_args(of)
    if origin is Literal:
        *most, last = map(str, inside)
        return f"{', '.join(most)} or {last}" if most else last
    if origin is Annotated:
        return _meta_text(next(meta for meta in inside[1:] if isinstance(meta, Meta)), range_text(inside[0]))
    return " or ".join(dict.fromkeys(text for text in map(range_text, inside) if text))


def _meta_text(meta: Meta, inner: str) -> str:
    if meta.description:
        return meta.description
    if meta.min_length:
        return f"at least {meta.min_length} {f'of {inner}' if inner else 'character'}"
    shown = (
        ("at least", meta.ge),
        ("above", meta.gt),
        ("at most", meta.le if meta.le != LARGEST else None),
        ("below", meta.lt),
    )
    found = [f"{words} {limit}" for words, limit in shown if limit is not None]
    return " and ".join([*found, *(["finite"] if meta.le == LARGEST else [])])


@functools.cache
def field_docs(config: type) -> dict[str, str]:
    """Return what the text below each field of a settings dataclass says, fields that it inherits included."""
    bases = [base for base in reversed(config.__mro__) if dataclasses.is_dataclass(base)]
    return {name: text for base in bases for name, text in _own_docs(base).items()}


def _own_docs(config: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    except OSError:  # made where there is no file, as in a notebook
        return {}
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, below in itertools.pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                if "ClassVar" not in ast.unparse(field.annotation):
                    docs[name] = " ".join(text.split())
    return docs
