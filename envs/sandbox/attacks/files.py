"""Attacks on files of the caller's: what is in them, that they are there, and that they stay as they are."""

READ = {
    "passwd": "open('/etc/passwd').read()\nprint('BREACH')",
    "a file": "print(open(secret).read() and 'BREACH')",
    "by os.open": "import os\nprint(os.read(os.open(secret, os.O_RDONLY), 9) and 'BREACH')",
    "by pathlib": "from pathlib import Path\nprint(Path(secret).read_text() and 'BREACH')",
    "by mmap": "import mmap\nwith open(secret, 'rb') as f: print(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[:] and 'BREACH')",
    "by a handle without rights": "import os\nos.open(secret, os.O_PATH)\nprint('BREACH')",
    "by sqlite": (
        "import sqlite3\ntry: sqlite3.connect(secret).execute('select * from sqlite_master')\n"
        "except sqlite3.DatabaseError as error: print('BREACH' if 'not a database' in str(error) else '')"
    ),
    "by a shell": "import subprocess\nprint('BREACH' if b'secret' in subprocess.run(['cat', secret], capture_output=True).stdout else '')",
    "by introspection": (
        "for c in ().__class__.__base__.__subclasses__():\n    if c.__name__ == '_wrap_close':\n"
        "        print(c.__init__.__globals__['popen']('cat ' + secret).read() and 'BREACH')"
    ),
    "by builtins": "print(__builtins__.__dict__['open'](secret).read() and 'BREACH')",
    "by unpickling": "import pickle\nprint(pickle.loads(b\"cbuiltins\\nopen\\n(S'\" + secret.encode() + b\"'\\ntR.\").read() and 'BREACH')",
    "by an import": (
        "import importlib.machinery as m\nprint('BREACH' if m.SourceFileLoader('x', secret).get_data(secret) else '')"
    ),
    "by a symbolic link": "import os\nos.symlink(secret, 'link')\nprint(open('link').read() and 'BREACH')",
    "by a hard link": "import os\nos.link(secret, folder + '/link')\nprint(open(folder + '/link').read() and 'BREACH')",
    "by dots": "print(open('../' * 20 + secret[1:]).read() and 'BREACH')",
    "by another root": "print(open(f'/proc/{pid}/root{secret}').read() and 'BREACH')",
    "by its own root": "print(open('/proc/self/root' + secret).read() and 'BREACH')",
    "by the first process's root": "print(open('/proc/1/root' + secret).read() and 'BREACH')",
    "by the caller's folder": "import os\nprint(os.listdir(f'/proc/{pid}/cwd') and 'BREACH')",
    "by handles left open": (
        "import os\nfor fd in range(3, 256):\n    try:\n"
        "        if b'secret' in os.pread(fd, 99, 0): print('BREACH')\n    except OSError: pass\n"
    ),
    "by a folder's handle": (
        "import os\nfor fd in range(3, 256):\n    try: print('BREACH' if 'secret.txt' in os.listdir(fd) else '')\n"
        "    except OSError: pass\n"
    ),
}
SEEN = {
    "that it is there": "import os\nprint('BREACH' if os.path.exists(secret) else '')",
    "its stat": "import os\nos.stat(secret)\nprint('BREACH')",
    "its stat by statx": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nbuffer = ctypes.create_string_buffer(512)\n"
        "print('BREACH' if libc.statx(-100, secret.encode(), 0, 0x7ff, buffer) == 0 else '')"
    ),
    "whether it may be read": "import os\nprint('BREACH' if os.access(secret, os.F_OK) else '')",
    "its attributes": "import os\nos.listxattr(secret)\nprint('BREACH')",
    "its file system": "import os\nos.statvfs(secret)\nprint('BREACH')",
    "its folder": "import os\nprint(os.listdir(folder) and 'BREACH')",
    "by a pattern": "import glob\nprint('BREACH' if glob.glob(folder + '/*') else '')",
    "by going there": "import os\nos.chdir(folder)\nprint('BREACH')",
    "by a system call": ("import ctypes\nprint('BREACH' if ctypes.CDLL(None).access(secret.encode(), 0) == 0 else '')"),
    "that others open it": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nprint('BREACH' if libc.inotify_add_watch(libc.inotify_init1(0), b'/usr', 0xfff) >= 0 else '')"
    ),
    "that others open it, by fanotify": (
        "import ctypes\nprint('BREACH' if ctypes.CDLL(None).fanotify_init(0x200, 0) >= 0 else '')"
    ),
    "that others open it, by dnotify": (
        "import fcntl, os, signal\nsignal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "fcntl.fcntl(os.open('/usr', os.O_RDONLY), 1026, 1)\nprint('BREACH')"
    ),
}
CHANGED = {
    "a new file": "open(out, 'w').write('x')\nprint('BREACH')",
    "a new folder": "import os\nos.mkdir(out)\nprint('BREACH')",
    "a new link": "import os\nos.symlink('x', out)\nprint('BREACH')",
    "a new pipe": "import os\nos.mkfifo(out)\nprint('BREACH')",
    "more in a file": "open(secret, 'a').write('x')\nprint('BREACH')",
    "less in a file": "import os\nos.truncate(secret, 0)\nprint('BREACH')",
    "no file": "import os\nos.remove(secret)\nprint('BREACH')",
    "another name": "import os\nos.rename(secret, out)\nprint('BREACH')",
    "another file in its place": "import os\nopen('mine', 'w').write('x')\nos.replace('mine', secret)\nprint('BREACH')",
    "no folder": "import shutil\nshutil.rmtree(folder)\nprint('BREACH')",
    "the library": "import os\nopen(os.__file__, 'r+b').close()\nprint('BREACH')",
    "the interpreter": "import sys\nopen(sys.base_prefix + '/skyrl-breach', 'w').write('x')\nprint('BREACH')",
    "beside the box": (
        "done = 0\nfor top in ('/', '/dev/', '/dev/shm/', '/mnt/', '/run/', '/var/tmp/'):\n    for i in range(9):\n        try:\n"
        "            open(f'{top}skyrl-breach-{i}', 'w').write('x' * 300000)\n            done += 1\n"
        "        except OSError: break\nprint('BREACH' if done > 3 else '')"
    ),
    "all files together": (
        "done = 0\nfor i in range(64):\n    with open(f'f{i}', 'wb') as f: done += f.write(bytes(1 << 20))\n"
        "print('BREACH')"
    ),
    "one big file": "f = open('f', 'wb', 0)\ndone = 0\nwhile done < 1 << 26: done += f.write(bytes(1 << 20))\nprint('BREACH')",
    "one big file by a hole": "import os\nos.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 1 << 26)\nprint('BREACH')",
    "a mount": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nprint('BREACH' if libc.mount(b'none', b'/mnt', b'tmpfs', 0, b'') == 0 else '')"
    ),
    "a mount made writable": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mount(b'none', b'/mnt', b'tmpfs', 1, b'')\n"
        "print('BREACH' if libc.mount(b'none', b'/mnt', b'', 32, b'') == 0 else '')"
    ),
    "another root folder": "import os\nos.chroot('/usr')\nprint('BREACH')",
}
ATTACKS = {
    **{f"read {name}": code for name, code in READ.items()},
    **{f"see {name}": code for name, code in SEEN.items()},
    **{f"leave {name}": code for name, code in CHANGED.items()},
}
MAY_LACK = (
    "see that others open it, by fanotify",
    "leave the interpreter",
    "leave the library",
    "leave beside the box",
)
