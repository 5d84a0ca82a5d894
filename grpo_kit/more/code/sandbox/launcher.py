"""The small process that starts programs. A script: requests on stdin, results on stdout, one at a time.

It stands between trainer and programs, so that the cost of starting one does not depend on the trainer's memory,
threads and CUDA context. With sandlock it confines itself (Landlock) before the first program, and programs inherit
that; with bubblewrap each program gets its own namespaces. Both add the system-call filter of syscalls.py and resource
limits, set between fork and exec: the program never runs without them and cannot undo them.
When stdin closes (the trainer ended, or gave up) it kills its program, removes its folder and ends.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import confinement  # noqa: E402
import syscalls  # noqa: E402
from program_watch import Watch, empty  # noqa: E402

FILE_BYTES, OPEN_FILES, STACK_BYTES = 8 << 20, 40, 8 << 20
# no user site, no packages; the environment is the launcher's
FLAGS = ("-s", "-S", "-B", "-P", "-X", "utf8")
_LINUX = sys.platform == "linux"


class Launcher:
    """One folder, one kind of isolation, one program at a time."""

    def __init__(self, setup: dict):
        self.kind, self.python, self.bwrap = setup["kind"], setup["python"], setup["bwrap"]
        self.environment = setup["environment"]
        self.home = os.path.join(setup["root"], "python")
        self.work = os.path.join(setup["root"], "work")
        self.box = os.path.join(self.work, "box")
        os.mkdir(self.work, 0o700)
        if _LINUX:
            confinement.prctl(confinement.PR_SET_CHILD_SUBREAPER, 1)
            try:
                with open("/proc/self/oom_score_adj", "w") as score:
                    # short of memory, the kernel kills a program before the trainer
                    score.write("500")
            except OSError:
                pass  # a read-only /proc; only a preference
        if self.kind == "sandlock":
            confinement.drop_capabilities()
            confinement.landlock(self.python, self.home, self.work, setup["sandlock"])

    def become(self, files: tuple[int, int, int], job: dict) -> None:
        """In the child: turn from a copy of the launcher into the program. Does not return."""
        os.setsid()
        program, box, home = os.path.join(self.work, "program.py"), self.box, None
        command = [self.python["executable"], *FLAGS]
        if self.kind == "sandlock":
            home = self.home
        elif self.kind == "bubblewrap":
            filter_file, writer = os.pipe()
            os.write(writer, syscalls.seccomp_filter(None))
            os.close(writer)
            os.set_inheritable(filter_file, True)
            command = [
                *confinement.bubblewrap(self.bwrap, self.python, self.work, filter_file),
                *command,
            ]
            program, box, home = "/program.py", "/box", self.python["prefix"]
        environment = {
            **self.environment,
            "HOME": box,
            "TMPDIR": box,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
        }
        if home:
            environment["PYTHONHOME"] = home
        for number, file in enumerate(files):
            os.dup2(file, number)  # all other descriptors close themselves at exec
        os.chdir(self.box)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        limits = {
            resource.RLIMIT_AS: job["memory_mb"] << 20,
            # the clock stops it first, unless it hangs
            resource.RLIMIT_CPU: int(job["seconds"]) + 2,
            resource.RLIMIT_FSIZE: FILE_BYTES,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_STACK: STACK_BYTES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }
        for limit, value in limits.items():
            hardest = resource.getrlimit(limit)[1]
            value = value if hardest == resource.RLIM_INFINITY else min(value, hardest)
            try:
                resource.setrlimit(limit, (value, value))
            except (OSError, ValueError):
                if _LINUX:
                    raise
        if _LINUX:
            confinement.prctl(confinement.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.kind == "sandlock":
            confinement.install_filter(syscalls.seccomp_filter(os.getpid()))
        os.execve(command[0], [*command, program], environment)

    def run(self, job: dict, code: bytes, stdin: bytes) -> tuple[dict, bytes, bytes]:
        """The result's fields, stdout and stderr. Raises OSError if the program could not be started."""
        empty(self.work)
        os.mkdir(self.box, 0o700)
        for name, content in (("program.py", code), ("stdin", stdin)):
            with open(os.path.join(self.work, name), "wb") as file:
                file.write(content)
        # a file: no pipe reader to wait for
        source = os.open(os.path.join(self.work, "stdin"), os.O_RDONLY)
        # stdout, stderr, and problems before exec
        readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
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
        # With sandlock the program may also write beside its folder, where its code and stdin are.
        watch = Watch(pid, readers[:2], started, job, self.work, len(code) + len(stdin))
        status = None
        try:
            watch.until_it_ends()
        finally:
            status = end(pid)
        watch.drain()
        os.set_blocking(readers[2], False)
        problem = os.read(readers[2], 2000)
        for file in readers:
            os.close(file)
        if problem:
            raise OSError(
                f"the program could not be started: {problem.decode(errors='replace')}"
            )
        wrapped = self.kind == "bubblewrap"
        fields, stdout, stderr = watch.result(status, wrapped)
        empty(self.work)
        path = b"/program.py" if wrapped else os.fsencode(os.path.join(self.work, "program.py"))
        return fields, stdout, stderr.replace(path, b"program.py")


def end(pid: int) -> int | None:
    """Kill the program and its processes, and wait for them; returns the program's wait status."""
    status = None
    give_up = time.monotonic() + 5
    victims = {pid}
    while time.monotonic() < give_up:
        for victim in victims | _orphans():
            for kill in (os.killpg, os.kill):
                try:
                    kill(victim, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
        try:
            ended_pid, ended_status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        victims.discard(ended_pid)
        if ended_pid == pid:
            status = ended_status
    return status


def _orphans() -> set[int]:
    """This process's children, and orphans given to it. With Landlock this is unreadable, but there are no forks."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return {int(number) for number in file.read().split()}
    except OSError:
        return set()


def _read_exactly(size: int) -> bytes | None:
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
    """Read a message: the length of its JSON, the JSON, then as many bytes as each of its `sizes`."""
    length = _read_exactly(4)
    header = length and _read_exactly(struct.unpack("!I", length)[0])
    if not header:
        return None
    fields = json.loads(header)
    bodies = [_read_exactly(size) for size in fields.pop("sizes")]
    return None if None in bodies else (fields, bodies)


def send(fields: dict, *bodies: bytes) -> None:
    """Write a message of the same form to stdout."""
    header = json.dumps({**fields, "sizes": [len(body) for body in bodies]}).encode()
    message = memoryview(struct.pack("!I", len(header)) + header + b"".join(bodies))
    while message:
        message = message[os.write(1, message) :]


def serve(setup: dict) -> None:
    """Confine this process, then run programs until stdin closes."""
    try:
        launcher = Launcher(setup)
    except Exception as problem:
        return send({"problem": f"{type(problem).__name__}: {problem}"})
    send({"ready": True})
    try:
        while message := receive():
            job, (code, stdin) = message
            try:
                answer = launcher.run(job, code, stdin)
            except OSError as problem:
                answer = ({"problem": str(problem)},)
            send(*answer)
    except (BrokenPipeError, EOFError):
        pass  # the trainer has ended
    empty(launcher.work)


def main() -> None:
    """Two processes, since the one that confines itself cannot remove its own folder."""
    # the trainer decides how to handle an interrupt
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = receive()[0]
    child = os.fork()
    if child == 0:
        if _LINUX:
            confinement.prctl(confinement.PR_SET_PDEATHSIG, signal.SIGKILL)
        serve(setup)
        os._exit(0)
    os.waitpid(child, 0)
    shutil.rmtree(setup["root"], ignore_errors=True)


if __name__ == "__main__":
    main()
