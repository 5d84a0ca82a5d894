"""An exact what-if: both sides share prompts and random numbers, and differ by the change alone."""

import json

import numpy as np
import pytest
import torch
from loop_runs import SMALL
from safetensors.torch import load_file

import grpo_kit as kit
from grpo_kit.record.files import RunFolderError, read_completions, read_metrics

OF_A_RUN = SMALL | {"steps": 5, "save_steps": 2, "save_total_limit": 9}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = kit.preset("smoke", **OF_A_RUN)
    task = config.make_task()
    model, tokenizer = kit.load_policy(config.model, seed=config.seed, quiet=True)
    folder = tmp_path_factory.mktemp("branched") / "run"
    trainer = kit.GRPOTrainer(
        model, task, config, tokenizer=tokenizer, folder=folder, live=None
    )
    trainer.train()
    trainer.save_model(folder / "model")
    return folder


def lines(folder, first, last):
    table = read_completions(folder)
    return table[table["step"].between(first, last)][
        ["step", "group", "prompt", "completion"]
    ].values.tolist()


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def test_a_change_that_is_none_is_the_run_itself_bit_for_bit(run):
    """The rate of before, said again: every completion and every weight is the run's own."""
    found = kit.branch(run, 3, learning_rate=OF_A_RUN["learning_rate"])
    one, other = found.folders
    assert one == run and found.step == 2 and other.name == "run-from-2"
    assert lines(one, 1, 5) == lines(other, 1, 5)
    assert all(torch.equal(weights(one)[name], w) for name, w in weights(other).items())
    assert found.rewards.value == 0 and found.comparison.fixed == found.comparison.broken == 0


def test_a_change_counts_from_the_step_on(run):
    before = read_metrics(run)
    found = kit.branch(run, 4, temperature=0.2)
    _, changed = found.folders
    assert (
        found.step == 4
        and lines(run, 1, 4) == lines(changed, 1, 4)
        and lines(run, 5, 5) != lines(changed, 5, 5)
    )
    prompts = [[row[:3] for row in lines(folder, 5, 5)] for folder in (run, changed)]
    assert prompts[0] == prompts[1]  # the same questions, answered otherwise
    assert read_metrics(changed)["temperature"].tolist()[-2:] == [1.0, 0.2]
    assert found.rewards.n == OF_A_RUN["prompts_per_step"]
    one, other = (
        read_completions(folder).query("step == 5")["reward"].mean() for folder in found.folders
    )
    assert found.rewards.value == pytest.approx(other - one)
    assert np.array_equal(before, read_metrics(run), equal_nan=True)  # the run is not touched
    assert "From step 4 on temperature=0.2" in repr(found) and found.plot().axes[0].lines
    tree = kit.branches(run)
    assert (
        f"└─ from step 4: temperature=0.2   {changed} (5 steps" in tree
        or "├─ from step 4: temperature=0.2" in tree
    )


def test_a_run_that_was_stopped_goes_on_in_a_branch(run, tmp_path):
    import shutil

    half = tmp_path / "half"
    shutil.copytree(
        run, half, ignore=shutil.ignore_patterns("model", "checkpoint-4", "checkpoint-5")
    )
    kept = [
        line
        for line in (run / "metrics.jsonl").read_text().splitlines(True)
        if json.loads(line)["step"] <= 3
    ]
    (half / "metrics.jsonl").write_text("".join(kept))
    found = kit.branch(half, 2, learning_rate=2e-2)
    assert [path.name for path in found.folders] == ["half-from-2", "half-from-2-2"]
    assert all(
        torch.equal(weights(run)[name], w) for name, w in weights(found.folders[0]).items()
    )
    assert kit.branches(half).count("─ from step 2") == 2 and "as it was" in kit.branches(half)


def test_what_cannot_be_branched_is_refused_before_anything_is_written(run):
    there = sorted(path.name for path in run.parent.iterdir())
    with pytest.raises(ValueError, match="changes is empty"):
        kit.branch(run, 2)
    with pytest.raises(ValueError, match="group_size=8 is for a new run; what can change:"):
        kit.branch(run, 2, group_size=8)
    with pytest.raises(ValueError, match="learning_rate=-1"):
        kit.branch(run, 2, learning_rate=-1)
    with pytest.raises(
        RunFolderError, match=r"no whole checkpoint up to step 1; it has \[2, 4"
    ):
        kit.branch(run, 1, learning_rate=1e-3)
    with pytest.raises(RunFolderError, match="holds no run"):
        kit.branches(run / "model")
    assert sorted(path.name for path in run.parent.iterdir()) == there
