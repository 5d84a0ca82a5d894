"""Do the parts of a reward cancel out? A group whose parts vary teaches nothing while the total does not vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from grpo_kit.rewards.scoring import totals

Scores = Sequence[float | None]


def cancelled_groups(
    scores: pd.DataFrame | Mapping[str, Scores],
    *,
    weights: Sequence[float] | None = None,
    group_size: int | None = None,
    tolerance: float = 1e-6,
) -> pd.DataFrame:
    """Per step, the groups whose parts vary while their total does not: no advantage, nothing learnt.

    scores: a run's completions (`read_completions(run)`: columns step, group, reward and a column reward/<part> of
    each part, whether parts of a WeightedSum or rewards of their own), or {part: scores of all completions}, the
    completions of a prompt adjacent, with weights, one a part, and group_size.
    tolerance: a smaller variation counts as none, as a share of the group's largest score where that is above 1;
    weights such as 0.2 leave differences of 1e-17 in Python and of 1e-7 in a trainer's float32.
    Completions without a total (None, NaN; see scoring.totals) are left out, and then groups with fewer than two. A
    gate that holds back the reward behind it counts as cancelling. In scores a part of weight 0 does not count; a
    table does not hold the weights, so there it does.
    Returns step (0 for scores), groups, cancelled, share (NaN without groups) and example: the scores of the first
    cancelled group, "" where there is none.
    Raises ValueError if columns are missing, or weights and group_size do not fit the scores.

    >>> table = cancelled_groups({"right": [1, 0], "short": [0, 1]}, weights=[0.5, 0.5], group_size=2)
    >>> table["cancelled"].tolist(), table["example"].tolist()
    ([1], ['right 1, 0; short 0, 1; reward 0.5, 0.5'])
    """
    if isinstance(scores, pd.DataFrame):
        if weights is not None or group_size is not None:
            raise ValueError(
                "weights and group_size go with scores by part; a table has the columns reward and group"
            )
        table = scores
    else:
        table = _as_table(scores, weights, group_size)
    parts = [name for name in table if str(name).startswith("reward/")]
    if not parts or not {"step", "group", "reward"} <= {*table}:
        raise ValueError(
            f"scores has the columns {list(table)}; it needs step, group, reward and reward/<part>, as "
            "read_completions gives them"
        )
    steps = table["step"].unique()
    # None becomes NaN.
    table = table.dropna(subset=["reward"]).astype(dict.fromkeys([*parts, "reward"], float))
    table = table[table.groupby(["step", "group"])["reward"].transform("size") > 1]
    groups = table.groupby(["step", "group"])[[*parts, "reward"]]
    least, most = groups.min(), groups.max()
    varies = most - least > tolerance * np.maximum(1, np.maximum(least.abs(), most.abs()))
    cancelled = varies[parts].any(axis=1) & ~varies["reward"]
    rows = []
    for step in steps:
        in_step = cancelled[cancelled.index.get_level_values("step") == step]
        examples = [_example(groups.get_group(group)) for group in in_step.index[in_step][:1]]
        rows.append(
            {
                "step": int(step),
                "groups": len(in_step),
                "cancelled": int(in_step.sum()),
                "share": float(in_step.astype(float).mean()),  # NaN without groups
                "example": "".join(examples),
            }
        )
    return pd.DataFrame(rows, columns=["step", "groups", "cancelled", "share", "example"])


def cancelled_share(
    parts: Sequence[Scores], totals: Scores, prompts: Sequence[Any]
) -> float | None:
    """The share of groups whose parts vary while the total does not. A group: adjacent completions of equal prompts.

    None if no group has two judged completions. `WeightedSum` logs this number as "frac_cancelled_groups".

    >>> cancelled_share([[1, 0, 1, 0], [0, 1, 1, 0]], [0.5, 0.5, 1, 0], ["a", "a", "b", "b"])
    0.5
    """
    groups = [number for number, (_, group) in enumerate(groupby(prompts)) for _ in group]
    row = cancelled_groups(_table(dict(enumerate(parts)), groups, totals)).iloc[0]
    return float(row["share"]) if row["groups"] else None


def _as_table(
    scores: Mapping[str, Scores], weights: Sequence[float] | None, group_size: int | None
) -> pd.DataFrame:
    lengths = {name: len(values) for name, values in scores.items()}
    rows = next(iter(lengths.values()), 0)
    if len(set(lengths.values())) != 1 or not rows:
        raise ValueError(
            f"scores has lengths {lengths}; give every part one score per completion"
        )
    if weights is None or len(weights) != len(scores):
        raise ValueError(f"weights={weights!r} for {len(scores)} parts; give one per part")
    if not group_size or group_size < 2 or rows % group_size:
        raise ValueError(
            f"group_size={group_size!r} for {rows} completions; give a divisor from 2 up"
        )
    groups = [row // group_size for row in range(rows)]
    weight_of = dict(zip(scores, weights, strict=True))
    weighted = {name: part for name, part in scores.items() if weight_of[name] != 0}
    return _table(weighted, groups, totals(list(scores.values()), weights, groups))


def _table(parts: Mapping[str, Scores], groups: Sequence[int], total: Scores) -> pd.DataFrame:
    columns = {f"reward/{name}": scores for name, scores in parts.items()} | {"reward": total}
    return pd.DataFrame(columns, dtype=float).assign(step=0, group=groups)


def _example(rows: pd.DataFrame) -> str:
    parts = []
    for name in rows:
        scores = ", ".join(f"{score:.4g}" for score in rows[name])
        parts.append(f"{name.removeprefix('reward/')} {scores}")
    return "; ".join(parts)
