"""Attacks on the limits of time and output."""

TIME = {
    "a loop": "while True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "deep sleep": "import signal\nsignal.sigwait([])\nimport time\ntime.sleep(600)",
    "a power": "print(len(str(7 ** 7 ** 9)))",
    "a regular expression": "import re\nre.match(r'(a|a)*$', 'a' * 60 + 'b')",
    "ignored signals": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass"
    ),
    "closed pipes": "import os, time\nos.close(0)\nos.close(1)\nos.close(2)\ntime.sleep(600)",
    "a child": "import os, time\nif os.fork() == 0: time.sleep(600)\nos.wait()",
    "a fifo": "import os\nos.mkfifo('p')\nopen('p').read()",
    "a fifo, to write": "import os\nos.mkfifo('p')\nopen('p', 'w').write('x')",
    "a lock": "import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()",
    "threads": "import threading\ndef f():\n    while True: pass\nfor _ in range(4): threading.Thread(target=f).start()",
    "a stop": "import os, signal, time\nif os.fork() == 0:\n    os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)",
    "waiting at the end": "import atexit, time\natexit.register(time.sleep, 600)",
    "an error that is caught": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "input": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "a factorial": "import math\nmath.factorial(10 ** 7)",
    "binomials": "import math\nmath.comb(10 ** 8, 10 ** 7)",
    "a checksum": "import hashlib\nhashlib.pbkdf2_hmac('sha256', b'x', b'y', 10 ** 9)",
    "a sum": "print(sum(range(10 ** 13)))",
    "a search": "print(-1 in iter(range(10 ** 13)))",
    "a maximum": "print(max(range(10 ** 13)))",
    "another regular expression": "import re\nre.match(r'(x+x+)+y', 'x' * 60)",
    "a search for what is not there": "import re\nre.search(r'(.*)*b', 'a' * 100)",
    "calls": "def f(n): return n if n < 2 else f(n - 1) + f(n - 2)\nprint(f(60))",
    "products": "import itertools\nfor x in itertools.product(range(10), repeat=20): pass",
    "an endless iterator": "import itertools\nfor x in itertools.count(): pass",
    "a comparison": "class A:\n    def __lt__(self, other):\n        while True: pass\nsorted([A(), A()])",
    "a name": "class A:\n    def __repr__(self):\n        while True: pass\nprint(repr(A()))",
    "small steps of output": "import time\nwhile True:\n    print('x', flush=True)\n    time.sleep(0.05)",
}
OUTPUT = {
    "lines": "for _ in range(300): print('x' * 10000)",
    "errors": "import sys\nfor _ in range(300): print('x' * 10000, file=sys.stderr)",
    "both": "import sys\nfor _ in range(300): print('x' * 10000) or print('x' * 10000, file=sys.stderr)",
    "one line": "print('x' * (3 << 20))",
    "bytes": "import os\nleft = bytes(3 << 20)\nwhile left: left = left[os.write(1, left):]",
    "a child's": "import subprocess\nsubprocess.run(['head', '-c', '3000000', '/dev/zero'])",
    "many children's": "import os\nfor _ in range(3): os.fork()\nos.write(1, b'x' * 60000)\nos.write(1, b'x' * 60000)",
    "a traceback": "raise ValueError('x' * (3 << 20))",
    "by another handle": "open('/dev/stdout', 'w').write('x' * (3 << 20))",
    "control characters": "print('\\x1b[2J\\0\\r' * (1 << 19))",
}
TIME_ATTACKS = {f"time by {name}": code for name, code in TIME.items()}
OUTPUT_ATTACKS = {f"output of {name}": code for name, code in OUTPUT.items()}
