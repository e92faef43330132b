"""Attacks on the machine's devices, and on the kernel's files."""

NODES = (
    "mem", "kmsg", "port", "kvm", "fuse", "net/tun", "loop-control", "loop0", "vda", "sda", "nvme0n1", "nvidia0", "nvidiactl",
    "dri/card0", "snd/timer", "hpet", "rtc0", "input/event0", "uinput", "vhost-net", "vhost-vsock", "ttyS0", "tty0", "mapper/control",
    "userfaultfd", "cpu_dma_latency", "hwrng", "watchdog", "autofs", "btrfs-control", "ppp", "vcs", "cuse",
)  # fmt: skip
FILES = {
    "sys": "import os\nprint(os.listdir('/sys/class') and 'BREACH')",
    "groups of control": "import os\nprint(os.listdir('/sys/fs/cgroup') and 'BREACH')",
    "the kernel's memory": "open('/proc/kcore', 'rb').read(1)\nprint('BREACH')",
    "the kernel's keys": "open('/proc/sysrq-trigger', 'w').close()\nprint('BREACH')",
    "the kernel's settings": "open('/proc/sys/vm/swappiness', 'r+').close()\nprint('BREACH')",
    "a new device": "import os, stat\nos.mknod('n', stat.S_IFCHR | 0o666, os.makedev(1, 1))\nprint('BREACH')",
    "a new disk": "import os, stat\nos.mknod('n', stat.S_IFBLK | 0o666, os.makedev(254, 0))\nprint('BREACH')",
    "ports": "import ctypes\nprint('BREACH' if ctypes.CDLL(None).ioperm(0x80, 1, 1) == 0 else '')",
    "another driver of a terminal": (
        "import fcntl, os, struct\nm, s = os.openpty()\nfcntl.ioctl(s, 0x5423, struct.pack('i', 0))\nprint('BREACH')"
    ),
    "the processors' registers": "open('/dev/cpu/0/msr', 'rb').close()\nprint('BREACH')",
    "the machine's clock": "open('/dev/rtc', 'rb').close()\nprint('BREACH')",
    "the machine's own memory in a file": "open('/dev/dax0.0', 'rb').close()\nprint('BREACH')",
    "a terminal that is typed into": (
        "import fcntl, os\nm, s = os.openpty()\nfcntl.ioctl(s, 0x5412, b'x')\nprint('BREACH')"
    ),
}
ATTACKS = {
    **{f"see /dev/{name}": f"import os\nos.stat('/dev/{name}')\nprint('BREACH')" for name in NODES},
    **{f"use {name}": code for name, code in FILES.items()},
}
MAY_LACK = tuple(
    name for name in ATTACKS if name not in ("use sys", "use groups of control", "use another driver of a terminal")
)
