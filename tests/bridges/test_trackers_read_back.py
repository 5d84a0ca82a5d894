"""What each tracker's own reader finds is what the run folder holds: numbers, completions, flags, changes, config."""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest

from grpo_kit.more.bridges.trackers import TRACKERS
from grpo_kit.record.files import read_changes, read_completions, read_metrics
from grpo_kit.watch.monitor import read_flags

HERE = Path(__file__).parent
INSTALLED = [name for name in TRACKERS if find_spec(name)]
STEPS = [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run folder, and what was found once and after steps 5 and 6 were done again."""
    if not INSTALLED:
        pytest.skip("no tracker is installed")
    root = tmp_path_factory.mktemp("tracked")
    paths = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])
    home = {"HOME": str(root), "TRACKIO_DIR": str(root / "trackio"), "PYTHONPATH": paths}
    home["HF_HUB_OFFLINE"] = "1"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_"))}
    words = [HERE / "tracked_run.py", root / "full", ",".join(INSTALLED)]
    done = forked.run(*words, environment=kept | home, timeout=600)
    assert not done.returncode, done.stderr[-3000:]
    line = next(
        line for line in reversed(done.stdout.splitlines()) if line.startswith('{"once"')
    )
    return root / "full", json.loads(line), done.stdout


def metrics_of(folder, when):
    if when == "again":
        return read_metrics(folder)
    old = folder.parent / "once"
    old.mkdir(exist_ok=True)
    shutil.copy(folder.parent / "once.jsonl", old / "metrics.jsonl")
    return read_metrics(old)


@pytest.mark.parametrize("when", ["once", "again"])
@pytest.mark.parametrize("tracker", INSTALLED)
def test_every_number_of_the_run_folder_is_there_once(run, tracker, when):
    """trackio and wandb take nothing back: there the steps that were done again stand twice, the later ones last."""
    folder, found, _ = run
    table, precision = metrics_of(folder, when), 1e-6 if tracker == "tensorboard" else 0
    told = {}
    for step, name, value in found[when][tracker]["numbers"]:
        told.setdefault((step, name), []).append(value)
    assert table["step"].tolist() == [0, *STEPS] and {"eval/accuracy", "reward/letters"} <= set(
        table
    )
    cells = {
        (row["step"], name if name.startswith("eval/") else f"train/{name}"): value
        for row in table.to_dict("records")
        for name, value in row.items()
        if value == value and name != "step"
    }
    assert len(cells) > 80
    for cell, value in cells.items():
        twice = when == "again" and tracker != "tensorboard" and cell[0] > 4
        values = told.pop(cell)
        assert len(values) == 1 + twice and values[-1] == pytest.approx(
            value, rel=precision, abs=0
        ), cell
    flags = [(flag.step, f"flags/{flag.name.replace(' ', '_')}") for flag in read_flags(folder)]
    assert sorted(told) == sorted(flags) and all(values == [1.0] for values in told.values())


@pytest.mark.parametrize("tracker", INSTALLED)
def test_completions_are_those_of_the_run_folder(run, tracker):
    folder, found, _ = run
    table = read_completions(folder)
    tables = found["again"][tracker]["tables"]
    assert sorted(map(int, tables)) == STEPS and len(table) == 48
    for step, rows in tables.items():
        kept = (
            table[table["step"] == int(step)]
            .drop(columns=["step", "tokens", "logprobs"])
            .astype(object)
        )
        kept = kept.where(kept.notna(), None).to_dict("records")
        if tracker == "tensorboard":
            kept = [
                {name: "" if v is None else str(v).strip() for name, v in row.items()}
                for row in kept
            ]
            rows = [{name: v.strip() for name, v in row.items()} for row in rows]
        assert rows == kept


@pytest.mark.parametrize("tracker", INSTALLED)
def test_flags_changes_and_config_are_there_once(run, tracker):
    folder, found, _ = run
    told = found["once"][tracker]
    flags, (change,) = read_flags(folder), read_changes(folder)
    wanted = [(flag.step, f"red flag: {flag.name}") for flag in flags] + [
        (change["step"], "change")
    ]
    assert flags and sorted((step, title) for step, title, _ in told["alerts"]) == sorted(
        wanted
    )
    assert any(
        "learning_rate 0.5 -> 0.4" in text
        for _, title, text in told["alerts"]
        if title == "change"
    )
    config = json.loads((folder / "run.json").read_text())
    assert {name: told["config"][name] for name in config} == config


def test_a_run_that_goes_on_is_one_run_and_nothing_is_sent(run):
    _, found, said = run
    if "trackio" in INSTALLED:
        assert found["again"]["trackio"]["runs"] == ["full"]
    if "wandb" in INSTALLED:
        assert found["again"]["wandb"]["runs"] == 1 and found["again"]["wandb"]["ends"] == [
            0,
            0,
            0,
        ]
        assert said.count("nothing is sent") == 3
