"""The predictions are those of the kit's own test, and asking leaves the model as it was."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_runs import SMALL
from loop_runs import task as letters_task

import grpo_kit as kit
from grpo_kit.loop.run_checks import trained_in
from grpo_kit.more.lab import power as room
from grpo_kit.more.lab.power import chance, least
from grpo_kit.more.lab.statistics import difference_over_seeds

SAVED = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "results" / "power.json").read_text(
        encoding="utf-8"
    )
)


@pytest.fixture(scope="module")
def task():
    return kit.tasks.largest(n_train=512, n_held_out=256)


def of(task, **asked):
    return kit.power(task, config=kit.preset("cpu"), **asked)


@pytest.mark.parametrize(
    ("difference", "seeds", "rows", "of_rows"),
    [(0.1, 4, 64, 0.01), (0.1, 8, 64, 0.01), (0.2, 3, 128, 0.01), (0.2, 8, 32, 0.2)],
)
def test_a_chance_is_how_often_the_kits_own_interval_lies_above_zero(
    difference, seeds, rows, of_rows
):
    """Seeds, rows and noise are drawn with these variances, and the laboratory's test looks at them."""
    rng, found, draws = np.random.default_rng(0), 0, 1500
    for _ in range(draws):
        lasting = rng.normal(0, of_rows**0.5, rows)
        lasting -= lasting.mean()  # these rows are those that are there
        change = difference + rng.normal(0, 0.08, (seeds, 1)) + lasting
        change = change + rng.normal(0, 0.12**0.5, (seeds, rows))
        found += difference_over_seeds(np.zeros_like(change), change)[0].low > 0
    told = chance(difference, seeds, rows, spreads=[0.08], noise=0.12, rows=of_rows)
    assert told == pytest.approx(found / draws, abs=0.04)


def test_one_spread_is_students_own_power():
    """Of 0.8 standard deviations, 15 pairs are found with 82 % (Cohen's table for the paired t, two-sided 5 %)."""
    assert chance(0.8, 15, 10**9, spreads=[1.0], noise=0, rows=0) == pytest.approx(
        0.821, abs=0.002
    )


def test_several_spreads_are_a_mean_and_huge_differences_are_certain():
    each = [chance(0.1, 6, 256, spreads=[s]) for s in (0.05, 0.15)]
    assert chance(0.1, 6, 256, spreads=(0.05, 0.15)) == pytest.approx(sum(each) / 2)
    assert chance(0.99, 20, 256, spreads=[0.02]) == 1  # where scipy knows no number


def test_the_least_difference_is_the_one_found_four_times_of_five():
    for seeds in (3, 8, 20):
        assert chance(least(seeds, 256), seeds, 256) == pytest.approx(0.8, abs=1e-3)
    assert least(2, 256, spreads=[0.5]) == 1


def test_the_constants_are_those_of_the_runs():
    for kind, fit in SAVED["constants"].items():
        said = {
            "spreads": list(room.SPREADS[kind]),
            "noise": room.NOISE[kind],
            "rows": room.ROWS[kind],
        }
        assert said == fit
    assert SAVED["rise"]["median"] == room.RISE


def test_fewer_seeds_would_not_do_and_hours_are_runs(task):
    found = of(task, difference=0.1, hours=1, step_seconds=5.0)
    assert chance(0.1, found.seeds, 256) >= 0.8 > chance(0.1, found.seeds - 1, 256)
    assert found.run_seconds == 5 * (32 + 256 / 32) and (found.steps, found.prompts) == (
        32,
        128,
    )
    assert found.hours_of(9) == pytest.approx(2 * 9 * 200 / 3600)
    assert found.shown_in == (9, least(9, 256))  # 18 runs of 200 s in an hour
    low, high = found.between
    assert (
        low < found.seeds < high
        and chance(0.1, low, 256, spreads=room.SPREADS["answer"][:1]) >= 0.8
    )
    assert (
        f"needs {found.seeds} seeds of each setting ({low} if they are quiet, {high} if noisy)"
        in found.sentence
    )
    assert "runs of 32 steps on 128 prompts, 256 held-out questions" in found.sentence
    assert "In 60 minutes, 9 seeds show a difference of" in found.sentence
    table = found.table()
    assert found.seeds in table.index and table.loc[3, "hours"] == pytest.approx(
        2 * 3 * 200 / 3600
    )
    assert table["least"].is_monotonic_decreasing and "finds 10 points" in repr(found)


def test_what_cannot_be_shown_is_said(task):
    assert "needs more than 100 seeds" in of(task, difference=0.01).sentence
    assert "no time for two seeds" in of(task, hours=0.01, step_seconds=60).sentence
    few = of(replace(task, held_out=task.held_out[:32]))
    assert (
        few.questions == 32 < few.enough
        and "Of held-out questions only 32 are there" in few.sentence
    )
    assert "steps are few" in kit.power(task, config=kit.preset("cpu", steps=4)).sentence
    assert of(task, spread=0.02).seeds < of(task).seeds < of(task, spread=0.3).seeds


def test_a_model_is_asked_and_timed_and_left_as_it_was(tmp_path, monkeypatch):
    """A task with a signal, so that the three steps move weights."""
    monkeypatch.chdir(tmp_path)
    config = kit.preset("smoke", **SMALL)
    model, tokenizer = kit.load_policy(config.model, quiet=True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = kit.power(letters_task(), model, tokenizer, config)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert trained_in(model) == (None, 0) and not list(tmp_path.iterdir())
    assert 0 < found.run_seconds < 60 and 0 < found.signal <= config.prompts_per_step
    assert re.search(r"First: the model is not ready \(.*\)", found.sentence)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"difference": 10}, "difference=10 must lie below 1"),
        ({"difference": 0}, "difference=0 must be a number above 0"),
        ({"hours": -1}, "hours=-1"),
        ({"spread": 0}, "spread=0 must be a number above 0; leave it out"),
        ({"model": object()}, "model and tokenizer go together"),
    ],
)
def test_what_cannot_be_is_refused_by_name(task, asked, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        of(task, **asked)
