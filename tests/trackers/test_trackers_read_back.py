"""What each tracker's own reader finds is what the run folder holds: numbers, completions, flags, changes, config."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo_kit.record.control import read_changes
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.trackers.names import TRACKERS, check_installed, name_of
from grpo_kit.watch.monitor import read_flags

HERE = Path(__file__).parent
INSTALLED = [name for name in TRACKERS if find_spec(name)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run folder, metrics.csv before steps were done again, and what was found then and afterwards."""
    if not INSTALLED:
        pytest.skip("no tracker is installed")
    root = tmp_path_factory.mktemp("tracked")
    paths = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    home = {"HOME": str(root), "TRACKIO_DIR": str(root / "trackio"), "PYTHONPATH": paths}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_", "TENSORBOARD_"))}
    done = subprocess.run(
        [sys.executable, HERE / "tracked_run.py", root / "full", ",".join(INSTALLED)],
        capture_output=True, text=True, env={**kept, "HF_HUB_OFFLINE": "1", **home}, timeout=600,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"once"'))
    return root / "full", json.loads(line), done.stdout


def metrics_of(folder, when):
    if when == "again":
        return read_metrics(folder)
    old = folder.parent / "once"
    old.mkdir(exist_ok=True)
    shutil.copy(folder.parent / "once.csv", old / "metrics.csv")
    return read_metrics(old)


def by_cell(numbers):
    """(step, name) -> values, the same one told twice is two."""
    found = {}
    for step, name, value in numbers:
        found.setdefault((step, name), []).append(value)
    return found


@pytest.mark.parametrize("when", ["once", "again"])
@pytest.mark.parametrize("tracker", INSTALLED)
def test_every_cell_of_metrics_csv_is_there_once(run, tracker, when):
    folder, found, _ = run
    told, precision = by_cell(found[when][tracker]["numbers"]), 1e-6 if tracker == "tensorboard" else 0
    table = metrics_of(folder, when)
    assert table["step"].tolist() == [1, 2, 3, 4] and {"eval/reward", "reward/letters"} <= set(table)
    cells = {
        (row["step"], name_of(name)): value
        for row in table.to_dict("records")
        for name, value in row.items()
        if value == value
    }
    assert len(cells) > 80
    for cell, value in cells.items():
        assert told.pop(cell, None) == [pytest.approx(value, rel=precision, abs=0)], cell
    flags = [(flag.step, f"flags/{flag.name.replace(' ', '_')}") for flag in read_flags(folder)]
    assert {name for _, name in told} == {name for _, name in flags}  # and no other number


@pytest.mark.parametrize("tracker", INSTALLED)
def test_completions_are_those_of_the_run_folder(run, tracker):
    folder, found, _ = run
    table = read_completions(folder)
    tables = found["again"][tracker]["tables"]
    assert sorted(map(int, tables)) == [1, 2, 3, 4] and len(table) == 32
    for step, rows in tables.items():
        kept = table[table["step"] == int(step)].drop(columns=["tokens", "logprobs"]).astype(object)
        kept = kept.where(kept.notna(), None).to_dict("records")
        if tracker == "tensorboard":
            kept = [{name: "" if v is None else str(v) for name, v in row.items()} for row in kept]
        assert rows == kept


@pytest.mark.parametrize("tracker", INSTALLED)
def test_flags_changes_and_config_are_told(run, tracker):
    folder, found, _ = run
    told = found["again"][tracker]
    flags, changes = read_flags(folder), [line for line in read_changes(folder) if "change" in line]
    assert flags and changes
    alerts = {(step, title) for step, title, _ in told["alerts"]}
    assert {(flag.step, f"red flag: {flag.name}") for flag in flags} <= alerts
    texts = [text for _, title, text in told["alerts"] if title == "change"]
    assert any("learning_rate" in text and "2e-12" in text for text in texts)
    assert (changes[0]["step"], "change") in alerts
    config = json.loads((folder / "run.json").read_text())
    assert {name: told["config"][name] for name in config} == config


def test_a_stop_goes_on_in_one_run_and_steps_done_again_begin_a_second(run):
    _, found, said = run
    if "trackio" in INSTALLED:
        assert found["once"]["trackio"]["runs"] == ["full"]
        assert sorted(found["again"]["trackio"]["runs"]) == ["full", "full-2"]
    if "wandb" in INSTALLED:
        assert (found["once"]["wandb"]["runs"], found["again"]["wandb"]["runs"]) == (1, 2)
        assert found["once"]["wandb"]["ends"] == [0, 0]
        assert "nothing is sent" in said
    assert ("the old one stays" in said) == bool({"trackio", "wandb"} & set(INSTALLED))


def test_what_is_not_installed_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("grpo_kit.trackers.names.find_spec", lambda name: None)
    for name in TRACKERS:
        with pytest.raises(ValueError, match=f"report_to='{name}'.*pip install {name}"):
            check_installed(name)
    check_installed(["none", "mlflow"])
