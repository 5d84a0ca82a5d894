"""One row a claim: effect, interval, verdict. Built from run folders, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.advice import elsewhere
from benchmarks.advice.claims import CLAIMS, SOURCES, Claim
from benchmarks.result import WEIGHTS
from grpo_kit import lab
from grpo_kit.guide.which_method import anchor
from grpo_kit.lab.statistics import holm

_UNITS = {
    "accuracy": ("points", 100),
    "reward_mean": ("points of reward", 100),
    "sampled_1.0": ("points", 100),
    "reward_roughness": ("points of reward", 100),
    "tokens_mean_wrong": ("tokens", 1),
    "grad_norm_max": ("", 1),
    "success": ("points", 100),
    "success_mean": ("points over the run", 100),
    "step_seconds_mean": ("s a step", 1),
    "differ": ("points", 100),
}


def verdict(claim: Claim, low: float, high: float) -> str:
    """ "holds", "does not" or "cannot tell", from the difference's 95 % interval.

    more (less: mirrored): holds if all of it is above 0; does not if all of it is below what matters.
    no less: holds if all of it is above minus what matters; does not if all of it is below 0.

    >>> verdict(Claim("x", "A1"), -0.02, 0.04)
    'does not'
    """
    if claim.says == "less":
        low, high = -high, -low
    if claim.says == "no less":
        return "holds" if low > -claim.matters else "does not" if high < 0 else "cannot tell"
    return "holds" if low > 0 else "does not" if high < claim.matters else "cannot tell"


def table(folder: str | Path, *, claims: list[Claim] | None = None) -> pd.DataFrame:
    """The claims with what the runs in `folder` say about them; p corrected for their number (Holm).

    A withdrawn claim keeps its effect; its verdict is "withdrawn", and it has no p. The others' p stay corrected for
    its look as well: withdrawing a row must not make another row surer.
    """
    found = lab.load(folder)
    rows: list[dict[str, Any]] = []
    for claim in CLAIMS if claims is None else claims:
        row: dict[str, Any] = {
            "claim": claim.text,
            "by": claim.by,
            "arm": claim.arm,
            "against": claim.against,
            "withdrawn": claim.withdrawn,
            "runs": claim.runs,
        }
        try:
            d = None if claim.needs else _difference(claim, found)
        except ValueError:
            # No seed has the outcome in both arms, such as a length of wrong answers where none is wrong.
            rows.append(row | {"seeds": 0, "verdict": f"cannot tell: no {claim.outcome}"})
            continue
        if d is None:
            why = f"not run: needs {claim.needs}" if claim.needs else "not run yet"
            rows.append(row | {"seeds": 0, "verdict": why})
            continue
        rows.append(
            row
            | {"outcome": claim.outcome, "says": claim.says, "matters": claim.matters}
            | {"seeds": d["seeds"], "effect": d["mean"], "low": d["low"], "high": d["high"], "p": d["p"]}
            | _origin(claim, found)
            | {"verdict": _word(claim, d)}
        )
    made = pd.DataFrame(rows)
    if "p" in made:
        made["p_holm"] = holm([None if pd.isna(p) else p for p in made["p"]])
        made.loc[made["withdrawn"] != "", ["p", "p_holm"]] = float("nan")
    return made


def _difference(claim: Claim, found: lab.Lab) -> dict[str, Any] | None:
    """Of the claim's arms; None where no seed has both."""
    if claim.runs:
        return elsewhere.difference(claim)
    if not {claim.arm, claim.against} <= set(found.arms) or not found.seeds(claim.arm, claim.against):
        return None
    return found.difference(claim.arm, claim.against, outcome=claim.outcome, null=claim.null)


def _origin(claim: Claim, found: lab.Lab) -> dict[str, str]:
    if claim.runs:
        return elsewhere.origin(claim)
    runs = found.runs[found.runs["arm"].isin([claim.arm, claim.against])]
    return {
        "model": ", ".join(WEIGHTS.get(m, m) for m in sorted(set(runs["model"]))),
        "hardware": ", ".join(sorted(set(runs["hardware"]))),
    }


def _word(claim: Claim, difference: dict[str, Any]) -> str:
    if claim.withdrawn:
        return "withdrawn"
    if difference["seeds"] < 2:
        return "one seed: cannot tell"
    return verdict(claim, difference["low"], difference["high"])


def effect_text(row: pd.Series) -> str:
    """'+4.2 [-3.0, 11.4] points'"""
    if not row["seeds"]:
        return ""
    unit, scale = _UNITS[row["outcome"]]
    values = [scale * row[name] for name in ("effect", "low", "high")]
    return f"{values[0]:+.1f} [{values[1]:.1f}, {values[2]:.1f}] {unit}".strip()


def markdown(made: pd.DataFrame, *, notebook: str = "") -> str:
    """The table for a README or a notebook, each claim a link to its cell in `notebook` (default: this one)."""
    lines = [
        "| claim | by | arms | seeds | effect, 95 % interval | p (Holm) | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, row in made.iterrows():
        arms = f"{row['arm']} / {row['against']}" if row["arm"] else ""
        p = row.get("p_holm")
        effect = effect_text(row)
        what = f"{row['outcome']}, {row['says']}: {effect}" if effect else ""
        link = f"[{row['claim']}]({notebook}#{anchor(row['claim'])})"
        p_text = "" if p is None or pd.isna(p) else format(p, ".2g")
        word = f"**{row['verdict']}**"
        if row["verdict"] == "withdrawn":
            word += f": {row['withdrawn']}"
        cells = [link, row["by"], arms, row["seeds"] or "", what, p_text, word]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def counts_text(made: pd.DataFrame) -> str:
    """How many of the rows with an effect have which verdict."""
    counts = made.loc[made["seeds"] > 0, "verdict"].str.removeprefix("one seed: ").value_counts()
    words = {
        "holds": "hold",
        "does not": "do not",
        "cannot tell": "cannot be told",
        "withdrawn": "are withdrawn",
    }
    said = ", ".join(f"{counts.get(word, 0)} {plural}" for word, plural in words.items())
    return f"Of {counts.sum()} rows with an effect: {said}. A withdrawn row decides nothing, either way."


def write(folder: Path, target: Path) -> None:
    """The whole table as one markdown file, with how it was made."""
    made = table(folder)
    runs = lab.load(folder).runs
    weights = ", ".join(WEIGHTS.get(name, name) for name in sorted(set(runs["model"])))
    gone = (made["verdict"] == "withdrawn").sum()
    standing = made["p"].notna().sum() if "p" in made else 0
    looks = f"all {standing} rows that have one"
    if gone:
        looks = (
            f"{standing + gone} looks: the {standing} rows that have one and the {gone} that are withdrawn "
            "(withdrawing a row makes no other row surer)"
        )
    text = [
        "# The advice, measured",
        "",
        "Written by `python -m benchmarks.advice --table` from the run folders. "
        f"{len(runs)} runs of {runs['arm'].nunique()} arms; weights: {weights}; hardware: "
        f"{', '.join(sorted(set(runs['hardware'])))}; {min(runs['date'])} to {max(runs['date'])}. Each claim links to "
        "its cell in notebook 15.",
        "",
        markdown(made, notebook="../../notebooks/15_the_advice_measured.ipynb"),
        "",
        "A verdict goes by its row's own 95 % interval: of twenty rows without any effect one is expected to leave 0 "
        f"out. p (Holm) is corrected for {looks}; a row "
        "that holds with a p (Holm) above 0.05 is a hint, not a finding. Accuracy is held out and greedy, and its "
        "interval counts seeds and rows; that of other outcomes counts seeds alone.",
        "",
        counts_text(made),
        "",
        "Who says it: " + "; ".join(f"**{key}** {name}" for key, name in SOURCES.items()) + ".",
        "",
    ]
    target.write_text("\n".join(text), encoding="utf-8")
