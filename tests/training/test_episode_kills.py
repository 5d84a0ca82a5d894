"""An EpisodeTrainer killed or stopped at any moment goes on to the weights, rows and episodes of an untouched run."""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_episodes import CALLS, MOMENTS, SAVING, Letters, act_at, make, task, whole_episodes
from tiny_run import press_stop, same, weights

from grpo_kit.episodes.observation import View
from grpo_kit.record.files import read_metrics

STEPS = 6
LIVES = """
import json, os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import torch
from tiny_episodes import act_at, make, whole_episodes
from tiny_run import weights
torch.set_num_threads(1)  # forked processes and thread pools do not mix

def live(folder, fault):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    begun = folder.exists()
    trainer = make(folder, max_steps=int(sys.argv[5]), save_strategy="steps", save_steps=2)
    if fault:
        act_at(trainer, act=lambda: os.kill(os.getpid(), signal.SIGKILL), **fault)
    trainer.train(resume_from_checkpoint=begun or None)
    torch.save(weights(trainer), folder / "weights.pt")
    os._exit(0)

place = Path(sys.argv[3])
assert live(place / "untouched", None) == 0
for fault in json.loads(sys.argv[4]):
    assert live(place / "killed", fault) == -signal.SIGKILL, fault
    whole_episodes(place / "killed")
assert live(place / "killed", None) == 0
"""


def faults(seed):
    """Kills in the order in which they come: in an episode, in a backward pass, in a save, and six anywhere."""
    draw = random.Random(seed)
    moments = ["environment", "backward", draw.choice(list(SAVING)), *draw.choices(list(MOMENTS), k=6)]
    found = []
    for moment in moments:
        # Before step 2 there is no checkpoint to go on from; what is saved is step 4 or 6.
        step = draw.choice([4, 6]) if moment in SAVING else draw.randrange(2, STEPS)
        if moment == "row":  # it is written as its step is done
            step += 1
        call = draw.randint(1, CALLS.get(moment, 1))
        found.append({"moment": moment, "step": step, "call": call, "after": draw.random() < 0.5})
    # A save comes at the end of its step, what has the same number of steps behind it after that.
    order = {name: place for place, name in enumerate(["row", *SAVING])}
    return sorted(found, key=lambda fault: (fault["step"], order.get(fault["moment"], len(order))))


def same_record(a, b):
    """metrics.csv but for times, and completions.parquet, of two runs."""
    one, other = (read_metrics(folder) for folder in (a, b))
    names = sorted(name for name in one if "seconds" not in name and name != "step_time")
    pd.testing.assert_frame_equal(one[names], other[names], check_exact=True)
    assert whole_episodes(a).to_csv() == whole_episodes(b).to_csv()
    assert len(pd.read_parquet(b / "completions.parquet")) == len(whole_episodes(a)), "no turn twice"


def test_killed_at_random_moments_and_resumed_it_is_as_never_killed(tmp_path):
    here = Path(__file__).parent
    plan = json.dumps(faults(seed=0))
    command = [sys.executable, "-c", LIVES, str(here.parent), str(here), str(tmp_path), plan, str(STEPS)]
    done = subprocess.run(command, cwd=here.parents[1], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    untouched, killed = (tmp_path / name for name in ("untouched", "killed"))
    assert same(*(torch.load(folder / "weights.pt") for folder in (untouched, killed)))
    assert pd.read_csv(killed / "metrics.csv")["step"].tolist() == list(range(1, STEPS + 1))
    same_record(untouched, killed)
    assert not (killed / ".saving").exists()


# ---- the stop button ------------------------------------------------------------------------------------------

RUNS = {  # what is trained
    "one prompt a turn": {},
    "a buffer for two steps": {"num_iterations": 2},
    "chat, four micro-batches": {
        "of": task(view=View(chat=True)), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    },
}  # fmt: skip
PRESSED = ["reset", "environment", "model", "packing", "optimizer", "completions"]


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory):
    made = {}

    def run(name):
        if name not in made:
            made[name] = make(tmp_path_factory.mktemp("unstopped") / "run", max_steps=4, **RUNS[name])
            made[name].train()
        return made[name]

    return run


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", RUNS)
def test_stopped_at_random_calls_it_goes_on_as_never_stopped(name, seed, unstopped, tmp_path, monkeypatch):
    draw = random.Random(f"{name} {seed}")
    trainer, pressed = make(tmp_path / "run", max_steps=4, **RUNS[name]), []
    for step in sorted(draw.sample([0, 2] if "two steps" in name else range(4), 2)):  # a buffer's first
        moment = draw.choice(PRESSED)
        call, after = draw.randint(1, CALLS.get(moment, 1)), draw.random() < 0.5

        def press(fault=(moment, step, call, after)):
            pressed.append(fault)
            press_stop()

        act_at(trainer, moment, press, step=step, call=call, after=after, patch=monkeypatch.setattr)
    for _ in range(3):
        trainer.train(on_stop="return")
    assert trainer.state.global_step == 4 and len(pressed) == 2, pressed
    straight = unstopped(name)
    assert same(weights(straight), weights(trainer)), pressed
    same_record(Path(straight.args.output_dir), tmp_path / "run")


class Slow(Letters):
    """The first step stops the run, and is still at work when the run goes on."""

    stopped = threading.Event()

    def step(self, text):
        if not Slow.stopped.is_set():
            Slow.stopped.set()
            Slow.goes_on = threading.Event()
            press_stop()
            Slow.goes_on.wait(30)
        elif not Slow.goes_on.is_set():  # all have been reset
            Slow.goes_on.set()
            time.sleep(0.3)
        return super().step(text)


def test_what_a_stop_left_at_work_does_not_play_in_the_next_episodes(tmp_path):
    straight = make(tmp_path / "a", of=task(seconds=60.0), max_steps=2)
    straight.train()
    trainer = make(tmp_path / "b", of=task(environment=Slow, seconds=60.0), max_steps=2)
    trainer.train(on_stop="return")
    assert trainer.interrupted and trainer.state.global_step == 0
    trainer.train(on_stop="return")
    assert same(weights(straight), weights(trainer))
    same_record(tmp_path / "a", tmp_path / "b")
