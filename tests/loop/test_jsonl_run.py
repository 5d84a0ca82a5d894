"""The record of a run as lines: what readers see while it is written, cut short, resumed, damaged; old folders too."""

import json
from pathlib import Path

import pytest
from loop_runs import make

import grpo_kit as kit
from grpo_kit.record.control import read_changes
from grpo_kit.record.files import METRIC_COLUMNS, RunFolderError, holds_run, read_completions, read_metrics
from grpo_kit.record.jsonl_run import RunLog
from grpo_kit.record.lines import lines_of


def test_a_runs_tables_have_the_columns_that_readers_know(tmp_path):
    trainer = make(tmp_path / "run", seams="fast")
    trainer.train()
    rows, completions = read_metrics(trainer.folder), read_completions(trainer.folder)
    assert list(rows["step"]) == [1, 2, 3, 4] and {*METRIC_COLUMNS} <= {*rows}
    assert rows.filter(like="reward/").columns.tolist() == [
        "reward/exact_answer", "reward/soft_format", "reward/letters",
    ]  # fmt: skip
    assert len(completions) == 4 * 8 and completions.groupby(["step", "group"]).size().eq(4).all()
    mean = completions.groupby("step")["reward"].mean()
    assert mean.tolist() == pytest.approx(rows["reward"].tolist())
    one = completions.iloc[0]
    assert one["prompt"].endswith(one["prefill"]) and "".join(one["tokens"]).startswith(one["completion"][:3])
    assert len(one["tokens"]) == len(one["logprobs"]) and max(one["logprobs"]) <= 0
    assert rows["entropy"].between(5, 12).all() and rows["rollout/logprob_gap"].lt(1e-4).all()


def test_lines_of_one_step_are_joined_and_a_line_cut_short_is_left_out(tmp_path):
    log = RunLog.open(tmp_path / "run", {"task": "t"})
    log.write(1, {"reward": 0.5, "kl": None}, {"completion": ["a", "b"], "reward": [0.0, None]})
    log.write(1, {"eval/accuracy": 0.25})
    with open(tmp_path / "run/metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "rew')
    rows = read_metrics(tmp_path / "run")
    assert rows[["step", "reward", "eval/accuracy"]].values.tolist() == [[1, 0.5, 0.25]]
    assert read_completions(tmp_path / "run")["reward"].isna().tolist() == [False, True]
    again = RunLog.open(tmp_path / "run", {"task": "t"}, resume=True)
    again.write(2, {"reward": 1.0})
    assert read_metrics(tmp_path / "run")["reward"].tolist() == [0.5, 1.0]


def test_steps_that_are_done_again_and_their_changes(tmp_path):
    log = RunLog.open(tmp_path / "run", {})
    for step in (1, 2, 3):
        changes = {"changes": {"beta": [0.0, 0.1]}} if step == 3 else {}
        log.write(step, {"reward": step / 10} | changes, {"completion": [f"c{step}"]})
    assert read_changes(tmp_path / "run") == [{"step": 3, "change": {"beta": 0.1}, "was": {"beta": 0.0}}]
    again = RunLog.open(tmp_path / "run", {}, resume=True)
    again.go_on_from(1)
    assert again.changes_at(2) == {} and again.changes_at(3) == {"beta": 0.1}
    assert list(read_metrics(tmp_path / "run")["step"]) == [1]
    again.write(2, {"reward": 0.9}, {"completion": ["again"]})
    assert read_metrics(tmp_path / "run")["reward"].tolist() == [0.1, 0.9]
    assert read_completions(tmp_path / "run")["completion"].tolist() == ["c1", "again"]


def test_a_damaged_line_is_named(tmp_path):
    log = RunLog.open(tmp_path / "run", {})
    log.write(1, {"reward": 1.0})
    with open(tmp_path / "run/metrics.jsonl", "ab") as file:
        file.write(b"rubbish\n")
    with pytest.raises(RunFolderError, match="metrics.jsonl, line 2 cannot be read: 'rubbish'"):
        read_metrics(tmp_path / "run")


def test_a_folder_that_is_no_place_for_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        RunLog.open(tmp_path / "file", {})
    log = RunLog.open(tmp_path / "run", {})
    assert holds_run(tmp_path / "run") and json.loads(Path(log.path, "run.json").read_text()) == {}
    with pytest.raises(RunFolderError, match="next free name is .*run-2"):
        RunLog.open(tmp_path / "run", {})


def test_readers_of_the_front_door_read_both_kinds(tmp_path):
    make(tmp_path / "run").train()
    assert len(kit.read_metrics(tmp_path / "run")) == 4 == len(list(lines_of(tmp_path / "run/metrics.jsonl")))
    assert len(kit.read_completions(tmp_path / "run")) == 32
