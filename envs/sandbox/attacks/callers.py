"""Attacks on the process that called, on its parent's and everybody's processes, and on what they hold."""

_NUMBERS = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nX = os.uname().machine == 'x86_64'\n"
SIGNALS = {
    "kill": "import os, signal\nos.kill(pid, signal.SIGUSR1)\nprint('BREACH')",
    "kill of the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGUSR1)",
    "kill of the group": "import os, signal\nos.killpg(os.getpgid(pid), signal.SIGUSR1)\nprint('BREACH')",
    "kill of everyone": "import os, signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\nos.kill(-1, signal.SIGUSR1)",
    "kill of its own group": "import os, signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\nos.kill(0, signal.SIGUSR1)",
    "tgkill": f"{_NUMBERS}print('BREACH' if libc.syscall(234 if X else 131, pid, pid, 10) == 0 else '')",
    "tkill": f"{_NUMBERS}print('BREACH' if libc.syscall(200 if X else 130, pid, 10) == 0 else '')",
    "sigqueue": f"{_NUMBERS}print('BREACH' if libc.sigqueue(pid, 10, ctypes.c_void_p(1)) == 0 else '')",
    "pidfd": "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGUSR1)\nprint('BREACH')",
    "owner of a handle": (
        "import fcntl, os, struct\nr, w = os.pipe()\nfcntl.fcntl(r, 8, pid)\nfcntl.fcntl(r, 10, 10)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')\nprint('BREACH')"
    ),
    "the new owner of a handle": (
        "import fcntl, os, struct\nr, w = os.pipe()\nfcntl.fcntl(r, 15, struct.pack('ii', 1, pid))\nfcntl.fcntl(r, 10, 10)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')\nprint('BREACH')"
    ),
    "a folder in proc": (
        "import os, signal\nsignal.pidfd_send_signal(os.open(f'/proc/{pid}', os.O_DIRECTORY), signal.SIGUSR1)\nprint('BREACH')"
    ),
    "a queued call": (
        f"{_NUMBERS}import struct\ninfo = struct.pack('iiiiiiq', 10, 0, -1, 0, os.getpid(), os.getuid(), 0) + bytes(96)\n"
        "print('BREACH' if libc.syscall(129 if X else 138, pid, 10, info) == 0 else '')"
    ),
    "a queued call to a thread": (
        f"{_NUMBERS}import struct\ninfo = struct.pack('iiiiiiq', 10, 0, -1, 0, os.getpid(), os.getuid(), 0) + bytes(96)\n"
        "print('BREACH' if libc.syscall(297 if X else 240, pid, pid, 10, info) == 0 else '')"
    ),
    "a shell": "import subprocess\nprint('BREACH' if subprocess.run(['sh', '-c', f'kill -USR1 {pid}']).returncode == 0 else '')",
    "message queue's notice": f"{_NUMBERS}print('BREACH' if libc.syscall(240 if X else 180, b'breach', 0o102, 0o600, 0) >= 0 else '')",
}
HELD = {
    "limits": "import resource\nresource.prlimit(pid, resource.RLIMIT_MSGQUEUE, (900, 900))\nprint('BREACH')",
    "limits of the parent": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_MSGQUEUE, (800, 800))",
    "limits read": "import resource\nprint(resource.prlimit(pid, resource.RLIMIT_CPU) and 'BREACH')",
    "processor": "import os\nos.sched_setaffinity(pid, [0])\nprint('BREACH')",
    "processor of the parent": "import os\nos.sched_setaffinity(os.getppid(), [max(os.sched_getaffinity(0))])",
    "niceness": "import os\nos.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + 1)\nprint('BREACH')",
    "niceness of the parent": "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), os.getpriority(os.PRIO_PROCESS, 0) + 1)",
    "niceness of the user": "import os\nos.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1)",
    "niceness of the group": "import os\nos.setpriority(os.PRIO_PGRP, os.getpgid(pid), os.getpriority(os.PRIO_PROCESS, 0) + 1)\nprint('BREACH')",
    "niceness read": "import os\nos.getpriority(os.PRIO_PROCESS, pid)\nprint('BREACH')",
    "scheduler": "import os\nos.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))\nprint('BREACH')",
    "input and output": f"{_NUMBERS}print('BREACH' if libc.syscall(251 if X else 30, 1, pid, 3 << 13) == 0 else '')",
    "group read": "import os\nos.getpgid(pid)\nprint('BREACH')",
    "session read": "import os\nos.getsid(pid)\nprint('BREACH')",
    "kill's score": "open(f'/proc/{pid}/oom_score_adj', 'w').write('900')\nprint('BREACH')",
    "kill's score of the parent": "import os\nopen(f'/proc/{os.getppid()}/oom_score_adj', 'w').write('1000')",
    "dumps": "open(f'/proc/{pid}/coredump_filter', 'w').write('0')\nprint('BREACH')",
    "limits by a system call": (
        f"{_NUMBERS}new = (ctypes.c_uint64 * 2)(700, 700)\n"
        "print('BREACH' if libc.syscall(302 if X else 261, pid, 12, new, None) == 0 else '')"
    ),
    "limits by a program": (
        "import subprocess\nprint('BREACH' if subprocess.run(['prlimit', '--pid', str(pid), '--msgqueue=600']).returncode == 0 else '')"
    ),
    "its group by joining it, of its own group": "import os\nos.setpgid(0, os.getpgid(pid))\nprint('BREACH')",
    "scheduler by attributes": (
        f"{_NUMBERS}import struct\nattributes = struct.pack('IIQiIQQQ', 48, 3, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, 0, 0, 0)\n"
        "print('BREACH' if libc.syscall(314 if X else 274, pid, attributes, 0) == 0 else '')"
    ),
    "input and output of the group": f"{_NUMBERS}print('BREACH' if libc.syscall(251 if X else 30, 2, os.getpgid(pid), 3 << 13) == 0 else '')",
    "pages referenced": "open(f'/proc/{pid}/clear_refs', 'w').write('1')\nprint('BREACH')",
    "places of pages": f"{_NUMBERS}print('BREACH' if libc.syscall(256 if X else 238, pid, 64, b'\\1' + bytes(7), b'\\1' + bytes(7)) >= 0 else '')",
    "events": f"{_NUMBERS}a = ctypes.create_string_buffer(bytes(4) + (128).to_bytes(4, 'little') + bytes(120))\n"
    "a[0] = 1\nprint('BREACH' if libc.syscall(298 if X else 241, a, pid, -1, -1, 0) >= 0 else '')",
}  # fmt: skip
MEMORY = {
    "its environment": "print('BREACH' if variable.encode() in open(f'/proc/{pid}/environ', 'rb').read() else '')",
    "the parent's environment": "import os\nprint('BREACH' if variable.encode() in open(f'/proc/{os.getppid()}/environ', 'rb').read() else '')",
    "its own environment": "import os\nprint('BREACH' if 'SKYRL_SECRET' in os.environ else '')",
    "everyone's environment": (
        "import os\nfor p in os.listdir('/proc'):\n    if p.isdigit():\n        try:\n"
        "            if variable.encode() in open(f'/proc/{p}/environ', 'rb').read(): print('BREACH')\n"
        "        except OSError: pass\n"
    ),
    "everyone": (
        "import os\nfor p in os.listdir('/proc'):\n    if p.isdigit():\n"
        "        if b'sandbox.trial\\0' in open(f'/proc/{p}/cmdline', 'rb').read(): print('BREACH')\n"
    ),
    "its clock": f"{_NUMBERS}print('BREACH' if libc.clock_getcpuclockid(pid, ctypes.byref(ctypes.c_int())) == 0 else '')",
    "its scheduler": "import os\nos.sched_getscheduler(pid)\nprint('BREACH')",
    "its processors": "import os\nprint(os.sched_getaffinity(pid) and 'BREACH')",
    "its program": "import os\nprint(os.readlink(f'/proc/{pid}/exe') and 'BREACH')",
    "its threads": "import os\nprint(os.listdir(f'/proc/{pid}/task') and 'BREACH')",
    "its mounts": "print(open(f'/proc/{pid}/mountinfo').read() and 'BREACH')",
    "its namespaces": "import os\nprint(os.readlink(f'/proc/{pid}/ns/pid') and 'BREACH')",
    "the parent's words": "import os\nprint('BREACH' if b'sandbox.trial' in open(f'/proc/{os.getppid()}/cmdline', 'rb').read() else '')",
    "what a shell sees": "import subprocess\nprint('BREACH' if b'sandbox.trial' in subprocess.run(['ps', 'axww'], capture_output=True).stdout else '')",
    "its words": "print(open(f'/proc/{pid}/cmdline').read() and 'BREACH')",
    "its state": "print(open(f'/proc/{pid}/status').read() and 'BREACH')",
    "its maps": "print(open(f'/proc/{pid}/maps').read() and 'BREACH')",
    "its memory": "open(f'/proc/{pid}/mem', 'rb').seek(0)\nprint('BREACH')",
    "its memory, to write": "open(f'/proc/{pid}/mem', 'r+b').seek(0)\nprint('BREACH')",
    "its handles": "import os\nprint(os.listdir(f'/proc/{pid}/fd') and 'BREACH')",
    "its memory by a call": (
        f"{_NUMBERS}buffer = ctypes.create_string_buffer(8)\n"
        "class V(ctypes.Structure):\n    _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "here, there = V(ctypes.addressof(buffer), 8), V(address, 8)\n"
        "print('BREACH' if libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 8 else '')"
    ),
    "its memory by a call, to write": (
        f"{_NUMBERS}buffer = ctypes.create_string_buffer(b'breached')\n"
        "class V(ctypes.Structure):\n    _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "here, there = V(ctypes.addressof(buffer), 8), V(address, 8)\n"
        "print('BREACH' if libc.process_vm_writev(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 8 else '')"
    ),
    "its steps": f"{_NUMBERS}print('BREACH' if libc.ptrace(0x4206, pid, 0, 0) == 0 else '')",
    "its handles by a call": f"{_NUMBERS}print('BREACH' if libc.syscall(438, libc.syscall(434, pid, 0), 0, 0) >= 0 else '')",
    "what it shares with others": f"{_NUMBERS}print('BREACH' if libc.syscall(312 if X else 272, pid, os.getpid(), 0, 0, 0) >= 0 else '')",
    "its shared memory": (
        f"{_NUMBERS}libc.shmat.restype = ctypes.c_void_p\nat = libc.shmat(shm, None, 0)\n"
        "print('BREACH' if at and at != 2**64 - 1 and ctypes.string_at(at, 6) == b'secret' else '')"
    ),
    "its locks": f"{_NUMBERS}print('BREACH' if libc.syscall(274 if X else 100, pid, ctypes.byref(ctypes.c_void_p()), ctypes.byref(ctypes.c_size_t())) == 0 else '')",
    "keys": f"{_NUMBERS}print('BREACH' if libc.syscall(250 if X else 219, 0, -3, 1) >= 0 else '')",
    "a new key": f"{_NUMBERS}print('BREACH' if libc.syscall(248 if X else 217, b'user', b'breach', b'x', 1, -1) >= 0 else '')",
    "frames": "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\nprint('BREACH' if 'SCENE' in f.f_globals else '')",
    "a module from outside": "import sys\nsys.path.insert(0, packages)\nimport typer\nprint('BREACH')",
    "the kernel's words": "print('BREACH' if open('/proc/cmdline').read() and __import__('os').path.exists(f'/proc/{pid}/cmdline') else '')",
}
ATTACKS = {
    **{f"signal by {name}": code for name, code in SIGNALS.items()},
    **{f"change {name}": code for name, code in HELD.items()},
    **{f"read {name}": code for name, code in MEMORY.items()},
}
MAY_LACK = (
    "change kill's score", "change kill's score of the parent", "change events", "read its steps", "read its handles by a call",
    "read keys", "read a new key", "signal by pidfd", "signal by message queue's notice", "change niceness of the user",
    "read its memory by a call", "read its memory by a call, to write", "read its memory", "read its memory, to write", "read frames",
    "read what it shares with others", "signal by kill of everyone", "read its locks", "change processor",
    "change processor of the parent", "change places of pages", "read what a shell sees",
)  # fmt: skip
