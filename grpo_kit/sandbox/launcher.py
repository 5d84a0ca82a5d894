"""The small process that starts programs: run as a script, one program at a time, requests on stdin, results on stdout.

It stands between trainer and programs so that starting one costs the same whatever the trainer's memory, threads and
CUDA context. With sandlock it confines itself (Landlock) before the first program, and every program inherits that;
with bubblewrap each program gets namespaces of its own. Both add the system-call filter of syscalls.py and resource
limits, set between fork and exec: the program never runs without them and cannot undo them.
When stdin closes (the trainer ended, or gave up) it kills what runs, removes its folder and ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import folders  # noqa: E402
import syscalls  # noqa: E402
from watch import Watch  # noqa: E402

FILE_BYTES = 8 << 20
OPEN_FILES = 40
STACK_BYTES = 8 << 20
FLAGS = (
    "-s",
    "-S",
    "-B",
    "-P",
    "-X",
    "utf8",
)  # the environment is ours: nothing of the user's, no site-packages

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 24, 22, 38
PR_SET_CHILD_SUBREAPER, SECCOMP_MODE_FILTER = 36, 2
LINUX = sys.platform == "linux"
libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *arguments) -> None:
    if libc.prctl(option, *arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def drop_capabilities() -> None:
    """Root keeps its user id and loses its powers, for itself and all it starts."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) != 0:
            break  # beyond the kernel's last one, or not root
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    if libc.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def install_filter(program: bytes) -> None:
    class SockFprog(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1))
    fprog = SockFprog(len(program) // 8, program)
    prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(fprog))


class Launcher:
    """One folder, one isolation, one program at a time."""

    def __init__(self, setup: dict):
        self.kind, self.python, self.root = setup["kind"], setup["python"], setup["root"]
        self.bwrap = setup["bwrap"]
        self.work = os.path.join(self.root, "work")
        self.box = os.path.join(self.work, "box")
        os.mkdir(self.work, 0o700)
        if LINUX:
            prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
            with open("/proc/self/oom_score_adj", "w") as score:
                score.write("500")  # memory short: a program goes before the trainer
        if self.kind != "none":
            drop_capabilities()
        if self.kind == "sandlock":
            self.confine(setup["sandlock"])

    def confine(self, package_folder: str) -> None:
        """Landlock for this process and all it starts: read the interpreter, write below work, nothing else."""
        python = self.python
        home = os.path.join(self.root, "python")
        for platlib in {"lib", python["platlibdir"]}:
            stdlib = os.path.join(home, platlib, python["version"])
            os.makedirs(stdlib)
            for entry in python["entries"]:  # links, since the real folder also holds installed packages
                link = os.path.join(stdlib, os.path.basename(entry))
                if not os.path.lexists(link):
                    os.symlink(entry, link)
        sys.path.append(package_folder)
        import sandlock

        readable = [home, python["executable"], *python["entries"], *python["libraries"], "/etc/ld.so.cache"]
        protection = sandlock.Protection
        sandlock.confine(
            sandlock.Sandbox(
                fs_readable=[path for path in readable if os.path.exists(path)],
                fs_writable=[self.work, "/dev/null"],
                # newer kernels only; sockets, ioctls on devices and signals are already closed by the filter
                allow_degraded=[
                    protection.NET_TCP,
                    protection.FS_IOCTL_DEV,
                    protection.SIGNAL_SCOPE,
                    protection.ABSTRACT_UNIX_SOCKET_SCOPE,
                ],
            )
        )
        sys.path.remove(package_folder)

    def command(self, filter_file: int) -> tuple[list[str], str]:
        """Arguments and the program's folder as it sees it."""
        python = [self.python["executable"], *FLAGS]
        if self.kind != "bubblewrap":
            return [*python, os.path.join(self.work, "program.py")], self.box
        arguments = [self.bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
        arguments += ["--cap-drop", "ALL", "--seccomp", str(filter_file)]
        for top in ("/lib", "/lib64"):
            if os.path.islink(top):
                arguments += ["--symlink", os.readlink(top), top]
        for path in (self.python["executable"], *self.python["libraries"], "/etc/ld.so.cache"):
            if os.path.exists(path):
                arguments += ["--ro-bind", path, path]
        for folder in sorted({os.path.dirname(entry) for entry in self.python["entries"]}):
            arguments += ["--ro-bind", folder, folder]
        for folder in self.python["masked"]:
            arguments += ["--tmpfs", folder, "--remount-ro", folder]
        arguments += ["--dev-bind", "/dev/null", "/dev/null", "--bind", self.box, "/box"]
        arguments += ["--ro-bind", os.path.join(self.work, "program.py"), "/program.py", "--chdir", "/box"]
        arguments += ["--remount-ro", "/"]
        return [*arguments, "--", *python, "/program.py"], "/box"

    def become(self, files: tuple[int, int, int], job: dict) -> None:
        """In the child: from a copy of the launcher to the program. Does not return."""
        os.setsid()
        filter_file = -1
        if self.kind == "bubblewrap":
            filter_file, writer = os.pipe()
            os.write(writer, syscalls.seccomp_filter(None))
            os.close(writer)
            os.set_inheritable(filter_file, True)
        arguments, box = self.command(filter_file)
        for number, file in enumerate(files):
            os.dup2(file, number)  # all other descriptors close themselves at exec
        os.chdir(self.box)
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                try:
                    signal.signal(number, signal.SIG_DFL)
                except (OSError, ValueError):
                    pass  # reserved by the C library
        limits = {
            resource.RLIMIT_AS: job["memory_mb"] << 20,
            resource.RLIMIT_CPU: int(job["seconds"])
            + 2,  # the clock comes first; this is for a launcher that hangs
            resource.RLIMIT_FSIZE: FILE_BYTES,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_STACK: STACK_BYTES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }
        for limit, value in limits.items():
            try:
                resource.setrlimit(limit, (value, value))
            except (OSError, ValueError):
                if self.kind != "none":  # macOS refuses some
                    raise
        environment = {"HOME": box, "TMPDIR": box, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        if self.kind == "sandlock":
            environment["PYTHONHOME"] = os.path.join(self.root, "python")
        elif self.kind == "bubblewrap":
            environment["PYTHONHOME"] = self.python["prefix"]
        if LINUX:
            prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if self.kind == "sandlock":
            install_filter(syscalls.seccomp_filter(os.getpid()))
        os.execve(arguments[0], arguments, environment)

    def run(self, job: dict, code: bytes, stdin: bytes) -> tuple[dict, bytes, bytes]:
        """The result's fields, stdout and stderr."""
        folders.empty(self.work)
        os.mkdir(self.box, 0o700)
        for name, content in (("program.py", code), ("stdin", stdin)):
            with open(os.path.join(self.work, name), "wb") as file:
                file.write(content)
        source = os.open(os.path.join(self.work, "stdin"), os.O_RDONLY)
        readers, writers = zip(
            *(os.pipe() for _ in range(3)), strict=True
        )  # stdout, stderr, complaints before exec
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                self.become((source, *writers[:2]), job)
            except BaseException as problem:
                os.write(writers[2], f"{type(problem).__name__}: {problem}".encode()[:2000])
            finally:
                os._exit(127)
        for file in (source, *writers):
            os.close(file)
        try:
            watch = Watch(pid, readers[:2], started, job, self.box)
            watch.until_it_ends()
            self.kill_all(pid)
            watch.drain()
            complaint = os.read(readers[2], 2000)
        finally:
            for file in readers:
                os.close(file)
        if complaint:
            raise OSError(f"the program could not be started: {complaint.decode(errors='replace')}")
        seen = (
            b"/program.py"
            if self.kind == "bubblewrap"
            else os.fsencode(os.path.join(self.work, "program.py"))
        )
        result, out, err = watch.result(self.status, wrapped=self.kind == "bubblewrap")
        folders.empty(self.work)
        return result, out, err.replace(seen, b"program.py")

    def kill_all(self, pid: int) -> None:
        """Kill the program and whatever it started; on return none of it is left."""
        self.status: int | None = None
        give_up = time.monotonic() + 5
        while time.monotonic() < give_up:
            for victim in (pid, *children()) if self.status is None else children():
                for kill in (os.killpg, os.kill):
                    try:
                        kill(victim, signal.SIGKILL)
                    except (ProcessLookupError, PermissionError):
                        pass
            try:
                found, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            if found == pid:
                self.status = status


def children() -> list[int]:
    """Direct children; orphaned grandchildren become direct ones. Empty where /proc cannot be read: no forks there."""
    try:
        with open("/proc/thread-self/children") as file:
            return [int(number) for number in file.read().split()]
    except OSError:
        return []


def read_exactly(size: int) -> bytes | None:
    """The next `size` bytes of stdin; None at its end."""
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def receive() -> tuple[dict, list[bytes]] | None:
    """A message: its length, JSON, then as many bytes as each of its `sizes`."""
    length = read_exactly(4)
    header = length and read_exactly(struct.unpack("!I", length)[0])
    if not header:
        return None
    fields = json.loads(header)
    bodies = [read_exactly(size) for size in fields.pop("sizes")]
    return None if None in bodies else (fields, bodies)


def send(fields: dict, *bodies: bytes) -> None:
    header = json.dumps({**fields, "sizes": [len(body) for body in bodies]}).encode()
    message = memoryview(struct.pack("!I", len(header)) + header + b"".join(bodies))
    while message:
        message = message[os.write(1, message) :]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what an interrupt means
    setup = receive()[0]
    try:
        try:
            launcher = Launcher(setup)
        except Exception as problem:
            return send({"problem": f"{type(problem).__name__}: {problem}"})
        send({"ready": True})
        while message := receive():
            job, (code, stdin) = message
            try:
                result, out, err = launcher.run(job, code, stdin)
            except OSError as problem:
                send({"problem": str(problem)})
                continue
            send(result, out, err)
    except (BrokenPipeError, EOFError):
        pass  # the trainer is gone
    finally:
        if os.path.isdir(os.path.join(setup["root"], "work")):
            folders.empty(os.path.join(setup["root"], "work"))
        shutil.rmtree(setup["root"], ignore_errors=True)  # with Landlock: the parent's to remove


if __name__ == "__main__":
    main()
