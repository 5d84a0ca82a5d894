"""After a restart: the run of a name that can go on is found, and goes on."""

import pytest
from loop_runs import make

from grpo_kit import unfinished_run
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.record._run_folder import alone


class StopAfter(Hook):
    def __init__(self, step):
        self.step = step

    def after_step(self, trainer, row, batch):
        if trainer.step == self.step:
            raise KeyboardInterrupt


def stopped(folder, step):
    with pytest.raises(Stopped):
        make(folder, hooks=[StopAfter(step)]).train()


def test_the_newest_run_that_can_go_on_is_found(tmp_path):
    assert unfinished_run(tmp_path, "run") is None
    stopped(tmp_path / "run", 1)
    stopped(tmp_path / "run-2", 2)
    make(tmp_path / "run-3").train()  # to its end
    (tmp_path / "run-4").mkdir()
    (tmp_path / "run-4" / "metrics.jsonl").write_text("not the kit's\n")
    assert unfinished_run(tmp_path, "run") == tmp_path / "run-2"
    with alone(tmp_path / "run-2"):
        assert unfinished_run(tmp_path, "run-2") is None, "it is being trained"
    make(tmp_path / "run-2").train(resume=True)
    assert unfinished_run(tmp_path, "run") == tmp_path / "run"
    (tmp_path / "run" / "run.json").write_text("{")
    assert unfinished_run(tmp_path, "run") is None
    make(tmp_path / "run-2", steps=6).train(resume=True)
    assert unfinished_run(tmp_path, "run") is None
