"""Attacks on modes, owners, times and attributes of files, and set-user-ID bits on any file."""

OF_OTHERS = {
    "mode by chmod": "import os\nos.chmod(secret, 0o4777)\nprint('BREACH')",
    "mode of the folder": "import os\nos.chmod(folder, 0o777)\nprint('BREACH')",
    "mode by fchmod": "import os\nos.fchmod(os.open(secret, os.O_RDONLY), 0o4777)\nprint('BREACH')",
    "mode by fchmodat2": (
        "import ctypes\nprint('BREACH' if ctypes.CDLL(None).syscall(452, -100, secret.encode(), 0o777, 0) == 0 else '')"
    ),
    "mode of the library": "import os, sys\nos.chmod(sys.base_prefix, os.stat(sys.base_prefix).st_mode)\nprint('BREACH')",
    "times by utime": "import os\nos.utime(secret, (1, 1))\nprint('BREACH')",
    "times by touch": "import pathlib\npathlib.Path(secret).touch(exist_ok=True)\nprint('BREACH')",
    "times of the library": "import os\nos.utime(os.__file__, ns=(os.stat(os.__file__).st_atime_ns,) * 2)\nprint('BREACH')",
    "owner": "import os\nos.chown(secret, os.getuid(), os.getgid())\nprint('BREACH')",
    "attribute": "import os\nos.setxattr(secret, 'user.breach', b'x')\nprint('BREACH')",
    "flags": (
        "import fcntl, os, struct\nfd = os.open(secret, os.O_RDONLY)\nflags = fcntl.ioctl(fd, 0x80086601, bytes(8))\n"
        "fcntl.ioctl(fd, 0x40086602, struct.pack('l', struct.unpack('l', flags)[0] | 0x40))\nprint('BREACH')"
    ),
    "mode by handles left open": (
        "import os\nfor fd in range(3, 256):\n    try:\n        os.fchmod(fd, os.fstat(fd).st_mode & 0o700 | 0o4)\n        print('BREACH')\n"
        "    except OSError: pass"
    ),
    "times by handles left open": (
        "import os\nfor fd in range(3, 256):\n    try:\n        os.utime(fd, (1, 1))\n        print('BREACH')\n    except OSError: pass"
    ),
    "mode by another root": "import os\nos.chmod(f'/proc/{pid}/root{secret}', 0o777)\nprint('BREACH')",
    "mode by a handle's name": "import os\nos.chmod(f'/proc/self/fd/{os.open(secret, os.O_PATH)}', 0o777)\nprint('BREACH')",
    "times by a system call": (
        "import ctypes, os\nprint('BREACH' if ctypes.CDLL(None).syscall(280 if os.uname().machine == 'x86_64' else 88, -100, secret.encode(), None, 0) == 0"
        " else '')"
    ),
    "times by a shell": "import subprocess\nprint('BREACH' if subprocess.run(['touch', '-d', '2001-01-01', secret]).returncode == 0 else '')",
    "list of who may": (
        "import os, struct\nos.setxattr(secret, 'system.posix_acl_access', struct.pack('<I', 2) + b''.join(struct.pack('<HHI', tag, 6, 2**32 - 1)"
        " for tag in (1, 4, 32)))\nprint('BREACH')"
    ),
    "owner by a system call": (
        "import ctypes, os\nprint('BREACH' if ctypes.CDLL(None).fchownat(-100, secret.encode(), os.getuid(), os.getgid(), 0x100) == 0 else '')"
    ),
    "mode by a copy's": "import shutil\nopen('mine', 'w').close()\nshutil.copymode('mine', secret)\nprint('BREACH')",
}
_CHECK = "import os\nprint('BREACH' if os.stat('f').st_mode & 0o6000 else '')"
SET_ID = {
    "chmod": "import os\nopen('f', 'w').close()\nos.chmod('f', 0o4755)\n",
    "chmod of the group's": "import os\nopen('f', 'w').close()\nos.chmod('f', 0o2755)\n",
    "fchmod": "import os\nos.fchmod(os.open('f', os.O_CREAT | os.O_RDWR), 0o4755)\n",
    "a new file": "import os\nos.umask(0)\nos.open('f', os.O_CREAT | os.O_RDWR, 0o4755)\n",
    "a new file of the folder's": "import os\nos.umask(0)\nos.open('f', os.O_CREAT | os.O_RDWR, 0o6755, dir_fd=os.open('.', os.O_RDONLY))\n",
    "creat": "import ctypes, os\nos.umask(0)\nctypes.CDLL(None).creat(b'f', 0o4755)\n",
    "mknod": "import os, stat\nos.umask(0)\nos.mknod('f', stat.S_IFREG | 0o4755)\n",
    "openat2": (
        "import ctypes, os, struct\nos.umask(0)\nhow = ctypes.create_string_buffer(struct.pack('QQQ', 0o102, 0o4755, 0))\n"
        "ctypes.CDLL(None).syscall(437, -100, b'f', how, 24)\n"
    ),
    "fchmodat2": "import ctypes\nopen('f', 'w').close()\nctypes.CDLL(None).syscall(452, -100, b'f', 0o4755, 0)\n",
    "a shell": "import subprocess\nopen('f', 'w').close()\nsubprocess.run(['chmod', 'u+s', 'f'])\n",
    "install": "import subprocess\nsubprocess.run(['install', '-m', '4755', '/bin/true', 'f'])\n",
    "a copy": "import subprocess\nsubprocess.run(['cp', '--preserve=mode', '/usr/bin/passwd', 'f'])\n",
    "perl": "import subprocess\nopen('f', 'w').close()\nsubprocess.run(['perl', '-e', 'chmod 04755, \"f\"'])\n",
    "a child": "import os\nopen('f', 'w').close()\nif os.fork() == 0: os.chmod('f', 0o6755)\nos.wait()\n",
    "a handle of the folder": "import os\nopen('f', 'w').close()\nos.chmod('f', 0o4755, dir_fd=os.open('.', os.O_RDONLY))\n",
    "a file without a name": (
        "import os\nos.umask(0)\nfd = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o4755)\nos.link(f'/proc/self/fd/{fd}', 'f', src_dir_fd=fd)\n"
    ),
    "32-bit calls": (
        "import ctypes, mmap\nopen('f', 'w').close()\nm = mmap.mmap(-1, 4096, flags=0x62, prot=7)\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "m.write(bytes.fromhex('53b80f000000bb') + (at + 64 & 2**32 - 1).to_bytes(4, 'little') + bytes.fromhex('b9ed090000cd805bc3'))\n"
        "m[64:66] = b'f\\0'\nctypes.CFUNCTYPE(ctypes.c_int)(at)()\n"
    ),
    "the calls of x32": "import ctypes\nopen('f', 'w').close()\nctypes.CDLL(None).syscall(0x40000000 + 90, b'f', 0o4755)\n",
    "an archive": (
        "import io, tarfile\ninfo = tarfile.TarInfo('f')\ninfo.mode = 0o4755\nwhole = io.BytesIO()\n"
        "with tarfile.open(fileobj=whole, mode='w') as tar: tar.addfile(info)\nwhole.seek(0)\n"
        "try: tarfile.open(fileobj=whole).extractall(filter='fully_trusted')\nexcept OSError: pass\n"
    ),
}
CAPABILITIES = {
    "setxattr": (
        "import os, struct\nopen('f', 'w').close()\nos.setxattr('f', 'security.capability', struct.pack('<5I', 0x02000000, 1 << 12, 0, 0, 0))\n"
        "print('BREACH')"
    ),
    "a handle": (
        "import os, struct\nos.setxattr(os.open('f', os.O_CREAT | os.O_RDWR), 'security.capability', struct.pack('<5I', 0x02000001, 1 << 21, 0, 0, 0))\n"
        "print('BREACH')"
    ),
}
ATTACKS = {
    **{f"change {name}": code for name, code in OF_OTHERS.items()},
    **{f"set-user-ID by {name}": code + _CHECK for name, code in SET_ID.items()},
    **{f"capability by {name}": code for name, code in CAPABILITIES.items()},
}
MAY_LACK = (
    "change flags", "change mode by fchmodat2", "set-user-ID by fchmodat2", "set-user-ID by openat2",
    "change mode of the library", "change times of the library", "set-user-ID by 32-bit calls",
    "set-user-ID by the calls of x32",
)  # fmt: skip
