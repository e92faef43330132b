"""Attacks on the limit of processes, on the end of all of them, and on the rights that they have. Each is bounded."""

_COUNT = "print('BREACH' if alive > {most} else alive)\nfor p in children: os.kill(p, 9)"
MANY = {
    "forks": (
        "import os, time\nchildren = []\nfor _ in range(40):\n    try: p = os.fork()\n    except OSError: break\n"
        "    if p == 0:\n        time.sleep(2)\n        os._exit(0)\n    children.append(p)\nalive = len(children)\n"
    ),
    "forks of forks": (
        "import os, time\nr, w = os.pipe()\nfor _ in range(6):\n    try: os.fork()\n    except OSError: pass\n"
        "os.write(w, b'x')\ntime.sleep(0.7)\nos.set_blocking(r, False)\nchildren = []\ntry: alive = len(os.read(r, 99))\n"
        "except OSError: alive = 0\n"
    ),
    "programs": (
        "import os, subprocess\nchildren = []\nfor _ in range(40):\n    try: children.append(subprocess.Popen(['sleep', '2']).pid)\n"
        "    except OSError: break\nalive = len(children)\n"
    ),
    "spawns": (
        "import os\nchildren = []\nfor _ in range(40):\n    try: children.append(os.posix_spawn('/bin/sleep', ['sleep', '2'], {}))\n"
        "    except OSError: break\nalive = len(children)\n"
    ),
    "orphans": (
        "import os, time\nr, w = os.pipe()\nfor _ in range(40):\n    try: p = os.fork()\n    except OSError: break\n"
        "    if p == 0:\n        os.setsid()\n        try:\n            if os.fork() == 0:\n                os.write(w, b'x')\n"
        "                time.sleep(2)\n        except OSError: pass\n        os._exit(0)\n    os.waitpid(p, 0)\ntime.sleep(0.2)\n"
        "os.set_blocking(r, False)\nchildren = []\ntry: alive = len(os.read(r, 99))\nexcept OSError: alive = 0\n"
    ),
    "threads": (
        "import os, threading, time\nchildren = []\nalive = 0\nfor _ in range(60):\n"
        "    try: threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n    except RuntimeError: break\n    alive += 1\n"
    ),
    "forks by a system call": (
        "import ctypes, os, time\nlibc = ctypes.CDLL(None)\nchildren = []\nfor _ in range(40):\n"
        "    p = libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 17, 0, 0, 0, 0)\n    if p < 0: break\n"
        "    if p == 0:\n        time.sleep(2)\n        os._exit(0)\n    children.append(p)\nalive = len(children)\n"
    ),
    "a pool": (
        "import multiprocessing, os\nchildren = []\nalive = 0\ntry:\n    found = [multiprocessing.get_context('fork').Process(target=os.read,"
        " args=(os.pipe()[0], 1), daemon=True) for _ in range(29)]\n    for p in found:\n        p.start()\n        alive += 1\n"
        "except OSError: pass\nchildren = [p.pid for p in found if p.pid]\n"
    ),
}
STAYING = {
    "a child": "{start}",
    "a child in a session of its own": "os.setsid()\n    {start}",
    "a child of a child": "os.setsid()\n    if os.fork(): os._exit(0)\n    {start}",
    "a child that ignores signals": "for s in range(1, 32):\n        try: signal.signal(s, signal.SIG_IGN)\n        except (OSError, ValueError): pass\n    {start}",
}
_START = "os.execv('/bin/sleep', ['sleep', mark])"
NAMESPACES = {
    "mounts": 0x20000, "groups of control": 0x2000000, "host names": 0x4000000, "shared memory": 0x8000000,
    "users": 0x10000000, "processes": 0x20000000, "networks": 0x40000000,
}  # fmt: skip
RIGHTS = {
    "becoming root": "import os\nos.setuid(0)\nopen('/etc/shadow').read()\nprint('BREACH')",
    "becoming somebody": "import os\nos.setresuid(12345, 12345, 12345)\nprint('BREACH' if os.getuid() == 12345 else '')",
    "other groups": "import os\nos.setgroups([0])\nprint('BREACH')",
    "more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40,) * 2)\nprint('BREACH')",
    "larger files": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40,) * 2)\nprint('BREACH')",
    "more files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\nprint('BREACH')",
    "more processes": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (4000, 4000))\nprint('BREACH')",
    "more processes by the first": (
        "import resource\nopen('/proc/1/mem', 'r+b').close()\n"
        "print('BREACH' if not 0 <= resource.prlimit(1, resource.RLIMIT_NPROC)[1] <= 16 else '')"
    ),
    "more memory by the first": (
        "import resource\nopen('/proc/1/mem', 'r+b').close()\n"
        "print('BREACH' if not 0 <= resource.prlimit(1, resource.RLIMIT_AS)[1] <= 1 << 29 else '')"
    ),
    "a core for whoever collects them": (
        "import resource\nprint('BREACH' if resource.getrlimit(resource.RLIMIT_CORE) != (1, 1) else '')"
    ),
    "another host name": "import socket\nsocket.sethostname('breach')\nprint('BREACH')",
    "another clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, time.time())\nprint('BREACH')",
    "a program in the kernel": (
        "import ctypes, struct, platform\nlibc = ctypes.CDLL(None)\nnumber = 321 if platform.machine() == 'x86_64' else 280\n"
        "table = ctypes.create_string_buffer(struct.pack('IIII', 2, 4, 4, 1), 128)\n"
        "print('BREACH' if libc.syscall(number, 0, table, 128) >= 0 else '')"
    ),
    "the kernel's log": "import ctypes\nbuffer = ctypes.create_string_buffer(99)\nprint('BREACH' if ctypes.CDLL(None).klogctl(3, buffer, 99) >= 0 else '')",
    "the kernel's faults": (
        "import ctypes, platform\nprint('BREACH' if ctypes.CDLL(None).syscall(323 if platform.machine() == 'x86_64' else 282, 1) >= 0 else '')"
    ),
    "the kernel's setting": "open('/proc/sys/kernel/core_pattern', 'w').write('core')\nprint('BREACH')",
    "the caller's mounts": "import ctypes, os\nprint('BREACH' if ctypes.CDLL(None).setns(os.open(f'/proc/{pid}/ns/mnt', 0), 0) == 0 else '')",
    "the caller's processes": "import ctypes, os\nprint('BREACH' if ctypes.CDLL(None).setns(os.open(f'/proc/{pid}/ns/pid', 0), 0) == 0 else '')",
    "a namespace by clone3": (
        "import ctypes, os, struct\nargs = ctypes.create_string_buffer(struct.pack('11Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0))\n"
        "p = ctypes.CDLL(None).syscall(435, args, 88)\nif p == 0: os._exit(0)\nprint('BREACH' if p > 0 else '')"
    ),
    "a namespace by clone": (
        "import ctypes, os\np = ctypes.CDLL(None).syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000000 | 17, 0, 0, 0, 0)\n"
        "if p == 0: os._exit(0)\nprint('BREACH' if p > 0 else '')"
    ),
}
ATTACKS = {
    **{f"many {name}": f"{code}{_COUNT.format(most=17)}" for name, code in MANY.items()},
    **{
        f"leave {name}": f"import os, signal, time\nif os.fork() == 0:\n    {code.format(start=_START)}\ntime.sleep(0.2)"
        for name, code in STAYING.items()
    },
    **{
        f"a namespace of {name}": f"import ctypes\nprint('BREACH' if ctypes.CDLL(None).unshare({flag}) == 0 else '')"
        for name, flag in NAMESPACES.items()
    },
    **{f"get {name}": code for name, code in RIGHTS.items()},
}
MAY_LACK = (
    "get becoming root", "get becoming somebody", "get other groups", "get another clock", "get a program in the kernel",
    "get the kernel's log", "get the kernel's faults", "get the kernel's setting", "get the caller's mounts", "get more processes",
    "get the caller's processes", "a namespace of groups of control", "get another host name",
)  # fmt: skip
