"""The plan of the advice: every claim once, arms that differ in what it says, and the rule that says how many seeds."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import lab_runs
import numpy as np
import pandas as pd
import pytest
import torch

import grpo_kit as kit
from benchmarks.advice.__main__ import PLAN, RESULTS
from benchmarks.advice.claims import CLAIMS
from benchmarks.advice.plan import arms, campaign, cost, runs, shown, tasks
from benchmarks.advice.plan.answered import ANSWERED, ELSEWHERE, NOT_ASKED
from benchmarks.advice.plan.arms import ARMS, resolved, unlike
from benchmarks.advice.plan.entry import FIRST, MOST, Asked, verdict
from benchmarks.advice.plan.rule import WIDTH, coverage_of_the_rule, narrow, next_seeds
from benchmarks.advice.table import table
from grpo_kit.more import lab

ROOT = Path(__file__).parents[2]
PIECES = {
    f"{who}{n}"
    for who, last in (("A", 9), ("B", 16), ("C", 12), ("D", 6), ("E", 6))
    for n in range(1, 1 + last)
}
SIDES = [
    (e, one, other)
    for e in campaign.ASKED
    for one, other in zip(*(e.tuned or ((e.arm,), (e.against,))), strict=True)
]


def pieces(entries):
    return {piece for entry in entries for piece in re.findall(r"[A-E]\d+", entry.by)}


# ---- what is in the plan


def test_every_piece_of_advice_is_asked_or_it_says_why_not():
    asked, not_asked = pieces([*campaign.ASKED, *ANSWERED, *ELSEWHERE]), pieces(NOT_ASKED)
    assert asked | not_asked == PIECES and not asked & not_asked and len(PIECES) == 49
    assert len(asked) >= 35
    names = [entry.name for entry in (*campaign.ASKED, *ANSWERED, *ELSEWHERE)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "entry, one, other", SIDES, ids=[f"{e.name}: {a}" for e, a, _ in SIDES]
)
def test_arms_differ_in_what_the_plan_says(entry, one, other):
    """Other rows made two published rows worthless: no arm has other rows, steps or lengths unless its row says so."""
    settings = [resolved(arm) for arm in (one, other)]
    for arm, each in zip((one, other), settings, strict=True):
        assert each.config.steps == ARMS[arm].get("steps", 20), arm
    assert unlike(*settings) == entry.unlike


def test_every_arm_is_used():
    assert {arm for e in campaign.ASKED for arm, _ in campaign.largest(e, 1)} == set(ARMS)


def test_every_arms_recorded_runs_are_found_by_its_settings():
    """A field that leaves Config must not make stored runs another arm's (lab._arm.fingerprint)."""
    assert not [arm for arm in ARMS if not runs.done(arm)]


def test_outcomes_are_read_in_both_arms():
    """A reward/<name> is among the rewards of both; samples need a temperature; 128 rows are too few for accuracy."""
    for entry, *sides in SIDES:
        for settings in map(resolved, sides):
            for name in re.findall(r"reward/(\w+)_(?:mean|last)", entry.outcome):
                assert name in [reward.__name__ for reward in settings.task.rewards], (
                    entry.name,
                    name,
                )
            if "_1.0" in entry.outcome:
                assert settings.eval_temperatures == (1.0,), entry.name
            if entry.outcome.startswith("pass@"):
                assert entry.outcome == f"pass@{settings.eval_samples}_1.0"
            if entry.outcome == "kl_last":
                assert settings.config.beta > 0
            if entry.outcome == "accuracy":
                assert len(settings.task.held_out) == 256, entry.name


def test_over_the_run_both_arms_sample_alike():
    for entry, *sides in SIDES:
        if entry.outcome.startswith("reward/"):
            settings = list(map(resolved, sides))
            assert len({s.config.temperature for s in settings}) == 1, entry.name
            assert {s.config.top_p for s in settings} == {1.0}, entry.name


def test_the_prefills_outcome_is_not_paid():
    for arm in ("prefill", "no prefill"):
        task = resolved(arm).task
        weights = dict(
            zip([r.__name__ for r in task.rewards], task.reward_weights, strict=True)
        )
        assert weights["last_is_right"] == 0.0
    assert campaign.entry_of("prefill").outcome == "reward/last_is_right_mean"


def test_answered_rows_have_a_verdict_in_the_committed_data():
    found = table(RESULTS, asked=[], elsewhere=[], claims=[]).set_index("name")["verdict"]
    for entry in ANSWERED:
        assert found[entry.name] in ("holds", "does not"), entry.name
        paths = re.findall(r"(?:benchmarks|notebooks)/[\w./-]+", entry.data)
        assert paths and all((ROOT / path).exists() for path in paths)
    for entry in ELSEWHERE:
        assert not entry.claim or entry.claim in {c.text for c in CLAIMS}


def test_a_row_that_is_replaced_is_one_of_the_first_table():
    replaced = [entry.replaces for entry in campaign.ASKED if entry.replaces]
    assert set(replaced) <= {claim.text for claim in CLAIMS} and len(set(replaced)) == len(
        replaced
    )
    withdrawn = {claim.text for claim in CLAIMS if claim.withdrawn}
    assert withdrawn <= set(replaced), "what was withdrawn is asked again"


@pytest.mark.parametrize(
    "entry", [e for e in campaign.ASKED if e.counts_if], ids=lambda e: e.name
)
def test_a_condition_can_be_read_and_says_what_it_reads(entry):
    condition = entry.counts_if
    assert set(condition.arms) <= set(ARMS)
    for arm in condition.arms:
        rewards = {f"reward/{r.__name__}" for r in resolved(arm).task.rewards}
        assert condition.column in rewards
    number = {0.05: "below 5 %", 0.005: "1 in 200", -0.1: "10 points below"}[condition.bound]
    assert number in str(condition) and condition.sign == (
        "<" if "below 5 %" in number else "<="
    )
    steps = {5: "first 5 steps", 1: "first step", 0: "last quarter"}[condition.first]
    assert steps in str(condition)


def curves(*values):
    return {
        seed: pd.DataFrame({"reward/exact_answer": each}) for seed, each in enumerate(values)
    }


def test_conditions_by_hand():
    conditions = {e.name: e.counts_if for e in campaign.ASKED if e.counts_if}
    rare, never, beta = (conditions[n] for n in ("resampled", "never-right", "beta-rescues"))
    low = curves([0, 0, 0.1, 0, 0.1, 1, 1], [0.04, None, 0.04, 0.04, 0.04, 0.04, 1])
    assert (
        rare.measured({"rare": low}) == pytest.approx(0.04)
        and rare.holds(0.0499)
        and not rare.holds(0.05)
    )
    assert never.measured({"never right": curves([0, 1], [1 / 32, 1])}) == pytest.approx(1 / 64)
    assert never.holds(1 / 200) and not never.holds(1 / 64)
    too_fast, fast = curves([1, 1, 1, 1, 1, 1, 0.2, 0.4]), curves([0] * 6 + [0.5, 0.7], [9] * 8)
    assert beta.measured({"too fast": too_fast, "fast": fast}) == pytest.approx(-0.3), (
        "seeds that both have"
    )
    assert beta.holds(-0.1) and not beta.holds(-0.09)
    assert beta.measured({"too fast": too_fast}) is None


def test_the_committed_plan_is_this_one():
    assert PLAN.read_text() == shown.plan_text(state=False), (
        "python -m benchmarks.advice --plan --write"
    )


# ---- rewards that are read


def test_rewards_by_hand():
    texts = ["82</answer>", "The largest is 82, not 47.", "47, 82", "12", "none"]
    columns = {"answer": ["82"] * 5}
    assert tasks.last_is_right(texts, **columns) == [1, 0, 1, 0, 0]
    assert tasks.mention(texts, **columns) == [1, 1, 1, 0, 0]
    close = tasks.Close()(
        ["<answer>82</answer>", "<answer>41</answer>", "41"], answer=["82"] * 3
    )
    assert close == pytest.approx([1.0, np.exp(-2 * 0.5), 0.0])


def test_answers_in_think_tags_are_read_there():
    task = tasks.TAGGED_THINK
    row = task.train[0]
    text = f"<think>{row['answer']}</think>"
    assert task.is_right(row, text) and not task.is_right(row, text.replace("think", "answer"))
    assert [r([text], answer=[row["answer"]]) for r in task.rewards] == [[1.0], [1.0]]
    assert task.examples[0][1] == "<think>82</think>"


# ---- the sampler in bfloat16


def test_the_rounded_sampler_gives_the_weights_back():
    model, _ = kit.load_policy("tiny-random", quiet=True)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyError), arms.rounded(model):
        inside = [p.detach().clone() for p in model.parameters()]
        raise KeyError
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(
        torch.equal(i, b.bfloat16().float()) for i, b in zip(inside, before, strict=True)
    )
    assert any(not torch.equal(i, b) for i, b in zip(inside, before, strict=True))


def test_the_rounded_sampler_trains_on_what_it_says(tmp_path):
    """Rounded weights sample otherwise; whether that counts as a step of the policy is what differs."""
    losses, gaps = {}, []
    for recompute in (True, False):
        sample = functools.partial(arms.RoundedSample, recompute=recompute)
        settings = {"sample": sample, "steps": 1, "learning_rate": 1e-8}
        base = lab_runs.base() | {"steps": 1}
        curve = lab.compare_arms(
            {f"r {recompute}": settings}, [0], **base, folder=tmp_path, quiet=True
        ).curves
        losses[recompute] = curve["loss"].iloc[0]
        gaps += curve.get("rollout/logprob_gap", pd.Series()).tolist()
    (gap,) = gaps  # where the ratio is taken to the sampler's own, the gap is in the ratio
    assert gap > 1e-4 and losses[True] != losses[False]


# ---- the rule


@pytest.mark.parametrize(
    "says, low, high, expected, why",
    [
        ("more", 0.01, 0.12, "holds", "beyond 0, and it may matter"),
        (
            "more",
            0.01,
            0.04,
            "no difference larger than the margin",
            "sure, and too small to matter",
        ),
        ("more", -0.04, 0.04, "no difference larger than the margin", ""),
        ("more", -0.12, 0.04, "does not", "an effect that matters is ruled out"),
        ("more", -0.01, 0.06, "cannot tell", ""),
        ("less", -0.12, -0.01, "holds", "mirrored"),
        ("less", -0.04, 0.12, "does not", "mirrored"),
        ("no less", -0.04, 0.20, "holds", ""),
        ("no less", -0.20, -0.06, "does not", ""),
        ("no less", -0.06, 0.01, "cannot tell", ""),
        ("no more", -0.20, 0.04, "holds", "mirrored"),
        ("no more", 0.01, 0.20, "does not", "mirrored"),
    ],
)
def test_verdicts(says, low, high, expected, why):
    assert verdict(says, 0.05, low, high) == expected, why


def test_an_interval_narrower_than_the_margin_decides():
    """One with a half width just below it need not: hence the whole width."""
    for says in ("more", "less", "no less", "no more"):
        middles = np.linspace(-0.2, 0.2, 401)
        assert "cannot tell" not in {
            verdict(says, 0.05, m - 0.0249, m + 0.0249) for m in middles
        }
        assert "cannot tell" in {verdict(says, 0.05, m - 0.0499, m + 0.0499) for m in middles}


def test_the_rule_keeps_its_coverage():
    """From 5 first seeds to 30, whatever the spread is; from 3 it would not."""
    spreads = np.array([0.1, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0, 1.5, 3.0]) * WIDTH
    made = [coverage_of_the_rule(s) for s in spreads]
    held, used = ([each[i] for each in made] for i in (0, 1))
    assert min(held) >= 0.92 and max(held) <= 0.97
    assert min(coverage_of_the_rule(s, most=10)[0] for s in spreads) >= 0.93, (
        "as it was asked at first"
    )
    assert min(coverage_of_the_rule(s, first=3)[0] for s in spreads) < 0.91
    assert used[0] == FIRST and used == sorted(used) and used[-1] > MOST[1] - 0.1


def test_only_the_width_counts():
    assert (
        narrow(-0.02, 0.029, 0.05)
        and narrow(9.0, 9.049, 0.05)
        and not narrow(-0.02, 0.031, 0.05)
    )


def made_lab(differences):
    """A Lab of two arms, b above a by so much for each seed."""
    rows = [
        {"arm": a, "seed": s, "x": d * (a == "b")}
        for a in "ab"
        for s, d in enumerate(differences)
    ]
    right = {(arm, s): [0, 1] for arm in "ab" for s in range(len(differences))}
    return lab.Lab(["a", "b"], pd.DataFrame(rows), right, pd.DataFrame(), "a")


@pytest.mark.parametrize(
    "differences, expected, why",
    [
        ([0.1, 0.1], [2, 3, 4], "the first five first"),
        ([0.1, 0.1, 0.1, 0.1, 0.101], [], "narrow"),
        ([0.1, 0.3, 0.1, 0.3, 0.2], [5], "wide: one more"),
        ([0.1, 0.3, 0.1, 0.3, 0.2, 0.1], [6], "and one more"),
        ([0.1, 0.3] * (MOST[1] // 2), [], "the largest number"),
    ],
)
def test_next_seeds(differences, expected, why):
    entry = Asked("n", "A1", "h", "b", "a", "x", priority=1)
    seeds = {arm: list(range(len(differences))) for arm in "ab"}
    assert next_seeds(entry, seeds, made_lab(differences)) == expected, why
    shifted = made_lab([d + 7 for d in differences])
    assert next_seeds(entry, seeds, shifted) == expected, "the estimate does not count"


def test_margins_go_by_the_outcome():
    for outcome, margin in (
        ("accuracy", 0.1),
        ("sampled_1.0", 0.1),
        ("pass@8_1.0", 0.1),
        ("reward/a_mean", 0.05),
    ):
        assert Asked("n", "A1", "h", "b", "a", outcome).margin == margin
    assert Asked("n", "A1", "h", "b", "a", "accuracy", "no less", 0.03).null == -0.03


# ---- hours


def test_the_measured_run_costs_what_was_measured():
    assert cost.seconds(replace(resolved("settled"), eval_temperatures=())) == pytest.approx(
        196 + 40
    )


@pytest.mark.parametrize(
    "arm, than, why",
    [
        ("4 x 16", "fast", "twice the completions"),
        ("beta 0.04", "fast", "a reference model"),
        ("256 tokens", "soft", "longer answers"),
        ("rare, resampled", "rare", "further rounds"),
        ("code", "code, GRPO", "samples are judged too"),
        ("settled", "2 iterations", "half of the rollouts"),
        ("2 iterations", "15 steps", "further updates"),
    ],
)
def test_what_costs_more(arm, than, why):
    assert cost.seconds(resolved(arm)) > cost.seconds(resolved(than)), why


def test_a_run_that_claims_share_counts_once():
    both = [campaign.entry_of("more-generations"), campaign.entry_of("group-of-2")]
    apart = sum(len(campaign.distinct([entry], most=False)) for entry in both)
    assert len(campaign.distinct(both, most=False)) == apart - FIRST


def test_the_whole_campaign_fits_its_hours():
    assert shown.hours_of(campaign.distinct(campaign.ASKED, most=True)) < 115


def test_what_was_taken_is_said_of_the_runs_that_are_there():
    """Beside the files themselves, all of them."""
    made = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in runs.FOLDER.glob("*/seed-*.json")
    ]
    parts = ("prepare_seconds", "train_seconds", "evaluate_seconds")
    took = sum(run["outcomes"].get(part) or 0 for run in made for part in parts) / 3600
    expected = sum(cost.seconds(resolved(run["arm"])) for run in made) / 3600
    said = f"Done: {len(made)} runs. They took {took:.1f} hours; expected of these were {expected:.1f}."
    assert said in shown.plan_text().splitlines()
    assert "Done:" not in shown.plan_text(state=False), "what is committed is a plan"
