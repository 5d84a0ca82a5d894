"""The table of claims: verdicts by rule, every claim with arms and a cell, the committed table as the runs have it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import lab_runs
import nbformat
import pandas as pd
import pytest

import grpo_kit as kit
from benchmarks.advice import elsewhere
from benchmarks.advice.__main__ import RESULTS, groups
from benchmarks.advice.arms import BASE, FAMILIES, NEGATIVE, cold_start
from benchmarks.advice.claims import CLAIMS, SOURCES, Claim
from benchmarks.advice.figure import draw_table, scaled
from benchmarks.advice.table import _UNITS, counts_text, effect_text, markdown, table, verdict, write
from grpo_kit import lab
from grpo_kit.guide.which_method import anchor
from grpo_kit.lab.settings import resolve

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "15_the_advice_measured.ipynb"


def says(what, matters=0.05):
    return Claim("x", "A1", "a", "b", says=what, matters=matters)


@pytest.mark.parametrize(
    "claim, low, high, expected, why",
    [
        (says("more"), 0.01, 0.30, "holds", "all of it above 0"),
        (says("more"), -0.01, 0.30, "cannot tell", "0 is inside, and so is an effect that matters"),
        (says("more"), -0.30, -0.01, "does not", "the other way round"),
        (says("more"), -0.04, 0.04, "does not", "whatever it is, it is too small to matter"),
        (says("less"), -0.30, -0.01, "holds", "mirrored"),
        (says("less"), 0.01, 0.30, "does not", "mirrored"),
        (says("less", 1.0), -0.9, 0.9, "does not", "in the outcome's own unit"),
        (says("no less"), -0.04, 0.20, "holds", "at worst a loss that does not matter"),
        (says("no less"), -0.06, 0.20, "cannot tell", "a loss that matters is inside"),
        (says("no less"), -0.30, -0.01, "does not", "a loss for certain"),
        (says("no less"), -0.04, -0.01, "holds", "a certain loss, too small to matter"),
    ],
)
def test_verdicts(claim, low, high, expected, why):
    assert verdict(claim, low, high) == expected, why


def test_every_claim_has_arms_that_exist_and_a_source():
    arms = {arm for family in FAMILIES.values() for arm in family}
    assert len(arms) == sum(map(len, FAMILIES.values())), "an arm's name is its folder: none twice"
    for claim in CLAIMS:
        there = set(elsewhere.arms_of(claim.runs)) if claim.runs else arms
        assert claim.needs or {claim.arm, claim.against} <= there, claim.text
        assert claim.by[0] in SOURCES and claim.says in ("more", "less", "no less")
        assert claim.outcome in _UNITS
    assert len({anchor(c.text) for c in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize("arm", [(f, a) for f, arms in FAMILIES.items() for a in arms], ids="/".join)
def test_every_arm_is_one_that_the_trainer_takes(arm):
    family, name = arm
    s = resolve({**BASE, **FAMILIES[family][name]})
    s.profile.grpo_config("x", tuning=s.tuning, **s.config)
    if family == "main" and "4 x 16" not in name:
        assert s.profile.completions_per_step == 32  # equal completions, or it says so


def test_rescaled_rewards_have_the_same_advantages():
    """(r - mean) / std does not see 2 r - 1: on equal questions the arm would test rounding alone."""
    row = NEGATIVE.train[0]
    texts = [f"{row['answer']}</answer>", "1</answer>", "nothing", f"{row['answer']}</answer>"]
    columns = {"answer": [row["answer"]] * 4, "prefill": ["<answer>"] * 4}
    plain = resolve({**BASE}).task.rewards
    for new, old in zip(NEGATIVE.rewards, plain, strict=True):
        pairs = zip(new(completions=texts, **columns), old(completions=texts, **columns), strict=True)
        assert [a == 2 * b - 1 for a, b in pairs] == [True] * 4


def test_cold_start_teaches_the_format():
    import torch

    task = lab_runs.task()
    model, tokenizer = kit.load_policy("tiny-random", quiet=True)
    row = task.train[-1]
    prompt = task.dataset(tokenizer)[len(task.train) - 1]["prompt"]
    target = f"<{task.answer_tag}>{row['answer']}</{task.answer_tag}>{tokenizer.eos_token}"
    ids = [tokenizer(text)["input_ids"] for text in (prompt, target)]
    batch = torch.tensor([ids[0] + ids[1]])
    labels = torch.tensor([[-100] * len(ids[0]) + ids[1]])
    loss = lambda: model.eval()(input_ids=batch, labels=labels).loss.item()  # noqa: E731
    before = loss()
    for _ in range(10):  # its rate is for a real model
        cold_start(model, tokenizer, task, 0, rows=8)
    assert loss() < before - 0.01


def test_groups_by_hand():
    made = pd.DataFrame(
        {
            "step": [1] * 4 + [2] * 4,
            "group": [0, 0, 1, 1] * 2,
            "prompt": ["p", "p", "q", "q", "p", "p", "q", "q"],
            "completion": ["a", "b", "c", "c", "a", "a", "a", "a"],
            "reward": [1, 0, 0.5, 0.5, 1, 1, 0, 0],
        }
    )
    assert groups(made).values.tolist() == [[1, 0.75, 0.5], [2, 0.5, 0.0]]
    twice = made[made["step"] == 2].assign(group=0)  # two batches of one group each
    assert groups(twice).values.tolist() == [[2, 0.5, 0.0]]


def test_table_from_run_folders(tmp_path):
    lab_runs.compare(tmp_path)
    for path in tmp_path.glob("cold/seed-*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens_mean_wrong": None}))
    claims = [
        Claim("Cold helps", "A1", "cold", "control"),
        Claim("Steadier", "B1", "again", "control", "reward_roughness", "less"),
        Claim("Later", "C1", "nobody", "control"),
        Claim("Never wrong", "C1", "cold", "control", "tokens_mean_wrong"),
        Claim("On a card", "C2", needs="a card"),
    ]
    made = table(tmp_path, claims=claims)
    expected = lab.load(tmp_path).difference("cold", "control")
    assert made.loc[0, "effect"] == expected["mean"] and made.loc[0, "seeds"] == 2
    assert made["verdict"].tolist()[2:] == [
        "not run yet",
        "cannot tell: no tokens_mean_wrong",
        "not run: needs a card",
    ]
    text = markdown(made)
    assert text.count("\n") == 6 and "[Cold helps](#cold-helps)" in text and effect_text(made.loc[0]) in text


def test_claims_that_other_benchmarks_decide(tmp_path, monkeypatch):
    def run(arm, seed, sampled, success, seconds=1.0):
        return {
            "arm": arm, "seed": seed, "after": {"sampled": sampled}, "success": success, "step_seconds": [seconds]
        }  # fmt: skip

    runs = [run("one", seed, [4, 0, 2], [0.0, 0.5], 3.0) for seed in (0, 1, 2)]
    runs += [run("other", seed, [4, 4, 2], [0.5, 0.5 + seed / 10]) for seed in (0, 1)]
    saved = {"weights": "w", "hardware": "h", "runs": runs}
    (tmp_path / elsewhere.FILES["agents"][0]).write_text(json.dumps(saved))
    monkeypatch.setattr(elsewhere, "RESULTS", tmp_path)
    elsewhere._saved.cache_clear()
    claims = [
        Claim("Held out", "B7", "other", "one", "success", runs="agents"),
        Claim("Faster learned", "B7", "other", "one", "success_mean", runs="agents"),
        Claim("Quicker", "B7", "other", "one", "step_seconds_mean", "less", 1.0, runs="agents"),
        Claim("Later", "B7", "nobody", "one", "success", runs="agents"),
        Claim("No file", "B7", "other", "one", "success", runs="hinted"),
    ]
    try:
        made = table(RESULTS, claims=claims)
    finally:
        elsewhere._saved.cache_clear()
    assert made["seeds"].tolist() == [2, 2, 2, 0, 0], "the seeds that both have"
    assert made["effect"].tolist()[:3] == pytest.approx([1 / 3, 0.275, -2.0])
    assert made["verdict"].tolist()[2:] == ["holds", "not run yet", "not run yet"]
    assert made.loc[0, "model"] == "w" and "points over the run" in effect_text(made.loc[1])


def test_a_withdrawn_claim_gets_no_verdict_and_makes_no_other_surer(tmp_path):
    runs = tmp_path / "runs"
    lab_runs.compare(runs)
    claims = [Claim("Cold helps", "A1", "cold", "control"), Claim("Again", "B1", "again", "control")]
    before = table(runs, claims=claims)
    claims[0] = replace(claims[0], withdrawn="the arms differ in more")
    made = table(runs, claims=claims)
    assert made["verdict"].tolist() == ["withdrawn", before.loc[1, "verdict"]]
    assert made.loc[0, "effect"] == before.loc[0, "effect"], "what was measured is still shown"
    assert made[["p", "p_holm"]].isna().values.tolist() == [[True, True], [False, False]]
    assert made.loc[1, "p_holm"] == before.loc[1, "p_holm"]
    first = markdown(made).splitlines()[2]
    assert first.endswith("|  | **withdrawn**: the arms differ in more |")
    counts = {"holds": "hold", "does not": "do not", "cannot tell": "cannot be told"}
    said = counts_text(made)
    assert "Of 2 rows" in said and "1 are withdrawn" in said
    assert sum(int(re.search(rf"(\d+) {word}", said)[1]) for word in counts.values()) == 1
    far = draw_table(made.assign(effect=9.0, low=8.5, high=9.5, matters=1.0, says="more")).axes[0]
    assert all(abs(x) <= 6 for line in far.lines[: 2 * len(made)] for x in line.get_xdata()), (
        "an arrow, no stub"
    )
    label = draw_table(made).axes[0].texts[0]
    assert label.get_text() == "withdrawn" and label.get_style() == "italic"


def test_the_two_withdrawn_rows_say_so_in_the_committed_table():
    text = RESULTS.with_suffix(".md").read_text()
    rows = [line for line in text.splitlines() if "**withdrawn**" in line]
    assert [line.split("]")[0] for line in rows] == [
        "| [A prefill speeds the start",
        "| [Rewards of at least 0 train better than rewards around 0",
    ]
    assert all(
        "different questions; to be measured again" in line and "**holds**" not in line for line in rows
    )
    assert "corrected for 35 looks: the 33 rows that have one and the 2 that are withdrawn" in text
    assert "10 hold, 7 do not, 16 cannot be told, 2 are withdrawn" in text


@pytest.mark.parametrize(
    "says, matters, expected, why",
    [
        ("more", 0.05, (2.0, -2.0, 8.0), "in units of what matters"),
        ("less", 0.05, (-2.0, -8.0, 2.0), "mirrored, low and high change places"),
        ("no less", 0.1, (1.0, -1.0, 4.0), "as more"),
    ],
)
def test_effects_on_one_scale(says, matters, expected, why):
    row = pd.Series({"effect": 0.1, "low": -0.1, "high": 0.4, "matters": matters, "says": says})
    assert scaled(row) == pytest.approx(expected), why


def test_picture_has_a_line_for_every_claim_that_was_run():
    made = table(RESULTS)
    run = made[made["seeds"] > 0]
    axes = draw_table(made).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == run["claim"].tolist()
    assert [text.get_text() for text in axes.texts] == run["verdict"].tolist()
    with pytest.raises(ValueError, match="no row with an effect"):
        draw_table(made[made["seeds"] == 0])


def test_committed_table_is_what_the_committed_runs_say(tmp_path):
    write(RESULTS, tmp_path / "advice.md")
    assert (tmp_path / "advice.md").read_text() == RESULTS.with_suffix(".md").read_text()


def test_every_claim_has_its_cell_in_the_notebook():
    cells = "".join(
        c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "markdown"
    )
    missing = [c.text for c in CLAIMS if f'<a id="{anchor(c.text)}"></a>' not in cells]
    assert not missing


def test_committed_runs_name_no_place_on_a_machine():
    for path in RESULTS.rglob("*.json"):
        text = path.read_text()
        assert "/tmp" not in text and "/home" not in text and "/work" not in text, path
