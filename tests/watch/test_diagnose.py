"""Anybody's log, brought under the record's names and asked by the same flags."""

import json
import os

import numpy as np
import pandas as pd
import pytest

import grpo_kit as kit
from grpo_kit.__main__ import main
from grpo_kit.more.bridges._log_rows import LogError, table_of

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
    cells = "".join(
        f"<tr>{''.join(f'<td>{row[own]}</td>' for own in names.values())}</tr>" for row in rows
    )
    return PAGE.format("".join(f"<th>{name}</th>" for name in names), cells)


def notebook(output):
    return json.dumps(
        {
            "cells": [{"cell_type": "code", "source": "", "outputs": [output]}],
            "nbformat": 4,
            "metadata": {},
        }
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


PRINTED = "".join(
    f"{ {k: str(v) for k, v in row.items() if k != 'step'} }\n 3%|## | 1/30\n" for row in ROWS
)
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
    assert flags == {
        "sparse reward": 12 if form == "notebook with a table" else 11,
        "part never paid": 12,
    }
    assert found.metrics["step"].tolist() == list(range(1, STEPS + 1))
    assert np.allclose(
        found.metrics["completion_length"], [100 + step for step in range(1, STEPS + 1)]
    )
    assert "reward 0.2 in the first fifth, 0 in the last: DOWN" in found.sentence
    assert "63% of steps without any spread" in found.sentence
    assert (
        found.untold["mode collapse"] == ["the completions"]
        and "sparse reward" not in found.untold
    )
    assert ("KL spike" in found.untold) == ("kl" not in found.metrics)


# of another run, which logged 20 steps
FIRST = [row | {"reward": 0.9, "loss": 0.1} for row in ROWS[:20]]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def without_steps(rows):
    return [
        {k: v for k, v in row.items() if k != "step"} | {"epoch": row["step"] / 100}
        for row in rows
    ]


def columns_of_two(folder):
    tables = [
        pd.DataFrame(rows)
        .set_index("step")
        .rename(columns=lambda name, run=run: f"{run} - train/{name}")
        for run, rows in (("one", FIRST), ("two", ROWS))
    ]
    pd.concat(tables, axis=1).reset_index(names="Step").to_csv(
        folder / "wandb.csv", index=False
    )
    return folder / "wandb.csv"


def column_of_names(folder):
    both = [
        row | {"run_id": run} for run, rows in (("one", FIRST), ("two", ROWS)) for row in rows
    ]
    table = pd.DataFrame(both).sort_values("step", kind="stable")
    table.to_csv(folder / "long.csv", index=False)
    return folder / "long.csv"


def two_states(folder):
    for name, rows in (("one", FIRST), ("two", ROWS)):
        for last in (10, len(rows)):  # two checkpoints of each
            place = folder / "out" / name / f"checkpoint-{last}"
            place.mkdir(parents=True)
            (place / "trainer_state.json").write_text(json.dumps({"log_history": rows[:last]}))
            at = 1e9 + last + 100 * (name == "two")
            os.utime(place / "trainer_state.json", (at, at))
    return folder / "out"


def two_folders_of_events(folder):
    torch_writer = pytest.importorskip("torch.utils.tensorboard")
    for name, rows in (("one", FIRST), ("two", ROWS)):
        with torch_writer.SummaryWriter(folder / "runs" / name) as writer:
            for row in rows:
                for measure, value in row.items():
                    writer.add_scalar(f"train/{measure}", value, row["step"])
    return folder / "runs"


def two_cells(folder):
    cells = [
        json.loads(notebook({"data": {"text/html": page(rows)}}))["cells"][0]
        for rows in (FIRST, ROWS)
    ]
    return as_file("two.ipynb", json.dumps({"cells": cells, "nbformat": 4, "metadata": {}}))(
        folder
    )


TWO = {
    "JSON lines, appended": as_file("log.jsonl", lines(*FIRST, *ROWS)),
    "a list": as_file("log.json", json.dumps([*FIRST, *ROWS])),
    "printed lines without steps": as_file(
        "train.log", "".join(f"{row}\n" for row in without_steps(FIRST) + without_steps(ROWS))
    ),
    "a CSV with columns of two": columns_of_two,
    "a CSV with a column of names": column_of_names,
    "a notebook with two tables": two_cells,
    "a folder of checkpoints": two_states,
    "folders of events": two_folders_of_events,
}


@pytest.mark.parametrize("form", TWO)
def test_a_log_of_two_runs_is_said_to_have_two(form, tmp_path):
    found = kit.diagnose(TWO[form](tmp_path))
    assert len(found.runs) == 2 and len(found.metrics) == STEPS
    assert (
        "has 2 runs (" in found.sentence
        and f"This is the last, {found.runs[-1]}: 30 logged" in found.sentence
    )
    assert "reward 0.2 in the first fifth" in found.sentence, (
        "the last alone, nothing of the first"
    )


@pytest.mark.parametrize(
    "rows",
    [
        [*ROWS, *ROWS[20:]], [*ROWS[:20], *ROWS[10:]], [*ROWS[9::10], ROWS[29]],
        [half for row in ROWS for half in (row, {"eval_reward": 0.1, "step": row["step"]})],
        [*ROWS, {"train_runtime": 3.0, "step": 30}],
    ],
    ids=["repeated", "resumed", "every tenth", "evaluations", "summary"],
)  # fmt: skip
def test_a_log_of_one_run_is_one(rows, tmp_path):
    found = kit.diagnose(as_file("log.jsonl", lines(*rows))(tmp_path))
    assert found.runs == () and found.sentence.startswith("log.jsonl: ")


NAN = float("nan")


@pytest.mark.parametrize(
    "form",
    {
        "JSON lines": as_file("log.jsonl", lines(*ROWS[:9], ROWS[9] | {"loss": NAN, "grad_norm": NAN})),
        "trainer_state": as_file(
            "trainer_state.json", json.dumps({"log_history": [row | {"grad_norm": NAN} for row in ROWS]})
        ),
        "printed": as_file("a.log", "".join(f"{row | {'loss': NAN, 'grad_norm': NAN}}\n" for row in ROWS)),
        "printed in quotes": as_file("b.log", "".join(f"{row | {'grad_norm': 'nan'}}\n" for row in ROWS)),
        "infinite": as_file("c.log", "".join(f"{row | {'loss': -float('inf')}}\n" for row in ROWS)),
        "a table": as_file(
            "t.ipynb", notebook({"data": {"text/html": page([*ROWS[:9], ROWS[9] | {"loss": "nan"}])}})
        ),
    }.values(),
)  # fmt: skip
def test_a_nan_of_a_log_is_not_read_as_nothing(form, tmp_path):
    assert "not finite" in {flag.name for flag in kit.diagnose(form(tmp_path)).flags}


VERL = {
    "training/global_step": "step", "critic/score/mean": "reward", "actor/pg_loss": "loss", "actor/lr": "learning_rate",
    "actor/grad_norm": "grad_norm", "actor/entropy": "entropy", "actor/kl_loss": "kl",
    "actor/pg_clipfrac": "clip_ratio", "response_length/mean": "completion_length",
    "response_length/clip_ratio": "completion_cut_off",
}  # fmt: skip
OPENRLHF = {
    "train/global_step": "step", "train/reward": "reward", "train/policy_loss": "loss",
    "train/actor_lr": "learning_rate", "train/kl": "kl", "train/ppo_clip_ratio": "clip_ratio",
    "train/response_length": "completion_length",
    "eval/accuracy": "eval/accuracy",
}  # fmt: skip
TRL_EVAL = {
    "step": "step",
    "reward": "reward",
    "eval_reward": "eval/reward",
    "eval_rewards/a/mean": "eval/reward/a",
}


@pytest.mark.parametrize(
    "names", [VERL, OPENRLHF, TRL_EVAL], ids=["verl", "OpenRLHF", "TRL's evaluations"]
)
def test_names_of_other_trainers(names, tmp_path):
    rows = [
        {name: 0.5 if own != "step" else step for name, own in names.items()}
        for step in range(1, 9)
    ]
    assert {*names.values()} <= {
        *kit.diagnose(as_file("log.jsonl", lines(*rows))(tmp_path)).metrics
    }


@pytest.mark.parametrize("length", [64.0, 100.0, 128.5, 256.0, 1024.0])
def test_a_mean_length_that_never_changes_is_no_limit(length, tmp_path):
    rows = [row | {"completions/mean_length": length} for row in ROWS[:11]]
    rows = [
        {name: value for name, value in row.items() if "clipped" not in name} for row in rows
    ]
    found = kit.diagnose(as_file("log.jsonl", lines(*rows))(tmp_path))
    assert "cut off" not in {flag.name for flag in found.flags}
    assert found.untold["cut off"] == ["completion_cut_off"]


@pytest.mark.parametrize(
    ("longest", "times", "seen"),
    [(200, 6, True), (200, 4, False), (7, 20, False), (128.5, 6, False)],
    ids=["", "seldom", "short", "no number of tokens"],
)
def test_a_mean_length_that_is_often_the_longest_is_the_limit(longest, times, seen):
    """Without the share that was cut off: all were, where so many steps have the log's longest mean."""
    lengths = [float(longest)] * times + [longest - 1.5 - 0.1 * step for step in range(10)]
    rows = [
        {"step": at, "completion_length": one, "reward": 0.1} for at, one in enumerate(lengths)
    ]
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
    from grpo_kit.record._jsonl_run import RunLog

    log = RunLog.open(
        tmp_path / "run", {"config": {}, "reward_parts": ["right"], "reward_weights": [0.0]}
    )
    for row in ROWS:
        log.write(row["step"], {"reward": 0.5, "reward/right": 0.0})
    log.flush()
    assert not kit.diagnose(tmp_path / "run").flags  # a part of weight 0 is not trained on


@pytest.mark.parametrize("text", ["", "no log", "[]", '{"loss": 1.0}\n{"loss": 0.5}'])
def test_what_is_no_log_of_such_a_run_is_refused(text, tmp_path):
    with pytest.raises(
        LogError, match="holds no steps of a run with a reward; known are run folders"
    ):
        kit.diagnose(as_file("log.txt", text)(tmp_path))


def test_names_and_numbers():
    rows = [
        {"Step": "1,000", "rewards / a b": "1,234.5", "note": "x", "flag": True},
        {"Step": 1000, "kl": float("nan")},
    ]
    assert table_of(rows).to_dict("records")[0]["reward/a b"] == 1234.5
