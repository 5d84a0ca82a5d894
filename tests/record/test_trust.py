"""A run's tables as others read them: one row a step, redone steps apart, and trouble in words."""

import json
import resource

import pandas as pd
import pytest
from test_run_folder import CONFIG, completions

from grpo_kit.record.files import RunFolderError, holds_run, read_completions, read_metrics
from grpo_kit.record.run_folder import RunFolder


def three_steps(path):
    run = RunFolder.open(path, config=CONFIG)
    for step in (1, 2, 3):
        run.write_step({"step": step, "reward": step / 10})
        run.write_completions(completions(step))
    return run


def test_redone_steps_stand_apart_for_any_reader(tmp_path):
    three_steps(tmp_path / "run")
    for step in (2, 3):
        (tmp_path / f"run/checkpoint-{step}").mkdir()
        (tmp_path / f"run/checkpoint-{step}/trainer_state.json").write_text("{}")
    for again in (1, 2):  # a run may be resumed twice
        run = RunFolder.open(tmp_path / "run", config=CONFIG, resume=True)
        assert run.go_on_from(2)
        assert not run.go_on_from(2)
        run.write_step({"step": 3, "reward": 0.9})
        run.write_completions(completions(3, reward=0.9))
        (tmp_path / "run/checkpoint-3").mkdir()
        seen = pd.read_parquet(tmp_path / "run/completions.parquet")
        assert seen.step.tolist() == [1, 1, 2, 2, 3, 3] and seen.reward.tolist()[-1] == 0.9
        raw = pd.read_csv(tmp_path / "run/metrics.csv")
        assert raw.step.tolist() == [1, 2, 3] and raw.reward.tolist() == [0.1, 0.2, 0.9]
        aside = tmp_path / "run/redone"
        assert len(pd.read_csv(aside / "metrics.csv")) == again, "nothing is deleted"
        assert len(pd.read_parquet(aside / "completions.parquet")) == 2 * again
        assert len(list(aside.glob("checkpoint-3*"))) == again
        assert (tmp_path / "run/checkpoint-2").is_dir()
    assert (
        read_metrics(aside).reward.tolist() == [0.9] and read_completions(aside).reward.tolist() == [0.9] * 2
    )


def test_a_row_written_again_takes_the_place_of_the_first(tmp_path):
    """As an evaluation after the step does; also from a new process, and on a disk that was full in between."""
    run = three_steps(tmp_path / "run")
    run.write_step({"step": 3, "reward": 0.3, "eval/reward": 0.5})
    resumed = RunFolder.open(tmp_path / "run", config=CONFIG, resume=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.warns(RuntimeWarning, match="kept in memory"):
            resumed.write_step({"step": 2, "reward": 0.2, "eval/reward": 0.4})
        resumed.write_step({"step": 4, "reward": 0.4})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert resumed.flush()
    raw = pd.read_csv(tmp_path / "run/metrics.csv")
    assert raw.step.tolist() == [1, 2, 3, 4]
    assert [json.loads(cell)["eval/reward"] for cell in raw.extra[1:3]] == [0.4, 0.5]


@pytest.mark.parametrize(
    "first, second, read",
    [
        ([None, None], ["a", None], [None, None, "a", None]),
        ([None, None], [0.5, None], [None, None, 0.5, None]),
        ([0.5, None], ["a", None], ["0.5", None, "a", None]),
        (None, ["a", "b"], [None, None, "a", "b"]),
    ],
    ids=["None, then text", "None, then numbers", "numbers, then text", "a new column"],
)
def test_an_extra_column_may_find_its_type_late(first, second, read, tmp_path):
    run = RunFolder.open(tmp_path / "run", config=CONFIG)
    run.write_completions(completions(1) | ({"note": first} if first else {}))
    run.write_completions(completions(2) | {"note": second})
    run.write_completions(completions(3))
    for table in (pd.read_parquet(tmp_path / "run/completions.parquet"), read_completions(tmp_path / "run")):
        assert [None if pd.isna(v) else v for v in table["note"]] == [*read, None, None]


@pytest.mark.parametrize(
    "row, words",
    [
        ("4,0.5", "line 5 cannot be read .2 cells where the header has 20"),
        ("4" + "," * 18 + "high,", "line 5 cannot be read.*high"),
        ("4" + "," * 19 + "{", "line 5 cannot be read"),
        ("," * 19, "line 5 cannot be read"),
    ],
)
def test_a_broken_row_is_named(row, words, tmp_path):
    three_steps(tmp_path / "run")
    with open(tmp_path / "run/metrics.csv", "a") as file:
        file.write(row + "\n")
    with pytest.raises(RunFolderError, match=words):
        read_metrics(tmp_path / "run")


def test_a_foreign_file_among_the_parts_is_named(tmp_path):
    three_steps(tmp_path / "run")
    folder = tmp_path / "run/completions.parquet"
    (folder / "notes.txt").write_text("mine")
    assert len(read_completions(tmp_path / "run")) == 6
    pd.DataFrame({"a": [1]}).to_parquet(folder / "part-mine.parquet")
    with pytest.raises(RunFolderError, match="part-mine.parquet is not a part"):
        read_completions(tmp_path / "run")
    (folder / "part-mine.parquet").rename(folder / "part-009-000000.parquet")
    with pytest.raises(RunFolderError, match="part-009-000000.parquet has no column 'step'"):
        read_completions(tmp_path / "run")
    (folder / "part-009-000000.parquet").write_text("no parquet")
    with pytest.raises(RunFolderError, match="part-009-000000.parquet cannot be read"):
        read_completions(tmp_path / "run")


def test_a_name_is_free_after_a_disk_that_was_full_at_the_start(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        with pytest.raises(RunFolderError, match="cannot be written"):
            RunFolder.open(tmp_path / "run", config=CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not holds_run(tmp_path / "run") and not (tmp_path / "run").exists()
    RunFolder.open(tmp_path / "run", config=CONFIG)
