"""Programs that try to get out of the sandbox, and what must be true afterwards. One row an attack.

As a script it runs rows and prints those that failed as JSON: `python tests/code/sandbox_attacks.py sandlock all`,
or `rights` in place of `all`: not those that end by time, memory or output, which are measured the same for everybody.
"""

# ruff: noqa: E501  (a row is a program: it stays on its line)
from __future__ import annotations

import glob
import json
import os
import re
import resource
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from grpo_kit.more.code.sandbox import _result
from grpo_kit.more.code.sandbox.pool import Pool

# attempt() says "closed" where the attack failed and "OPEN" where it worked: no row may print OPEN.
PRELUDE = """
import os, sys
class Failed(Exception): pass
def attempt(action, *arguments, **named):
    try:
        got = action(*arguments, **named)
    except BaseException as problem:
        print("closed", type(problem).__name__, problem)
    else:
        print("OPEN", repr(got)[:200])
def listed(path):  # with bubblewrap the folders above the interpreter are there, and empty but for it
    names = set(os.listdir(path)) - set((sys.prefix + "/program.py/box/dev/null/usr/lib/lib32/lib64/libx32/bin/etc").split("/"))
    if not names:
        raise Failed("nothing there")
    return names
def read(path):
    with open(path, "rb") as file:
        return file.read(100)
"""


# Calls by their number on x86-64 and aarch64.
RAW = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
COLUMN = 0 if os.uname().machine == "x86_64" else 1
def checked(value):
    if value in (-1, 2**64 - 1, 2**32 - 1, None):
        raise Failed(os.strerror(ctypes.get_errno()))
    return value
def raw(numbers, *arguments):
    number = numbers[COLUMN]
    if number is None:
        raise Failed("no such call here")
    libc.syscall.restype = ctypes.c_long
    return checked(libc.syscall(ctypes.c_long(number), *[a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]))
"""


@dataclass(frozen=True)
class Attack:
    """name; program; the status it must be given; what stdout + stderr must match."""

    name: str
    program: str
    status: str | tuple[str, ...] = "ok"
    says: str = "closed"
    seconds: float = 5.0
    stdin: str = ""
    prelude: bool = True
    memory_mb: int = 256


def raw_calls(name: str, *calls: str) -> Attack:
    return Attack(name, "\n".join(f"attempt(raw, {call})" for call in calls))


SOCKETS = "import socket\nAF, K = socket, socket.socket\n"
SPIN = "\nwhile True: pass"

ATTACKS = [
    # reading
    Attack("read /etc/passwd", "attempt(read, '/etc/passwd'); attempt(read, '/etc/hostname')"),
    Attack("read a secret beside us", "attempt(read, '@SECRET@')"),
    Attack("read the home folder", "attempt(listed, '@HOME@'); attempt(read, '@HOME@/.ssh/id_rsa')"),
    Attack("read ~ as it sees it", "print(os.listdir(os.path.expanduser('~'))); attempt(listed, '/root')", says=r"\[\]"),
    Attack("read our source and its answers", "attempt(read, '@REPO@/grpo_kit/__init__.py'); attempt(listed, '@REPO@'); attempt(os.listdir, '@REPO@/grpo_kit')"),
    Attack(
        "import installed packages",
        "attempt(__import__, 'grpo_kit'); attempt(__import__, 'pip'); attempt(__import__, 'sandlock')\n"
        "import sysconfig, glob\n"
        "for path in sys.path: print(glob.glob(path + '/../**/site-packages/*', recursive=True))\n"
        "attempt(read, '@SITE@/pip/__init__.py')",
    ),
    Attack("list the root", "attempt(listed, '/home'); attempt(listed, '/tmp'); attempt(listed, '/var'); attempt(listed, '/')"),
    Attack(
        "read another run's folder",
        "for name in ('work/program.py', 'work/stdin', 'work/box/x'): attempt(read, '@OTHER@/' + name)\n"
        "attempt(open, '@OTHER@/work/new', 'w'); attempt(os.listdir, '@OTHER@/work')",
    ),
    Attack("environment of ours", "print(dict(os.environ)); assert not any('MARKER' in str(i) for i in os.environ.items()); print('closed')"),
    Attack(
        "environment in memory",
        "char = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')\ni = 0\n"
        "while char[i]: print(char[i]); i += 1\nprint('closed')",
    ),
    Attack(
        "/proc of the parent",
        "for pid in (os.getppid(), @PARENT@, 1, 'self', 'thread-self'):\n"
        "    for name in ('environ', 'cmdline', 'mem', 'maps', 'status', 'fd', 'root', 'cwd', 'task'):\n"
        "        path = f'/proc/{pid}/{name}'\n"
        "        if (pid, name) not in (('self', 'cwd'), ('thread-self', 'cwd')): attempt(listed if name in ('fd', 'root', 'cwd', 'task') else read, path)",
    ),
    Attack("other processes in /proc", "attempt(os.listdir, '/proc'); attempt(read, '/proc/meminfo')"),
    Attack("descriptors through /proc", "attempt(os.listdir, '/proc/self/fd'); attempt(os.listdir, '/dev/fd')"),
    Attack(
        "inherited descriptors",
        "for n in range(3, 4096):\n"
        "    try: os.fstat(n)\n"
        "    except OSError: pass\n"
        "    else: print('OPEN', n)\n"
        "print('closed')",
    ),
    Attack("devices", "for name in ('tty', 'kmsg', 'mem', 'sda', 'ptmx', 'nvidia0', 'fuse', 'kvm'): attempt(os.open, '/dev/' + name, os.O_RDWR)"),
    Attack("system settings", "attempt(read, '/sys/kernel/vmcoreinfo'); attempt(read, '/proc/sys/kernel/randomize_va_space'); attempt(os.listdir, '/sys/class')"),
    Attack("terminal injection", "import fcntl, termios\nfor n in range(3): attempt(fcntl.ioctl, n, termios.TIOCSTI, b'x')"),
    # writing
    Attack(
        "write outside the folder",
        "for path in ('@OUTSIDE@/x', '/tmp/x', '/dev/shm/x', '/etc/x', '/var/tmp/x', '@HOME@/x', '@SECRET@', sys.executable,"
        " os.__file__, sys.prefix + '/lib/evil.py', os.path.dirname(os.__file__) + '/evil.py'):\n"
        "    attempt(open, path, 'a')\n    attempt(os.mkdir, path + '.d'); attempt(os.mkfifo, path + '.f')",
    ),
    Attack("truncate", "attempt(os.truncate, '@SECRET@', 0); attempt(os.truncate, os.__file__, 0)"),
    Attack(
        "delete and move",
        "attempt(os.unlink, '@SECRET@'); attempt(os.rename, '@SECRET@', 'mine'); open('x', 'w').close()\n"
        "attempt(os.rename, 'x', '@OUTSIDE@/x'); attempt(os.rmdir, '@OUTSIDE@')",
    ),
    Attack(
        "change mode, owner and times",  # reported as done, and nothing is done
        "for action in (lambda p: os.chmod(p, 0o777), lambda p: os.chown(p, 1, 1), lambda p: os.utime(p, (1, 1))):\n"
        "    for path in ('@SECRET@', '@OUTSIDE@', os.__file__):\n"
        "        try: action(path)\n"
        "        except OSError: pass\n"
        "fd = os.open(os.__file__, os.O_RDONLY)\n"
        "os.fchmod(fd, 0o777); print('closed', oct(os.fstat(fd).st_mode))",
    ),
    Attack("extended attributes", "attempt(os.setxattr, '@SECRET@', 'user.x', b'1'); attempt(os.getxattr, '@SECRET@', 'user.y')"),
    Attack(
        "symlinks out of the folder",
        "os.symlink('@SECRET@', 'a'); os.symlink('@OUTSIDE@', 'b'); os.symlink('/', 'c')\n"
        "attempt(read, 'a'); attempt(open, 'a', 'w'); attempt(open, 'b/x', 'w'); attempt(os.listdir, 'b'); attempt(read, 'c/etc/passwd')",
    ),
    Attack(
        "hard links out of the folder",
        "attempt(os.link, '@SECRET@', 'a'); attempt(os.link, '/etc/passwd', 'b'); open('x', 'w').close()\n"
        "attempt(os.link, 'x', '@OUTSIDE@/x')",
    ),
    Attack("leave through ..", "attempt(read, '../' * 20 + '@SECRET@'.lstrip('/')); attempt(listed, '../..')"),
    Attack(
        "leave through a folder's descriptor",
        "fd = os.open('/', os.O_PATH | os.O_DIRECTORY)\n"
        "attempt(os.open, '@SECRET@'.lstrip('/'), os.O_RDONLY, dir_fd=fd); attempt(listed, fd); os.fchdir(fd)\n"
        "attempt(listed, '.')",
    ),
    Attack("device files", "import stat\nattempt(os.mknod, 'a', stat.S_IFBLK | 0o666, os.makedev(8, 0)); attempt(os.mknod, 'b', stat.S_IFCHR | 0o666, os.makedev(1, 1))"),
    Attack("plant a module for the next run", "for p in sys.path: attempt(open, p + '/usercustomize.py', 'w')\nopen('json.py', 'w').write('1/0'); import json; print(json.dumps(1))"),
    Attack("/dev/shm", "attempt(open, '/dev/shm/left', 'w'); from _posixshmem import shm_open; attempt(shm_open, '/left', os.O_CREAT | os.O_RDWR, 0o600)"),
    # network
    Attack("connect to a server on this machine", SOCKETS + "attempt(lambda: socket.create_connection(('127.0.0.1', @PORT@), 1).send(b'out'))"),
    Attack("connect by IPv6", SOCKETS + "attempt(lambda: socket.create_connection(('::1', @PORT@), 1))"),
    Attack("UDP", SOCKETS + "attempt(lambda: K(AF.AF_INET, AF.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', @UDP@)))"),
    Attack("listen", SOCKETS + "attempt(lambda: socket.create_server(('127.0.0.1', 0)))"),
    Attack("DNS", SOCKETS + "attempt(socket.getaddrinfo, 'example.com', 80)", says="closed gaierror"),
    Attack("unix socket by path", SOCKETS + "s = None\nattempt(lambda: K(AF.AF_UNIX).connect('@UNIX@'))"),
    Attack("unix socket, abstract", SOCKETS + "attempt(lambda: K(AF.AF_UNIX).connect('\\0@ABSTRACT@')); attempt(lambda: K(AF.AF_UNIX, AF.SOCK_DGRAM).sendto(b'x', '\\0@ABSTRACT@'))"),
    Attack(
        "unix socket out of a pair",
        SOCKETS + "a, b = AF.socketpair(); a.send(b'1'); print('pair', b.recv(1))\n"
        "attempt(lambda: AF.socketpair(type=AF.SOCK_DGRAM)); attempt(a.connect, '@UNIX@'); attempt(a.sendto, b'x', '@UNIX@')",
    ),
    Attack("raw, packet, netlink, vsock", SOCKETS + "for family, kind in ((2, 3), (10, 3), (17, 3), (16, 3), (16, 2), (40, 1), (38, 5), (31, 3), (29, 3)): attempt(lambda: K(family, kind))"),
    Attack("URLs", "import urllib.request\nattempt(urllib.request.urlopen, 'http://127.0.0.1:@PORT@/', timeout=1)"),
    # processes
    Attack("fork bomb", "while True:\n    try: os.fork()\n    except OSError as problem: print('closed', problem); break"),
    Attack("subprocess and exec", "import subprocess\nattempt(subprocess.run, ['/bin/sh', '-c', 'echo hi']); attempt(os.system, 'exit 0') if False else print(os.system('echo OPE''N'))\nattempt(os.execv, '/bin/sh', ['sh']); attempt(os.posix_spawn, '/bin/true', ['true'], {})"),
    Attack("exec the interpreter again", "os.execv(sys.executable, [sys.executable, '-c', 'print(open(\"/etc/passwd\").read())'])", "error", "Permission|No such file"),
    Attack("threads bomb", "import threading\nfor _ in range(10000): attempt(threading.Thread(target=input).start); break"),
    Attack("multiprocessing", "import multiprocessing as m\nattempt(lambda: m.Process(target=print).start()); attempt(lambda: m.Pool(2))"),
    raw_calls("raw fork, vfork, clone, clone3", "(57, None)", "(58, None)", "(56, 220), 17, 0, 0, 0, 0", "(56, 220), 0x50f00, 0, 0, 0, 0", "(435, 435), 0, 88"),
    Attack("background children", "for _ in range(3):\n    try:\n        if os.fork() == 0: os.setsid(); os.fork(); __import__('time').sleep(100)\n    except OSError as problem: print('closed', problem)"),
    Attack("signal the parent", "import signal\nfor pid in (os.getppid(), @PARENT@, -1, 0, 1, -@PARENT@):\n    for n in (0, 15, 9):\n        if pid not in (-1, 0, 1) and os.getpid() > 100: attempt(os.kill, pid, n)\nprint('closed')"),
    Attack("kill everything", "import signal\nsignal.signal(15, signal.SIG_IGN)\ntry: os.kill(-1, 15); os.killpg(os.getpgid(0), 15)\nexcept OSError: pass\nprint('closed')", ("ok", "killed"), ""),
    Attack("signal through a descriptor's owner", "import fcntl, signal\nr, w = os.pipe()\nattempt(fcntl.fcntl, r, fcntl.F_SETOWN, @PARENT@); attempt(fcntl.fcntl, r, 10, 9); attempt(fcntl.fcntl, r, fcntl.F_SETLEASE, 1)"),
    raw_calls("signal by other calls", "(200, 130), @PARENT@, 9", "(129, 138), @PARENT@, 9, 0", "(434, 434), @PARENT@, 0", "(424, 424), 3, 9, 0, 0"),
    raw_calls("ptrace and other memory", "(101, 117), 16, @PARENT@, 0, 0", "(310, 270), @PARENT@, 0, 0, 0, 0, 0", "(311, 271), @PARENT@, 0, 0, 0, 0, 0", "(312, 272), @PARENT@, 1, 0, 0, 0", "(438, 438), 3, 0, 0", "(440, 440), 3, 0, 0, 0, 0"),
    # the kernel
    raw_calls("namespaces and mounts", "(272, 97), 0x10000000", "(272, 97), 0x20000", "(308, 268), 0, 0", "(165, 40), b'none', b'/tmp', b'tmpfs', 0, 0", "(161, 51), b'.'", "(155, 41), b'.', b'.'", "(428, 428), -100, b'/', 1", "(430, 430), b'tmpfs', 0"),
    raw_calls("kernel interfaces", "(321, 280), 0, 0, 0", "(425, 425), 1, 0", "(323, 282), 0", "(298, 241), 0, 0, -1, -1, 0", "(250, 219), 0, -3, 0", "(248, 217), b'user', b'a', b'b', 1, -3", "(304, 265), 0, 0, 0", "(303, 264), 0, b'/', 0, 0, 0", "(300, 262), 0, 0", "(294, 26), 0", "(444, 444), 0, 0, 1", "(317, 277), 1, 0, 0"),
    raw_calls("the machine", "(169, 142), 0xfee1dead, 672274793, 0, 0", "(175, 105), 0, 0, 0", "(246, 104), 0, 0, 0, 0", "(167, 224), b'/x', 0", "(170, 161), b'x', 1", "(163, 89), 0", "(179, 60), 0, 0, 0, 0", "(103, 116), 0, 0, 0", "(227, 112), 0, 0"),
    raw_calls("another user", "(105, 146), 1", "(106, 144), 1", "(116, 159), 0, 0", "(126, 91), 0, 0", "(157, 167), 1, 0, 0, 0, 0", "(135, 92), 0x0040000"),
    raw_calls("System V and POSIX IPC", "(29, 194), 4660, 4096, 0o1600", "(64, 190), 4660, 1, 0o1600", "(68, 186), 4660, 0o1600", "(240, 180), b'left', 0o102, 0o600, 0"),
    Attack("32-bit and x32 calls", "attempt(raw, (0x40000000 + 39, 9999)); attempt(raw, (0x40000000 + 57, 9999))"),
    Attack("raise the limits", "import resource\nfor name in ('AS', 'CPU', 'FSIZE', 'NOFILE', 'STACK', 'CORE', 'MEMLOCK'):\n    attempt(resource.setrlimit, getattr(resource, 'RLIMIT_' + name), (resource.RLIM_INFINITY,) * 2)\nattempt(resource.prlimit, os.getppid(), resource.RLIMIT_CPU, (1, 1)); attempt(resource.prlimit, @PARENT@, resource.RLIMIT_NOFILE, (1, 1))"),
    Attack("priority and cores", "attempt(os.nice, -5); attempt(os.setpriority, os.PRIO_USER, 0, 19); attempt(os.setpriority, os.PRIO_PROCESS, @PARENT@, 19); attempt(os.sched_setaffinity, @PARENT@, [0]); attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))"),
    # memory
    Attack("one huge allocation", "x = bytearray(10**10)", "memory", "MemoryError"),
    Attack("many small allocations", "x = []\nwhile True: x.append(' ' * 1000 + str(len(x)))", "memory", "MemoryError"),
    Attack("mmap", "import mmap\nx = [mmap.mmap(-1, 1 << 24)]\nwhile True: x.append(mmap.mmap(-1, 1 << 24)); x[-1][::4096] = b'1' * 4096", ("memory", "error"), "Cannot allocate|MemoryError"),
    Attack("memfd", "attempt(os.memfd_create, 'x')"),
    Attack("caught and tried again", "x = []\nwhile True:\n    try: x.append(bytearray(1 << 22))\n    except MemoryError: pass", "timeout", "", 0.5),
    Attack("huge integers", "print(len(str(10**10**8)))", ("timeout", "memory", "error"), "", 0.5),
    Attack("huge power", "x = 9**9**9**9", ("timeout", "memory"), "", 0.5),
    Attack("huge string", "print('x' * 10**11)", "memory", "MemoryError"),
    Attack("compile bomb", "eval('(' * 5000 + ')' * 5000)", ("error", "memory", "killed"), ""),
    Attack("regular expression bomb", "import re\nre.match('(a+)+$', 'a' * 40 + 'b')", "timeout", "", 0.5),
    # disk
    Attack("one large file", "with open('x', 'wb') as f:\n    while True: f.write(bytes(1 << 20))", ("error", "killed"), "File too large|folder"),
    Attack("many files", "for i in range(10**6): open(str(i), 'w').write('x' * 100)", "killed", "too much in its folder"),
    Attack("many large files", "for i in range(1000): open(str(i), 'wb').write(bytes(4 << 20))", "killed", "too much in its folder"),
    Attack("many large files beside its folder", "for i in range(100): open(f'../{i}', 'wb').write(bytes(4 << 20))", ("killed", "error"), "too much in its folder|Read-only"),
    Attack("another folder in its place", "os.rename('../box', '../other'); os.mkdir('../box')\nfor i in range(100): open(f'../other/{i}', 'wb').write(bytes(4 << 20))", ("killed", "error"), "too much in its folder|Read-only|busy"),
    Attack("sparse file", "f = open('x', 'wb'); attempt(f.truncate, 1 << 40)"),
    Attack("deleted but open", "files = []\nfor i in range(1000):\n    files.append(open('x', 'wb', buffering=0)); os.unlink('x'); files[-1].write(bytes(1 << 20))", "error", "Too many open files"),
    Attack("many folders", "for i in range(10**6): os.mkdir(str(i))", "killed", "too much in its folder"),
    Attack("a deep tree", "for i in range(900): os.mkdir('d' * 200); os.chdir('d' * 200)\nprint('closed')", ("ok", "killed"), ""),
    Attack("folders without permissions", "os.umask(0)\nos.makedirs('a/b/c'); open('a/b/x', 'w').close(); os.mkdir('z', 0); libc.mkdir(b'y', 0o300); os.mkdir('y/in', 0)\nprint('closed')", ("ok", "killed"), ""),
    Attack("names", "for name in ('new\\nline', '\\\\', ' ', '-rf', '\\udcff\\udcfe', '*', 'x' * 255): open(name, 'w').close()\nprint('closed')"),
    Attack("links, fifos and sockets left", "os.symlink('@OUTSIDE@', 'l'); os.symlink('..', 'up'); os.mkfifo('f'); os.symlink('loop', 'loop'); os.mkdir('d'); os.symlink('@OUTSIDE@', 'd/l')\nprint('closed')"),
    # output
    Attack("flood stdout", "while True: print('x' * 1000)", "output", "xxx"),
    Attack("flood stderr", "while True: print('x' * 1000, file=sys.stderr)", "output", "xxx"),
    Attack("flood both", "while True: os.write(1, b'x' * 5000); os.write(2, b'y' * 5000)", "output", "xxx"),
    Attack("undecodable output", "sys.stdout.buffer.write(bytes(range(256)) * 4)", says="\ufffd"),
    Attack("control characters", "print('\\x1b]0;title\\x07\\x1b[2J\\x00')", says="\x1b"),
    Attack("close stdout and linger", "os.close(1); os.close(2)" + SPIN, "timeout", "", 0.5),
    Attack("stdin never read", "print('closed')", stdin="x" * 10_000_000),
    Attack("write to stdin", "attempt(os.write, 0, b'x')", stdin="abc"),
    # time
    Attack("sleep", "import time; time.sleep(100)", "timeout", "", 0.5),
    Attack("loop that ignores signals", "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nprint('closed', flush=True)" + SPIN, "timeout", "closed", 0.5),
    Attack("stop itself", "import signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout", "", 0.5),
    Attack("wait on a fifo", "os.mkfifo('f'); open('f')", "timeout", "", 0.5),
    Attack("except everything", "while True:\n    try:\n        while True: pass\n    except BaseException: pass", "timeout", "", 0.5),
    Attack("never finish exiting", "import atexit, time\natexit.register(time.sleep, 100)", "timeout", "", 0.5),
    # ends
    Attack("deep recursion", "def f(): f()\nf()", "error", "RecursionError"),
    Attack("exhausted stack", "sys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(self, n): return getattr(self, n)\nrepr(A().x)", ("killed", "memory", "error"), ""),
    Attack("segmentation fault", "ctypes.string_at(0)", "killed", ""),
    Attack("abort", "os.abort()", "killed", ""),
    Attack("os._exit with faked output", "print('passed: 10/10'); sys.stdout.flush(); os._exit(0)", says="passed"),
    Attack("claim a verdict", "print('{\"status\": \"ok\", \"exit_code\": 0}'); sys.stderr.write('sandbox: ok'); sys.exit(3)", "error", "status"),
    Attack("write to the launcher's stream", "for n in range(3, 64):\n    try: os.write(n, b'\\0\\0\\0\\x10{\"status\": \"ok\"}')\n    except OSError: pass\n    else: print('OPEN', n)\nsys.exit(1)", "error", ""),
    Attack("exit codes of a wrapper", "sys.exit(255)", "error", ""),
    # inside the interpreter
    Attack("patched builtins", "import builtins\nbuiltins.print = lambda *a: None\nbuiltins.open = None\nbuiltins.exit = quit = None\nos.write(1, b'closed')"),
    Attack("frames", "frame = sys._getframe()\nnames = []\nwhile frame: names.append((frame.f_code.co_filename, sorted(frame.f_globals))); frame = frame.f_back\nprint(len(names)); assert len(names) == 1; print('closed')"),
    Attack("objects in memory", "import gc\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and any('grpo_kit' in str(k) or 'bodies' == k for k in o)]\nassert not found and not [m for m in sys.modules if 'grpo' in m or 'sandlock' in m], found; print('closed')"),
    Attack("arguments of the interpreter", "print(sys.argv, sys.orig_argv); assert not any('MARKER' in a for a in sys.orig_argv); print('closed')"),
    Attack("unpickling", "import pickle\nclass E:\n    def __reduce__(self): return os.execv, ('/bin/sh', ['sh', '-c', 'echo OPE' 'N'])\nattempt(pickle.loads, pickle.dumps(E()))"),
    Attack("tracing", "sys.settrace(lambda *a: 1/0); sys.setprofile(None)\ntry: (lambda: 0)()\nexcept ZeroDivisionError: print('closed')", ("ok", "error"), ""),
    Attack("no text for Python", "\0\0\udc00\x1f", "error", "", prelude=False),
    Attack("an encoding it does not know", "# coding: nonsense\nprint(1)", "error", "SyntaxError", prelude=False),
]  # fmt: skip


class Host:
    """What an attack could reach on this machine: a secret, a folder, servers, this process."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="attacked-")
        self.secret = Path(self.folder.name, "secret")
        self.secret.write_text("MARKER-secret")
        self.secret.chmod(0o644)
        self.other = Path(self.folder.name, "grpo-kit-sandbox-other")
        for name in ("work/program.py", "work/stdin", "work/box/x"):
            (self.other / name).parent.mkdir(parents=True, exist_ok=True)
            (self.other / name).write_text("MARKER-other")
        self.outside = Path(self.folder.name, "outside")
        self.outside.mkdir(mode=0o777)
        Path(self.outside, "kept").write_text("kept")
        os.environ["MARKER_KEY"] = "MARKER-environment"
        self.received: list[str] = []
        self.abstract = f"attacked-{os.getpid()}"
        unix = str(Path(self.folder.name, "socket"))
        tcp, tcp6 = socket.create_server(("127.0.0.1", 0)), None
        port = tcp.getsockname()[1]
        try:
            tcp6 = socket.create_server(("::1", port), family=socket.AF_INET6)
        except OSError:
            pass  # no IPv6 here
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        path, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        path.bind(unix)
        os.chmod(unix, 0o777)
        abstract.bind("\0" + self.abstract)
        for server in (path, abstract):
            server.listen()
        self.servers = [one for one in (tcp, tcp6, udp, path, abstract) if one]
        for server in self.servers:
            threading.Thread(target=self._listen, args=(server,), daemon=True).start()
        self.places = {
            "@SECRET@": str(self.secret), "@OTHER@": str(self.other), "@OUTSIDE@": str(self.outside), "@HOME@": str(Path.home()),
            "@REPO@": str(Path(__file__).parents[2]), "@TMP@": tempfile.gettempdir(), "@PARENT@": str(os.getpid()),
            "@PORT@": str(port), "@UDP@": str(udp.getsockname()[1]), "@UNIX@": unix, "@ABSTRACT@": self.abstract,
            "@SITE@": os.path.dirname(os.__file__) + "/site-packages",
        }  # fmt: skip

    def _listen(self, server: socket.socket) -> None:
        try:
            if server.type == socket.SOCK_DGRAM:
                server.recv(100)
            else:
                server.accept()
        except OSError:
            return
        self.received.append(str(server))

    def state(self) -> dict:
        """Everything a successful attack would change."""
        if not self.secret.exists():
            return {"secret": "gone", "received": list(self.received)}
        status = self.secret.stat()
        stdlib = os.stat(os.__file__)
        return {
            "secret": (self.secret.read_text(), status.st_mode, status.st_mtime, status.st_uid),
            "outside": sorted(os.listdir(self.outside)),
            "folder mode": os.stat(self.outside).st_mode,
            "standard library": (stdlib.st_mode, stdlib.st_mtime, stdlib.st_size),
            "received": list(self.received),
            "shared memory": sorted(os.listdir("/dev/shm"))
            if os.path.isdir("/dev/shm")
            else [],
            "System V": [
                Path(f).read_text().count("\n") for f in sorted(glob.glob("/proc/sysvipc/*"))
            ],
            "limits": (
                resource.getrlimit(resource.RLIMIT_NOFILE),
                resource.getrlimit(resource.RLIMIT_CPU),
            ),
            "priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)),
        }

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.folder.cleanup()


def programs_running(pool: Pool) -> list[str]:
    """Command lines of the pool's processes that are not launchers (two each)."""
    parents, lines = {}, {}
    for path in glob.glob("/proc/[0-9]*"):
        try:
            parents[int(path[6:])] = int(
                Path(path, "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
            lines[int(path[6:])] = (
                Path(path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue
    inside = {launcher.process.pid for launcher in pool._idle}
    for _ in range(10):
        inside |= {pid for pid, parent in parents.items() if parent in inside}
    roots = [os.path.basename(launcher.root) for launcher in pool._idle]
    escaped = {pid for pid, line in lines.items() if any(root in line for root in roots)}
    return [
        line
        for pid, line in lines.items()
        if pid in inside | escaped and "launcher.py" not in line
    ]


def problems(attack: Attack, pool: Pool, host: Host) -> list[str]:
    """What is wrong after `attack`; empty: contained, reported as what it was, and the next program runs."""
    limits = {"seconds": attack.seconds, "memory_mb": attack.memory_mb, "output_kb": 64}
    needs_raw = any(word in attack.program for word in ("raw", "libc", "ctypes"))
    code = (PRELUDE + RAW * needs_raw) * attack.prelude + attack.program
    for mark, value in host.places.items():
        code = code.replace(mark, value)
    before = host.state()
    raw = code.encode("utf-8", "surrogatepass"), attack.stdin.encode()
    result = _result(*pool.run([raw], limits, 1)[0])
    said = result.stdout + result.stderr
    wrong = []
    if result.status not in (
        (attack.status,) if isinstance(attack.status, str) else attack.status
    ):
        wrong.append(f"status {result.status}, code {result.exit_code}")
    if "OPEN" in said or "MARKER" in said:
        wrong.append("it worked")
    if not re.search(attack.says, said):
        wrong.append(f"said nothing like {attack.says!r}")
    if wrong:
        wrong.append(said[:3000])
    if result.seconds > attack.seconds + 2:
        wrong.append(f"took {result.seconds:.1f} s")
    if len(result.stdout) > 65536 or len(result.stderr) > 65536 + 100:
        wrong.append("more output than allowed")
    after = host.state()
    wrong += [
        f"{what}: {before[what]} -> {after[what]}"
        for what in after
        if before[what] != after[what]
    ]
    if running := programs_running(pool):
        wrong.append(f"still running: {running}")
    for launcher in pool._idle:
        if left := os.listdir(os.path.join(launcher.root, "work")):
            wrong.append(f"left in the folder: {left[:5]}")
    unhurried = {**limits, "seconds": 30.0}
    harmless = _result(
        *pool.run([(b"import json; print(json.dumps([1, 2]))", b"")], unhurried, 1)[0]
    )
    if (harmless.stdout, harmless.status) != ("[1, 2]\n", "ok"):
        wrong.append(f"afterwards a harmless program gave {harmless}")
    return wrong


def chosen(which: str) -> list[Attack]:
    amounts = {"timeout", "memory", "output"}
    statuses = [
        {attack.status} if isinstance(attack.status, str) else set(attack.status)
        for attack in ATTACKS
    ]
    return [
        attack
        for attack, ends in zip(ATTACKS, statuses, strict=True)
        if which == "all" or not ends & amounts
    ]


def main(kind: str, which: str) -> None:
    host, pool = Host(), Pool(kind)
    failed, attacks = {}, chosen(which)
    try:
        for attack in attacks:
            if wrong := problems(attack, pool, host):
                failed[attack.name] = wrong
    finally:
        pool.close()
        host.close()
    print(json.dumps({"uid": os.getuid(), "attacks": len(attacks), "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
