"""Rows of the plan with no run, some, enough, or the wrong ones; what they replace; which verdicts changed."""

from dataclasses import replace

import lab_runs
import pytest
from plan_runs import write

from benchmarks.advice import row as advice_row
from benchmarks.advice.claims import Claim
from benchmarks.advice.plan import campaign
from benchmarks.advice.plan.condition import Condition
from benchmarks.advice.plan.entry import Elsewhere
from benchmarks.advice.row import of_asked, of_elsewhere, say
from benchmarks.advice.table import asked_again, counts_text, markdown, table

OLD = Claim("Cold helps", "A4", "cold", "control")
RARE = Condition("the control is rare", "control", "reward/exact_answer", 1, "<", 0.05)


@pytest.fixture
def entry(small, monkeypatch):
    """A claim of 3 to 4 seeds that redoes a row of the first table."""
    made = replace(
        campaign.ASKED[0], first=3, most=4, margin=0.1, redone="other rows", replaces=OLD.text
    )
    monkeypatch.setattr(campaign, "ASKED", [made])
    monkeypatch.setattr(advice_row, "CLAIM_OF", {OLD.text: OLD})
    monkeypatch.setattr("benchmarks.advice.table.CLAIM_OF", {OLD.text: OLD})
    return made


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The first campaign's runs: an arm "cold" beside "control"."""
    folder = tmp_path_factory.mktemp("first")
    lab_runs.compare(folder)
    return folder


def add(differences, start=0, **outcomes):
    for seed, difference in enumerate(differences, start):
        write("control", seed, reward_mean=0.5, **outcomes)
        write("cold", seed, reward_mean=0.5 + difference, **outcomes)


def test_a_row_says_how_far_it_is(entry):
    row = of_asked(entry)
    assert (
        row["verdict"] == "not run yet"
        and not row["run"]
        and row["estimated"]
        and row["hours"] > 0
    )
    add([0.2])
    row = of_asked(entry)
    assert (row["verdict"], row["why"]) == ("so far", "so far, 1 of 3 seeds") and row[
        "p"
    ] is None
    assert not row["estimated"] and row["hours"] == pytest.approx(2 * 360 / 3600)
    add([0.2, 0.4], start=1)
    row = of_asked(entry)
    assert (
        row["run"]
        and row["verdict"] == "cannot tell"
        and row["why"] == "so far, 3 of at most 4 seeds"
    )
    add([0.3], start=3)
    row = of_asked(entry)
    assert (row["verdict"], row["why"], row["seeds"]) == ("holds", "", 4) and row["p"] < 0.05
    assert (
        row["effect"] == pytest.approx(0.275)
        and "+0.275 [" in say(row)
        and "4 seeds" in say(row)
    )


def test_a_verdict_is_of_the_entrys_own_hypothesis(entry):
    add([-0.01, 0.01, 0.0, 0.0])
    assert of_asked(entry)["verdict"] == "no difference larger than the margin"
    no_less = of_asked(replace(entry, says="no less"))
    assert no_less["verdict"] == "holds" and no_less["p"] < 0.01 < of_asked(entry)["p"]


def test_what_arms_differ_in_besides_is_said(entry):
    add([0.2, 0.2, 0.2])
    assert of_asked(entry)["unlike"] == ""
    write("cold", 2, reward_mean=0.7, train_rows="others")
    assert of_asked(entry)["unlike"] == "other train rows" and "also unlike: other" in say(
        of_asked(entry)
    )


def test_an_outcome_that_no_run_has_is_no_verdict(entry):
    add([0.2, 0.2, 0.2])
    row = of_asked(replace(entry, outcome="nothing"))
    assert (
        row["verdict"] == "cannot tell" and "outcome='nothing'" in row["why"] and not row["run"]
    )
    assert of_asked(replace(entry, outcome="reward_mean - tokens"))["effect"] == pytest.approx(
        0.2
    )


@pytest.mark.parametrize("first_step, verdict", [(0.04, "holds"), (0.06, "conditions not met")])
def test_a_row_whose_condition_fails_has_no_verdict_and_says_why(
    entry, first, first_step, verdict
):
    add(
        [0.3, 0.31, 0.3, 0.31], curve={"step": [1, 2], "reward/exact_answer": [first_step, 0.9]}
    )
    row = of_asked(replace(entry, counts_if=RARE))
    assert row["verdict"] == verdict and row["run"] == (verdict == "holds")
    if not row["run"]:
        said = counts_text(whole(first, replace(entry, counts_if=RARE)))
        assert said.endswith(
            " Hypotheses of the plan with no verdict as their condition was not met: 1."
        )
        assert (
            row["p"] is None and row["why"] == "counts only if the control is rare; it is 6.0 %"
        )
        assert row["effect"] > 0, "what was measured is still shown"


def test_a_condition_of_an_arm_that_is_not_run_is_not_met(entry, small):
    small["fast"] = small["control"] | {"temperature": 0.9}
    add([0.3] * 4, curve={"step": [1, 2], "reward/exact_answer": [0, 0]})
    row = of_asked(replace(entry, counts_if=replace(RARE, than="fast")))
    assert row["verdict"] == "conditions not met" and "fast is not run yet" in row["why"]


def whole(first, entry, **given):
    return table(first, asked=[entry], answered=[], elsewhere=[], claims=[OLD], **given)


def test_the_first_tables_row_stands_until_the_new_one_is_run(entry, first):
    made = whole(first, entry)
    assert (
        made["name"].tolist() == ["cold", "Cold helps"]
        and made.loc[1, "why"] == "other rows; asked again: cold"
    )
    assert made["run"].tolist() == [False, True]
    assert "[cold](#cold): h" in markdown(made) and "with no verdict yet: 1" in counts_text(
        made
    )
    add([0.2, 0.4])
    assert len(whole(first, entry)) == 2, "2 of 3 seeds"
    add([0.2], start=2)
    made = whole(first, entry)
    assert made["name"].tolist() == ["cold"] and made.loc[0, "p_holm"] == made.loc[0, "p"]
    assert "no verdict yet" not in counts_text(made)


def test_verdicts_that_changed(entry, first):
    again = asked_again(whole(first, entry), first, asked=[entry])
    assert again["now"].tolist() == ["**not run yet**"] and again["changed"].tolist() == [""]
    add([0.3, 0.31, 0.3, 0.31])
    again = asked_again(whole(first, entry), first, asked=[entry])
    old = again["first"].item().split(":")[0]
    assert (
        old != "**holds**"
        and again["changed"].item() == "yes"
        and again["why"].item() == "other rows"
    )
    assert (
        again["now"].item().startswith("**holds**: +30.5 [")
        and "points" in again["first"].item()
    )


def test_what_was_published_is_what_is_compared(entry, first, monkeypatch):
    monkeypatch.setattr(
        "benchmarks.advice.table.CLAIM_OF", {OLD.text: replace(OLD, published="holds")}
    )
    add([0.3, 0.31, 0.3, 0.31])
    again = asked_again(whole(first, entry), first, asked=[entry])
    assert again["first"].item().startswith("**holds**") and again["changed"].item() == "no"


def test_a_claim_that_another_command_asks_is_judged_with_all_its_seeds(entry, first):
    from grpo_kit.more import lab

    asked = Elsewhere(
        "other",
        "A4",
        "h",
        "d.json",
        "python x",
        "accuracy",
        "no less",
        0.1,
        2,
        0.4,
        3,
        OLD.text,
    )
    row = of_elsewhere(asked, lab.load(first))
    assert (row["verdict"], row["seeds"], row["run"], row["p"]) == ("so far", 2, False, None)
    row = of_elsewhere(replace(asked, seeds=2), lab.load(first))
    assert (
        row["run"]
        and row["says"] == "no less"
        and row["margin"] == 0.1
        and row["name"] == "other"
    )
