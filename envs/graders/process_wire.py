"""The wire between the two processes of `two_process_tests.py`, above whose text this one is put: never imported.

A process reaches what the other one holds through `Far`, by pickles that make nothing but plain values and more of
`Far`. What is compared with a plain value is a plain copy, of which no method is the other process's.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import io
import operator
import os
import pickle
import sys
import types
from typing import Any

PLAIN: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range,
    collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque, decimal.Decimal,
    fractions.Fraction, datetime.date, datetime.datetime, datetime.time, datetime.timedelta,
)  # fmt: skip
CLASSES = {(kind.__module__, kind.__name__): kind for kind in PLAIN if kind is not type(None)}
BASES: tuple[Any, ...] = (int, float, str, bytes, list, tuple, dict, set, frozenset)
"""What a subclass of these is equal to goes along with it."""
MUTABLE = (list, dict, set, bytearray, collections.deque)
TESTS = "__main__"
"""Tests may stand behind `if __name__ == "__main__"`; the program's own main never runs."""


class ProgramEnded(BaseException):
    """The other process is gone; no test may take that for an error of its own."""


def asks(name: str, *, far_only: bool = False) -> Any:
    """Return a method that has the other process do it; a binary one may take no part beside a plain value."""

    def method(self: "Far", *args: Any) -> Any:
        if far_only and not isinstance(args[0], Far):
            return NotImplemented
        return self._wire.ask(name, self, *args)

    return method


class Far:
    """A value of the other process that is not plain."""

    def __init__(self, wire: "Wire", number: int, base: Any) -> None:
        """Name it by its number there."""
        vars(self).update(_wire=wire, _number=number, _base=base)

    def __getattr__(self, name: str) -> Any:
        """Ask for an attribute."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._wire.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute there."""
        self._wire.ask("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it there; lists and the like that it changed change here, too."""
        return self._wire.ask("call", self, args, kwargs)

    __getitem__ = asks("getitem")
    __setitem__ = asks("setitem")
    __contains__ = asks("contains")
    __len__ = asks("len")
    __bool__ = asks("bool")
    __iter__ = asks("iter")
    __next__ = asks("next")
    __str__ = asks("str")
    __repr__ = __str__

    def __instancecheck__(self, value: Any) -> bool:
        """Ask whether another far value is one of this class; a plain one never is."""
        return isinstance(value, Far) and self._wire.ask("isinstance", value, self)

    def __eq__(self, other: object) -> Any:
        """Ask only about two far values; beside a plain one its plain base alone can be equal."""
        if isinstance(other, Far):
            return self._wire.ask("eq", self, other)
        return NotImplemented if self._base is None else self._base == other

    def __hash__(self) -> int:
        """Hash the base where there is one, as for what it is equal to."""
        return hash(self._number) if self._base is None else hash(self._base)

    # Beside a plain value the program would choose what the difference to the right answer is.
    __lt__ = asks("lt", far_only=True)
    __add__ = asks("add", far_only=True)
    __sub__ = asks("sub", far_only=True)


def call(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function."""
    return function(*args, **kwargs)


OPERATIONS = {
    "call": call, "getattr": getattr, "setattr": setattr, "getitem": operator.getitem, "setitem": operator.setitem,
    "len": len, "bool": bool, "contains": operator.contains, "iter": iter, "next": next, "str": str,
    "isinstance": isinstance, "eq": operator.eq, "lt": operator.lt, "add": operator.add, "sub": operator.sub,
}  # fmt: skip


class Wire:
    """Questions and answers between the two processes; while one waits it answers what the other asks."""

    def __init__(self, reading: int, writing: int, *, judge: bool) -> None:
        """Talk through two pipes."""
        self.reading, self.writing, self.judge = reading, writing, judge
        self.mine: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.far: dict[Any, Any] = {}
        self.errors: dict[int, Any] = {}
        self.ended = False

    def ask(self, name: str, *args: Any) -> Any:
        """Have the other process do something and return or raise what came of it."""
        self.send("ask", name, args)
        while True:
            message = self.receive()
            if message[0] == "ask":
                self.answer(*message[1:])
                continue
            kind, value, printed, changed = message
            if self.judge and isinstance(printed, str):
                sys.stdout.write(printed)
            if kind == "raised":
                raise self.error(name, *value)
            for place, new in changed:
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
                self.check(*args[:2])
            lists = [item for item in enumerate(args[1]) if type(item[1]) in MUTABLE] if name == "call" else []
            before = [self.dumps(item) for _, item in lists]
            value: Any = OPERATIONS[name](*args)
            changed = [item for item, old in zip(lists, before, strict=True) if self.dumps(item[1]) != old]
            message = ("answer", value, self.printed(), changed)
        except ProgramEnded:
            raise
        except BaseException as error:  # the program's, and SystemExit is one of them
            message = ("raised", (type(error), error.args), self.printed(), ())
        self.send(*message)

    def check(self, value: Any, name: str) -> None:
        """Give the program attributes of the tests' own objects alone: others lead to frames and to the judge."""
        if name.startswith("_") or type(value).__module__ != TESTS or isinstance(value, Far | Wire):
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

    def send(self, *message: Any) -> None:
        """Send a message."""
        data = self.dumps(message)
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
            return Reader(io.BytesIO(self.read(int.from_bytes(self.read(8), "big"))), self).load()
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

    def dumps(self, value: Any) -> bytes:
        """Write a value; what is not plain stays here and gets a number."""
        out = io.BytesIO()
        Writer(out, self).dump(value)
        return out.getvalue()


class Writer(pickle.Pickler):
    """Writes plain values whole, and others as numbers."""

    def __init__(self, file: io.BytesIO, wire: Wire) -> None:
        """Write for a wire."""
        super().__init__(file, protocol=5)
        self.wire = wire

    def persistent_id(self, obj: Any) -> Any:
        """Return None for what is plain, else how the other process names it."""
        if type(obj) in PLAIN or (isinstance(obj, type) and obj in PLAIN):
            return None
        wire = self.wire
        if type(obj) is Far:
            return ("yours", vars(obj)["_number"])
        if id(obj) in wire.errors:
            return ("yours", wire.errors[id(obj)])
        if isinstance(obj, type) and issubclass(obj, BaseException) and getattr(builtins, obj.__name__, None) is obj:
            return ("builtin", obj.__name__)
        number = wire.numbers.setdefault(id(obj), len(wire.mine))
        wire.mine[number] = obj
        if isinstance(obj, types.ModuleType):
            return ("module", number, obj.__name__)
        if isinstance(obj, type) and issubclass(obj, BaseException):
            return ("error", number, obj.__name__, next(b for b in obj.__bases__ if issubclass(b, BaseException)))
        base = next((base for base in BASES if isinstance(obj, base)), None)
        return ("mine", number, None if base is None else base(obj))


class Reader(pickle._Unpickler):  # pyright: ignore[reportAttributeAccessIssue] (the one in C has no table to shorten)
    """Reads what a `Writer` wrote, and makes nothing else whatever the bytes are."""

    # A Writer writes none of these, and BUILD would set attributes of a class such as Fraction, its `__eq__` for one.
    dispatch = {  # noqa: RUF012 (the library's name and kind)
        code: load
        for code, load in pickle._Unpickler.dispatch.items()  # pyright: ignore[reportAttributeAccessIssue]
        if code not in b"".join((pickle.BUILD, pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4))
    }

    def __init__(self, file: io.BytesIO, wire: Wire) -> None:
        """Read for a wire."""
        super().__init__(file)
        self.wire = wire

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the plain classes."""
        return CLASSES[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Return what the other process named."""
        kind, what, *more = pid
        far = self.wire.far
        if kind == "yours":
            return self.wire.mine[what]
        if kind == "builtin":
            return builtin_error(what)
        if kind == "module" and more[0] in sys.stdlib_module_names:
            return importlib.import_module(more[0])
        if what not in far:
            if kind == "error":
                far[what] = type(str(more[0]), (more[1],), {})
                self.wire.errors[id(far[what])] = what
            else:
                far[what] = Far(self.wire, what, more[0] if kind == "mine" else None)
        return far[what]


def builtin_error(name: str) -> type:
    """Return a builtin error's class."""
    found = getattr(builtins, name)
    if not issubclass(found, BaseException):
        raise TypeError(name)
    return found


def replace(old: Any, new: Any) -> None:
    """Put a container's new content into it."""
    if type(old) is not type(new):
        return
    if isinstance(old, list | bytearray):
        old[:] = new
    else:
        old.clear()
        (old.extend if isinstance(old, collections.deque) else old.update)(new)
