"""What two arms differ in besides their settings is said; what a run leaves is a row of numbers."""

import json

import lab_runs
import pandas as pd
import pytest

from grpo_kit.more import lab
from grpo_kit.more.lab._arm import outcomes, unlike

SAME = {
    "steps": 10,
    "n": 128,
    "completions": 320,
    "tokens": 1000.0,
    "max_completion_tokens": 12,
    "train_rows": "a",
}


def runs(**changes):
    """Two seeds of "one" and "other", the latter changed."""
    return pd.DataFrame(
        [
            {"arm": arm, "seed": s, **SAME, **(changes if arm == "other" else {})}
            for arm in ("one", "other")
            for s in (0, 1)
        ]
    )


@pytest.mark.parametrize(
    "changes, expected, why",
    [
        ({}, [], "nothing differs"),
        ({"train_rows": "b"}, ["other train rows"], "the mistake of two published rows"),
        (
            {"train_rows": None},
            ["train rows not on record"],
            "old results: not known is not equal",
        ),
        ({"steps": 20}, ["20 steps for 10"], "the arm's own number first"),
        ({"max_completion_tokens": 32}, ["32 tokens at most for 12"], ""),
        (
            {"max_completion_tokens": None},
            ["not on record tokens at most for 12"],
            "old results",
        ),
        ({"n": 64}, ["64 held-out rows for 128"], ""),
        (
            {"completions": 640, "tokens": 1900.0},
            ["2.0 x the completions", "1.9 x the tokens"],
            "compute",
        ),
        ({"tokens": 400.0}, ["0.40 x the tokens"], "less of it too"),
        ({"tokens": 1090.0}, [], "answers of a few tokens more are what training does"),
    ],
)
def test_what_is_unlike(changes, expected, why):
    assert unlike(runs(**changes), "other", "one") == expected, why


def test_the_seeds_that_both_have_count():
    table = runs()
    table.loc[len(table)] = {"arm": "other", "seed": 2, **SAME, "steps": 99}
    assert unlike(table, "other", "one") == []


def test_the_laboratory_says_it(tmp_path, capsys):
    base = lab_runs.base()
    task = base["task"]
    arms = {
        "control": {},
        "longer": {"steps": 2},
        "rows": {"task": lab_runs.replace_rows(task)},
        "cold": {"temperature": 0.5},
    }
    found = lab.compare_arms(arms, [0], **{**base, "steps": 1}, folder=tmp_path)
    said = capsys.readouterr().out
    assert "longer differs from control in more than its settings: 2 steps for 1" in said
    assert "rows differs from control in more than its settings: other train rows" in said
    assert "cold differs" not in said
    assert (
        found.summary()["unlike"]["rows"].startswith("other train rows")
        and found.summary()["unlike"]["cold"] == ""
    )
    assert found.unlike("longer")[0] == "2 steps for 1"


def test_samples_by_row_are_kept(tmp_path):
    """pass@k needs each row's; sampled_<t> stays their share."""
    lab.compare_arms(
        {"a": {"eval_temperatures": (1.0,), "eval_samples": 3}},
        [0],
        **{**lab_runs.base(), "steps": 1},
        folder=tmp_path,
        quiet=True,
    )
    result = json.loads((tmp_path / "a" / "seed-0" / "result.json").read_text())
    counts = result["sampled_right"]["1.0"]
    assert (
        len(counts) == 8 and max(counts) <= 3 and result["sampled"]["1.0"] == sum(counts) / 24
    )
    row = lab.load(tmp_path).runs.iloc[0]
    assert row["pass@3_1.0"] == sum(c > 0 for c in counts) / 8 >= row["sampled_1.0"]


def test_outcomes_by_hand():
    result = {
        "accuracy": {"value": 0.5},
        "before": {"value": 0.1},
        "sampled": {"1.0": 0.25},
        "constant": None,
    }
    result |= {
        "prepare_seconds": 2.0,
        "train_seconds": 5.0,
        "sampled_right": {"1.0": [0, 2]},
        "eval_samples": 4,
    }
    metrics = pd.DataFrame(
        {
            "reward": [0.1, 0.2, 0.3, 0.4],
            "reward/exact_answer": [0.0, 0.25, None, 0.75],
            "grad_norm": [6.0, 4.0, 2.0, 0.0],
            "completion_length": [10.0, 20.0, 30.0, 40.0],
            "kl": [None, 0.1, 0.2, 0.3],
            "entropy": [1.0] * 4,
            "frac_reward_zero_std": [0.0] * 4,
        }
    )
    row = outcomes(result, metrics)
    assert (
        row["reward/exact_answer_mean"] == pytest.approx(1 / 3)
        and row["reward/exact_answer_last"] == 0.75
    )
    assert (row["length_mean"], row["length_last"], row["kl_last"]) == (
        25.0,
        40.0,
        pytest.approx(0.3),
    )
    assert row["grad_norm_early"] == 3.0 and row["seconds"] == 7.0 and row["pass@4_1.0"] == 0.5
    assert pd.isna(outcomes(result, metrics.drop(columns="kl"))["kl_last"]), (
        "no reference model"
    )
