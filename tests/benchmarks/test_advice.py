"""The table: every claim with arms and a cell, one family of looks, the committed table as the runs have it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import lab_runs
import nbformat
import pandas as pd
import pytest

import grpo_kit as kit
from benchmarks import notebook_runs
from benchmarks.advice import elsewhere
from benchmarks.advice.__main__ import PAGES, RESULTS, say_counts
from benchmarks.advice.arms import FAMILIES, cold_start, negative, old
from benchmarks.advice.claims import CLAIMS, SOURCES, Claim
from benchmarks.advice.curves import draw_curves
from benchmarks.advice.figure import STYLES, draw_table, scaled
from benchmarks.advice.plan import campaign, runs, tuned
from benchmarks.advice.plan.answered import ANSWERED, ELSEWHERE
from benchmarks.advice.row import labs_of, of_elsewhere
from benchmarks.advice.table import (
    anchor,
    counts_text,
    effect_text,
    markdown,
    not_asked_text,
    write,
)
from benchmarks.advice.table import table as whole_table
from grpo_kit import lab
from grpo_kit._support import display

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "15_the_advice_measured.ipynb"


def table(folder, claims):
    """Of these claims alone."""
    return whole_table(folder, asked=[], answered=[], elsewhere=[], claims=claims)


@pytest.fixture(scope="module")
def committed():
    return whole_table(RESULTS)


def test_every_claim_has_arms_that_exist_and_a_source():
    arms = {arm for family in FAMILIES.values() for arm in family}
    assert len(arms) == sum(map(len, FAMILIES.values())), (
        "an arm's name is its folder: none twice"
    )
    for claim in CLAIMS:
        if claim.runs == elsewhere.READINESS:
            assert all(
                (elsewhere.RESULTS / name).exists() for name in elsewhere.files(claim)
            ), claim.text
        else:
            there = set(elsewhere.arms_of(claim.runs)) if claim.runs else arms
            assert {claim.arm, claim.against} <= there, claim.text
        assert claim.by[0] in SOURCES and claim.says in ("more", "less", "no less")
    names = [c.text for c in CLAIMS] + [
        e.name for e in (*campaign.ASKED, *ANSWERED, *ELSEWHERE)
    ]
    assert len({anchor(name) for name in names}) == len(names)


def test_rewards_between_minus_one_and_one(tmp_path):
    """What is trained on is 2 r - 1 of the same questions' r, and a reward read beside it stays in [0, 1]."""
    plain = lab_runs.base() | {"steps": 1}
    two = {"plain": {}, "negative": negative(plain["task"])}
    found = lab.compare_arms(two, [0], **plain, folder=tmp_path, quiet=True)
    curves = found.curves.set_index("arm")
    assert curves.loc["negative", "reward"] == pytest.approx(
        2 * curves.loc["plain", "reward"] - 1
    )
    names = [name for name in curves if name.startswith("reward/") and name != "reward/one"]
    assert names and curves.loc["negative", names].tolist() == pytest.approx(
        curves.loc["plain", names].tolist()
    )


def test_an_arm_of_old_rollouts_has_them(tmp_path):
    arms = {"sync 2": old(sync_every=2), "newest": old(buffer="newest", lead=2)}
    curves = lab.compare_arms(arms, [0], **lab_runs.base(), folder=tmp_path, quiet=True).curves
    ages = {arm: curve["rollout/age"].tolist() for arm, curve in curves.groupby("arm")}
    assert ages["sync 2"] == [0, 1, 0] and ages["newest"][0] == 0


def test_cold_start_teaches_the_format():
    import torch

    task = lab_runs.task()
    model, tokenizer = kit.load_policy("tiny-random", quiet=True)
    row = task.train[-1]
    (prompt,) = task.render(tokenizer, [row])
    target = f"<{task.answer_tag}>{row['answer']}</{task.answer_tag}>{tokenizer.eos_token}"
    ids = [tokenizer(text)["input_ids"] for text in (prompt, target)]
    batch = torch.tensor([ids[0] + ids[1]])
    labels = torch.tensor([[-100] * len(ids[0]) + ids[1]])
    loss = lambda: model.eval()(input_ids=batch, labels=labels).loss.item()  # noqa: E731
    before = loss()
    for _ in range(10):  # its rate is for a real model
        cold_start(model, tokenizer, task, 0, rows=8)
    assert loss() < before - 0.01


def test_table_from_run_folders(tmp_path):
    lab_runs.compare(tmp_path)
    for path in tmp_path.glob("cold/seed-*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens_mean_wrong": None}))
    claims = [
        Claim("Cold helps", "A1", "cold", "control"),
        Claim("Steadier", "B1", "again", "control", "reward_roughness", "less"),
        Claim("Later", "C1", "nobody", "control"),
        Claim("Never wrong", "C1", "cold", "control", "tokens_mean_wrong"),
    ]
    made = table(tmp_path, claims)
    expected = lab.load(tmp_path).difference("cold", "control")
    assert made.loc[0, "effect"] == expected["mean"] and made.loc[0, "seeds"] == 2
    assert made["verdict"].tolist()[2:] == ["not run yet", "not run yet"], (
        "no seed has it in both arms"
    )
    text = markdown(made)
    assert text.count("\n") == 5 and "[Cold helps](#cold-helps) (first table)" in text
    assert (
        effect_text(made.loc[0]) in text and "[cold](../benchmarks/results/advice/cold)" in text
    )


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
        made = table(RESULTS, claims)
    finally:
        elsewhere._saved.cache_clear()
    assert made["seeds"].tolist() == [2, 2, 2, 0, 0], "the seeds that both have"
    assert made["effect"].tolist()[:3] == pytest.approx([1 / 3, 0.275, -2.0])
    assert made["verdict"].tolist()[2:] == ["holds", "not run yet", "not run yet"]
    assert made.loc[0, "model"] == "w" and "points over the run" in effect_text(made.loc[1])


def test_an_effect_has_the_digits_of_its_margin():
    row = {"seeds": 5, "effect": -0.034, "low": -0.095, "high": 0.028, "margin": 0.05}
    assert effect_text(row | {"outcome": "kl_last"}) == "-0.03 [-0.10, 0.03] nats (margin 0.05)"
    assert effect_text(row | {"outcome": "accuracy"}) == "-3.4 [-9.5, 2.8] points (margin 5)"
    one = row | {"seeds": 1, "low": -float("inf"), "high": float("inf"), "outcome": "accuracy"}
    assert effect_text(one) == "-3.4 points, one seed, so no interval (margin 5)"


def test_what_notebook_11_leaves_is_read(tmp_path, monkeypatch):
    """Its folder becomes one result, and that the plan's row: so far, for fewer seeds than are asked."""
    for seed in (0, 1):
        shutil.copytree(
            RESULTS / "control" / f"seed-{seed}", tmp_path / "grpo" / "GRPO" / f"seed-{seed}"
        )
    for seed in (0, 1, 2):
        made = {"right": [0, 1] * 64, "seconds": 60.0, "history": []}
        (tmp_path / f"PPO seed {seed}.json").write_text(json.dumps(made))
    found = notebook_runs.runs_of(tmp_path)
    assert [(run["arm"], run["seed"]) for run in found] == [
        ("GRPO", 0),
        ("GRPO", 1),
        *[("PPO", s) for s in range(3)],
    ]
    (tmp_path / elsewhere.FILES["ppo"][0]).write_text(
        json.dumps({"weights": "w", "hardware": "h", "runs": found})
    )
    monkeypatch.setattr(elsewhere, "RESULTS", tmp_path)
    elsewhere._saved.cache_clear()
    (entry,) = (e for e in ELSEWHERE if e.name == "ppo-or-grpo")
    try:
        row = of_elsewhere(entry, lab.load(RESULTS))
        both = of_elsewhere(replace(entry, seeds=2), lab.load(RESULTS))
    finally:
        elsewhere._saved.cache_clear()
    grpo = [sum(run["right"]) / 128 for run in found if run["arm"] == "GRPO"]
    assert row["effect"] == pytest.approx(sum(grpo) / 2 - 0.5), (
        "GRPO less PPO, over the seeds that both have"
    )
    assert (row["verdict"], row["seeds"], row["planned"], row["p"]) == ("so far", 2, 8, None)
    assert (
        both["run"]
        and both["margin"] == 0.1
        and both["data"][0][1].endswith(elsewhere.FILES["ppo"][0])
    )


def test_a_withdrawn_claim_gets_no_verdict_and_makes_no_other_surer(tmp_path):
    runs = tmp_path / "runs"
    lab_runs.compare(runs)
    claims = [
        Claim("Cold helps", "A1", "cold", "control"),
        Claim("Again", "B1", "again", "control"),
    ]
    before = table(runs, claims)
    claims[0] = replace(claims[0], withdrawn="the arms differ in more")
    made = table(runs, claims)
    assert made["verdict"].tolist() == ["withdrawn", before.loc[1, "verdict"]]
    assert made.loc[0, "effect"] == before.loc[0, "effect"], "what was measured is still shown"
    assert made[["p", "p_holm"]].isna().values.tolist() == [[True, True], [False, False]]
    assert made.loc[1, "p_holm"] == before.loc[1, "p_holm"]
    assert "| **withdrawn**: the arms differ in more |" in markdown(made)
    said = counts_text(made)
    assert "Of 2 rows" in said and "1 withdrawn" in said


@pytest.mark.parametrize(
    "says, margin, expected, why",
    [
        ("more", 0.05, (2.0, -2.0, 8.0), "in margins"),
        ("less", 0.05, (-2.0, -8.0, 2.0), "mirrored, low and high change places"),
        ("no more", 0.05, (-2.0, -8.0, 2.0), "mirrored"),
        ("no less", 0.1, (1.0, -1.0, 4.0), "as more"),
    ],
)
def test_effects_on_one_scale(says, margin, expected, why):
    row = pd.Series({"effect": 0.1, "low": -0.1, "high": 0.4, "margin": margin, "says": says})
    assert scaled(row) == pytest.approx(expected), why


def test_picture_has_a_line_for_every_row_with_an_effect(committed):
    run = committed[committed["seeds"] > 0]
    axes = draw_table(committed).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    names = [label.replace("\n", " ").split(" · ")[0].removesuffix(" *") for label in labels]
    assert (
        names == run["name"].tolist()
        and max(len(part) for label in labels for part in label.split("\n")) <= 32
    )
    assert [text.get_text() for text in axes.texts] == [
        effect_text(row) for _, row in run.iterrows()
    ]
    judged = [
        STYLES[word] for word in STYLES if word not in ("withdrawn", "conditions not met")
    ]
    assert len(set(judged)) == len(judged) and len({style[1:] for style in judged}) == len(
        judged
    )
    with pytest.raises(ValueError, match="no row with an effect"):
        draw_table(committed[committed["seeds"] == 0])


def test_what_does_not_fit_ends_in_an_arrow(committed):
    far = committed[committed["name"] == "no-kl"].assign(
        effect=9.0, low=8.5, high=9.5, margin=1.0, says="more"
    )
    axes = draw_table(far).axes[0]
    drawn = [
        line
        for line in axes.lines
        if len(line.get_xdata()) and line.get_label().startswith("_")
    ]
    assert all(abs(x) <= 5 for line in drawn for x in line.get_xdata())
    assert sum(line.get_marker() == ">" for line in drawn) == 1


def test_curves_are_drawn_beside_what_they_are_compared_with(committed):
    """One panel for each control: arms of other comparisons are another question."""
    rows = committed[committed["name"].isin(["no-kl", "8-bit", "staleness", "hint-imitated"])]
    labs = labs_of(rows)
    assert [(outcome, found.arms) for outcome, found in labs] == [
        ("accuracy", ["beta 0.04", "control"]),
        ("accuracy", ["control", "8-bit AdamW"]),
        ("accuracy", ["oldest first", "newest first"]),
    ]
    figure = draw_curves(labs)
    assert len(figure.axes) == 3 and figure.get_figwidth() <= 8, (
        "a wider one's words are too small on a page"
    )
    for axes, (_, found) in zip(figure.axes, labs, strict=True):
        assert [line.get_label() for line in axes.lines] == [f"{arm} (5)" for arm in found.arms]
        compared, other = axes.lines
        assert (compared.get_linestyle(), other.get_linestyle()) == ("--", "-")
        assert compared.get_zorder() > other.get_zorder(), "where both are equal, both are seen"
        own = found.curves[found.curves["arm"] == found.against]
        assert compared.get_ydata()[0] == pytest.approx(own[own["step"] == 1]["reward"].mean())
        figure.canvas.draw()
        assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0, (
            "over no curve"
        )
    with pytest.raises(ValueError, match="labs is empty"):
        draw_curves([])


def test_an_arm_has_one_colour_in_all_panels(committed):
    """settled is compared with in one panel, and compared in two others."""
    names = [
        "annealing-linear",
        "hotter",
        "sampling-at-0.7",
        "not-below-0.7",
        "evaluated-hotter",
        "evaluated-colder",
    ]
    panels = draw_curves(labs_of(committed[committed["name"].isin(names)])).axes
    shown = [(line.get_label(), line.get_color()) for axes in panels for line in axes.lines]
    colours = dict(shown)
    assert len(shown) > len(colours) >= 5 and set(shown) == set(colours.items())
    assert colours["settled (30)"] == display.BASE
    for axes in panels:
        assert len({line.get_color() for line in axes.lines}) == len(axes.lines)


def test_what_is_never_right_or_not_trained_is_seen(committed):
    (axes,) = draw_curves(labs_of(committed[committed["name"] == "never-right"])).axes
    untrained, trained = axes.lines
    assert (untrained.get_marker(), list(untrained.get_ydata())) == ("o", [0.0])
    assert not any(trained.get_ydata()) and axes.get_ylim()[0] < 0 < 1 < axes.get_ylim()[1]


# ---- what is committed


def test_the_rates_of_full_fine_tuning_are_as_the_pages_say():
    """2e-5 beside 1e-5 over the 11 seeds that both have, and the means over the two seeds of the sweep."""
    paired = runs.load(["full, 2e-05", "settled"], "settled", below=tuned.SEEDS[0])
    assert paired.unlike("full, 2e-05", "settled") == []
    d = paired.difference("full, 2e-05", "settled", outcome="accuracy")
    interval = "[{:.1f}, {:.1f}]".format(100 * d["low"], 100 * d["high"])
    assert d["seeds"] == 11
    section = (
        (ROOT / "docs/results.md").read_text().split("### The rate of full fine-tuning")[1]
    )
    assert f"{100 * d['mean']:+.1f} points {interval} above 1e-5, p = {d['p']:.3f}" in section
    swept = runs.load(["full, 5e-06", "full, 1e-05", "full, 2e-05"], "full, 1e-05").runs
    swept = swept[swept["seed"].isin(tuned.SEEDS)].groupby("arm")["accuracy"].mean()
    by_rate = {arm.removeprefix("full, "): f"{100 * mean:.1f}" for arm, mean in swept.items()}
    assert by_rate == {"5e-06": "84.8", "1e-05": "82.8", "2e-05": "86.7"}
    for page, words in (
        (
            "notebooks/05_train_full.ipynb",
            "86.7, 82.8 and 84.8 % (n = 256): two seeds cannot tell",
        ),
        ("notebooks/05_train_full.ipynb", f"5.5 points above 1e-5 {interval}"),
        ("notebooks/00_start_here.ipynb", f"5.5 points above 1e-5 {interval}"),
        ("docs/which_method.md", f"5.5 points above 1e-5 {interval}"),
    ):
        assert words in (ROOT / page).read_text(), page


def test_one_family_over_all_rows_that_are_run(committed):
    run = committed[committed["run"].astype(bool)]
    judged = run[run["verdict"] != "withdrawn"]
    # what was counted is there, whatever the chance
    judged = judged[judged["counted"] != "samples"]
    assert (
        judged["p_holm"].notna().all()
        and committed[~committed["run"].astype(bool)]["p_holm"].isna().all()
    )
    first = judged.loc[judged["p"].astype(float).idxmin()]
    assert float(first["p_holm"]) == pytest.approx(len(run) * float(first["p"])), (
        "all looks, withdrawn ones too"
    )
    of_13 = {"Annealing by a cosine helps", "A group of 4 is enough (equal completions)"}
    assert of_13 <= {claim.text for claim in CLAIMS}, "notebook 13's looks are rows"


def test_every_arm_of_the_first_campaign_is_compared_or_named():
    used = {arm for claim in CLAIMS if not claim.runs for arm in (claim.arm, claim.against)}
    there = {path.name for path in RESULTS.iterdir()}
    named = not_asked_text(RESULTS).splitlines()[0]
    assert there - used == {"longer, DAPO", "sync 20"} and all(
        arm in named for arm in there - used
    )


def test_committed_table_is_what_the_committed_runs_say(tmp_path, committed):
    write(committed, RESULTS, tmp_path / "advice.md")
    assert (tmp_path / "advice.md").read_text() == RESULTS.with_suffix(".md").read_text(), (
        "python -m benchmarks.advice --table"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_the_tables_counts(page, committed):
    text, counts = page.read_text(), counts_text(committed)
    assert text.count(counts) == 1 and say_counts(text, counts) == text
    assert "Of 2 rows" in say_counts(text, "Of 2 rows") and counts not in say_counts(
        text, "Of 2 rows"
    )


def test_every_claim_has_its_cell_in_the_notebook():
    cells = "".join(
        c.source
        for c in nbformat.read(NOTEBOOK, as_version=4).cells
        if c.cell_type == "markdown"
    )
    names = [c.text for c in CLAIMS] + [
        e.name for e in (*campaign.ASKED, *ANSWERED, *ELSEWHERE)
    ]
    assert not [name for name in names if f'<a id="{anchor(name)}"></a>' not in cells]


def test_what_notebook_13_shows_of_a_row_is_what_notebook_15_shows():
    """Both show one table; outputs of different days must not differ in an effect, a verdict or a p."""
    shown = {}
    for path in (ROOT / "notebooks" / "13_explore_and_anneal.ipynb", NOTEBOOK):
        of = shown[path.stem] = {}
        cells = [
            cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
        ]
        texts = [
            out.get("data", {}).get("text/markdown", "")
            for cell in cells
            for out in cell.outputs
        ]
        for line in "\n".join(texts).splitlines():
            # the last five: done, effect, verdict, p, cost
            if line.startswith("| [") and line.count("|") == 7:
                claim, *rest = line.strip("| ").split(" | ")
                of.setdefault(claim.partition("]")[0], rest)
    of_13, of_15 = shown.values()
    assert len(of_13) >= 10 and of_13 == {name: of_15.get(name) for name in of_13}


def test_committed_runs_name_no_place_on_a_machine():
    for path in RESULTS.rglob("*.json"):
        text = path.read_text()
        assert "/tmp" not in text and "/home" not in text and "/work" not in text, path


def test_claims_about_untrained_models(tmp_path, monkeypatch):
    """Questions are paired by their text, whatever their order; samples with a word of reflection are counted."""
    zero_shot = {"samples": 4, "words": {"any": 0}}
    small = zero_shot | {"questions": ["a", "b", "c"], "formatted": [0, 1, 4]}
    large = zero_shot | {"questions": ["c", "a", "d"], "formatted": [4, 4, 0]}
    thinking = {"samples": 4, "questions": ["a", "b"], "words": {"any": 2}}
    for name, readiness in (("small", small), ("large", large)):
        made = {
            "largest, zero-shot": {"readiness": readiness},
            "countdown, thinking": {"readiness": thinking},
        }
        saved = {
            "weights": name,
            "hardware": "h",
            "tasks": made if name == "small" else dict([*made.items()][:1]),
        }
        (tmp_path / f"readiness_{name}.json").write_text(json.dumps(saved))
    monkeypatch.setattr(elsewhere, "RESULTS", tmp_path)
    elsewhere._saved.cache_clear()
    claims = [
        Claim("Format", "C1", "small", "large", "formatted", "less", 0.1, runs="readiness"),
        Claim("Words", "D4", "small", "nothing", "reflecting", margin=0.01, runs="readiness"),
        Claim(
            "Not counted", "D4", "large", "nothing", "reflecting", margin=0.01, runs="readiness"
        ),
        Claim("No file", "C1", "small", "none", "formatted", "less", 0.1, runs="readiness"),
    ]
    try:
        made = table(RESULTS, claims)
    finally:
        elsewhere._saved.cache_clear()
    assert made["seeds"].tolist() == [2, 8, 0, 0] and made["counted"].tolist()[:2] == [
        "questions",
        "samples",
    ]
    assert made["effect"].tolist()[:2] == [-0.5, 0.25] and made.loc[1, "low"] == pytest.approx(
        0.0715, abs=1e-4
    )
    assert made["verdict"].tolist() == ["cannot tell", "holds", "not run yet", "not run yet"]
    assert made.loc[0, "model"] == "large; small" and "| 2 questions |" in markdown(made)
