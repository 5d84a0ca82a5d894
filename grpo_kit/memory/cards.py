"""What fits on how many cards, and the least that a step could take there: a table on paper, nothing of it measured.

python -m grpo_kit.memory.cards        # docs/cards.md's table, as Markdown
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from grpo_kit.memory.plan import request_for, tokens_of
from grpo_kit.memory.plan_table import MemoryPlan
from grpo_kit.memory.request import Request
from grpo_kit.memory.roofline import CARDS, Card, step_floor
from grpo_kit.memory.shapes import KNOWN
from grpo_kit.memory.sharding import DIVIDES_WEIGHTS, SHARDINGS
from grpo_kit.profiles import Profile, profile

QWEN = tuple(name for name in KNOWN if name.startswith("Qwen/Qwen2.5-"))
_MICRO_BATCHES = (8, 4, 2, 1)
SYSTEMS = (("T4", 1), ("RTX 4090", 1), ("RTX 4090", 2), ("RTX 4090", 4), ("RTX 4090", 8))
SYSTEMS += (("H100 80GB", 1), ("H100 80GB", 2), ("H100 80GB", 4), ("H100 80GB", 8))
SECONDS = ("rollout, s", "update, s", "exchange, s", "floor of a step, s")
ON_PAPER = (
    "On paper: memory as plan_memory adds it up, seconds from the cards' data sheets. Floors, which no run reaches; "
    "nothing in this table has been measured."
)


@dataclass(frozen=True)
class CardsTable:
    """Made by cards_table(); rows: its columns, one row a system and tuning. Prints with what its numbers are."""

    rows: pd.DataFrame

    def __str__(self) -> str:
        return f"{ON_PAPER}\n{self._shown().to_string(index=False)}"

    def _repr_html_(self) -> str:
        return f"<p><b>{ON_PAPER}</b></p>{self._shown().to_html(index=False)}"

    def markdown(self) -> str:
        """As a Markdown table, what it is above it."""
        shown = self._shown()
        lines = [list(shown), ["---"] * len(shown.columns), *shown.astype(str).to_numpy().tolist()]
        return "\n".join([f"*{ON_PAPER}*", "", *(f"| {' | '.join(line)} |" for line in lines)])

    def _shown(self) -> pd.DataFrame:
        there = self.rows[self.rows["model"].notna()]
        shown = self.rows.drop(columns="usable GiB").astype(object)
        for name in SECONDS:
            shown[name] = there[name].map(lambda v: f"{v:.2g}" if v < 9.95 else f"{v:.0f}")
        both = there[["GiB", "usable GiB"]].itertuples(index=False)
        shown["GiB"] = pd.Series(
            [f"{peak:.1f} of {usable:.1f}" for peak, usable in both], there.index, dtype=object
        )
        shown["model"] = shown["model"].fillna("none of them")
        return shown.fillna("")


def cards_table(
    systems: Sequence[tuple[str | Card, int]] = SYSTEMS,
    *,
    models: Sequence[str] = QWEN,
    tunings: Sequence[str] | None = None,
    **changes: Any,
) -> CardsTable:
    """The largest of the models that fits each system, by full fine-tuning and LoRA, with the floor of its step.

    systems: (a name in CARDS or a Card, how many of them). models: small to large, names that plan_memory knows.
    tunings: of "full", "lora", "qlora"; None: the first two, on one card all three (4-bit weights are not divided).
    changes: fields of the cards' profiles, such as max_completion_tokens=512. Every system makes the same completions a
    step: 64 of 256 tokens, behind prompts of 256, unless changed. Of several ways to divide a model that fits, the one
    with the lowest floor is taken. Where weights are sharded: torch's AdamW, every layer checkpointed, the largest
    micro-batch of 8, 4, 2, 1 that fits; "sparing" as in plan_memory.
    rows: cards, tuning, model, sharding, update (the kit's, or TRL's rows at a time), GiB (the peak on one card),
    usable GiB, rollout, update and exchange in seconds, and their sum, the floor of a step.
    Raises ValueError for an unknown card, model, tuning or field, and for a number of cards that does not divide the
    completions.

    >>> cards_table([("RTX 4090", 1)], tunings=["lora"]).rows["model"].item()
    'Qwen2.5-7B'
    """
    rows = []
    for card, gpus in systems:
        name, known = (card, _known(card)) if isinstance(card, str) else (f"{card.gb:g} GB", card)
        for tuning in tunings or (("full", "lora") if gpus > 1 else ("full", "lora", "qlora")):
            found = largest_that_fits(known, gpus, tuning, models=models, **changes)
            rows.append({"cards": f"{gpus} x {name}", "tuning": tuning, **_row(found)})
    return CardsTable(pd.DataFrame(rows))


def largest_that_fits(
    card: Card, gpus: int, tuning: str, *, models: Sequence[str] = QWEN, **changes: Any
) -> tuple[Request, MemoryPlan, dict[str, float]] | None:
    """What was asked of the largest model that fits, its plan, and the floor of its step; None where none fits."""
    cfg = profile(card.profile, **changes)
    cfg = replace(cfg, max_completion_tokens=tokens_of(cfg))  # once, for all models and ways
    for model in reversed(models):
        fitting = [way for way in _ways(card, gpus, tuning, replace(cfg, model=model)) if way[1].fits]
        if fitting:
            return min(fitting, key=lambda way: way[2]["step"])
    return None


def _ways(
    card: Card, gpus: int, tuning: str, cfg: Profile
) -> Iterator[tuple[Request, MemoryPlan, dict[str, float]]]:
    """Every way to divide this model among the cards; with TRL's update, in the largest micro-batch that fits."""
    own = replace(cfg, gradient_checkpointing=True)
    for sharding in SHARDINGS if gpus > 1 and tuning != "qlora" else ("ddp",):
        for sparing in (False, True) if sharding in DIVIDES_WEIGHTS else (False,):
            for micro_batch in _MICRO_BATCHES if sharding != "ddp" else (cfg.micro_batch,):
                changed = cfg if sharding == "ddp" else replace(own, micro_batch=micro_batch)
                request = request_for(
                    changed, card.gb, tuning=tuning, gpus=gpus, sharding=sharding, sparing=sparing
                )
                plan = request.plan()
                if plan.fits:
                    yield request, plan, step_floor(request, plan, card)
                    break


def _row(found: tuple[Request, MemoryPlan, dict[str, float]] | None) -> dict[str, Any]:
    if found is None:
        return dict.fromkeys(("model", "sharding", "update", "GiB", "usable GiB", *SECONDS))
    request, plan, floor = found
    sharding = request.sharding if request.gpus > 1 else "-"
    return {
        "model": request.cfg.model.rpartition("/")[2].removesuffix("-Instruct"),
        "sharding": sharding + (", sparing" if request.sparing else ""),
        "update": f"TRL's, {plan.micro_batch} rows" if plan.micro_batch else "the kit's",
        "GiB": plan.peak_gib,
        "usable GiB": plan.usable_gib,
        **dict(zip(SECONDS, floor.values(), strict=True)),
    }


def _known(name: str) -> Card:
    if name not in CARDS:
        raise ValueError(
            f"card {name!r} is not known; use one of {', '.join(CARDS)}, or a Card of its data sheet"
        )
    return CARDS[name]


if __name__ == "__main__":
    print(cards_table().markdown())
