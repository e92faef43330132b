"""The wire between the two processes of `two_process_tests.py`, above whose text this one is put: never imported.

A process reaches what the other one holds through `Far`. What is compared with a plain value is a plain copy, of which
no method is the other process's, and neither is any that the judge calls on a subclass of a plain class.
"""

import importlib
import io
import json
import operator
import os
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # in the sandbox its text stands above this one
    from nanoskyrl.envs.graders.wire_values import (
        BASES,
        MUTABLE,
        builtin_error,
        decode,
        encode,
        error_of_program,
        replace,
    )

TESTS = "__main__"
"""Tests may stand behind `if __name__ == "__main__"`; the program's own main never runs."""


CHANGING = (
    "append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "popitem", "setdefault", "update", "add",
    "discard", "difference_update", "intersection_update", "symmetric_difference_update",
)  # fmt: skip
"""Methods of plain classes that change what they are called on."""


class ProgramEnded(BaseException):
    """The other process is gone; no test may take that for an error of its own."""


def asks(name: str, on_base: Any = None, *, far_only: bool = False) -> Any:
    """Return a method that has the other process do it, or that does it here on the plain base.

    Args:
        name: The operation.
        on_base: The same for the plain value of a subclass; None: the other process does it for those, too.
        far_only: Whether it takes no part beside a plain value.
    """

    def method(self: "Far", *args: Any) -> Any:
        if on_base is not None and vars(self)["_base"] is not None:
            return on_base(plain(self), *map(plain, args))
        if far_only and not isinstance(args[0], Far):
            return NotImplemented
        return self._wire.ask(name, self, *args)

    return method


class Far:
    """A value of the other process that is not plain."""

    def __init__(self, wire: "Wire", number: int, base: Any) -> None:
        """Name it by its number there; the base is the plain value of a subclass, or None."""
        vars(self).update(_wire=wire, _number=number, _base=base)

    def __getattr__(self, name: str) -> Any:
        """Ask for an attribute, but for what the plain class of a subclass says without changing anything."""
        if name.startswith("__"):
            raise AttributeError(name)
        if self._base is not None and hasattr(self._base, name) and name not in CHANGING:
            return getattr(plain(self), name)
        return self._wire.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute there."""
        self._wire.ask("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it there; lists and the like that it changed change here, too."""
        return self._wire.ask("call", self, args, kwargs)

    __getitem__ = asks("getitem", operator.getitem)
    __setitem__ = asks("setitem")
    __contains__ = asks("contains", operator.contains)
    __len__ = asks("len", len)
    __bool__ = asks("bool", bool)
    __iter__ = asks("iter", iter)
    __next__ = asks("next")
    __str__ = asks("str")
    __repr__ = __str__

    def __instancecheck__(self, value: Any) -> bool:
        """Ask whether another far value is one of this class; a plain one never is."""
        return isinstance(value, Far) and self._wire.ask("isinstance", value, self)

    def __eq__(self, other: object) -> Any:
        """Ask only about two far values without a base; beside a plain one its plain base alone can be equal."""
        if self._base is not None:
            return plain(self) == plain(other)
        return self._wire.ask("eq", self, other) if isinstance(other, Far) and other._base is None else NotImplemented

    def __hash__(self) -> int:
        """Hash the base where there is one, as for what it is equal to."""
        return hash(self._number) if self._base is None else hash(self._base)

    # Beside a plain value the program would choose what the difference to the right answer is.
    __lt__ = asks("lt", operator.lt, far_only=True)
    __add__ = asks("add", operator.add, far_only=True)
    __sub__ = asks("sub", operator.sub, far_only=True)


def plain(value: Any) -> Any:
    """Return the plain base of a far value that has one, as it is by now; any other value as it is."""
    if type(value) is not Far or (base := vars(value)["_base"]) is None:
        return value
    return value._wire.ask("base", value) if type(base) in MUTABLE else base


def call(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function."""
    return function(*args, **kwargs)


def base_of(value: Any) -> Any:
    """Return the plain value of a subclass of a plain class, or None."""
    return next((base(value) for base in BASES if isinstance(value, base)), None)


def names_of(names: Any) -> dict[str, Any]:
    """Return what the program holds under some names. Asked of the program alone."""
    held = vars(sys.modules["solution"])
    return {name: held[name] for name in names if name in held}


OPERATIONS = {
    "call": call, "getattr": getattr, "setattr": setattr, "getitem": operator.getitem, "setitem": operator.setitem,
    "len": len, "bool": bool, "contains": operator.contains, "iter": iter, "next": next, "str": str,
    "base": base_of, "isinstance": isinstance, "eq": operator.eq, "lt": operator.lt, "add": operator.add,
    "sub": operator.sub,
}  # fmt: skip


class Wire:
    """Questions and answers between the two processes; while one waits it answers what the other asks."""

    def __init__(self, reading: int, writing: int, *, judge: bool) -> None:
        """Talk through two pipes."""
        sys.set_int_max_str_digits(0)  # numbers travel as text, of any length
        self.reading, self.writing, self.judge = reading, writing, judge
        self.operations = OPERATIONS if judge else {**OPERATIONS, "names": names_of}
        self.mine: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.far: dict[int, Any] = {}
        self.errors: dict[int, int] = {}
        self.ended = False
        self.failed = False
        """In the judge: an assert failed in a function of the tests that the program called, and may have caught."""

    def ask(self, name: str, *args: Any) -> Any:
        """Have the other process do something and return or raise what came of it."""
        self.send(self.encoded(["ask", name, args]))
        while True:
            kind, *rest = self.receive()
            if kind == "ask":
                self.answer(*rest)
                continue
            value, printed, changed = rest
            if self.judge and isinstance(printed, str):
                sys.stdout.write(printed)
            if kind == "raised":
                raise self.error(name, *value)
            for place, new in changed if name == "call" else ():
                replace(args[1][place], new)
            return value

    def error(self, name: str, kind: Any, args: Any) -> BaseException:
        """Return an error of the other process as one of here."""
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            return RuntimeError(str(args))
        if name != "next" and issubclass(kind, StopIteration | StopAsyncIteration | GeneratorExit):
            return RuntimeError("StopIteration")  # else `all(map(...))` in a test would end early, and be true
        try:
            return kind(*args)
        except TypeError:
            return ValueError(*args) if issubclass(kind, ValueError) else RuntimeError(*args)

    def answer(self, name: Any, args: Any) -> None:
        """Do what the other process asks."""
        try:
            if self.judge and name in ("getattr", "setattr"):
                self.check(name, *args[:2])
            lists = [item for item in enumerate(args[1]) if type(item[1]) in MUTABLE] if name == "call" else []
            before = [self.encoded(item) for _, item in lists]
            value: Any = self.operations[name](*args)
            changed = [list(item) for item, old in zip(lists, before, strict=True) if self.encoded(item[1]) != old]
            message = self.encoded(["answer", value, self.printed(), changed])
        except ProgramEnded:
            raise
        except BaseException as error:  # the program's, and SystemExit is one of them
            # The program's own are of a class of their own here.
            self.failed |= isinstance(error, AssertionError) and not isinstance(error, error_of_program(AssertionError))
            message = self.encoded(["raised", [type(error), error.args], self.printed(), ()])
        self.send(message)

    def check(self, how: str, value: Any, name: str) -> None:
        """Give the program attributes of the tests' own objects alone: others lead to frames and to the judge.

        Their methods it may call, and not replace by functions of its own.
        """
        of_tests = type(value).__module__ == TESTS and not isinstance(value, Far | Wire)
        if name.startswith("_") or not of_tests or (how == "setattr" and callable(getattr(type(value), name, None))):
            raise AttributeError(name)

    def printed(self) -> str:
        """Return what the program printed since, for tests that catch it."""
        out = sys.stdout
        if self.judge or not isinstance(out, io.StringIO):
            return ""
        text = out.getvalue()
        out.seek(0)
        out.truncate()
        return text

    def encoded(self, value: Any) -> bytes:
        """Return a value as bytes; what is not plain stays here and gets a number."""
        return json.dumps(encode(value, self.refer)).encode()

    def send(self, data: bytes) -> None:
        """Send a message."""
        left = memoryview(len(data).to_bytes(8, "big") + data)
        try:
            while left:
                left = left[os.write(self.writing, left) :]
        except OSError as error:
            self.ended = True
            raise ProgramEnded from error

    def receive(self) -> Any:
        """Receive a message."""
        try:
            message = decode(json.loads(self.read(int.from_bytes(self.read(8), "big"))), self.referred)
            if type(message) is not list:
                raise ValueError(message)
            return message
        except ProgramEnded:
            raise
        except BaseException as error:  # what it wrote is no message: it cannot resume
            self.ended = True
            raise ProgramEnded from error

    def read(self, size: int) -> bytes:
        """Read so many bytes."""
        found = bytearray()
        while len(found) < size:
            chunk = os.read(self.reading, min(size - len(found), 1 << 20))
            if not chunk:
                self.ended = True
                raise ProgramEnded
            found += chunk
        return bytes(found)

    def refer(self, value: Any) -> list[Any]:
        """Return how the other process names what is not plain."""
        if type(value) is Far:
            return ["yours", vars(value)["_number"]]
        if id(value) in self.errors:
            return ["yours", self.errors[id(value)]]
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if is_error and (value.__module__ == "builtins"):
            return ["builtin", value.__name__]
        number = self.numbers.setdefault(id(value), len(self.mine))
        self.mine[number] = value
        if isinstance(value, types.ModuleType):
            return ["module", number, value.__name__]
        if is_error:
            return ["error", number, value.__name__, self.refer(next(b for b in value.__bases__ if is_error_class(b)))]
        return ["mine", number, encode(base_of(value), self.refer)]

    def referred(self, tag: str, what: Any, *more: Any) -> Any:
        """Return what the other process named."""
        if tag == "yours":
            return self.mine[what]
        if tag == "builtin":
            return error_of_program(builtin_error(what)) if self.judge else builtin_error(what)
        if tag == "module" and more[0] in sys.stdlib_module_names:
            return importlib.import_module(more[0])
        if tag not in ("mine", "error", "module") or type(what) is not int:
            raise ValueError(tag)
        if what not in self.far:
            if tag == "error":
                if not is_error_class(more[1]):
                    raise ValueError(tag)
                self.far[what] = type(str(more[0]), (more[1],), {})
                self.errors[id(self.far[what])] = what
            else:
                self.far[what] = Far(self, what, more[0] if tag == "mine" else None)
        return self.far[what]


def is_error_class(value: Any) -> bool:
    """Say whether a value is a class of errors."""
    return isinstance(value, type) and issubclass(value, BaseException)
