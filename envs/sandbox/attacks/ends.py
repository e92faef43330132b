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
