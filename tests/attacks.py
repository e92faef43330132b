"""Programs that try to get out of a sandbox; each prints BREACH where it succeeds.

`{secret}` is a file of the caller's that holds a secret, `{tcp}`, `{tcp6}`, `{udp}` and `{unix}` are where something of
the caller's listens, `{free}` is a port that it tries to reach, `{interface}` a network it is on, `{pid}` is the caller,
`{out}` is a path outside that does not exist, `{variable}` is in the caller's environment.
"""

READS = {
    "passwd": "open('/etc/passwd').read()\nprint('BREACH')",
    "shadow": "open('/etc/shadow').read()\nprint('BREACH')",
    "file of the caller": "print(open('{secret}').read() and 'BREACH')",
    "file by os.open": "import os\nprint(os.read(os.open('{secret}', os.O_RDONLY), 9) and 'BREACH')",
    "file by pathlib": "from pathlib import Path\nprint(Path('{secret}').read_text() and 'BREACH')",
    "folder of the caller": "import os\nfrom os.path import dirname\nprint(os.listdir(dirname('{secret}')) and 'BREACH')",
    "walk from the root": (  # the interpreter's own files are there for it
        "import os, sys\nfor top, folders, files in os.walk('/root'):\n"
        "    folders[:] = [d for d in folders if os.path.join(top, d) != sys.base_prefix]\n"
        "    for f in files:\n        open(os.path.join(top, f), 'rb').read(1)\n"
        "        print('BREACH')\n        raise SystemExit\n"
    ),
    "symlink out": "import os\nos.symlink('{secret}', 'link')\nprint(open('link').read() and 'BREACH')",
    "hard link out": "import os\nos.link('{secret}', 'link')\nprint(open('link').read() and 'BREACH')",
    "dots out": "print(open('../' * 20 + '{secret}'[1:]).read() and 'BREACH')",
    "environment": "import os\nprint('BREACH' if 'SKYRL_SECRET' in os.environ else '')",
    "environment of the caller": "print('BREACH' if b'{variable}' in open('/proc/{pid}/environ', 'rb').read() else '')",
    "environment of the parent": (
        "import os\nprint('BREACH' if b'{variable}' in open(f'/proc/{{os.getppid()}}/environ', 'rb').read() else '')"
    ),
    "root of the caller": "print(open('/proc/{pid}/root{secret}').read() and 'BREACH')",
    "walk of proc": (
        "import os\nfor p in os.listdir('/proc'):\n    if p.isdigit():\n        try:\n"
        "            if b'{variable}' in open(f'/proc/{{p}}/environ', 'rb').read(): print('BREACH')\n"
        "        except OSError: pass\n"
    ),
    "memory of the caller": "open('/proc/{pid}/mem', 'rb').seek(0)\nprint('BREACH')",
    "handles left open": (
        "import os\nfor fd in range(3, 256):\n    try:\n        os.fstat(fd)\n"
        "        if b'secret' in os.pread(fd, 99, 0): print('BREACH')\n    except OSError: pass\n"
    ),
    "module from outside": "import sys\nsys.path.insert(0, '{packages}')\nimport typer\nprint('BREACH')",
}

NETWORK = {
    "tcp": "import socket\nsocket.create_connection(('127.0.0.1', {tcp}), 1)\nprint('BREACH')",
    "tcp v6": "import socket\nsocket.create_connection(('::1', {tcp6}), 1)\nprint('BREACH')",
    "udp": (
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', {udp}))\n"
        "s.settimeout(0.3)\nprint(s.recv(9) and 'BREACH')"
    ),
    "unix": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('{unix}')\nprint('BREACH')",
    "unix without a path": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0{abstract}')\nprint('BREACH')",
    "raw": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)\nprint('BREACH')",
    "name": (
        "import socket\nfor *kind, _, _, address in socket.getaddrinfo('localhost', {tcp}, type=socket.SOCK_STREAM):\n"
        "    s = socket.socket(*kind)\n    s.settimeout(1)\n    if s.connect_ex(address) == 0: print('BREACH')"
    ),
    "web": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{tcp}', timeout=1)\nprint('BREACH')",
    "listen": (
        "import socket\ns = socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "s.bind(('0.0.0.0', {free}))\ns.listen()\nprint('LISTENS', flush=True)\n"
        "s.settimeout(1)\ns.accept()\nprint('BREACH')"
    ),
    "host of the machine": "import socket\ns = socket.socket(40, socket.SOCK_STREAM)\nprint('BREACH')",
    "sockets by io_uring": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print('BREACH' if libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0 else ctypes.get_errno())"
    ),
    "keyring": (
        "import ctypes, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "number = 250 if platform.machine() == 'x86_64' else 219\n"
        "print('BREACH' if libc.syscall(number, 0, -3, 1) >= 0 else ctypes.get_errno())"
    ),
    "netlink": (
        "import socket\ns = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\ns.bind((0, 0))\n"
        "import struct\ns.send(struct.pack('IHHIIBxxx', 20, 18, 0x301, 1, 0, 0))\n"
        "s.settimeout(0.2)\nwhile True:\n    if b'{interface}\\0' in s.recv(65536):\n        print('BREACH')\n        break"
    ),
}

WRITES = {
    "file outside": "open('{out}', 'w').write('x')\nprint('BREACH')",
    "file in tmp": "open('/tmp/skyrl-breach', 'w').write('x')\nprint('DONE')",
    "system file": "open('/usr/skyrl-breach', 'w').write('x')\nprint('BREACH')",
    "files beside the box": (
        "done = 0\nfor top in ('/', '/dev/', '/dev/shm/', '/mnt/', '/run/', '/var/'):\n    for i in range(40):\n        try:\n"
        "            open(f'{{top}}skyrl-breach-{{i}}', 'w').write('x' * 1000000)\n            done += 1\n"
        "        except OSError: break\nprint('BREACH' if done > 2 else '')"
    ),
    "remove a file": "import os\nos.remove('{secret}')\nprint('BREACH')",
    "signal the caller": "import os, signal\nos.kill({pid}, signal.SIGTERM)\nprint('SENT')",
    "signal the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('SENT')",
    "signal everyone": "import os, signal\nos.kill(-1, signal.SIGKILL)\nprint('SENT')",
    "signal the group of the caller": "import os, signal\nos.killpg(os.getpgid({pid}), signal.SIGTERM)\nprint('SENT')",
    "ptrace": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print('BREACH' if libc.ptrace(16, {pid}, 0, 0) == 0 else ctypes.get_errno())"
    ),
    "read memory by a system call": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nbuffer = ctypes.create_string_buffer(8)\n"
        "class V(ctypes.Structure):\n    _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "here, there = V(ctypes.addressof(buffer), 8), V({address}, 8)\n"
        "n = libc.process_vm_readv({pid}, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)\n"
        "print('BREACH' if n == 8 else ctypes.get_errno())"
    ),
    "mount": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print('BREACH' if libc.mount(b'none', b'/tmp', b'tmpfs', 0, b'') == 0 else ctypes.get_errno())"
    ),
    "new namespaces": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print('BREACH' if libc.unshare(0x10000000) == 0 else ctypes.get_errno())"
    ),
    "enter the caller's namespaces": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nfd = os.open('/proc/{pid}/ns/mnt', os.O_RDONLY)\n"
        "print('BREACH' if libc.setns(fd, 0) == 0 else ctypes.get_errno())"
    ),
    "another root": "import os\nos.chroot('/usr')\nprint('BREACH')",
    "become root": "import os\nos.setuid(0)\nopen('/etc/shadow').read()\nprint('BREACH')",
    "a shell": "import subprocess\nprint('BREACH' if b'root' in subprocess.run(['cat', '/etc/passwd'], capture_output=True).stdout else '')",
    "set the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)\nprint('BREACH')",
    "turn limits off": (
        "import resource\nfor kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):\n"
        "    resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2)\nprint('BREACH')"
    ),
    "kernel log": "import ctypes\nbuffer = ctypes.create_string_buffer(99)\nprint('BREACH' if ctypes.CDLL(None).klogctl(3, buffer, 99) > 0 else '')",
    "load a program into the kernel": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "import platform, struct\nnumber = 321 if platform.machine() == 'x86_64' else 280\n"
        "table = ctypes.create_string_buffer(struct.pack('IIII', 2, 4, 4, 1), 128)\n"
        "print('BREACH' if libc.syscall(number, 0, table, 128) >= 0 else ctypes.get_errno())"
    ),
    "introspection": (
        "for c in ().__class__.__base__.__subclasses__():\n    if c.__name__ == '_wrap_close':\n"
        "        print(c.__init__.__globals__['popen']('cat {secret}').read() and 'BREACH')"
    ),
    "builtins": "print(__builtins__.__dict__['open']('{secret}').read() and 'BREACH')",
    "unpickling": "import pickle\nprint(pickle.loads(b\"cbuiltins\\nopen\\n(S'{secret}'\\ntR.\").read() and 'BREACH')",
    "frames": "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\nprint('BREACH' if 'nanoskyrl' in str(f.f_globals.keys()) else '')",
}

EXHAUSTION = {
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(600)\nprint('SLEPT')",
    "memory": "x = bytearray(1 << 34)\nprint('BREACH')",
    "memory bit by bit": "x = []\nwhile True: x.append('a' * 100000)",
    "memory in children": "import os\nfor _ in range(8): os.fork()\nx = []\nwhile True: x.append(bytearray(1 << 20))",
    "output": "while True: print('x' * 10000)",
    "errors": "import sys\nwhile True: print('x' * 10000, file=sys.stderr)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb that forgives": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nfor _ in range(100000): threading.Thread(target=time.sleep, args=(600,)).start()",
    "orphan": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)",
    "files": "i = 0\nwhile True:\n    i += 1\n    open(f'f{{i}}', 'w').write('x' * 1000000)",
    "one big file": "f = open('f', 'wb')\nwhile True: f.write(b'x' * 1000000)",
    "deep recursion": "def f(n): return f(n + 1)\nf(0)",
    "recursion without a limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
    "a power": "print(len(str(9 ** 9 ** 8)) and 'DONE')",
    "a regular expression": "import re\nre.match(r'(a|a)*$', 'a' * 60 + 'b')",
    "ignores the end": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass"
    ),
    "crash": "import ctypes\nctypes.string_at(0)",
    "closes its pipes": "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)",
}

ATTACKS = {**READS, **NETWORK, **WRITES, **EXHAUSTION}
HARMFUL = (
    "file in tmp", "system file", "files beside the box", "signal everyone", "mount", "set the clock", *EXHAUSTION,
)  # fmt: skip
"""Not to be run without a sandbox."""
SIGNALS = ("signal the caller", "signal the parent", "signal the group of the caller")
"""Harmless where the caller is a process made for it, which must not survive."""
CONTROL = tuple(attack for attack in ATTACKS if attack not in (*HARMFUL, *SIGNALS))
"""Harmless enough to run without a sandbox, where each must print BREACH: else it proves nothing."""
MAY_LACK = {
    "root": ("shadow", "walk from the root", "raw", "another root", "become root", "enter the caller's namespaces"),
    "a look at other processes": ("memory of the caller", "ptrace", "read memory by a system call", "root of the caller"),
    "IPv6": ("tcp v6",),
    "a network": ("netlink",),
    "what the kernel may be built without or refuse": (
        "host of the machine", "sockets by io_uring", "keyring", "new namespaces", "kernel log",
        "load a program into the kernel", "turn limits off",
    ),
}  # fmt: skip
"""What a machine may not give to anybody: there the attack cannot succeed, sandbox or not."""
