"""A weighted sum of rewards whose parts stay visible."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_kit.rewards.response import Reward


class WeightedSum:
    """One reward out of several: sum of weight x part, in [0, 1]; None where a part cannot judge.

    parts: {reward: weight}, or pairs (reward, weight). Weights are positive and sum to 1; weights exact in
    binary (0.75 and 0.25, not 0.8 and 0.2) keep equal sums equal, which TRL's share of groups without spread
    depends on. A part with None makes the sum None: adding the rest would score it 0.
    Under TRL and the kit's trainer each part is passed on through `log_metric` ("reward/<part>", the mean of
    the judged) and `log_extra` (a column of the completions).
    Raises ValueError for weights that do not fit, two parts of one name, a part that returns the wrong
    length, NaN or a value outside [0, 1]; the message names part, row and completion.

    >>> from grpo_kit.rewards import ExactAnswer, SoftFormat
    >>> WeightedSum({ExactAnswer(): 0.75, SoftFormat(think=None): 0.25})(["<answer>5</answer>"], answer=["4"])
    [0.25]
    """

    def __init__(self, parts: Mapping[Reward, float] | Sequence[tuple[Reward, float]]) -> None:
        pairs = list(parts.items() if isinstance(parts, Mapping) else parts)
        self.parts: list[Reward] = [part for part, _ in pairs]
        self.weights: list[float] = [float(weight) for _, weight in pairs]
        self.names: list[str] = [reward_name(part) for part in self.parts]
        if not pairs or min(self.weights) <= 0 or not math.isclose(sum(self.weights), 1, abs_tol=1e-9):
            raise ValueError(f"parts has the weights {self.weights}; use positive weights that sum to 1")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"parts has the names {self.names}; each must differ, set __name__ on one")
        needed = (column for part in self.parts for column in getattr(part, "columns", ()))
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(needed))
        self.__name__ = "weighted_sum"

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        scores = {}
        for name, part in zip(self.names, self.parts, strict=True):
            scores[name] = checked_scores(part, completions, **columns)
            judged = [score for score in scores[name] if score is not None]
            if log_metric is not None and judged:
                log_metric(f"reward/{name}", sum(judged) / len(judged))
            if log_extra is not None:
                log_extra(f"reward/{name}", list(scores[name]))
        rows = zip(*scores.values(), strict=True)
        return [None if None in row else self._sum(row) for row in rows]

    def __repr__(self) -> str:
        inside = ", ".join(f"{n}: {w:g}" for n, w in zip(self.names, self.weights, strict=True))
        return f"WeightedSum({{{inside}}})"

    def _sum(self, row: Sequence[float]) -> float:
        return min(1.0, sum(w * s for w, s in zip(self.weights, row, strict=True)))


def reward_name(reward: Reward) -> str:
    """The name a reward goes by in metrics: its `__name__`.

    Raises ValueError if it has none (functools.partial, a class instance without one).
    """
    name = getattr(reward, "__name__", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"reward {reward!r} has no __name__; set one, it names the metric")
    return name


def checked_scores(reward: Reward, completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """The reward's scores, held to its contract: one per completion, each None or in [0, 1].

    Raises ValueError naming the reward, the row and the completion. An exception in the reward passes through.
    """
    name, scores = reward_name(reward), reward(completions, **columns)
    if len(scores) != len(completions):
        raise ValueError(f"reward {name!r} returned {len(scores)} scores for {len(completions)} completions")
    for row, score in enumerate(scores):
        if score is not None and not 0 <= score <= 1:  # NaN fails both comparisons
            raise ValueError(
                f"reward {name!r} gave {score!r} in row {row}, completion {completions[row]!r}; "
                "use a value in [0, 1], or None where it cannot judge"
            )
    return list(scores)
