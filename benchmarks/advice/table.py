"""All rows in one table, in one family for Holm: asked by the plan, answered from committed data, asked elsewhere.

A row of the first campaign that the plan asks again stands under the plan's row until that is run by its first seeds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks.advice.claims import CLAIMS, SHORT, SOURCES, Claim
from benchmarks.advice.plan.answered import ANSWERED, ELSEWHERE, NOT_ASKED
from benchmarks.advice.plan.campaign import BY_THEME
from benchmarks.advice.plan.entry import Answered, Asked, Elsewhere
from benchmarks.advice.row import (
    CLAIM_OF,
    NOT_YET,
    UNMET,
    WITHDRAWN,
    Row,
    of_answered,
    of_asked,
    of_claim,
    of_elsewhere,
)
from grpo_kit.more import lab
from grpo_kit.more.lab.statistics import holm

NOTEBOOK = "../../notebooks/15_the_advice_measured.ipynb"
SURE = 0.05  # p after Holm below which a verdict is more than a hint
_JOIN = "\u00a0"  # a space at which no narrow column breaks a line
_VERDICTS = {
    "holds": "hold",
    "does not": "do not",
    "no difference larger than the margin": "with no difference larger than the margin",
    "cannot tell": "cannot be told",
    WITHDRAWN: "withdrawn",
}


def anchor(claim: str) -> str:
    """What the cell of a row in notebook 15 is linked by, made of the row's name.

    >>> anchor("not-below-0.7")
    'not-below-0-7'
    """
    return re.sub("[^a-z0-9]+", "-", claim.lower()).strip("-")


def table(
    folder: str | Path,
    *,
    asked: Sequence[Asked] = BY_THEME,
    answered: Sequence[Answered] = ANSWERED,
    elsewhere: Sequence[Elsewhere] = ELSEWHERE,
    claims: Sequence[Claim] = CLAIMS,
) -> pd.DataFrame:
    """One row a hypothesis, whether it is run or not. folder: the runs of the first campaign.

    p: of the row's own hypothesis; p_holm: corrected for all rows that are run. A withdrawn row keeps its effect and
    has no p, and the others' stay corrected for its look: withdrawing a row must not make another row surer.
    """
    found = lab.load(folder)
    rows: list[Row] = []
    elsewhere_by_claim = {entry.claim: entry for entry in elsewhere if entry.claim}
    left = {claim.text: claim for claim in claims}
    for entry in answered:
        left.pop(entry.claim, None)
    for entry in asked:
        rows.append(of_asked(entry))
        old = left.pop(entry.replaces, None)
        if old is not None and not _settles(rows[-1]):
            rows.append(of_claim(old, found) | {"why": _why_again(old, entry)})
    for claim in [claim for text, claim in left.items() if text not in elsewhere_by_claim]:
        rows.append(of_claim(claim, found))
    rows += [of_answered(entry, found) for entry in answered]
    for entry in elsewhere:
        rows.append(of_elsewhere(entry, found))
        if entry.claim in left and not _settles(rows[-1]):
            rows.append(of_claim(left[entry.claim], found))
    made = pd.DataFrame(rows)
    made["p_holm"] = holm([None if pd.isna(p) else p for p in made["p"]])
    made.loc[made["verdict"] == WITHDRAWN, ["p", "p_holm"]] = None
    return made


def section(made: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The rows of these names, and those of the first table that stand in their place."""
    old = [entry.replaces for entry in BY_THEME if entry.name in names]
    old += [entry.claim for entry in ELSEWHERE if entry.name in names]
    return made[made["name"].isin([*names, *old])]


def _settles(row: Row) -> bool:
    """Whether the row takes the place of the first table's: run by its first seeds, with a verdict or without."""
    return bool(row["run"]) or row["verdict"] == UNMET


def _why_again(old: Claim, entry: Asked) -> str:
    again = f"asked again: {entry.name}"
    reason = old.withdrawn or entry.redone.split("; now ")[0]
    return f"{reason}; {again}" if reason else again


def markdown(made: pd.DataFrame, *, notebook: str = "", root: str = "..") -> str:
    """The rows for a README or a notebook, each linked to its cell in `notebook` (default: this one).

    root: the repository, from where this is read.
    """
    lines = [
        "| claim, and who says it | what was done (raw data) | effect, 95 % interval | verdict | p; Holm's | seeds; "
        "hours |",
        "|---" * 6 + "|",
    ]
    for _, row in made.iterrows():
        cells = [
            f"{claim_text(row, notebook)} ({who_text(row['by'])})",
            _done_text(row, root),
            effect_text(row),
        ]
        cells += [verdict_text(row), _p_text(row), _cost_text(row)]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def claim_text(row: pd.Series | Row, notebook: str = "") -> str:
    """A link to the row's cell by its name, and what it says; a row of the first campaign says so."""
    link = f"[{row['name']}]({notebook}#{anchor(row['name'])})"
    said = re.sub(r"<\w+>", r"`\g<0>`", row["claim"])  # a tag would be taken for HTML
    return f"{link} (first table)" if row["kind"] == "first" else f"{link}: {said}"


def who_text(by: str) -> str:
    """ "C3, E4" with their pieces' names.

    >>> who_text("C3")
    'C3 *GRPO Training Notes*'
    """
    return re.sub(r"\b([A-E])(\d*)\b", lambda m: f"{m[0]} *{SHORT[m[1]]}*", by)


def effect_text(row: pd.Series | Row) -> str:
    """'+4.2 [-3.0, 11.4] points (margin 5)'; "" where there is no effect."""
    if not row["seeds"] or pd.isna(row["effect"]):
        return ""
    unit, scale = _unit(row["outcome"])
    value, low, high, margin = (
        scale * float(row[name]) for name in ("effect", "low", "high", "margin")
    )
    digits = 1 if margin >= 1 else 2
    interval = f" [{low:.{digits}f}, {high:.{digits}f}]" if high < float("inf") else ""
    none = "" if interval else ", one seed, so no interval"
    return f"{value:+.{digits}f}{interval} {unit}".rstrip() + f"{none} (margin {margin:g})"


def verdict_text(row: pd.Series | Row) -> str:
    """The verdict and, where there is something to say, why, and what else the arms differ in."""
    also = f"also unlike: {row['unlike']}" if row["unlike"] else ""
    more = "; ".join(filter(None, [row["why"], also]))
    return f"**{row['verdict']}**" + (f": {more}" if more else "")


def counts_text(made: pd.DataFrame) -> str:
    """How many rows have which verdict, and how many are more than a hint."""
    run = made[made["run"].astype(bool)]
    counts = run["verdict"].value_counts()
    said = ", ".join(
        f"{counts[word]} {plural}" for word, plural in _VERDICTS.items() if word in counts
    )
    sure = run[(run["p_holm"].astype(float) < SURE) & (run["verdict"] == "holds")]
    left = made[(made["kind"] == "asked") & ~made["run"].astype(bool)]["verdict"]
    unmet = (left == UNMET).sum()
    lacking = {"as their condition was not met": unmet, "yet": len(left) - unmet}
    more = "".join(
        f" Hypotheses of the plan with no verdict {why}: {n}."
        for why, n in lacking.items()
        if n
    )
    return (
        f"Of {len(run)} rows that are run: {said}. {len(sure)} of those that hold do so after Holm's correction for "
        f"all {len(run)}.{more}"
    )


def asked_again(
    made: pd.DataFrame, folder: str | Path, *, asked: Sequence[Asked] = BY_THEME
) -> pd.DataFrame:
    """Rows that did not stand up to review: what the first version said of them, and what their new runs say.

    changed: "yes", "no", or "" while the new row has no verdict.
    """
    found = lab.load(folder)
    rows = []
    for entry in (entry for entry in asked if entry.redone):
        new, old = made[made["name"] == entry.name].iloc[0], CLAIM_OF.get(entry.replaces)
        was, then = "", "no row of its own"
        if old is not None:
            first = of_claim(old, found)
            was = old.published or first["verdict"]
            then = f"**{was}**: {effect_text(first)}"
        told = bool(new["run"]) and was != ""
        rows.append(
            {
                "claim": claim_text(new),
                "first": then,
                "now": f"**{new['verdict']}**: {effect_text(new)}".removesuffix(": "),
                "changed": ("no" if new["verdict"] == was else "yes") if told else "",
                "why": entry.redone,
            }
        )
    return pd.DataFrame(rows)


def asked_again_markdown(again: pd.DataFrame, *, notebook: str = "") -> str:
    """What asked_again says."""
    lines = [
        "| claim | first version | now | changed | why it was asked again |",
        "|---" * 5 + "|",
    ]
    rows = again.assign(
        claim=[claim.replace("](#", f"]({notebook}#") for claim in again["claim"]]
    )
    return "\n".join(
        [*lines, *(f"| {' | '.join(row)} |" for row in rows.itertuples(index=False))]
    )


def not_asked_text(folder: str | Path) -> str:
    """The first campaign's arms that no row compares, and the pieces of advice that nothing here asks."""
    used = {arm for claim in CLAIMS for arm in (claim.arm, claim.against) if not claim.runs}
    arms = sorted(set(lab.load(folder).arms) - used)
    pieces = "; ".join(f"**{entry.by}** {entry.why}" for entry in NOT_ASKED)
    return f"Run, not asked: {', '.join(arms)}.\n\nNot asked: {pieces}."


def sources_text() -> str:
    """The letters and names of the table's second column."""
    said = (f"**{key}** *{SHORT[key]}*: {name}" for key, name in SOURCES.items())
    return "Who says it: " + "; ".join(said) + "."


def write(made: pd.DataFrame, folder: Path, target: Path) -> None:
    """The whole table of `folder` as one markdown file, with how it was made."""
    run = made[made["run"].astype(bool)]
    weights, hardware = (
        sorted({each for both in run[column] for each in both.split("; ") if each})
        for column in ("model", "hardware")
    )
    text = [
        "# The advice, measured",
        "",
        "Written by `python -m benchmarks.advice --table` from the committed runs. Weights: "
        f"{'; '.join(weights)}. Hardware: {'; '.join(hardware)}. Each name links to its "
        "cell in notebook 15, and arms to their runs.",
        "",
        counts_text(made),
        "",
        markdown(made, notebook=NOTEBOOK, root="../.."),
        "",
        "An effect is the first arm's outcome less the second's. Its verdict goes by its own 95 % interval and margin "
        "([PLAN.md](../advice/plan/PLAN.md)): of twenty rows without any effect one is expected to leave 0 out. p is "
        "of the row's own hypothesis; Holm's is corrected for all rows that are run, notebook 13's looks and the "
        "withdrawn among them; a row that holds with one above 0.05 is a hint, not a finding. Accuracy is held "
        "out and greedy, and its interval counts seeds and rows; that of other outcomes counts seeds alone. Hours are "
        "of one core, and both arms'; those of rows that are not run are estimates. (first table): from the first "
        "campaign, 10 steps; where the plan asks it again it stands until that is run.",
        "",
        not_asked_text(folder),
        "",
        "## Asked again",
        "",
        "Rows that did not stand up to review, beside their new runs.",
        "",
        asked_again_markdown(asked_again(made, folder), notebook=NOTEBOOK),
        "",
        sources_text(),
        "",
    ]
    target.write_text("\n".join(text), encoding="utf-8")


def _done_text(row: pd.Series, root: str) -> str:
    arms = f"{row['arm']} / {row['against']}"
    links = [f"[{label}]({root}/{path})" if path else label for label, path in row["data"]]
    if row["data"] and all(label == path for label, path in row["data"]):  # files, not arms
        data = ", ".join(f"[data]({root}/{path})" for _, path in row["data"])
        links = [f"{arms} ({data})" if row["arm"] else data]
    return f"{' / '.join(links) or arms}; {row['outcome']}, {row['says']}"


def _cost_text(row: pd.Series) -> str:
    """'5; 0.9 h', '2 of 5; 0.4 h', '16 questions'."""
    none_yet = row["verdict"] == NOT_YET
    seeds = "0" if none_yet else f"{row['seeds']}"
    of = f" of {row['planned']}" if none_yet or row["seeds"] < row["planned"] else ""
    counted = "" if row["counted"] == "seeds" else f" {row['counted']}"
    hours = (
        f"{'about ' if row['estimated'] else ''}{row['hours']:.1f}{_JOIN}h"
        if row["hours"]
        else ""
    )
    there = "" if none_yet and not row["planned"] else f"{seeds}{of}{counted}"
    return "; ".join(filter(None, [there, hours]))


def _p_text(row: pd.Series) -> str:
    there = [float(p) for p in (row["p"], row["p_holm"]) if not (p is None or pd.isna(p))]
    return "; ".join(format(p, ".2g") if p >= 1e-4 else f"<{_JOIN}0.0001" for p in there)


def _unit(outcome: str) -> tuple[str, float]:
    """An outcome's unit, and what its numbers are multiplied by."""
    if outcome in ("tokens_mean_wrong", "length_last"):
        return "tokens", 1
    if outcome.startswith("grad_norm"):
        return "of the norm", 1
    if outcome == "kl_last":
        return "nats", 1
    if outcome == "step_seconds_mean":
        return "s a step", 1
    of_the_run = re.match(r"reward/\w+_mean$|success_mean$", outcome)
    return (
        "points over the run"
        if of_the_run
        else "points of reward"
        if "reward" in outcome
        else "points",
        100,
    )
