"""Processes of their own that begin where the imports of torch and the kit have ended: forks of one that did no more.

A fresh interpreter spends four seconds on these imports. Tests that ask what a second process does to a run (kill it,
share its steps, go on with it) take run() and start(); those that ask how a process starts, what it imports or says
meanwhile, start an interpreter.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = """torch.distributed transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
transformers.models.llama.modeling_llama transformers.generation.utils peft pandas""".split()
WITHOUT_THE_KIT = [*LIBRARIES, "datasets", "matplotlib.backends.backend_agg"]
KIT = """trainer.grpo_trainer engine.fast models.loading evaluation.accuracy watch.monitor tasks.largest""".split()


class Server:
    """A process that imports the modules and then forks for each start(). path: its PYTHONPATH.

    Where there is a card, and with KIT_SLOW_TESTS=1, each start() is a fresh interpreter: CUDA survives no fork.
    """

    def __init__(self, modules, path=f"{ROOT}:{ROOT / 'tests'}", **environment):
        import torch

        self.folder, self.path, self.started = Path(tempfile.mkdtemp(prefix="forked-")), path, 0
        self.fresh = torch.cuda.is_available() or bool(os.environ.get("KIT_SLOW_TESTS"))
        if self.fresh:
            return
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, *modules], cwd=ROOT, env=os.environ | {"PYTHONPATH": path} | environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(self.folder / "err", "w"),  # noqa: SIM115
            text=True, start_new_session=True,
        )  # fmt: skip
        atexit.register(self.end)

    def start(self, *words, cwd=None, environment=None):
        """`python WORDS` running: a script, -m or -c, and its arguments. environment: all of it, None: this one's."""
        self.started += 1
        place = self.folder / str(self.started)
        environment = dict(os.environ if environment is None else environment)
        if self.fresh:
            return Child(
                None,
                place,
                _interpreter(words, cwd, place, environment | {"PYTHONPATH": self.path}),
            )
        request = {
            "words": list(map(str, words)), "cwd": str(cwd or Path.cwd()), "place": str(place),
            "environment": environment,
        }  # fmt: skip
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, (self.folder / "err").read_text()
        return Child(int(answer), place)

    def run(self, *words, timeout=300, **how):
        """The same, waited for: an object with returncode, stdout and stderr, as subprocess.run gives."""
        child = self.start(*words, **how)
        out, errors = child.communicate(timeout)
        return subprocess.CompletedProcess(words, child.returncode, out, errors)

    def end(self):
        """End it; a child that still runs goes on."""
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Child:
    """What start() started, in the words of subprocess.Popen."""

    stdin = stdout = stderr = None  # its output is in files

    def __init__(self, pid, place, process=None):
        self.pid = process.pid if process else pid
        self._place, self._process, self.returncode = place, process, None
        for which in ("out", "err"):
            place.with_suffix(f".{which}").touch()

    def poll(self):
        if self._process:
            self.returncode = self._process.poll()
        elif self.returncode is None:
            with contextlib.suppress(FileNotFoundError):
                self.returncode = int(self._place.with_suffix(".ended").read_text())
        return self.returncode

    def wait(self, timeout=300):
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                self.kill()
                raise AssertionError(
                    f"after {timeout} s it still runs:\n{self.text('err')[-2000:]}"
                )
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout=300):
        self.wait(timeout)
        return self.text("out"), self.text("err")

    def text(self, which):
        """What it has written so far: out or err."""
        return self._place.with_suffix(f".{which}").read_text()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        """The whole group: it leads one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _interpreter(words, cwd, place, environment):
    """A fresh one that writes where a fork would."""
    with open(f"{place}.out", "w") as out, open(f"{place}.err", "w") as errors:
        return subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=cwd, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
        )  # fmt: skip


@functools.cache
def _server():
    return Server([*LIBRARIES, *(f"grpo_kit.{name}" for name in KIT)])


@functools.cache
def bare():
    """A server that has imported the libraries and nothing of the kit: for what the kit's own import does."""
    return Server(WITHOUT_THE_KIT)


def start(*words, **how):
    """Server.start of one that has imported the libraries and the kit."""
    return _server().start(*words, **how)


def run(*words, **how):
    """Server.run of it."""
    return _server().run(*words, **how)


# ---- in the server's process ----------------------------------------------------------------------------------------


def serve(modules):
    """Fork for each request on stdin, answer with the child's number; its end goes into a file beside its output."""
    import gc

    for name in modules:
        importlib.import_module(name)
    if matmul := sys.modules.get("grpo_kit.engine.cpu._matmul"):
        matmul.compiled()  # here, so that it does not take two seconds of each child
    assert threading.active_count() == 1, f"a fork has one thread: {threading.enumerate()}"
    gc.collect(), gc.freeze()
    running, asked = {}, sys.stdin
    while True:
        if select.select([asked], [], [], 0.01 if running else None)[0]:
            line = asked.readline()
            if not line:
                return
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                asked.close()
                os._exit(_child(**request))
            running[pid] = request["place"]
            print(pid, flush=True)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            path = Path(running.pop(pid) + ".ending")
            path.write_text(str(os.waitstatus_to_exitcode(status)))
            path.rename(path.with_suffix(".ended"))


def _child(words, cwd, place, environment):
    """Be `python WORDS`; returns its exit status."""
    os.setsid()
    for number, path in ((0, os.devnull), (1, f"{place}.out"), (2, f"{place}.err")):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    try:
        status = _as_main(*words)
    except BaseException:
        status = 1
        traceback.print_exc()
    threading._shutdown()  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    return status


def _as_main(first, *rest):
    import runpy

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if first == "-m":
            sys.argv, sys.path[:0] = list(rest), [os.getcwd()]
            runpy._run_module_as_main(rest[0])
        elif first == "-c":
            sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv, sys.path[:0] = [first, *rest], [str(Path(first).resolve().parent)]
            main.__file__ = first
            exec(compile(Path(first).read_text(), first, "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


if __name__ == "__main__":
    serve(sys.argv[1:])
