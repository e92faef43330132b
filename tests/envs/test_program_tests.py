"""Programs that would forge a pass of their tests, and tests that honest programs pass."""

import pytest

from nanoskyrl.envs.graders import program_tests
from nanoskyrl.envs.graders.program_tests import PASSED, run_tests
from nanoskyrl.envs.sandbox.base import FULL_PYTHON, Limits, available
from nanoskyrl.stages.core.errors import SandboxError

LIMITS = Limits(seconds=120.0, memory_mb=1024)
QUICK = Limits(seconds=2.0, memory_mb=1024)
TESTS = "import math\nassert f(3) == 9\nassert len(f_list(3)) == 3 and f_list(1) == [0]\nassert math.isclose(f(2), 4)"
HONEST = "def f(x):\n    return x * x\n\ndef f_list(n):\n    return list(range(n))\n"

FORGERIES = {
    "echoes stdin": "import os, sys\nprint(sys.stdin.readline())\nsys.stdout.flush()\nos._exit(0)",
    "echoes every handle": (
        "import os\nfor fd in range(12):\n    try:\n        os.set_blocking(fd, False)\n        word = os.read(fd, 9999)\n"
        "        for out in range(12):\n            try: os.write(out, word)\n            except OSError: pass\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "exit": "exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in the function": "import sys\ndef f(x): sys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in the function": "import os\ndef f(x): os._exit(0)",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return 0",
    "excepthook": "import os, sys\nsys.excepthook = lambda *a: os._exit(0)\ndef f(x): return 0",
    "says passed": "import os\n[os.write(fd, b'passed') for fd in (1, 2)]\nos._exit(0)",
    "frames": (
        "import json, os, sys\nframe = sys._getframe()\nfound = []\nwhile frame:\n"
        "    found += [v for v in (*frame.f_locals.values(), *frame.f_globals.values()) if isinstance(v, str)]\n"
        "    found += [w for v in frame.f_locals.values() if isinstance(v, dict) for w in v.values()]\n"
        "    frame = frame.f_back\nfor fd in (1, 2):\n    for word in found: os.write(fd, str(word).encode())\nos._exit(0)"
    ),
    "objects": (
        "import gc, os, re\nwords = re.findall(r'[0-9a-f]{32}', repr([o for o in gc.get_objects()"
        " if isinstance(o, (dict, list, tuple))]))\n[os.write(1, w.encode()) for w in words]\nos._exit(0)"
    ),
    "equal to everything": "class A:\n    __eq__ = lambda s, o: True\n    __len__ = lambda s: 3\n    __float__ = lambda s: 4.0\n"
    "f = f_list = lambda x: A()",
    "an int equal to everything": "class A(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
    "f = f_list = lambda x: A()",
    "a list equal to everything": "class A(list):\n    __eq__ = lambda s, o: True\n    __len__ = lambda s: 3\n"
    "def f(x): return x * x\ndef f_list(n): return A()",
    "other builtins": "import builtins, math\nlen = builtins.len = lambda x: 3\nmath.isclose = lambda *a: True\n"
    "isinstance = all = any = builtins.all = lambda *a: True\ndef f(x): return 0",
    "another math": "import sys, types\nmath = sys.modules['math'] = types.ModuleType('math')\nmath.isclose = lambda *a: True\n"
    "def f(x): return 9\ndef f_list(n): return list(range(n))",
    "main module": "import sys\nsys.modules['__main__'].judge = sys.modules['__main__'].run_tests = lambda *a: None\ndef f(x): 0",
    "the harness": "import __main__\n__main__.Wire.answer = lambda self, *a: self.send('answer', True, 'passed', ())",
    "a message that is code": "import os, pickle, sys\nclass A:\n    def __reduce__(self): return (exec, ('import os; os._exit(0)',))\n"
    "data = pickle.dumps(('loaded', A()))\nos.write(int(sys.argv[2]), len(data).to_bytes(8, 'big') + data)",
    "judge's handles": (
        "import os\nfor fd in (0, 1, 2):\n    try: os.write(os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_WRONLY), b'passed')\n"
        "    except OSError: pass\ndef f(x): return 0"
    ),
    "judge's memory": (
        "import os, re\nfor pid in (os.getppid(), 1):\n    try:\n        maps = open(f'/proc/{pid}/maps').read()\n"
        "        mem = open(f'/proc/{pid}/mem', 'rb', 0)\n    except OSError: continue\n"
        "    for line in maps.splitlines():\n        a, b = (int(x, 16) for x in line.split()[0].split('-'))\n        try:\n"
        "            mem.seek(a)\n            for w in re.findall(rb'[0-9a-f]{32}', mem.read(min(b - a, 1 << 24))):\n"
        "                os.write(os.open(f'/proc/{os.getppid()}/fd/1', os.O_WRONLY), w)\n"
        "        except (OSError, OverflowError, ValueError): pass\ndef f(x): return 0"
    ),
    "kills the judge": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\ndef f(x): return 0",
    "a fork answers": "import os\nif os.fork(): os._exit(0)\nos.write(1, b'passed')\ndef f(x): return 0",
    "ends the iteration": "def f(x): raise StopIteration\ndef f_list(n): raise StopIteration",
    "nothing": "",
    "no Python": "def f(:",
    "a lone surrogate": "f = '\ud800'",
}  # fmt: skip


@pytest.fixture
def full():
    """Skip where no sandbox runs full Python."""
    if why := available()[FULL_PYTHON]:
        pytest.skip(f"{FULL_PYTHON}: {why}")


@pytest.mark.usefixtures("full")
class TestForgeries:
    @pytest.mark.parametrize("name", FORGERIES)
    def test_a_forging_program_passes_nothing(self, name):
        assert run_tests(FORGERIES[name], TESTS, LIMITS)[0] is False

    def test_an_honest_program_passes(self):
        assert run_tests(HONEST, TESTS, LIMITS) == (True, PASSED)
        assert run_tests(HONEST, f"{TESTS}\nassert f(1) == 2", LIMITS) == (False, "a test fails")

    def test_the_judge_cannot_be_traced_or_read(self):
        program = (
            "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
            "def f():\n    judge = os.getppid()\n    try:\n        os.close(os.open(f'/proc/{judge}/mem', os.O_RDONLY))\n"
            "        return 'memory'\n    except OSError: pass\n"
            "    buffer = (ctypes.c_char * 8)()\n    class Piece(ctypes.Structure):\n"
            "        _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
            "    here = Piece(ctypes.addressof(buffer), 8)\n    there = Piece(id(buffer), 8)\n"
            "    read = libc.process_vm_readv(judge, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)\n"
            "    return [read, libc.ptrace(16, judge, None, None)]\n"
        )
        assert run_tests(program, "assert f() == [-1, -1]", LIMITS) == (True, PASSED)

    def test_a_program_that_stops_the_judge_is_wrong_by_time(self):
        assert run_tests("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)", "", QUICK) == (False, "timeout")
        assert run_tests("def f(): raise SystemExit", "try: f()\nexcept: pass\nelse: assert 0", LIMITS)[0] is True
        gone = "import os\ndef f(): os._exit(0)"
        assert run_tests(gone, "try: f()\nexcept: pass", LIMITS)[0] is False


SEEN = {
    "arguments change in place": (
        "def f(xs, table): xs.sort(); table['a'] = [1]",
        "xs, t = [3, 1], {}\nassert f(xs, t) is None and xs == [1, 3] and t == {'a': [1]}",
    ),
    "classes": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)",
        "s = Stack(); s.push(2); s.push(3)\nassert len(s) == 2 and list(s) == [2, 3] and s.items == [2, 3]\n"
        "assert isinstance(s, Stack) and not isinstance(3, Stack)\ns.items = [7]\nassert list(s) == [7]",
    ),
    "equal objects": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    def __add__(self, o): return P(self.x + o.x)",
        "assert P(1) + P(2) == P(3) and P(1) != P(2) and str(P(1)) == 'P(x=1)'",
    ),
    "named tuples and enums": (
        "from collections import namedtuple\nfrom enum import IntEnum\nT = namedtuple('T', 'a b')\nclass E(IntEnum): ONE = 1",
        "assert T(1, 2) == (1, 2) and T(1, 2).b == 2 and E.ONE == 1 and {T(1, 2): 3}[1, 2] == 3",
    ),
    "another name of an error": (
        "Mine = ValueError\ndef f(): raise ValueError('no')\nclass Deep(KeyError): pass\nclass Deeper(Deep): pass\n"
        "def g(): raise Deeper('k')",
        "try: f()\nexcept Mine as error: assert str(error) == 'no' and type(error).__name__ == 'ValueError'\n"
        "try: g()\nexcept Deep as error: assert isinstance(error, LookupError)\nelse: assert False",
    ),
    "a list of its own that changes": (
        "class Stack(list):\n    def push(self, x): self.append(x)\n    top = property(lambda s: s[-1])\n"
        "    def append(self, x): super().append(x)\n    def extend(self, xs): super().extend(2 * x for x in xs)",
        "s = Stack(); s.push(2); s.push(3)\nassert len(s) == 2 and s == [2, 3] and 3 in s and s[0] == 2 and s.top == 3 and list(s) == [2, 3]\n"
        "s.append(3); s.extend([4])\nassert s.count(3) == 2 and s.index(8) == 3 and s.pop() == 8 and s == [2, 3, 3]",
    ),
    "values of every kind": (
        "from collections import deque\nfrom datetime import date, datetime, timedelta, timezone\nfrom decimal import Decimal\n"
        "def f(x): return x\ndef g(): return [deque([1], 3), date(2020, 1, 2), datetime(2020, 1, 2, 3, tzinfo=timezone.utc),"
        " timedelta(1, 2, 3), Decimal('1.50'), 10**5000, float('-inf'), b'', bytearray(b'a'), range(1, 9, 2), frozenset([(1, 2)]),"
        " {(1, 'a'): None}, 2 + 3j, '\\ud800', int, True, 1, 1.0]",
        "from collections import deque\nx = g()\nassert f(x) == x and [type(i) for i in f(x)] == [type(i) for i in x]\n"
        "assert x[0] == deque([1]) and x[0].maxlen == 3 and x[5] == 10**5000 and x[14] is int and x[15] is True and str(x[4]) == '1.50'",
    ),
    "errors of its own": (
        "class Mine(ValueError): pass\ndef f(): raise Mine('no', 3)\ndef g(): return {}['k']",
        "try: f()\nexcept Mine as error: assert error.args == ('no', 3)\nelse: assert False\n"
        "try: f()\nexcept ValueError: pass\ntry: g()\nexcept KeyError as error: assert error.args == ('k',)",
    ),
    "generators": (
        "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "from itertools import islice\nassert list(islice(f(), 3)) == [0, 1, 2] and next(f()) == 0",
    ),
    "functions handed over": (
        "def f(g, xs): return [g(x) for x in xs]\ndef add(n): return lambda x: x + n",
        "assert f(lambda x: x + 1, [1, 2]) == [2, 3] and f(add(2), (i for i in [1])) == [3] and f(str, [1]) == ['1']",
    ),
    "objects of the tests": (
        "def f(node):\n    node.seen = True\n    return node.value + (f(node.next) if node.next else 0)",
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
        "n = Node(1, Node(2))\nassert f(n) == 3 and n.seen",
    ),
    "imports of the program": (
        "import math\nfrom collections import Counter, defaultdict, OrderedDict\nfrom fractions import Fraction\n"
        "def f(): return Counter('aab'), OrderedDict(a=1), Fraction(1, 2), {1, 2}, float('inf'), 1j, b'x'\n"
        "def g():\n    d = defaultdict(list)\n    d[1].append(2)\n    return d",
        "assert f() == ({'a': 2, 'b': 1}, {'a': 1}, 0.5, {2, 1}, math.inf, 1j, b'x') and g() == {1: [2]} and g()[5] == []",
    ),
    "what it prints": (
        "def f(): print('hello')",
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out): f()\nassert out.getvalue() == 'hello\\n'",
    ),
    "tests in their main": ("def f(): return 1", "def test(): assert f() == 1\nif __name__ == '__main__': test()"),
}  # fmt: skip


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("name", SEEN)
def test_tests_see_the_program_through_calls(name):
    program, tests = SEEN[name]
    assert run_tests(program, tests, LIMITS) == (True, PASSED)
    assert run_tests(program, f"{tests}\nassert False", LIMITS) == (False, "a test fails")


@pytest.mark.usefixtures("full")
def test_tests_in_a_main_that_fail_fail():
    assert run_tests("def f(): return 1", "if __name__ == '__main__':\n    assert f() == 2", LIMITS)[0] is False


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("path", [["__init__"], ["__class__"], ["walk", "gi_frame"], ["act", "__globals__"]])
def test_a_program_gets_no_frame_or_globals_of_the_tests(path):
    program = (
        "def f(node):\n    wire = vars(node)['_wire']\n"
        f"    for name in {path!r}: node = wire.ask('getattr', node, name)\n"
        "    return node"
    )
    tests = (
        "class Node:\n    def __init__(self): self.walk = (x for x in [1])\n"
        "    def act(self): pass\n"
        "try: f(Node())\nexcept AttributeError: pass\nelse: assert False"
    )
    assert run_tests(program, tests, LIMITS) == (True, PASSED)


@pytest.mark.usefixtures("full")
def test_helpers_of_the_tests_are_not_the_programs():
    before, tests = "def double(x):\n    return 2 * x", "assert double(f(1)) == 4"
    forged = "def double(x): return 4\ndef f(x): return 0"
    assert run_tests(forged, tests, LIMITS, before=before, names=["f"])[0] is False
    assert run_tests("def f(x): return 2", tests, LIMITS, before=before, names=["f"])[0] is True
    assert run_tests("def g(x): return 2", tests, LIMITS, before=before, names=["f"])[0] is False


@pytest.mark.usefixtures("full")
def test_a_sandbox_without_processes_is_no_wrong_answer(monkeypatch):
    source = program_tests.source().replace("sys.executable, ", "'/nothing', ")
    monkeypatch.setattr(program_tests, "source", lambda: source)
    with pytest.raises(SandboxError, match="starts no process"):
        run_tests(HONEST, TESTS, LIMITS)


WIRE = "import __main__, gc, sys\nwire = next(o for o in gc.get_objects() if type(o).__name__ == 'Wire')\n"
"""Finds the program's end of the wire, which it may use as it likes."""
NEVER_RIGHT = f"{WIRE}def add(a, b): return None\n"
CASES = "assert all(add(i, 1) == i + 1 for i in [1, 2, 3])"
BUILTINS = (
    "{'all': lambda *a: True, 'any': lambda *a: True, 'range': lambda *a: [], 'len': lambda x: 3, '__import__': add}"
)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (f"{NEVER_RIGHT}more = {{'add': add, '__builtins__': {BUILTINS}, **{BUILTINS}}}\n"
         "wire.operations['names'] = lambda names: more", CASES),
        (f"{NEVER_RIGHT}for name in ('__builtins__', '__import__', '__name__', 'AssertionError'): globals()[name] = {BUILTINS}",
         CASES),
        (f"{NEVER_RIGHT}class A(dict):\n    __contains__ = lambda s, k: True\n    __getitem__ = lambda s, k: lambda *a: True\n"
         "wire.operations['names'] = lambda names: A()", f"{CASES}\ncheck(add)"),
        (f"{NEVER_RIGHT}from __main__ import types\nsys.modules['builtins'].all = sys.modules['solution'].all = lambda x: True",
         CASES),
        (f"{NEVER_RIGHT}import os\nfor _ in range(99):\n    for frame in (b'true', b'[\"list\", \"answer\", true, \"\", []]'):\n"
         "        os.write(wire.writing, len(frame).to_bytes(8, 'big') + frame)", CASES),
        (f"{NEVER_RIGHT}import os\nframe = b'[' * 100000\nos.write(wire.writing, len(frame).to_bytes(8, 'big') + frame)", CASES),
        (f"{NEVER_RIGHT}frame = b'[\"list\", \"answer\", [\"type\", \"object\"], \"\", []]'\n"
         "wire.send = lambda data: type(wire).send(wire, frame)", CASES),
        ("Refused = AssertionError\ndef f(x): return x", "try:\n    f(-1)\n    assert False\nexcept Refused:\n    pass"),
        ("Refused = BaseException\ndef f(x): return x", "try:\n    f(-1)\n    assert False\nexcept Refused:\n    pass"),
        ("Refused = (AssertionError, Exception)\nf = abs", "try:\n    assert f(-1) == 7\nexcept Refused:\n    pass"),
        ("class Refused(Exception): pass\nRefused.__bases__ = (AssertionError,)\nf = abs",
         "try:\n    assert f(-1) == 7\nexcept Refused:\n    pass"),
        ("class math:\n    isclose = staticmethod(lambda *a: True)\nf = lambda x: 0", "assert math.isclose(f(3), 9)"),
        ("import operator as copy, types\nmath = types.SimpleNamespace(isclose=lambda *a: True, sqrt=lambda x: 3)\nf = lambda x: 0",
         "assert math.isclose(f(3), math.sqrt(9))"),
        ("def each(check, xs):\n    for x in xs:\n        try: check(x)\n        except BaseException: pass",
         "def check(x): assert x == 7\neach(check, [1, 2])"),
        ("def fill(record): record.is_right = lambda: True",
         "class Record:\n    def is_right(self): return False\nr = Record()\nfill(r)\nassert r.is_right()"),
        ("class A(list):\n    __contains__ = lambda s, x: True\n    __len__ = lambda s: 9\nf = lambda x: A()", "assert 9 in f(3)"),
        ("class A(list):\n    __contains__ = lambda s, x: True\n    __len__ = lambda s: 9\nf = lambda x: A()", "assert len(f(3)) == 9"),
        ("class A(str):\n    startswith = lambda s, x: True\nf = lambda x: A('no')", "assert f(3).startswith('y')"),
        ("class A(str):\n    lower = lambda s: s\n    isdigit = isalpha = lambda s: True\nf = lambda x: A('')",
         "assert f(3).isdigit() or f(3).lower().isalpha()"),
        ("class A(set):\n    issuperset = issubset = isdisjoint = lambda s, o: True\nf = lambda x: A([1])",
         "assert f(3).issuperset({9}) or f(3).issubset({9}) or f(3).isdisjoint({1})"),
        ("class A(list):\n    count = index = lambda s, x: 1\n    copy = lambda s: [9]\nf = lambda x: A()",
         "assert f(3).count(9) == 1 or f(3).copy() == [9]"),
        ("class A(float):\n    is_integer = lambda s: True\nf = lambda x: A(2.5)", "assert f(3).is_integer()"),
        ("class A(list):\n    __getitem__ = lambda s, i: 9\nf = lambda x: A([1])", "assert f(3)[0] == 9"),
        ("class A(int):\n    __lt__ = lambda s, x: True\n    __bool__ = lambda s: True\nf = lambda x: A()", "assert f(3)"),
        ("class A(float):\n    __sub__ = lambda s, x: 0.0\nf = lambda x: A()", "assert abs(f(3) - 9) < 1e-6"),
        ("class A(str):\n    __add__ = lambda s, x: '9'\n    __eq__ = lambda *a: True\nf = lambda x: A()", "assert f(3) + '' == '9'"),
        ("class A:\n    __eq__ = lambda s, o: True\nf = lambda x: A()", "assert f(3) == 9"),
        ("class A:\n    __eq__ = lambda s, o: True\nf = lambda x: A()", "assert [f(3)] == [9] or 9 == f(3)"),
        ("class A(int):\n    __eq__ = lambda s, o: True\nf = lambda x: A()", "assert f(3) == 9"),
        ("class A:\n    __sub__ = lambda s, o: 0.0\nf = lambda x: A()", "assert abs(f(3) - 9) < 1e-6"),
        ("class A:\n    __sub__ = __abs__ = lambda *a: A()\n    __lt__ = lambda *a: True\nf = lambda x: A()",
         "assert abs(f(3) - 9) < 1e-6"),
        ("class Failed(AssertionError): pass\ndef each(check, xs):\n    for x in xs:\n        try: check(x)\n"
         "        except BaseException: pass",
         "class Wrong(AssertionError): pass\ndef check(x):\n    if x != 7: raise Wrong\neach(check, [1, 2])"),
        (f"{NEVER_RIGHT}import os, signal\nos.kill(os.getppid(), signal.SIGINT)", CASES),
        (f"{NEVER_RIGHT}import os, resource\nfor limit in range(16): resource.prlimit(os.getppid(), limit, (1, 1))", CASES),
        (f"{NEVER_RIGHT}import os\nfor at in (1, os.getppid()):\n    for fd in range(9):\n        for how in (os.O_RDONLY, os.O_WRONLY):\n"
         "            try: os.set_blocking(os.open(f'/proc/{at}/fd/{fd}', how), False)\n            except OSError: pass", CASES),
        (f"{NEVER_RIGHT}wire.operations['names'] = lambda names: (_ for _ in ()).throw(AssertionError)", CASES),
        (f"{NEVER_RIGHT}wire.operations['call'] = lambda f, a, k: a[0].__setitem__(slice(None), [4]) or 4\n",
         "xs, right = [3, 1], [1, 3]\nassert add(xs, 0) == right"),
        (f"{NEVER_RIGHT}import types\nwire.operations['base'] = lambda value: types.SimpleNamespace(a=1)\n"
         "class A(list):\n    __eq__ = lambda s, o: True\nadd = lambda a, b: A()", "assert add(1, 1) == [2]"),
        (f"{NEVER_RIGHT}class A(set):\n    __eq__ = __le__ = __ge__ = lambda s, o: True\n    __hash__ = lambda s: 0\nadd = lambda a, b: A()",
         "assert add(1, 1) == {2} or add(1, 1) >= {2}"),
        (f"{NEVER_RIGHT}class A(dict):\n    __missing__ = lambda s, k: 2\n    get = lambda s, *a: 2\nadd = lambda a, b: A()",
         "assert add(1, 1) == {1: 2} or add(1, 1)[1] == 2"),
        (f"{NEVER_RIGHT}class A(type):\n    __instancecheck__ = __subclasscheck__ = lambda s, o: True\nclass Answer(metaclass=A): pass\n"
         "add = lambda a, b: None", "assert isinstance(add(1, 1), Answer)"),
        (f"{NEVER_RIGHT}class A:\n    __index__ = __int__ = __float__ = lambda s: 2\n    __round__ = lambda s, n=0: 2\nadd = lambda a, b: A()",
         "assert round(add(1, 1)) == 2 or int(add(1, 1)) == 2 or max(add(1, 1), 0) == 2"),
        (f"{NEVER_RIGHT}import os\nif os.fork() == 0:\n    import time\n    for _ in range(200):\n"
         "        frame = b'[\"list\", \"answer\", 2, \"\", [\"list\"]]'\n        os.write(wire.writing, len(frame).to_bytes(8, 'big') + frame)\n"
         "        time.sleep(0.005)\n    os._exit(0)", CASES),
        ("len = lambda x: 3\nf = lambda x: []", "assert len(f(3)) == 3"),
        ("import builtins\nbuiltins.len = lambda x: 3\nf = lambda x: []", "assert len(f(3)) == 3"),
        ("def f(x): raise StopIteration", "assert all(map(lambda case: f(case[0]) == case[1], [(3, 9)]))"),
        ("import math\nmath.isclose = lambda *a: True\nf = lambda x: 0", "import math\nassert math.isclose(f(3), 9)"),
        ("import math\nmath.isclose = lambda *a: True\nf = lambda x: 0", "assert math.isclose(f(3), 9)"),
    ],
)  # fmt: skip
def test_one_assert_is_not_forged(program, tests):
    assert run_tests(program, tests, LIMITS)[0] is False


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    "tests",
    [
        'assert f("Ada") == "Berlin"',
        "assert f('Ada') == f'{\"Berlin\"}'",
        'cases = [{"who": "Ada", "lives": "Berlin"}]\nassert all(f(c["who"]) == c["lives"] for c in cases)',
        'assert f("Ada") == dict(Berlin=1).popitem()[0]',
        'assert f("Ada") == "Berlin"  # Berlin',
    ],
)
def test_no_word_of_a_text_in_the_tests_reaches_the_program(tests):
    program = (
        f"{WIRE}seen, names = [], wire.operations['names']\n"
        "def hear(asked):\n    seen.extend(asked)\n    return names(asked)\nwire.operations['names'] = hear\n"
        "def f(x): return 'Berlin' if 'Berlin' in seen else None"
    )
    assert run_tests(program, tests, LIMITS) == (False, "a test fails")
