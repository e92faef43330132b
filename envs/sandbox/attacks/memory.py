"""Attacks on the limit of memory: of one process, of all together, in files, and in the kernel. Each is bounded.

Limit and attacks fit together: with 256 MB, whoever holds 600 for a second, or 200 that no limit counts, has got out.
"""

_HOLD = "time.sleep(1)\nprint('BREACH')"
ONE = {
    "at once": "x = bytearray(1 << 31)\n",
    "bit by bit": "x = [bytearray(b'x') * (1 << 20) for _ in range(600)]\n",
    "in text": "x = 'a'\nwhile len(x) < 600 << 20: x += x\n",
    "in lists": "x = [0] * (600 << 17)\n",
    "in small things": "x = [[i] for i in range(8_000_000)]\n",
    "by mmap": "import mmap\nx = mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\nfor i in range(0, 600 << 20, 4096): x[i] = 1\n",
    "shared by mmap": "import mmap\nx = mmap.mmap(-1, 600 << 20)\nfor i in range(0, 600 << 20, 4096): x[i] = 1\n",
    "in huge pages": "import mmap\nx = mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)\n",
    "by malloc": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\nat = libc.malloc(ctypes.c_size_t(600 << 20))\nctypes.memset(at, 1, 600 << 20)\n",
    "by unpacking": "import zlib\nx = zlib.decompress(zlib.compress(bytes(600 << 20)))\n",
    "in an array": "import array\nx = array.array('q', bytes(8)) * (600 << 17)\n",
    "in a number": "x = 1 << (600 << 23)\nx += 1\n",
    "by a width": "x = f\"{'':>{600 << 20}}\"\n",
    "by filling with zeros": "x = '1'.zfill(600 << 20)\n",
    "by putting text in": "x = ('a' * 24000).replace('a', 'b' * 27000)\n",
    "by joining": "x = ('b' * 27000).join('a' * 24000)\n",
    "in bytes": "x = b'x' * (600 << 20)\n",
    "in a table": "x = {i: str(i) for i in range(6_000_000)}\n",
    "in a set": "x = {str(i) for i in range(5_000_000)}\n",
    "in a queue": "import collections\nx = collections.deque(range(20_000_000))\n",
    "in JSON": "import json\nx = json.dumps(['x' * (1 << 20)] * 620)\n",
    "by a percent sign": "x = '%629145600d' % 1\n",
    "in calls": "def f(n):\n    x = 'x' * (1 << 20) + str(n)\n    return f(n - 1) if n else time.sleep(1)\nf(620)\n",
    "by slices": "y = list(range(1 << 17))\nx = [y[:] for _ in range(620)]\n",
    "in permutations": "import itertools\nx = list(itertools.permutations(range(10)))\n",
    "in pairs": "x = list(zip(range(9_000_000), range(9_000_000)))\n",
    "by a checksum": "import hashlib\nhashlib.scrypt(b'x', salt=b'y', n=1 << 19, r=8, p=1, maxmem=1 << 30)\n",
    "in threads": (
        "import threading\nthreading.stack_size(200 << 20)\nts = [threading.Thread(target=time.sleep, args=(2,)) for _ in range(8)]\n"
        "for t in ts: t.start()\n"
    ),
}
_TOGETHER = (
    "import mmap, os\nr, w = os.pipe()\nfor i in range(8):\n    if os.fork() == 0:\n        {hold}\n        os.write(w, b'x')\n"
    "        time.sleep(3)\n        os._exit(0)\n    {wait}\nseen = 0\nwhile seen < 8: seen += len(os.read(r, 8))\n"
)
ALL = {
    "children": _TOGETHER.format(hold="x = bytearray(b'x') * (80 << 20)", wait="pass"),
    "children that share": _TOGETHER.format(
        hold="x = mmap.mmap(-1, 80 << 20)\n        for i in range(0, 80 << 20, 4096): x[i] = 1", wait="pass"
    ),
    "orphans": _TOGETHER.format(
        hold="if os.fork(): os._exit(0)\n        os.setsid()\n        x = bytearray(b'x') * (80 << 20)",
        wait="os.wait()",
    ),
    "children of threads": (
        "import os, threading\nr, w = os.pipe()\ndef one():\n    if os.fork() == 0:\n        x = bytearray(b'x') * (80 << 20)\n"
        "        os.write(w, b'x')\n        time.sleep(3)\n        os._exit(0)\n    time.sleep(3)\n"
        "for _ in range(8): threading.Thread(target=one, daemon=True).start()\nseen = 0\nwhile seen < 8: seen += len(os.read(r, 8))\n"
    ),
    "closed pipes": (
        "import os\nsaid = os.dup(1)\nos.close(1)\nos.close(2)\nfor i in range(8):\n    if os.fork() == 0:\n"
        "        x = bytearray(b'x') * (80 << 20)\n        time.sleep(2)\n        os._exit(0)\ntime.sleep(1)\nos.dup2(said, 1)\n"
    ),
}
HIDDEN = {
    "a first thread that ended": _TOGETHER.format(
        hold="import ctypes, threading\n        def f():\n            x = bytearray(b'x') * (80 << 20)\n            os.write(w, b'x')\n"
        "            time.sleep(3)\n            os._exit(0)\n        threading.Thread(target=f).start()\n"
        "        ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)",
        wait="pass",
    )
    .replace("for i in range(8)", "for i in range(6)")
    .replace("seen < 8", "seen < 6"),
    "processes that may not be looked at": _TOGETHER.format(
        hold="import ctypes\n        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n        x = bytearray(b'x') * (80 << 20)",
        wait="pass",
    ),
    "processes that move on": _TOGETHER.format(
        hold="x = bytearray(b'x') * (80 << 20)\n        end = time.time() + 1\n        while time.time() < end:\n            try:\n"
        "                if os.fork(): os._exit(0)\n            except OSError: pass",
        wait="pass",
    ),
    "children that read one file and write over it": _TOGETHER.format(
        hold="import mmap\n        f = open(f'f{i}', 'w+b')\n        f.truncate(8 << 20)\n        x = [mmap.mmap(f.fileno(), 8 << 20, flags=2) for _ in range(10)]\n"
        "        for m in x:\n            for i in range(0, 8 << 20, 4096): m[i] = 1",
        wait="pass",
    ),
}
TABLES = (
    "import ctypes, time\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
    "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]\nn = 0\n"
    "for i in range(60000):\n    at = libc.mmap(0x100000000000 + (i << 30), 4096, 1, 0x100022, -1, 0)\n"
    "    if at in (None, 2**64 - 1): break\n    ctypes.string_at(at, 1)\n    n += 1\ntime.sleep(0.5)\n"
    "print('BREACH' if n == 60000 else n)"
)
"""Pages of zeros far from each other: each needs 8 kB of tables, and is not counted as held."""
_NUMBERS = "import ctypes, os\nlibc = ctypes.CDLL(None)\nX = os.uname().machine == 'x86_64'\n"
_SENT = "print('BREACH' if sent > 200 << 20 else sent)"
_FILL = "    s.setblocking(False)\n    try:\n        while sent < {most} << 20: sent += s.send(bytes(1 << 16))\n    except OSError: pass\n"
UNCOUNTED = {
    "pairs of sockets": (
        "import socket\nsent, kept = 0, []\ntry:\n    for _ in range(4000): kept += socket.socketpair()\nexcept OSError: pass\n"
        f"for s in kept:\n{_FILL.format(most=210)}{_SENT}"
    ),
    "pairs of large sockets": (
        "import socket\nsent, kept = 0, []\ntry:\n    for _ in range(120): kept += socket.socketpair()\nexcept OSError: pass\n"
        "for s in kept:\n    try: s.setsockopt(1, 7, 4 << 20)\n    except OSError: pass\n"
        f"{_FILL.format(most=210)}{_SENT}"
    ),
    "pairs of sockets of forks": (
        "import os, socket, time\nr, w = os.pipe()\nfor _ in range(4):\n    try: os.fork()\n    except OSError: pass\n"
        "sent, kept = 0, []\ntry:\n    for _ in range(110): kept += socket.socketpair()\nexcept OSError: pass\n"
        f"for s in kept:\n    try: s.setsockopt(1, 7, 4 << 20)\n    except OSError: pass\n{_FILL.format(most=20)}"
        "os.write(w, sent.to_bytes(8, 'big'))\ntime.sleep(0.3)\nos.set_blocking(r, False)\nsent = 0\n"
        f"try:\n    while True: sent += int.from_bytes(os.read(r, 8), 'big')\nexcept OSError: pass\n{_SENT}"
    ),
    "sockets that wait for a listener": (
        "import socket\nlistener = socket.socket(1)\nlistener.bind('\\0mine')\nlistener.listen(4096)\nsent = 0\n"
        "for _ in range(1500):\n    with socket.socket(1) as s:\n        s.setblocking(False)\n        try:\n            s.connect('\\0mine')\n"
        f"            while sent < 210 << 20: sent += s.send(bytes(1 << 16))\n        except OSError: pass\n{_SENT}"
    ),
    "sockets on the way": (
        "import socket\na, b = socket.socketpair()\na.setblocking(False)\nsent = 0\nfor _ in range(2000):\n    try:\n        s, t = socket.socketpair()\n"
        "        for u in (s, t):\n            try: u.setsockopt(1, 7, 4 << 20)\n            except OSError: pass\n"
        "        s.setblocking(False)\n        try:\n            while sent < 210 << 20: sent += s.send(bytes(1 << 16))\n        except OSError: pass\n"
        f"        socket.send_fds(a, [b'x'], [s.fileno(), t.fileno()])\n        s.close()\n        t.close()\n    except OSError: break\n{_SENT}"
    ),
    "large pipes": (
        "import fcntl, os\nsent = 0\nkept = []\ntry:\n    for _ in range(500):\n        r, w = os.pipe()\n        kept.append((r, w))\n"
        "        os.set_blocking(w, False)\n        fcntl.fcntl(w, 1031, 1 << 20)\n        while sent < 30 << 20:\n            try: sent += os.write(w, bytes(1 << 20))\n"
        "            except BlockingIOError: break\nexcept OSError: pass\nprint('BREACH' if sent > 24 << 20 else sent)"
    ),
    "memory behind handles": (
        "import os\nsent = 0\nkept = []\nfor i in range(30):\n    fd = os.memfd_create(str(i))\n    kept.append(fd)\n"
        f"    try: sent += os.write(fd, bytes(12 << 20))\n    except OSError: pass\n{_SENT}"
    ),
    "secret memory": f"{_NUMBERS}print('BREACH' if libc.syscall(447, 0) >= 0 else '')",
    "shared segments": (
        f"{_NUMBERS}libc.shmat.restype = ctypes.c_void_p\nsent, ids = 0, []\nfor i in range(6):\n"
        "    ids.append(libc.shmget(0, ctypes.c_size_t(40 << 20), 0o1600))\n    if ids[-1] < 0: break\n    at = libc.shmat(ids[-1], None, 0)\n"
        "    if not at or at == 2**64 - 1: break\n    ctypes.memset(at, 1, 40 << 20)\n    libc.shmdt(ctypes.c_void_p(at))\n    sent += 40 << 20\n"
        f"{_SENT}\nfor i in ids: libc.shmctl(i, 0, None)"
    ),
    "messages": f"{_NUMBERS}print('BREACH' if libc.msgget(0, 0o1600) >= 0 else '')",
    "semaphores": f"{_NUMBERS}print('BREACH' if libc.semget(0, 32, 0o1600) >= 0 else '')",
    "pages given to pipes": (
        f"{_NUMBERS}buffer = ctypes.create_string_buffer(4096)\nclass V(ctypes.Structure):\n"
        "    _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\nr, w = os.pipe()\n"
        "print('BREACH' if libc.vmsplice(w, ctypes.byref(V(ctypes.addressof(buffer), 4096)), ctypes.c_size_t(1), 0) > 0 else '')"
    ),
    "events of others' store": f"{_NUMBERS}at = ctypes.c_void_p()\nprint('BREACH' if libc.syscall(206 if X else 0, 64, ctypes.byref(at)) == 0 else '')",
    "files in memory": "import os\nsent = 0\ntry:\n    for i in range(30): sent += open(f'/dev/shm/skyrl-{os.getpid()}-{i}', 'wb').write(bytes(12 << 20))\n"
    "except OSError: pass\nfor i in range(30):\n    try: os.unlink(f'/dev/shm/skyrl-{os.getpid()}-{i}')\n    except OSError: pass\n"
    f"{_SENT}",
    "files of the box": "sent = 0\ntry:\n    for i in range(30): sent += open(f'f{i}', 'wb').write(bytes(12 << 20))\nexcept OSError: pass\n"
    f"{_SENT}",
    "empty files": "import time\nfor i in range(40_000): open(f'f{i}', 'w').close()\ntime.sleep(0.5)\nprint('BREACH')",
    "tables of pages": TABLES,
    "empty files beside the box": "import os, time\nfor i in range(40_000): open(f'/dev/shm/skyrl-{os.getpid()}-{i}', 'w').close()\n"
    "time.sleep(0.5)\nprint('BREACH')\nfor i in range(40_000): os.unlink(f'/dev/shm/skyrl-{os.getpid()}-{i}')",
    "empty files beside a zombie": "import os, time\nif os.fork() == 0: os._exit(0)\nfor i in range(40_000): open(f'f{i}', 'w').close()\n"
    "time.sleep(0.5)\nprint('BREACH')",
    "more names of a file": "import os, time\nopen('f', 'w').close()\nfor i in range(40_000): os.link('f', f'f{i}')\ntime.sleep(0.5)\nprint('BREACH')",
    "attributes of a file": "import os, time\nsent = 0\nfor k in range(40):\n    open(f'f{k}', 'w').close()\n    for i in range(100):\n"
    f"        os.setxattr(f'f{{k}}', f'user.a{{i}}', bytes(60000))\n        sent += 60000\ntime.sleep(0.5)\n{_SENT}",
    "attributes beside the box": "import os, time\nsent = 0\nname = f'/dev/shm/skyrl-{os.getpid()}'\nopen(name, 'w').close()\nfor i in range(4000):\n"
    f"    os.setxattr(name, f'user.a{{i}}', bytes(60000))\n    sent += 60000\ntime.sleep(0.5)\n{_SENT}\nos.unlink(name)",
    "files without a name": "import os\nsent, kept = 0, []\ntry:\n    for i in range(30):\n        kept.append(os.open('.', os.O_TMPFILE | os.O_RDWR))\n"
    f"        sent += os.write(kept[-1], bytes(12 << 20))\nexcept OSError: pass\n{_SENT}",
    "files that were deleted": "import os\nsent, kept = 0, []\ntry:\n    for i in range(30):\n        kept.append(open(f'f{i}', 'wb', 0))\n"
    f"        os.unlink(f'f{{i}}')\n        sent += kept[-1].write(bytes(12 << 20))\nexcept OSError: pass\n{_SENT}",
    "signals that wait": "import ctypes, os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\nlibc = ctypes.CDLL(None)\n"
    "sent = sum(libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(1)) == 0 for _ in range(20_000))\nprint('BREACH' if sent > 5000 else sent)",
    "timers": f"{_NUMBERS}at = ctypes.c_void_p()\nsent = sum(libc.syscall(222 if X else 107, 1, None, ctypes.byref(at)) == 0 for _ in range(20_000))\n"
    "print('BREACH' if sent > 5000 else sent)",
    "empty folders": "import os, time\nfor i in range(40_000): os.mkdir(f'f{i}')\ntime.sleep(0.5)\nprint('BREACH')",
    "links": "import os, time\nfor i in range(40_000): os.symlink('x' * 900, f'f{i}')\ntime.sleep(0.5)\nprint('BREACH')",
}
ATTACKS = {
    **{f"held {name}": f"import time\n{code}{_HOLD}" for name, code in {**ONE}.items()},
    **{f"held by {name}": f"import time\n{code}{_HOLD}" for name, code in {**ALL, **HIDDEN}.items()},
    **{f"uncounted in {name}": code for name, code in UNCOUNTED.items()},
}
MAY_LACK = (
    "uncounted in attributes of a file", "uncounted in attributes beside the box", "uncounted in files without a name",
    "held in huge pages", "uncounted in secret memory", "uncounted in sockets that wait for a listener", "held in threads",
    "uncounted in large pipes", "uncounted in pairs of sockets",
    "uncounted in sockets on the way", "uncounted in pairs of large sockets", "uncounted in pairs of sockets of forks",
)  # fmt: skip
