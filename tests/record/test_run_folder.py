"""The run folder: what is written is there whole, for other processes too, and a full disk loses nothing."""

import io
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo_kit.record.files import (
    METRIC_COLUMNS,
    RunFolderError,
    cached_json,
    next_run_folder,
    read_completions,
    read_metrics,
    settings_folder,
)
from grpo_kit.record.run_folder import RunFolder

CONFIG = {"model": "tiny-random", "reward_parts": ["exact", "format"]}


def completions(step: int, n: int = 2, reward: float | None = 0.5) -> dict[str, list]:
    return {
        "step": [step] * n,
        "prompt": ["Which?"] * n,
        "prefill": ["<answer>"] * n,
        "completion": [f"{step}-{i}</answer>" for i in range(n)],
        "reward/exact": [reward] * n,
        "reward": [reward] * n,
        "advantage": [0.0] * n,
        "group": [0] * n,
        "temperature": [1.0] * n,
    }


def test_metrics_come_back_exactly(tmp_path):
    run = RunFolder.open(tmp_path / "run", config=CONFIG)
    run.write_step(
        {"step": 1, "reward": 0.1 + 0.2, "reward/exact": np.float32(0.1), "kl": None, "loss": math.nan}
    )
    run.write_step({"step": 2, "reward": 1e-300, "reward/format": 1, "grad_norm": math.inf})
    table = read_metrics(tmp_path / "run")
    assert table.reward.tolist() == [0.1 + 0.2, 1e-300]
    assert table["reward/exact"][0] == float(np.float32(0.1))
    assert table.grad_norm[1] == math.inf
    assert table.kl.isna().all() and table.loss.isna().all()
    assert table.step.dtype == np.int64
    assert all(pd.api.types.is_numeric_dtype(table[name]) for name in table)
    lines = (tmp_path / "run/metrics.csv").read_text().split("\n")
    assert lines[0].split(",") == [
        *METRIC_COLUMNS[:9],
        "reward/exact",
        "reward/format",
        *METRIC_COLUMNS[9:],
        "extra",
    ]
    assert lines[2] == "2,,,,,,inf,1e-300,,,1,,,,,,,,,"


def test_header_stays_and_unknown_keys_go_to_extra(tmp_path):
    run = RunFolder.open(tmp_path / "run", config=CONFIG)
    run.write_step({"step": 1, "reward": 0.5})
    run.write_step(
        {"step": 2, "reward": 0.5, "eval_reward": 0.75, "note": 'a "quoted", note\n', "bad": math.nan}
    )
    assert len({line.count(",") for line in (tmp_path / "run/metrics.csv").read_text().splitlines()[:2]}) == 1
    table = read_metrics(tmp_path / "run")
    assert table.eval_reward[1] == 0.75 and np.isnan(table.eval_reward[0])
    assert table.note[1] == 'a "quoted", note\n'
    assert "extra" not in table


def test_a_run_is_never_overwritten_and_the_next_name_is_said(tmp_path):
    RunFolder.open(tmp_path / "run", config=CONFIG)
    (tmp_path / "run-2").mkdir()
    (tmp_path / "run-2/notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="run-3"):
        RunFolder.open(tmp_path / "run", config=CONFIG)
    assert next_run_folder(tmp_path, "run") == tmp_path / "run-3"
    assert next_run_folder(tmp_path, "other") == tmp_path / "other"
    (tmp_path / "old/checkpoint-4").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="old-2"):
        RunFolder.open(tmp_path / "old", config=CONFIG)


@pytest.mark.parametrize(
    "make, config, message",
    [
        (lambda p: p.write_text("x"), CONFIG, "is a file"),
        (lambda p: None, {"reward_parts": ["a", "a"]}, "twice"),
    ],
)
def test_open_refuses(tmp_path, make, config, message):
    make(tmp_path / "run")
    with pytest.raises(RunFolderError, match=message):
        RunFolder.open(tmp_path / "run", config=config)


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda run: run.write_step({"reward": 1.0}), "step"),
        (lambda run: run.write_step({"step": 1, "reward": "high"}), "reward"),
        (lambda run: run.write_completions({"step": [1, 1], "reward": [0.5]}), "lengths"),
        (lambda run: run.write_completions({"reward": [0.5]}), "step"),
    ],
)
def test_wrong_rows_are_refused_and_leave_nothing(tmp_path, write, message):
    run = RunFolder.open(tmp_path / "run", config=CONFIG)
    with pytest.raises(ValueError, match=message):
        write(run)
    run.write_step({"step": 1})
    assert len(read_metrics(tmp_path / "run")) == 1 and read_completions(tmp_path / "run").empty


def test_reading_nothing_yet_and_no_folder(tmp_path):
    RunFolder.open(tmp_path / "run", config=CONFIG)
    assert read_metrics(tmp_path / "run").empty and "reward" in read_metrics(tmp_path / "run")
    assert read_completions(tmp_path / "run").empty and "completion" in read_completions(tmp_path / "run")
    with pytest.raises(RunFolderError, match="does not exist"):
        read_metrics(tmp_path / "nowhere")


def test_a_row_still_being_written_is_left_out(tmp_path):
    run = RunFolder.open(tmp_path / "run", config=CONFIG)
    run.write_step({"step": 1, "reward": 0.5})
    whole = (tmp_path / "run/metrics.csv").read_bytes()
    second = whole.splitlines(keepends=True)[1].replace(b"1,", b"2,", 1)
    for cut in range(len(second)):
        (tmp_path / "run/metrics.csv").write_bytes(whole + second[:cut])
        assert read_metrics(tmp_path / "run").step.tolist() == [1]
    for cut in range(whole.index(b"\n")):
        (tmp_path / "run/metrics.csv").write_bytes(whole[:cut])
        assert read_metrics(tmp_path / "run").empty


def test_completions_are_a_parquet_data_set(tmp_path):
    run = RunFolder.open(tmp_path / "run", config=CONFIG)
    run.write_completions(completions(1, reward=None))  # all None first: the type must still be a number
    run.write_completions(completions(2, n=3) | {"seen": ["a", None, "b"]})
    run.write_completions({name: [] for name in completions(1)})
    table = read_completions(tmp_path / "run")
    assert table.completion.tolist() == [
        "1-0</answer>",
        "1-1</answer>",
        "2-0</answer>",
        "2-1</answer>",
        "2-2</answer>",
    ]
    assert table.reward.tolist()[2:] == [0.5] * 3 and table.reward[:2].isna().all()
    assert table.seen.tolist()[2::2] == ["a", "b"]
    plain = pd.read_parquet(tmp_path / "run/completions.parquet")
    assert plain.completion.tolist() == table.completion.tolist() and plain.reward.dtype == float


def test_resume_keeps_everything_and_the_last_word_wins(tmp_path):
    run = RunFolder.open(tmp_path / "run", config=CONFIG)
    for step in (1, 2, 3):
        run.write_step({"step": step, "reward": step / 10})
        run.write_completions(completions(step))
        run.write_completions(completions(step))  # two rollout buffers in one step
    with open(tmp_path / "run/metrics.csv", "ab") as file:
        file.write(b"4,0.5,1")  # the process died in the middle of a row
    resumed = RunFolder.open(
        tmp_path / "run", config=CONFIG | {"steps": 9, "reward_parts": ["other"]}, resume=True
    )
    resumed.write_step({"step": 3, "reward": 0.9, "reward/other": 1.0})
    resumed.write_completions(completions(3, reward=0.9))
    table = read_metrics(tmp_path / "run")
    assert table.step.tolist() == [1, 2, 3] and table.reward.tolist() == [0.1, 0.2, 0.9]
    assert table["reward/other"][2] == 1.0
    seen = read_completions(tmp_path / "run")
    assert seen.step.tolist() == [1] * 4 + [2] * 4 + [3] * 2
    assert seen.reward.tolist() == [0.5] * 8 + [0.9] * 2
    assert '"steps"' not in (tmp_path / "run/run.json").read_text()
    assert '"steps": 9' in (tmp_path / "run/config-resumed-1.json").read_text()


def test_resume_of_an_empty_folder_starts_a_run(tmp_path):
    RunFolder.open(tmp_path / "run", config=CONFIG, resume=True).write_step({"step": 1})
    assert read_metrics(tmp_path / "run").step.tolist() == [1]


FULL_DISK = """
import resource, sys, warnings
from pathlib import Path
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.record.run_folder import RunFolder
from tests.record.test_run_folder import CONFIG, completions

folder = Path(sys.argv[1])
run = RunFolder.open(folder, config=CONFIG)
run.write_step({"step": 1, "reward": 0.125})
run.write_completions(completions(1))
size = (folder / "metrics.csv").stat().st_size
free = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, free[1]))  # room for 7 bytes: half a row
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in (2, 3, 4):
        run.write_step({"step": step, "reward": 0.25})
        run.write_completions(completions(step))
assert len(caught) == 1 and "kept in memory" in str(caught[0].message), [str(c.message) for c in caught]
assert caught[0].category is RuntimeWarning
assert (folder / "metrics.csv").stat().st_size == size, "a half row stays"
assert read_metrics(folder).step.tolist() == [1]
assert read_completions(folder).step.unique().tolist() == [1]
assert not list(folder.glob("**/.*")), "a temporary file stays"
assert not run.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, free)
run.write_step({"step": 5, "reward": 0.5})
assert run.flush()
assert read_metrics(folder).step.tolist() == [1, 2, 3, 4, 5]
assert read_completions(folder).step.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
assert (folder / "metrics.csv").read_text().count("step,") == 1
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
from grpo_kit.record.files import RunFolderError
from grpo_kit.record.run_folder import RunFolder
resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))
try:
    RunFolder.open(sys.argv[1], config={"a": 1})
except RunFolderError as error:
    assert "cannot be written" in str(error)
else:
    sys.exit("no error")
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
    assert len(seen) % 2 == 0
    last, reads = len(metrics), reads + 1
print(reads)
"""


def test_another_process_reads_while_the_run_writes(tmp_path):
    run = RunFolder.open(tmp_path / "run", config=CONFIG)
    reader = in_python(READER, str(tmp_path / "run"))
    assert reader.stdout.readline() == "ready\n", reader.stderr.read()
    for step in range(1, 151):
        run.write_step({"step": step, "reward": step / 7, "num_tokens": step * 1000})
        run.write_completions(completions(step))
        time.sleep(0.005)
    out, errors = reader.communicate(timeout=60)
    assert reader.returncode == 0, errors
    assert int(out) > 1


def test_an_interrupt_in_a_write_leaves_whole_rows(tmp_path, monkeypatch):
    run = RunFolder.open(tmp_path / "run", config=CONFIG)
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
    assert (
        folder == tmp_path / "runs" / "sweep_cpu_bf4593" and folder.is_dir()
    )  # a fixed name: results are kept in it
    (folder / "found.json").write_text("{}")
    assert settings_folder(tmp_path / "runs", "sweep_cpu", [1e-5, 2e-5], 4) == folder
    assert [file.name for file in folder.iterdir()] == ["found.json"]
    others = [([1e-5, 2e-5], 8), ([2e-5, 1e-5], 4), ([1e-5, 2e-5],)]
    assert len({folder, *(settings_folder(tmp_path / "runs", "sweep_cpu", *other) for other in others)}) == 4
    assert settings_folder(tmp_path / "runs", "sweep_smoke", [1e-5, 2e-5], 4) != folder
