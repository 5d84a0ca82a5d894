"""Anybody's log, brought under the record's names and asked by the same flags."""

import json

import numpy as np
import pandas as pd
import pytest

import grpo_kit as kit
from grpo_kit.__main__ import main
from grpo_kit.watch.diagnose import LogError, table_of

STEPS = 30
ROWS = [  # TRL's names; from step 12 on all rewards are equal, and nothing is right
    {
        "loss": 0.0, "grad_norm": 0.2, "learning_rate": 1e-6, "completions/mean_length": 100.0 + step,
        "completions/clipped_ratio": 0.1, "rewards/right/mean": 0.0 if step >= 12 else 0.2, "rewards/right/std": 0.1,
        "reward": 0.0 if step >= 12 else 0.2, "reward_std": 0.0 if step >= 12 else 0.3,
        "frac_reward_zero_std": 1.0 if step >= 12 else 0.25, "kl": 0.01, "entropy": 0.4, "step": step,
    }
    for step in range(1, STEPS + 1)
]  # fmt: skip
PAGE = "<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>"


def page(rows):
    names = {
        "Step": "step", "Training Loss": "loss", "reward": "reward", "reward_std": "reward_std", "kl": "kl",
        "completions / mean_length": "completions/mean_length", "rewards / right": "rewards/right/mean",
    }  # fmt: skip
    cells = "".join(f"<tr>{''.join(f'<td>{row[own]}</td>' for own in names.values())}</tr>" for row in rows)
    return PAGE.format("".join(f"<th>{name}</th>" for name in names), cells)


def notebook(output):
    return json.dumps(
        {"cells": [{"cell_type": "code", "source": "", "outputs": [output]}], "nbformat": 4, "metadata": {}}
    )


def as_trainer_state(folder):
    place = folder / "out" / "checkpoint-30"
    place.mkdir(parents=True)
    (place / "trainer_state.json").write_text(
        json.dumps({"log_history": [*ROWS, {"train_runtime": 3.0, "step": 30}]})
    )
    return folder / "out"


def as_file(name, text):
    def write(folder):
        (folder / name).write_text(text, encoding="utf-8")
        return folder / name

    return write


def as_csv(folder):
    table = pd.DataFrame(ROWS).rename(columns=lambda name: f"my-run - train/{name}").rename(
        columns={"my-run - train/step": "train/global_step"}
    )  # fmt: skip
    table.to_csv(folder / "wandb_export.csv", index=False, encoding="utf-8-sig")
    return folder / "wandb_export.csv"


def as_events(folder):
    torch_writer = pytest.importorskip("torch.utils.tensorboard")
    with torch_writer.SummaryWriter(folder / "runs") as writer:
        for row in ROWS:
            for name, value in row.items():
                writer.add_scalar(f"train/{name}", value, row["step"])
    return folder / "runs"


PRINTED = "".join(f"{ {k: str(v) for k, v in row.items() if k != 'step'} }\n 3%|## | 1/30\n" for row in ROWS)
FORMS = {
    "trainer_state": as_trainer_state,
    "printed lines": as_file("train.log", PRINTED),
    "JSON lines": as_file("log.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)),
    "CSV": as_csv,
    "events": as_events,
    "notebook with a table": as_file("a.ipynb", notebook({"data": {"text/html": page(ROWS)}})),
    "notebook with lines": as_file(
        "b.ipynb", notebook({"output_type": "stream", "text": PRINTED.splitlines(True)})
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_log_says_the_same(form, tmp_path):
    found = kit.diagnose(FORMS[form](tmp_path))
    flags = {flag.name: flag.step for flag in found.flags}
    # A table of a notebook has no share of groups: it is 1 or not known.
    assert flags == {"sparse reward": 12 if form == "notebook with a table" else 11, "part never paid": 12}
    assert found.metrics["step"].tolist() == list(range(1, STEPS + 1))
    assert np.allclose(found.metrics["completion_length"], [100 + step for step in range(1, STEPS + 1)])
    assert "reward 0.2 in the first fifth, 0 in the last: DOWN" in found.sentence
    assert "63% of steps without any spread" in found.sentence
    assert found.untold["mode collapse"] == ["the completions"] and "sparse reward" not in found.untold
    assert ("KL spike" in found.untold) == ("kl" not in found.metrics)


@pytest.mark.parametrize(
    ("longest", "times", "seen"),
    [(200, 6, True), (200, 4, False), (7, 20, False)],
    ids=["", "seldom", "short"],
)
def test_a_mean_length_that_is_often_the_longest_is_the_limit(longest, times, seen):
    """Without the share that was cut off: all were, where so many steps have the log's longest mean."""
    lengths = [float(longest)] * times + [longest - 1.5 - 0.1 * step for step in range(10)]
    rows = [{"step": at, "completion_length": one, "reward": 0.1} for at, one in enumerate(lengths)]
    table = table_of(rows)
    assert ("completion_cut_off" in table) == seen
    if seen:
        assert table["completion_cut_off"].tolist() == [1.0] * times + [0.0] * 10
        recorded = table_of([row | {"completion_cut_off": 0.3} for row in rows])
        assert set(recorded["completion_cut_off"]) == {0.3}  # what the log says is kept


def test_the_command_prints_it(tmp_path, capsys):
    assert main(["diagnose", str(FORMS["JSON lines"](tmp_path))]) == 0
    said = capsys.readouterr().out
    assert (
        "- sparse reward since step 11" in said
        and "Cannot be told from this log:" in said
        and "First try:" in said
    )
    assert main(["diagnose", str(tmp_path / "none")]) == 2


def test_a_run_folder_of_the_kit_is_asked_with_its_settings(tmp_path):
    from grpo_kit.record.jsonl_run import RunLog

    log = RunLog.open(tmp_path / "run", {"config": {}, "reward_parts": ["right"], "reward_weights": [0.0]})
    for row in ROWS:
        log.write(row["step"], {"reward": 0.5, "reward/right": 0.0})
    log.flush()
    assert not kit.diagnose(tmp_path / "run").flags  # a part of weight 0 is not trained on


@pytest.mark.parametrize("text", ["", "no log", "[]", '{"loss": 1.0}\n{"loss": 0.5}'])
def test_what_is_no_log_of_such_a_run_is_refused(text, tmp_path):
    with pytest.raises(LogError, match="holds no steps of a run with a reward; known are run folders"):
        kit.diagnose(as_file("log.txt", text)(tmp_path))


def test_names_and_numbers():
    rows = [
        {"Step": "1,000", "rewards / a b": "1,234.5", "note": "x", "flag": True},
        {"Step": 1000, "kl": float("nan")},
    ]
    assert table_of(rows).to_dict("records")[0]["reward/a b"] == 1234.5
