"""The record of a run: what is written is there whole, for other processes too, and a full disk loses nothing."""

import io
import json
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import grpo_kit as kit
from grpo_kit.record._jsonl_run import RunLog
from grpo_kit.record.files import (
    METRIC_COLUMNS,
    RunFolderError,
    cached_json,
    holds_run,
    next_run_folder,
    read_changes,
    read_completions,
    read_metrics,
    settings_folder,
)
from tests.made_metrics import Recorded


def completions(step: int, n: int = 2, reward: float | None = 0.5) -> dict[str, list]:
    return {
        "step": [step] * n,
        "prompt": ["Which?"] * n,
        "completion": [f"{step}-{i}</answer>" for i in range(n)],
        "reward": [reward] * n,
        "group": [0] * n,
    }


def test_metrics_come_back_exactly(tmp_path):
    run = Recorded(tmp_path / "run")
    run.write_step(
        {
            "step": 1,
            "reward": 0.1 + 0.2,
            "reward/exact": np.float32(0.1),
            "kl": None,
            "loss": math.nan,
        }
    )
    run.write_step(
        {
            "step": 2,
            "reward": 1e-300,
            "reward/format": 1,
            "grad_norm": math.inf,
            "note": 'a "b"\n',
        }
    )
    table = read_metrics(tmp_path / "run")
    assert table.reward.tolist() == [0.1 + 0.2, 1e-300]
    assert table["reward/exact"][0] == float(np.float32(0.1))
    assert table.grad_norm[1] == math.inf and table.note[1] == 'a "b"\n'
    assert table.kl.isna().all() and table.loss.isna().all()
    assert table.step.dtype == np.int64
    assert list(table)[:11] == [*METRIC_COLUMNS[:9], "reward/exact", "reward/format"]


def test_a_run_is_never_overwritten_and_the_next_name_is_said(tmp_path):
    RunLog.open(tmp_path / "run", {})
    (tmp_path / "run-2").mkdir()
    (tmp_path / "run-2/notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="run-3"):
        RunLog.open(tmp_path / "run", {})
    assert next_run_folder(tmp_path, "run") == tmp_path / "run-3"
    assert next_run_folder(tmp_path, "other") == tmp_path / "other"
    (tmp_path / "old/checkpoint-4").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="old-2"):
        RunLog.open(tmp_path / "old", {})


def test_reading_nothing_yet_and_no_folder(tmp_path):
    RunLog.open(tmp_path / "run", {})
    assert read_metrics(tmp_path / "run").empty and "reward" in read_metrics(tmp_path / "run")
    assert read_completions(tmp_path / "run").empty and "completion" in read_completions(
        tmp_path / "run"
    )
    with pytest.raises(RunFolderError, match="does not exist"):
        read_metrics(tmp_path / "nowhere")
    for folder in (None, 3, ["runs/x"]):
        with pytest.raises(RunFolderError, match="must be a text or a path"):
            read_completions(folder)


def test_a_line_still_being_written_is_left_out(tmp_path):
    Recorded(tmp_path / "run").write_step({"step": 1, "reward": 0.5})
    whole = (tmp_path / "run/metrics.jsonl").read_bytes()
    for cut in range(len(whole) - 1):
        (tmp_path / "run/metrics.jsonl").write_bytes(whole + whole.replace(b"1", b"2", 1)[:cut])
        assert read_metrics(tmp_path / "run").step.tolist() == [1]
        (tmp_path / "run/metrics.jsonl").write_bytes(whole[:cut])
        assert read_metrics(tmp_path / "run").empty


def test_any_changed_byte_of_a_line_is_seen_or_changes_no_value(tmp_path):
    Recorded(tmp_path / "run").write_step(
        {"step": 1, "reward": 0.5, "note": 'a "b, ü", {"line_crc32": 3'}
    )
    path = tmp_path / "run/metrics.jsonl"
    whole, table, seen = path.read_bytes(), read_metrics(tmp_path / "run"), 0
    for place in range(len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert read_metrics(tmp_path / "run")[list(table)].equals(table), (
                "but for a column more"
            )
        except RunFolderError as error:
            assert "line 1 cannot be read" in str(error)
            seen += 1
    assert seen >= len(whole) - len('"line_crc32"') - 1
    path.write_bytes(whole.replace(b"0.5", b"0.7"))
    with pytest.raises(
        RunFolderError,
        match="other bytes than were written .without its line_crc32 it is taken",
    ):
        read_metrics(tmp_path / "run")
    own = whole.replace(b"0.5", b"0.7").rpartition(b', "line_crc32"')[0] + b"}\n"
    path.write_bytes(own)
    assert read_metrics(tmp_path / "run").reward.tolist() == [0.7], (
        "a line of an older kit has none"
    )


def test_completions_without_a_reward_yet_are_numbers_all_the_same(tmp_path):
    run = Recorded(tmp_path / "run")
    run.write_completions(completions(1, reward=None))
    run.write_completions(completions(2, n=3) | {"seen": ["a", None, "b"]})
    table = read_completions(tmp_path / "run")
    assert table.completion.tolist() == [
        f"{s}-{i}</answer>" for s, n in ((1, 2), (2, 3)) for i in range(n)
    ]
    assert table.reward.tolist()[2:] == [0.5] * 3 and table.reward[:2].isna().all()
    assert table.reward.dtype == float and table.seen.tolist()[2::2] == ["a", "b"]


def test_resume_keeps_everything_and_the_settings_of_then(tmp_path):
    run = Recorded(tmp_path / "run", {"steps": 3})
    for step in (1, 2, 3):
        run.write_step({"step": step, "reward": step / 10})
    resumed = Recorded(tmp_path / "run", {"steps": 9}, resume=True)
    resumed.write_step({"step": 3, "reward": 0.9, "reward/other": 1.0})
    table = read_metrics(tmp_path / "run")
    assert table.step.tolist() == [1, 2, 3] and table.reward.tolist() == [0.1, 0.2, 0.9]
    assert json.loads((tmp_path / "run/run.json").read_text()) == {"steps": 3}
    assert json.loads((tmp_path / "run/run-resumed-1.json").read_text()) == {"steps": 9}


def test_a_runs_tables_have_the_columns_that_readers_know(tmp_path):
    from loop_runs import make  # here: other processes of these tests read this file, too

    trainer = make(tmp_path / "run", seams="fast")
    trainer.train()
    rows, completions = read_metrics(trainer.folder), read_completions(trainer.folder)
    assert list(rows["step"]) == [1, 2, 3, 4] and {*METRIC_COLUMNS} <= {*rows}
    assert rows.filter(like="reward/").columns.tolist() == [
        "reward/exact_answer", "reward/soft_format", "reward/letters",
    ]  # fmt: skip
    assert (
        len(completions) == 4 * 8 and completions.groupby(["step", "group"]).size().eq(4).all()
    )
    mean = completions.groupby("step")["reward"].mean()
    assert mean.tolist() == pytest.approx(rows["reward"].tolist())
    one = completions.iloc[0]
    assert one["prompt"].endswith(one["prefill"]) and "".join(one["tokens"]).startswith(
        one["completion"][:3]
    )
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
    assert read_changes(tmp_path / "run") == [
        {"step": 3, "change": {"beta": 0.1}, "was": {"beta": 0.0}}
    ]
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
    with pytest.raises(
        RunFolderError, match="metrics.jsonl, line 2 cannot be read .*: 'rubbish'"
    ):
        read_metrics(tmp_path / "run")


def test_a_folder_that_is_no_place_for_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        RunLog.open(tmp_path / "file", {})
    log = RunLog.open(tmp_path / "run", {})
    assert holds_run(tmp_path / "run") and json.loads((log.path / "run.json").read_text()) == {}
    with pytest.raises(RunFolderError, match="next free name is .*run-2"):
        RunLog.open(tmp_path / "run", {})


def test_readers_of_the_front_door(tmp_path):
    from loop_runs import make

    make(tmp_path / "run").train()
    assert (
        len(kit.read_metrics(tmp_path / "run")) == 4
        and len(kit.read_completions(tmp_path / "run")) == 32
    )


FULL_DISK = """
import resource, sys, warnings
from pathlib import Path
from grpo_kit.record.files import read_completions, read_metrics
from tests.made_metrics import Recorded
from tests.record.test_run_log import completions

folder = Path(sys.argv[1])
run = Recorded(folder)
run.write_step({"step": 1, "reward": 0.125})
run.write_completions(completions(1))
size = (folder / "metrics.jsonl").stat().st_size
free = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, free[1]))  # room for 7 bytes: half a row
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in (2, 3, 4):
        run.write_step({"step": step, "reward": 0.25})
        run.write_completions(completions(step))
assert len(caught) == 1 and "kept in memory" in str(caught[0].message), [str(c.message) for c in caught]
assert caught[0].category is RuntimeWarning
assert (folder / "metrics.jsonl").stat().st_size == size, "a half row stays"
assert read_metrics(folder).step.tolist() == [1]
assert read_completions(folder).step.unique().tolist() == [1]
assert not list(folder.glob("**/.*")), "a temporary file stays"
assert not run.log.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, free)
run.write_step({"step": 5, "reward": 0.5})
assert run.log.flush()
assert read_metrics(folder).step.tolist() == [1, 2, 3, 4, 5]
assert read_completions(folder).step.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
"""


def in_python(code: str, *arguments: str) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_full_disk_loses_nothing_and_leaves_no_half_row(tmp_path):
    process = in_python(FULL_DISK, str(tmp_path / "run"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_a_full_disk_before_training_is_a_clear_error(tmp_path):
    code = """
import resource, sys
from pathlib import Path
from grpo_kit.record.files import RunFolderError
from grpo_kit.record._jsonl_run import RunLog
resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))
try:
    RunLog.open(sys.argv[1], {"a": 1})
except RunFolderError as error:
    assert "cannot be written" in str(error)
else:
    sys.exit("no error")
assert not Path(sys.argv[1]).exists(), "its name is free"
"""
    process = in_python(code, str(tmp_path / "run"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


READER = """
import sys, time
from pathlib import Path
from grpo_kit.record.files import read_completions, read_metrics
folder = Path(sys.argv[1])
reads, last = 0, 0
print("ready", flush=True)
while last < 150:
    metrics, seen = read_metrics(folder), read_completions(folder)
    assert metrics.step.tolist() == list(range(1, len(metrics) + 1)), metrics.step.tolist()
    assert (metrics.reward == metrics.step / 7).all() and (metrics.num_tokens == metrics.step * 1000).all()
    assert len(seen) >= 2 * len(metrics), "a step with a row has its completions"
    last, reads = len(metrics), reads + 1
print(reads)
"""


def test_another_process_reads_while_the_run_writes(tmp_path):
    run = Recorded(tmp_path / "run")
    reader = in_python(READER, str(tmp_path / "run"))
    assert reader.stdout.readline() == "ready\n", reader.stderr.read()
    for step in range(1, 151):
        run.log.write(
            step, {"reward": step / 7, "num_tokens": step * 1000}, {"completion": ["a", "b"]}
        )
        time.sleep(0.005)
    out, errors = reader.communicate(timeout=60)
    assert reader.returncode == 0, errors
    assert int(out) > 1


def test_an_interrupt_in_a_write_leaves_whole_rows(tmp_path, monkeypatch):
    run = Recorded(tmp_path / "run")
    run.write_step({"step": 1})

    class Stopped(io.FileIO):
        def write(self, data):
            super().write(data[:5])
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.open", lambda path, mode, buffering: Stopped(path, mode))
    with pytest.raises(KeyboardInterrupt):
        run.write_step({"step": 2})
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.write_step({"step": 3})
    assert read_metrics(tmp_path / "run").step.tolist() == [1, 2, 3]


def test_what_is_cached_is_made_once_and_never_half_written(tmp_path):
    path, made = tmp_path / "found.json", []

    def make(result):
        made.append(result)
        if result is None:
            raise KeyboardInterrupt
        return result

    with pytest.raises(KeyboardInterrupt):
        cached_json(path, lambda: make(None))
    assert not list(tmp_path.iterdir())
    assert cached_json(path, lambda: make({"a": (1, 2)})) == {"a": [1, 2]}
    assert cached_json(path, lambda: make({"a": "other"})) == {"a": [1, 2]}
    assert len(made) == 2 and [file.name for file in tmp_path.iterdir()] == ["found.json"]


def test_the_same_settings_find_the_same_folder(tmp_path):
    folder = settings_folder(tmp_path / "runs", "sweep_cpu", [1e-5, 2e-5], 4)
    # a fixed name: results are kept in it
    assert folder == tmp_path / "runs" / "sweep_cpu_bf4593" and folder.is_dir()
    (folder / "found.json").write_text("{}")
    assert settings_folder(tmp_path / "runs", "sweep_cpu", [1e-5, 2e-5], 4) == folder
    assert [file.name for file in folder.iterdir()] == ["found.json"]
    others = [([1e-5, 2e-5], 8), ([2e-5, 1e-5], 4), ([1e-5, 2e-5],)]
    assert (
        len(
            {
                folder,
                *(settings_folder(tmp_path / "runs", "sweep_cpu", *other) for other in others),
            }
        )
        == 4
    )
    assert settings_folder(tmp_path / "runs", "sweep_smoke", [1e-5, 2e-5], 4) != folder
