"""Two processes end together: a stop, an error, a full memory or disk in one of them is met by both, and none waits.

The cases are in ranks_faults.py, where each process checks what it sees.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from ranks_run import launch

slow = pytest.mark.skipif(not os.environ.get("KIT_SLOW_TESTS"), reason="minutes; KIT_SLOW_TESTS=1 runs it")
FAULTS = Path(__file__).with_name("ranks_faults.py")


KILLED = """
import sys
from pathlib import Path
import torch
from ranks_run import state_of
from tiny_run import make

torch.set_num_threads(1)
folder = Path(sys.argv[1])
how = dict(per_device_train_batch_size=4, max_steps=6, learning_rate=1e-3, save_strategy="steps", save_steps=1)
how |= dict(num_iterations=2, save_total_limit=2)


def slow(completions, **columns):  # so that a kill finds the run under way
    import time
    time.sleep(0.15)
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


for name in sys.argv[3:]:
    trainer = make("kit", folder / name, rewards=slow, **how)
    trainer.train(resume_from_checkpoint=sys.argv[2] == "resume" or None)
    torch.save(state_of(trainer), folder / f"{name} {trainer.ranks.index}.pt")
"""


def killed_after(folder, checkpoint, seconds, rank):
    """Kill -9 one of the processes, so many seconds after the checkpoint is there."""

    def watch(run):
        until = time.monotonic() + 150
        while not (folder / checkpoint).is_dir():
            assert run.poll() is None and time.monotonic() < until, run.communicate()[0][-3000:]
            time.sleep(0.01)
        time.sleep(seconds)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        for child in children:
            if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{child}/environ").read_text():
                os.kill(int(child), signal.SIGKILL)

    return watch


def test_killed_and_resumed(tmp_path):
    """The other process does not wait, torchrun says who was killed; the last whole checkpoint goes on bit for bit."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    code, out = launch(  # two runs, one after the other; the second is killed
        script, tmp_path, "new", "whole", "run", check=False, seconds=180,
        started=killed_after(tmp_path / "run", "checkpoint-3", 0.1, rank=1),
    )  # fmt: skip
    assert code != 0 and "SIGKILL" in out, out[-4000:]
    assert not list(tmp_path.glob("run *.pt")), "killed before its end"
    launch(script, tmp_path, "resume", "run")
    whole = [torch.load(tmp_path / f"whole {rank}.pt") for rank in (0, 1)]
    for rank in (0, 1):
        weights = torch.load(tmp_path / f"run {rank}.pt")
        assert all(torch.equal(weights[n], whole[rank][n]) for n in weights)


@pytest.mark.parametrize(
    "cases",
    [
        ["stops", "stops_in_a_buffer", "stop_at_the_optimizer"],
        ["reward_that_raises", "out_of_memory", "disk", "half_a_step"],
        ["changes", "pause_and_stop", "held_out", "first_contact"],
        pytest.param(["many_stops"], marks=slow),
    ],
    ids=" ".join,
)
def test_what_one_meets_both_meet(cases, tmp_path):
    out = launch(FAULTS, tmp_path, *cases, seconds=1800 if cases == ["many_stops"] else 300)[1]
    for case in cases:
        assert {int(rank) for rank in re.findall(rf"{case} holds in process (\d)", out)} == {0, 1}, out[
            -4000:
        ]
