"""The sandbox with ordinary programs: results, limits, batches, and what is left behind (nothing)."""

import asyncio
import glob
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

from grpo_kit.more.code import sandbox
from grpo_kit.more.code.sandbox import (
    isolation,
    program_watch,
    run_python,
    run_python_batch,
    syscalls,
)
from grpo_kit.more.code.sandbox.pool import LauncherError, Pool

ROOT = Path(__file__).parents[2]
# seconds: nothing here is meant to reach it
LIMITS = {"seconds": 20.0, "memory_mb": 256, "output_kb": 64}
needs_isolation = pytest.mark.skipif(
    isolation() is None, reason="nothing here isolates programs"
)

ORDINARY = {
    "prints": ("print('x', 1.5, [1])", "", "ok", 0),
    "reads": ("print(sum(map(int, open(0))))", "1\n2\n3\n", "ok", 0),
    "unicode": ("print(input()[::-1], 'ä漢😀')", "äöü😀\n", "ok", 0),
    "standard library": (
        "import json, re, math, random, itertools, collections, datetime, decimal, hashlib, heapq, sqlite3\n"
        "import zlib, uuid, functools, string, typing, dataclasses, bisect, fractions, csv, io, enum\n"
        "random.seed(1); print(random.random(), hashlib.sha256(b'x').hexdigest(), decimal.Decimal(1) / 7)\n"
        "print(sqlite3.connect(':memory:').execute('select 1').fetchall(), {'b', 'a', 'c'})",
        "",
        "ok",
        0,
    ),
    "asyncio": ("import asyncio\nasync def f(): await asyncio.sleep(0)\nasyncio.run(f())", "", "ok", 0),
    "files in its folder": (
        "import os, tempfile, shutil\nopen('a', 'w').write('x'); os.mkdir('d'); shutil.copy('a', 'd/b')\n"
        "os.rename('a', 'c'); print(sorted(os.listdir('.')), open('d/b').read())\n"
        "with tempfile.TemporaryDirectory() as t: print(os.path.isdir(t))\n"
        "with tempfile.NamedTemporaryFile('w') as f: f.write('1')\nprint(open(os.devnull).read() == '')",
        "",
        "ok",
        0,
    ),
    "a class and a pickle": ("import pickle\nclass A: x = 1\nprint(pickle.loads(pickle.dumps(A())).x)", "", "ok", 0),
    "exception": ("def f():\n    return [][0]\nf()", "", "error", 1),
    "no syntax": ("def f(:", "", "error", 1),
    "exit code": ("import sys; sys.exit(3)", "", "error", 3),
    "exit message": ("import sys; sys.exit('gave up')", "", "error", 1),
    "end of input": ("input()", "", "error", 1),
    "words about memory": ("import sys; print('MemoryError', file=sys.stderr)", "", "ok", 0),
    "nothing": ("", "", "ok", 0),
    "NULs": ("print('\0')", "", "error", 1),
    "lone surrogate": ("print('\udc80')", "", "error", 1),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", "", "killed", -signal.SIGSEGV),
}  # fmt: skip


def results(kind: str) -> dict:
    pool = Pool(kind)
    programs = [
        (code.encode("utf-8", "surrogatepass"), stdin.encode())
        for code, stdin, *_ in ORDINARY.values()
    ]
    try:
        found = pool.run(programs, LIMITS, 2)
    except LauncherError as problem:
        pytest.skip(f"no {kind} here: {problem}")
    finally:
        pool.close()
    results = [sandbox._result(*one) for one in found]
    if all(b"bwrap" in err for _, _, err in found):
        pytest.skip(f"no {kind} here: {results[0].stderr}")
    return dict(zip(ORDINARY, results, strict=True))


@pytest.mark.parametrize("kind", ["sandlock", "bubblewrap"])
def test_ordinary_programs_give_what_plain_python_gives(kind, tmp_path):
    found = results(kind)
    for name, (code, stdin, status, exit_code) in ORDINARY.items():
        result = found[name]
        assert (name, result.status, result.exit_code) == (name, status, exit_code), result
        if "\0" in code or "\udc80" in code:
            assert "SyntaxError" in result.stderr
            continue
        folder = tmp_path / name
        folder.mkdir()
        plain = subprocess.run(
            [sys.executable, "-IBX", "utf8", "-c", "import sys; exec(compile(sys.argv[1], 'p', 'exec'))", code],
            input=stdin, capture_output=True, text=True, cwd=folder, env={"PYTHONHASHSEED": "0"},
        )  # fmt: skip
        if "{'b'" not in code:  # the order of a set is fixed in the sandbox, not with -I
            assert (name, result.stdout) == (name, plain.stdout)
        assert result.stderr.strip().splitlines()[-1:] == plain.stderr.strip().splitlines()[-1:]


@needs_isolation
def test_what_an_exception_looks_like():
    result = run_python("import json\ndef f():\n    json.loads('{')\nf()")
    assert result.status == "error" and result.exit_code == 1 and not result.ok
    assert 'File "program.py", line 4, in <module>' in result.stderr
    assert (
        result.stderr.strip()
        .splitlines()[-1]
        .startswith("json.decoder.JSONDecodeError: Expecting property name")
    )


@needs_isolation
def test_the_same_program_gives_the_same_output():
    code = "print({'a', 'b', 'c', 'd'}, hash('x'))"
    assert len({run_python(code).stdout for _ in range(3)}) == 1


@needs_isolation
def test_each_limit_is_reported_as_itself():
    programs = [
        "import time; time.sleep(60)",
        "x = bytearray(10**9)",
        "print('x' * 10**6)",
        "import os; os.kill(os.getpid(), 9)",
    ]
    found = run_python_batch([(code, "") for code in programs], seconds=1.0)
    assert [result.status for result in found] == ["timeout", "memory", "output", "killed"]
    assert [result.exit_code for result in found] == [None, 1, None, -9]
    assert 1.0 <= found[0].seconds < 3.0
    assert found[2].stdout == "x" * 65536


@needs_isolation
def test_limits_are_the_callers():
    assert run_python("x = bytearray(300 << 20)", memory_mb=1024).ok
    assert run_python("x = bytearray(60 << 20)", memory_mb=64).status == "memory"
    assert run_python("print('x' * 200_000)", output_kb=300).ok
    assert run_python("print('x' * 2000)", output_kb=1).status == "output"
    assert run_python("print(1)", memory_mb=sandbox.SMALLEST_MEMORY_MB).ok


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"seconds": 0}, "seconds is 0"),
        ({"seconds": -1.5}, "seconds is -1.5"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"seconds": float("inf")}, "seconds is inf"),
        (
            {"seconds": 1e300},
            "seconds is 1e.300: a program needs a time limit above 0, and of at most 86400",
        ),
        ({"memory_mb": 8}, "memory_mb is 8.*64 or more"),
        ({"output_kb": 0}, "output_kb is 0"),
    ],
)
def test_limits_that_make_no_sense(named, says):
    with pytest.raises(ValueError, match=says):
        run_python("print(1)", **named)


@pytest.mark.parametrize(
    "programs", [["print(1)"], [("print(1)",)], [("print(1)", 3)], [(b"print(1)", "")]]
)
def test_programs_that_are_none(programs):
    with pytest.raises(ValueError, match=r"programs\[0\] is .* give \(code, stdin\)"):
        run_python_batch(programs)
    with pytest.raises(ValueError, match="workers is 0"):
        run_python_batch([("print(1)", "")], workers=0)
    assert run_python_batch([]) == []


@needs_isolation
def test_stdin_of_any_size():
    text = "äx" * 2_500_000 + "\n"
    assert run_python("print(len(input()))", text, seconds=10).stdout == f"{len(text) - 1}\n"
    assert run_python("print(1)", text, seconds=10).ok
    assert (
        run_python("import sys; print(repr(sys.stdin.read()))", "\udc80\0").stdout
        == "'\\udced\\udcb2\\udc80\\x00'\n"
    )


@needs_isolation
def test_a_batch_keeps_its_order_and_every_core_busy():
    started = time.monotonic()
    # the first ends last
    codes = [f"import time; time.sleep({1.2 - i / 20}); print({i})" for i in range(8)]
    found = run_python_batch([(code, "") for code in codes], workers=8, seconds=20)
    assert [result.stdout for result in found] == [f"{i}\n" for i in range(8)]
    assert time.monotonic() - started < 6  # in turn: 8.2 s of sleep alone
    mixed = run_python_batch(
        [("1/0", ""), ("print(1)", ""), ("while True: pass", "")], seconds=1
    )
    assert [result.status for result in mixed] == ["error", "ok", "timeout"]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def zombies() -> list[str]:
    states = []
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            name, rest = Path(path).read_text().rsplit(")", 1)
        except OSError:
            continue
        if rest.split()[:2] == ["Z", str(os.getpid())]:
            states.append(name)
    return states


@needs_isolation
def test_nothing_is_left_after_two_hundred_runs():
    run_python_batch([("print(1)", "")] * 4)
    before = open_files(), threading.active_count()
    statuses = {r.status for r in run_python_batch([("print(1)", ""), ("1/0", "")] * 100)}
    assert statuses == {"ok", "error"}
    assert (open_files(), threading.active_count()) == before
    assert zombies() == []


@needs_isolation
def test_a_closed_pool_leaves_nothing():
    pool = Pool(isolation())
    pool.run([(b"open('x', 'w')", b"")] * 2, LIMITS, 2)
    launchers = list(pool._idle)
    assert len(launchers) == 2 and all(os.path.isdir(launcher.root) for launcher in launchers)
    before = open_files()
    pool.close()
    assert not any(os.path.exists(launcher.root) for launcher in launchers)
    assert all(launcher.process.returncode == 0 for launcher in launchers)
    assert open_files() == before - 4


@needs_isolation
def test_from_threads_and_from_a_running_event_loop():
    found = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: run_python(f"print({i})").stdout}))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: f"{i}\n" for i in range(6)}

    async def as_in_a_notebook():
        return run_python("print(1)").stdout, await asyncio.to_thread(
            lambda: run_python("print(2)").stdout
        )

    assert asyncio.run(as_in_a_notebook()) == ("1\n", "2\n")


@needs_isolation
def test_after_a_fork_both_go_on():
    assert run_python("print(1)").ok
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, run_python("print(2)").stdout.encode())
            sandbox.pool._close_all()
        finally:
            os._exit(0)
    os.close(writer)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(reader, 10) == b"2\n"
    os.close(reader)
    assert run_python("print(3)").stdout == "3\n"


@needs_isolation
def test_a_launcher_that_died_is_replaced():
    pool = Pool(isolation())
    pool.run([(b"print(1)", b"")], LIMITS, 1)
    (launcher,) = pool._idle
    launcher.process.kill()
    launcher.process.wait()
    fields, out, _ = pool.run([(b"print(2)", b"")], LIMITS, 1)[0]
    assert (fields["status"], out) == ("ok", b"2\n")
    assert not os.path.exists(launcher.root)
    pool.close()


@needs_isolation
def test_a_launcher_that_dies_before_it_is_ready_is_no_result(monkeypatch, tmp_path):
    pool = Pool(isolation())
    (tmp_path / "launcher.py").write_text("import sys; sys.exit(1)")
    monkeypatch.setattr(sandbox.pool, "HERE", tmp_path)
    with pytest.raises(LauncherError, match="has ended"):
        pool.run([(b"print(1)", b"")], LIMITS, 1)
    pool.close()


@needs_isolation
def test_a_launcher_that_is_killed_costs_its_program_nothing():
    pool = Pool(isolation())
    pool.run([(b"", b"")], LIMITS, 1)
    (launcher,) = pool._idle
    killer = threading.Timer(0.5, launcher.process.kill)
    killer.start()
    fields, out, _ = pool.run([(b"import time; time.sleep(1); print(2)", b"")], LIMITS, 1)[0]
    killer.join()
    assert (fields["status"], out) == ("ok", b"2\n")
    pool.close()


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(number) for number in path.read_text().split()] if path.exists() else []


@pytest.mark.parametrize(
    "machine, has_one", [("x86_64", True), ("aarch64", True), ("riscv64", False)]
)
def test_which_machines_have_a_filter_of_system_calls(machine, has_one, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert syscalls.supported() is has_one


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def alone(tmp_path: Path) -> Path:
    """A folder to import the sandbox from without the rest of the package, which takes seconds."""
    package = Path("grpo_kit", "more", "code")
    shutil.copytree(ROOT / package / "sandbox", tmp_path / "alone" / package / "sandbox")
    for folder in (package, *package.parents[:-1]):
        (tmp_path / "alone" / folder / "__init__.py").touch()
    return tmp_path / "alone"


@needs_isolation
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_trainer_that_is_interrupted_or_killed_leaves_nothing_running(how, tmp_path):
    script = """
        import signal, sys
        from grpo_kit.more.code.sandbox import run_python_batch
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        run_python_batch([("print(1)", "")] * 2, workers=2)
        print("started", flush=True)
        try:
            run_python_batch([("while True: pass", "")] * 6, workers=2, seconds=60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            sys.stdin.read()
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(alone(tmp_path))},
    )  # fmt: skip
    assert trainer.stdout.readline() == "started\n"
    time.sleep(1.0)
    below = [
        pid
        for launcher in children_of(trainer.pid)
        for pid in (launcher, *children_of(launcher))
    ]
    below += [program for pid in below for program in children_of(pid) if program not in below]
    assert len(below) >= 6  # two launchers of two processes, two programs
    trainer.send_signal(how)
    if how == signal.SIGINT:
        assert trainer.stdout.readline() == "interrupted\n"  # and by then all is gone
    give_up = time.monotonic() + (0.1 if how == signal.SIGINT else 10)
    while (left := [pid for pid in below if running(pid)]) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert left == []
    assert list(temporary.iterdir()) == []
    trainer.kill()
    trainer.communicate()


def without_isolation(code: str, tmp_path: Path) -> subprocess.CompletedProcess:
    """Run `code` where neither sandlock can be imported nor bwrap be found."""
    return subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": str(alone(tmp_path)), "PATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip


def test_where_nothing_isolates_it_refuses_and_says_what_to_install(tmp_path):
    done = without_isolation(
        """
        from grpo_kit.more.code.sandbox import SandboxUnavailableError, isolation, run_python, run_python_batch
        assert isolation() is None
        for run in (lambda: run_python("print(1)"), lambda: run_python_batch([("print(1)", "")])):
            try:
                run()
            except SandboxUnavailableError as refusal:
                print(refusal)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("pip install sandlock")
        == done.stdout.count("apt install bubblewrap")
        == 2
    )
    assert "allow_unsafe=True" in done.stdout


def test_unsafe_has_the_limits_without_the_isolation(tmp_path):
    done = without_isolation(
        """
        import os, time
        os.environ["KEY"] = "secret"
        from grpo_kit.more.code.sandbox import run_python, run_python_batch
        codes = [
            "print(input())", "while True: pass", "x = bytearray(10**9)", "print('x' * 10**6)", "1/0",
            "import os; print(os.environ.get('KEY'), os.listdir('.'))",
            "import os, time\\nif os.fork() == 0: os.setsid(); os.fork(); time.sleep(97)\\nprint('left')",
        ]
        found = run_python_batch([(code, "hi") for code in codes], seconds=1.0, allow_unsafe=True)
        print([result.status for result in found])
        print([found[i].stdout for i in (0, 5, 6)])
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['ok', 'timeout', 'memory', 'output', 'error', 'ok', 'ok']",
        r"['hi\n', 'None []\n', 'left\n']",
    ]


def test_emptying_a_folder_follows_no_link(tmp_path):
    outside, top = tmp_path / "outside", tmp_path / "top"
    outside.mkdir()
    (outside / "kept").touch()
    top.mkdir()
    deep = top
    for _ in range(300):
        deep = deep / "d"
        deep.mkdir()
    (top / "link").symlink_to(outside)
    (top / "d" / "link").symlink_to(outside)
    (top / "moved0").mkdir(mode=0)
    os.mkfifo(top / "d" / "fifo")
    os.chmod(top / "d" / "d" / "d", 0)
    program_watch.empty(str(top))
    assert list(top.iterdir()) == [] and list(outside.iterdir()) == [outside / "kept"]


def test_a_folder_is_counted_without_following_links(tmp_path):
    assert not program_watch.over_limit(str(tmp_path), 1000, 10)
    (tmp_path / "up").symlink_to("..")
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert program_watch.over_limit(str(tmp_path), 50_000, 10)
    assert not program_watch.over_limit(str(tmp_path), 500_000, 2)
    (tmp_path / "d").mkdir()
    assert program_watch.over_limit(str(tmp_path), 500_000, 2)


def test_what_vanishes_while_a_folder_is_counted_hides_nothing_else(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(bytes(100_000))

    vanished = Mock(**{"stat.side_effect": FileNotFoundError})
    found = MagicMock(**{"__enter__.return_value": [vanished, *os.scandir(tmp_path)]})
    monkeypatch.setattr(program_watch.os, "scandir", lambda path: found)
    found.__exit__.return_value = None
    assert program_watch.over_limit(str(tmp_path), 250_000, 10)
