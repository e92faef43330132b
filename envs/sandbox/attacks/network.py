"""Attacks on the network: every way to a socket, and what listens on this machine."""

WAYS = {
    "tcp": "import socket\nsocket.create_connection(('127.0.0.1', tcp), 1)\nprint('BREACH')",
    "tcp v6": "import socket\nsocket.create_connection(('::1', tcp6), 1)\nprint('BREACH')",
    "tcp in many ways": "import socket\ns = socket.socket(2, 1, 262)\ns.settimeout(1)\ns.connect(('127.0.0.1', tcp))\nprint('BREACH')",
    "tcp in many ways, v6": "import socket\ns = socket.socket(10, 1, 262)\ns.settimeout(1)\ns.connect(('::1', tcp6))\nprint('BREACH')",
    "tcp that opens fast": (
        "import socket\ns = socket.socket()\ns.sendto(b'x', 0x20000000, ('127.0.0.1', tcp))\nprint('BREACH')"
    ),
    "tcp that does not wait": (
        "import select, socket\ns = socket.socket(2, 1 | 2048)\ns.connect_ex(('127.0.0.1', tcp))\nselect.select([], [s], [], 1)\n"
        "print('BREACH' if s.getsockopt(1, 4) == 0 else '')"
    ),
    "udp": (
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', udp))\n"
        "s.settimeout(1)\nprint(s.recv(9) and 'BREACH')"
    ),
    "udp in parts": (
        "import socket\ns = socket.socket(2, 2)\ns.connect(('127.0.0.1', udp))\ns.sendmsg([b'x', b'y'])\n"
        "s.settimeout(1)\nprint(s.recv(9) and 'BREACH')"
    ),
    "unix": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(unix)\nprint('BREACH')",
    "unix without a path": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0' + abstract)\nprint('BREACH')",
    "a pair that goes elsewhere": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nlistener = socket.socket(1, 2)\n"
        "listener.bind('\\0mine')\na.sendto(b'x', '\\0mine')\nprint(listener.recv(9) and 'BREACH')"
    ),
    "a pair with a name": "import socket\na, b = socket.socketpair()\na.bind('named')\nprint('BREACH')",
    "listening": "import socket\ns = socket.socket()\ns.bind(('0.0.0.0', 0))\ns.listen()\nprint('BREACH')",
    "listening, v6": "import socket\ns = socket.socket(10)\ns.bind(('::', 0))\ns.listen()\nprint('BREACH')",
    "a server": "import http.server\nhttp.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\nprint('BREACH')",
    "a name": (
        "import socket\nfor *kind, _, _, address in socket.getaddrinfo('localhost', tcp, type=socket.SOCK_STREAM):\n"
        "    s = socket.socket(*kind)\n    s.settimeout(1)\n    if s.connect_ex(address) == 0: print('BREACH')"
    ),
    "the web": "import urllib.request\nurllib.request.urlopen(f'http://127.0.0.1:{tcp}', timeout=1)\nprint('BREACH')",
    "asyncio": (
        "import asyncio\nasync def f(): await asyncio.wait_for(asyncio.open_connection('127.0.0.1', tcp), 1)\n"
        "asyncio.run(f())\nprint('BREACH')"
    ),
    "a shell": (
        "import subprocess\nprint('BREACH' if subprocess.run(['bash', '-c', f'echo > /dev/tcp/127.0.0.1/{tcp}']).returncode == 0 else '')"
    ),
    "a child": (
        "import os, socket\nif os.fork() == 0:\n    socket.create_connection(('127.0.0.1', tcp), 1)\n    print('BREACH', flush=True)\n"
        "    os._exit(0)\nos.wait()"
    ),
    "io_uring": (
        "import ctypes\nprint('BREACH' if ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(256)) >= 0 else '')"
    ),
    "a handle that somebody left": (
        "import os, stat\nfor fd in range(3, 256):\n    try: print('BREACH' if stat.S_ISSOCK(os.fstat(fd).st_mode) else '')\n"
        "    except OSError: pass"
    ),
    "tcp by C": (
        "import ctypes, struct\nlibc = ctypes.CDLL(None)\ns = libc.socket(2, 1, 0)\n"
        "address = struct.pack('<H', 2) + struct.pack('>H', tcp) + bytes([127, 0, 0, 1]) + bytes(8)\n"
        "print('BREACH' if libc.connect(s, address, 16) == 0 else '')"
    ),
    "tcp by a system call": (
        "import ctypes, os\nprint('BREACH' if ctypes.CDLL(None).syscall(41 if os.uname().machine == 'x86_64' else 198, 2, 1, 0) >= 0 else '')"
    ),
    "tcp by the calls of x32": "import ctypes\nprint('BREACH' if ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0) >= 0 else '')",
    "tcp by 32-bit calls": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, flags=0x22, prot=7)\n"
        "m.write(bytes.fromhex('53b867010000bb02000000b90100000031d2cd805bc3'))\n"
        "print('BREACH' if ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))() >= 0 else '')"
    ),
    "udp by a shell": (
        "import subprocess\nprint('BREACH' if subprocess.run(['bash', '-c', f'echo x > /dev/udp/127.0.0.1/{udp}']).returncode == 0 else '')"
    ),
    "another language": (
        "import subprocess\ncode = f\"use IO::Socket::INET; exit(IO::Socket::INET->new('127.0.0.1:{tcp}') ? 0 : 1)\"\n"
        "print('BREACH' if subprocess.run(['perl', '-e', code]).returncode == 0 else '')"
    ),
    "a listener of multiprocessing": "from multiprocessing.connection import Listener\nListener(('127.0.0.1', 0))\nprint('BREACH')",
    "a listener of multiprocessing, in the files": "from multiprocessing.connection import Listener\nListener(family='AF_UNIX')\nprint('BREACH')",
    "a server of asyncio": (
        "import asyncio\nasync def f(): return (await asyncio.start_server(print, '127.0.0.1', 0)).sockets\nprint(asyncio.run(f()) and 'BREACH')"
    ),
    "a log": (
        "import logging, logging.handlers\nlogging.raiseExceptions = False\n"
        "h = logging.handlers.SocketHandler('127.0.0.1', tcp)\nh.createSocket()\nprint('BREACH' if h.sock else '')"
    ),
    "a socket that is handed over": (
        "import os, socket\na, b = socket.socketpair()\nif os.fork() == 0:\n    s = socket.socket()\n    s.connect(('127.0.0.1', tcp))\n"
        "    socket.send_fds(a, [b'x'], [s.fileno()])\n    os._exit(0)\na.close()\nprint(socket.recv_fds(b, 1, 1)[1] and 'BREACH')"
    ),
    "loopback, brought up": (
        "import fcntl, socket, struct\nfcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH14x', b'lo', 0x49))\nprint('BREACH')"
    ),
    "the interfaces": "import socket\nprint(socket.if_nameindex() and 'BREACH')",
}
SOCKETS = {
    "raw": "2, 3, 1", "raw v6": "10, 3, 58", "packets": "17, 3, 3", "icmp": "2, 2, 1", "udp lite": "2, 2, 136",
    "sctp": "2, 1, 132", "dccp": "2, 6, 33", "netlink": "16, 3, 0", "netlink of devices": "16, 2, 15",
    "netlink of sockets": "16, 3, 4", "netlink of audits": "16, 3, 9", "netlink of filters": "16, 3, 12", "the host of the machine": "40, 1, 0",
    "ciphers": "38, 5, 0", "keys": "15, 3, 2", "bluetooth": "31, 3, 1", "tipc": "30, 1, 0", "cars": "29, 3, 1",
    "express data": "44, 3, 0", "kernel connections": "41, 2, 0", "shared memory of mainframes": "43, 1, 0", "unix packets": "1, 5, 0",
    "unix datagrams": "1, 2, 0",
}  # fmt: skip
ATTACKS = {
    **{f"reach {name}": code for name, code in WAYS.items()},
    **{
        f"a socket for {name}": f"import socket\nsocket.socket({args})\nprint('BREACH')"
        for name, args in SOCKETS.items()
    },
}
MAY_LACK = (
    "reach tcp v6", "reach tcp in many ways", "reach tcp in many ways, v6", "reach tcp that opens fast", "reach listening, v6",
    "reach io_uring", "reach tcp by the calls of x32", "reach tcp by 32-bit calls",
    *(name for name in ATTACKS if name.startswith("a socket for") and not name.endswith(("raw", "netlink", "packets", "grams"))),
)  # fmt: skip
