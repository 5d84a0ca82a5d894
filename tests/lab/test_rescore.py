"""A run's completions under another reward: the same one changes nothing, its opposite turns all around."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from loop_runs import letters, make, task

import grpo_kit as kit
from grpo_kit.record.files import RunFolderError, read_completions
from grpo_kit.rewards import ExactAnswer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    # two passes over 16 rows
    trainer = make(tmp_path_factory.mktemp("rescored") / "run", steps=9, dynamic_sampling=1)
    trainer.train()
    return trainer.folder


def share(found):
    return found.table()["value"].tolist()


def test_the_runs_own_reward_gives_what_the_run_had(run):
    found = kit.rescore(run, task())
    recorded = read_completions(run)
    assert found.completions["after"].tolist() == pytest.approx(recorded["reward"].tolist())
    assert np.allclose(found.completions["advantage_before"], recorded["advantage"], atol=1e-5)
    before, now, *rest = share(found)
    assert (
        before == now > 0
        and rest == [0, 0, 0]
        and found.direction == pytest.approx(1)
        and found.changed().empty
    )


def test_the_opposite_reward_turns_every_group_around(run):
    def against(completions, **columns):
        return [-x for x in letters(completions)]

    same, found = kit.rescore(run, letters), kit.rescore(run, against)
    assert np.allclose(
        same.completions["advantage_after"], -found.completions["advantage_after"]
    )
    assert kit.rescore(run, task(), reward_weights=[0, 0, -1]).direction == pytest.approx(
        found.direction, abs=1e-6
    )
    with_signal = found.groups["signal before"] == 1
    assert (
        found.groups["reversed"][with_signal] == 1
    ).all() and found.direction == pytest.approx(-1, abs=1e-4)


def test_a_constant_has_no_signal_and_no_direction(run):
    found = kit.rescore(run, lambda completions, **columns: [0.5] * len(completions))
    assert (
        share(found)[1] == 0
        and found.direction is None
        and "0.0 % of groups have a signal" in found.sentence
    )


def test_what_cannot_be_judged_has_no_part_in_it(run):
    def some(completions, **columns):
        return [None if len(text) % 2 else 1.0 * len(text) for text in completions]

    found = kit.rescore(run, some)
    unjudged = found.completions["after"].isna()
    assert unjudged.any() and (found.completions["advantage_after"][unjudged] == 0).all()


def test_columns_of_the_rows_are_those_of_the_step(run):
    """Every question names its answer; a reward that compares them would find one that belongs elsewhere."""

    def fits(completions, question, answer, **columns):
        return [float(a in q) for q, a in zip(question, answer, strict=True)]

    found = kit.rescore(run, fits, task=task())
    assert found.completions["after"].eq(1).all()
    with pytest.raises(
        ValueError,
        match=r"'fits' asks for the column \['question'\], which rescore \(give task=,",
    ):
        kit.rescore(run, fits)
    other = replace(task(), train=task().train[::-1])
    with pytest.raises(
        ValueError, match="has not the rows that the run was trained on: step 1 asked for"
    ):
        kit.rescore(run, fits, task=other)


def test_what_changes_most_comes_first_and_each_text_once(run):
    found = kit.rescore(
        run, lambda completions, **columns: [float(len(text)) for text in completions]
    )
    changed = found.changed(5)
    sizes = (changed["after"] - changed["before"]).abs()
    assert sizes.is_monotonic_decreasing and not changed["completion"].duplicated().any()
    assert isinstance(found.table(), pd.DataFrame) and "<table" in found._repr_html_()


def test_what_cannot_be_scored_again_is_refused(run, tmp_path):
    with pytest.raises(RunFolderError, match="does not exist"):
        kit.rescore(tmp_path / "no", ExactAnswer())
    with pytest.raises(RunFolderError, match="holds no completions to score again"):
        kit.rescore(tmp_path, ExactAnswer())
    with pytest.raises(ValueError, match=r"reward_weights=\[1\] has 1 numbers for 2 rewards"):
        kit.rescore(run, [ExactAnswer(), letters], reward_weights=[1])
