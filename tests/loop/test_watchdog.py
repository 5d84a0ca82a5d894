"""A step that hangs says so while it hangs, and where; one that takes its time says nothing."""

import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import forked
import pytest
from loop_runs import make, task

from grpo_kit.loop.protocols import Hook
from grpo_kit.record.files import read_metrics
from grpo_kit.trainer.watch_run import Watchdog, where

ROOT = Path(__file__).parents[2]
QUICK = {"factor": 1.0, "at_least": 0.2}


def slow_in(step, seconds=1.6):
    """A reward that takes its time in one step."""
    called = []

    def waits(completions, **columns):
        called.append(1)
        time.sleep(seconds if len(called) == step else 0)
        return [0.0] * len(completions)

    return waits


def with_reward(reward):
    made = task()
    return replace(
        made, rewards=[*made.rewards, reward], reward_weights=[*made.reward_weights, 0.0]
    )


def test_a_reward_that_hangs_is_named_while_it_hangs(tmp_path, capsys):
    make(tmp_path / "run", hooks=[Watchdog(**QUICK)], task=with_reward(slow_in(3))).train()
    said = capsys.readouterr().out
    found = re.findall(r"Step 3 has taken ([\d.]+) s .*still in (.*?)\. Interrupt", said)
    assert len(found) >= 2 and float(found[1][0]) == pytest.approx(
        2 * float(found[0][0]), rel=0.01
    )
    assert re.fullmatch(r"reward 'waits' \(waits, line \d+ of test_watchdog.py\)", found[0][1])
    assert "Step 3 is done, after 2 s." in said
    assert "in waits" in (tmp_path / "run" / "stack.txt").read_text()


def test_a_run_in_time_says_nothing_and_leaves_nothing(tmp_path, capsys):
    before = {*threading.enumerate()}  # an earlier test's may be among them
    make(tmp_path / "run", hooks=[Watchdog()]).train()
    assert (
        "has taken" not in capsys.readouterr().out
        and not (tmp_path / "run" / "stack.txt").exists()
    )
    assert not [t for t in {*threading.enumerate()} - before if isinstance(t, threading.Timer)]


def test_sampling_and_the_update_are_told_apart(tmp_path, capsys):
    trainer = make(tmp_path / "run", hooks=[Watchdog(**QUICK)], steps=1)
    trainer.hooks[0]._seconds.append(0.01)
    sample, gradients = trainer.sample, trainer.update.gradients

    def late(way, seconds):
        def call(*given):
            time.sleep(seconds)
            return way(*given)

        return call

    trainer.sample, trainer.update.gradients = late(sample, 0.7), late(gradients, 2.5)
    trainer.train()
    said = capsys.readouterr().out
    assert "still in sampling (call, line" in said and "still in the update (call, line" in said


def test_after_a_stop_nobody_watches(tmp_path, capsys):
    class Stop(Hook):
        def before_step(self, trainer):
            raise KeyboardInterrupt

    trainer = make(tmp_path / "run", hooks=[Watchdog(**QUICK), Stop()])
    trainer.hooks[0]._seconds.append(0.01)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    time.sleep(0.4)
    assert "has taken" not in capsys.readouterr().out


def test_a_run_that_goes_on_knows_how_long_steps_take(tmp_path):
    make(tmp_path / "run", steps=2, save_steps=1).train()
    resumed = make(tmp_path / "run", hooks=[Watchdog()], steps=4, save_steps=1)
    resumed.train(resume=True)
    took = read_metrics(tmp_path / "run")["step_seconds"].tolist()
    assert list(resumed.hooks[0]._seconds) == took and len(took) == 4


HANGS = """
import re, sys
sys.path[:0] = [{tests!r}, {root!r}]
from dataclasses import replace
from loop_runs import make, task
from grpo_kit.trainer.watch_run import Watchdog

def matches(completions, **columns):
    return [float(bool(re.fullmatch(r"(a+)+b", "a" * 60))) for _ in completions]

made = task()
made = replace(made, rewards=[*made.rewards, matches], reward_weights=[*made.reward_weights, 0.0])
make({folder!r}, hooks=[Watchdog(stack_after=1.0)], task=made).train()
"""


def test_where_python_itself_is_held_the_stack_is_written(tmp_path):
    """A regular expression that never ends lets no other thread run: no line, but the stack says which reward."""
    folder = tmp_path / "run"
    code = HANGS.format(tests=str(ROOT / "tests"), root=str(ROOT), folder=str(folder))
    running = forked.start("-c", code)
    try:
        for _ in range(600):
            time.sleep(0.1)
            if (folder / "stack.txt").exists() and "matches" in (
                folder / "stack.txt"
            ).read_text():
                break
        else:
            pytest.fail("no stack after a minute")
    finally:
        running.kill()
        running.wait()


def test_elsewhere_is_a_hook():
    assert where(threading.get_ident()).startswith("a hook (test_elsewhere_is_a_hook, line")
    with pytest.raises(ValueError, match="at_least=0 must be a number above 0"):
        Watchdog(at_least=0)
