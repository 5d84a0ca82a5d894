"""Rewards that begin before their call: the same scores, nothing left running, however it ends."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from grpo_kit.rewards import CodeFormat, CodeRunner, CodeRuns, CodeTests, Gated, WeightedSum
from grpo_kit.rewards.ahead import begin, drop, that_begin
from grpo_kit.rewards.code_runner import _PROGRAMS_KEPT
from grpo_kit.rewards.code_tests import Job
from grpo_kit.rewards.scoring import PendingScores
from grpo_kit.sandbox import PythonBatch, SandboxUnavailableError, isolation

UNSAFE = isolation() is None
DOUBLE = json.dumps([[[2], 4], [[3], 6]])
BLOCKS = [
    f"{code}\n```"
    for code in (
        "def f(n):\n    return n * 2",
        "def f(n):\n    return 4",
        "def f(n):\n    return x",
        "def f(n:",
        "import time\ndef f(n):\n    time.sleep(0.2)\n    return n + n",
        "def f(n):\n    return n * 2",
        "no block ```\n```",
    )
]


def runner(**limits):
    return CodeRunner(allow_unsafe=UNSAFE, **limits)


def columns(rows):
    return {"prefill": ["```python\n"] * rows, "tests": [DOUBLE] * rows, "entry_point": ["f"] * rows}


def programs():
    """Programs that run now, by their process ids: what launchers' children run in their boxes."""
    mine = psutil.Process().children(recursive=True)
    found = []
    for process in mine:
        try:
            found += [process.pid] * any("program.py" in word for word in process.cmdline())
        except psutil.Error:
            pass
    return found


def wait_until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def given_to_the_sandbox(monkeypatch):
    seen, real = [], PythonBatch.add
    monkeypatch.setattr(
        PythonBatch, "add", lambda self, programs: seen.extend(programs) or real(self, programs)
    )
    return seen


def test_scores_are_the_same_begun_or_not(given_to_the_sandbox):
    plain = [reward(BLOCKS, **columns(7)) for reward in (CodeRuns(runner()), CodeTests(runner()))]
    given_to_the_sandbox.clear()
    shared = runner()
    rewards = [CodeRuns(shared), CodeTests(shared)]
    for row, text in enumerate(BLOCKS):  # one after the other, as they end
        begin(rewards, [text], workers=1, **columns(1))
        if row == 3:
            time.sleep(0.3)
    begin(rewards, [], workers=1, **columns(0))
    begun = len(given_to_the_sandbox)
    assert begun == 5  # one is there twice, one is no block
    assert [reward(BLOCKS, **columns(7)) for reward in rewards] == plain
    assert len(given_to_the_sandbox) == begun, "nothing ran again"
    assert shared._batch is None and not shared._running and not shared._ahead


def test_what_is_begun_runs_while_nobody_looks():
    reward = CodeTests(runner(seconds=5))
    sleeps = "import time\ndef f(n):\n    time.sleep(0.3)\n    return n * 2\n```"
    reward(BLOCKS[:1], **columns(1))  # a launcher is there
    begin([reward], [sleeps], workers=1, **columns(1))
    time.sleep(1.5)
    started = time.monotonic()
    assert reward([sleeps], **columns(1)) == [1.0]
    assert time.monotonic() - started < 0.4  # its two calls sleep 0.6 s


def test_the_call_has_the_machine_for_itself(monkeypatch):
    """Also where everything was begun, with one core left over, and nothing is new."""
    shared, workers, real = runner(seconds=5), [], PythonBatch.results

    def results(self, numbers):
        workers.append(self.workers)
        return real(self, numbers)

    monkeypatch.setattr(PythonBatch, "results", results)
    sleeps = "import time\ntime.sleep(0.3)\ndef f(n):\n    return n * 2\n```"
    begin([CodeTests(shared)], [sleeps], workers=1, **columns(1))
    assert CodeTests(shared)([sleeps], **columns(1)) == [1.0]
    assert workers == [None]


def test_other_tests_or_another_prefill_are_another_program():
    reward = CodeTests(runner())
    begin([reward], [BLOCKS[0]], workers=2, **columns(1))
    other = columns(1) | {"tests": [json.dumps([[[2], 5]])]}
    assert reward([BLOCKS[0]], **other) == [0.0]
    assert reward([BLOCKS[0]], **columns(1) | {"prefill": ["```python\ndef g(): pass\n"]}) == [1.0]
    assert reward([BLOCKS[0]], **columns(1)) == [1.0]
    reward.drop()


def test_a_time_limit_met_ahead_is_tried_again_at_the_call(given_to_the_sandbox):
    """As it is on a machine that is busy decoding: the first run of it is stopped from outside."""
    reward = CodeTests(runner(seconds=0.6))
    slow = "import time\nbegan = time.monotonic()\ndef f(n):\n    time.sleep(0.1)\n    return n * 2\n```"
    begin([reward], [slow], workers=1, **columns(1))
    wait_until(programs)
    os.kill(programs()[0], signal.SIGSTOP)
    time.sleep(0.8)
    begin([reward], [], workers=1, **columns(0))
    assert reward([slow], **columns(1)) == [1.0]
    assert len(given_to_the_sandbox) == 2


def test_one_that_never_ends_scores_zero_and_is_stopped():
    reward = CodeTests(runner(seconds=0.5))
    forever = "while True: pass\ndef f(n): return n\n```"
    begin([reward], [forever], workers=1, **columns(1))
    assert reward([forever], **columns(1)) == [0.0]
    assert not programs()


@pytest.mark.parametrize("how", ["drop", "interrupt in the call", "exception of another"])
def test_nothing_is_left_running(how, monkeypatch):
    reward = CodeTests(runner(seconds=60))
    forever = "while True: pass\n```"
    begin([reward], [forever, *BLOCKS[:2]], workers=1, **columns(3))
    wait_until(programs)
    if how == "drop":
        drop([reward])
    elif how == "exception of another":
        bad = columns(1) | {"entry_point": [None]}
        begin([reward], [BLOCKS[1]], workers=1, **bad)  # says nothing, and stops what was begun
        with pytest.raises(ValueError, match="row 0: entry_point=None"):
            reward([BLOCKS[1]], **bad)
    else:
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                reward([forever], **columns(1))
        finally:
            signal.signal(signal.SIGALRM, previous)
    wait_until(lambda: not programs(), 3)
    assert reward.runner._batch is None and not reward.runner._running and not reward.runner._ahead
    assert reward(BLOCKS[:2], **columns(2)) == [1.0, 0.5]


def test_an_interrupt_at_any_moment_leaves_nothing():
    """Pressed after 0 to 60 ms, in begin, between calls or in the call."""
    for press in range(12):
        reward = CodeTests(runner(seconds=30))
        texts = [f"# {press}\n{text}" for text in BLOCKS[:5]]
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.005 * press)
            for text in texts:
                begin([reward], [text], workers=2, **columns(1))
            reward([*texts, "while True: pass\n```"], **columns(6))
        except KeyboardInterrupt:
            drop([reward])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        wait_until(lambda: not programs(), 5)
        assert reward(texts[:2], **columns(2)) == [1.0, 0.5]


def test_a_kill_ends_what_was_begun(tmp_path):
    """No handler runs: the launchers see that their trainer is gone."""
    code = (
        "from grpo_kit.rewards import CodeRunner; from grpo_kit.rewards.code_tests import Job; import time\n"
        f"runner = CodeRunner(seconds=60, allow_unsafe={UNSAFE})\n"
        "runner.begin([Job('while True: pass', 'f', ())], workers=1); print('begun', flush=True); time.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "begun\n"
    parent = psutil.Process(trainer.pid)
    wait_until(lambda: any("program.py" in " ".join(p.cmdline()) for p in parent.children(recursive=True)))
    below = parent.children(recursive=True)
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_no_more_is_begun_than_is_kept():
    shared = runner(seconds=30)
    jobs = [Job(f"x = {i}", None, ()) for i in range(_PROGRAMS_KEPT + 40)]
    shared.begin(jobs, workers=1)
    shared.begin(jobs, workers=1)
    assert len(shared._running) + len(shared._ahead) == _PROGRAMS_KEPT
    shared.drop()
    assert not shared._running and not shared._ahead


def test_without_a_sandbox_only_the_call_says_so(monkeypatch):
    def refuse(self, programs):
        raise SandboxUnavailableError("no isolation here")

    monkeypatch.setattr(PythonBatch, "add", refuse)
    reward = CodeTests(runner())
    begin([reward], BLOCKS[:1], workers=1, **columns(1))
    with pytest.raises(SandboxUnavailableError):
        reward(BLOCKS[:1], **columns(1))


def test_parts_are_found_inside_what_is_made_of_them():
    shared = runner()
    runs, tests = CodeRuns(shared), CodeTests(shared)
    whole = WeightedSum([(Gated(tests, on=CodeFormat()), 0.75), (runs, 0.25)])
    found = that_begin([PendingScores(whole, "whole"), tests, CodeFormat()])
    assert len(found) == 2 and runs in found and tests in found
    assert that_begin([CodeFormat(), lambda completions, **columns: [1.0]]) == []
