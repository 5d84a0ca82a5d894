"""Rewards made of others, whose parts stay visible: weighted sums, gates, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_kit.rewards.cancel import cancelled_share
from grpo_kit.rewards.cases import Case
from grpo_kit.rewards.response import Reward


class _Composite:
    """A reward made of others, its parts. Each part is asked once a batch, and its scores can be seen."""

    def __init__(self, name: str, parts: Sequence[Reward]) -> None:
        self.__name__ = name
        self.parts: list[Reward] = list(parts)
        inside = all_parts(self)
        self.names: list[str] = [reward_name(part) for part in inside]
        if len(set(self.names)) < len(self.names):
            raise ValueError(
                f"{name} has parts of the names {self.names}; each must differ: set __name__ on one, or use one "
                "object in both places"
            )
        if name in self.names:
            raise ValueError(
                f"a part is named {name!r}, as what it would be a part of; set __name__ on it, metrics are kept by name"
            )
        needed = (column for part in inside for column in getattr(part, "columns", ()))
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(needed))

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        seen: dict[str, list[float | None]] = {}
        loggers = {"log_metric": log_metric, "log_extra": log_extra}  # a part may log things of its own
        columns |= {key: log for key, log in loggers.items() if log is not None}
        totals = self._judge(completions, columns, seen)
        for name in self.names:
            judged = [score for score in seen[name] if score is not None]
            if log_metric is not None and judged:
                log_metric(f"reward/{name}", sum(judged) / len(judged))
            if log_extra is not None:
                log_extra(f"reward/{name}", list(seen[name]))
        if log_metric is not None:
            for name, value in self._measure(totals, columns, seen).items():
                log_metric(name, value)
        return totals

    def cheats(self, honest: Case) -> list[Case]:
        """The cheats of all parts."""
        leaves = [part for part in all_parts(self) if not isinstance(part, _Composite)]
        cases = [case for part in leaves if hasattr(part, "cheats") for case in part.cheats(honest)]
        return list({(case.name, case.prefill, case.completion): case for case in cases}.values())

    def _ask(
        self,
        part: Reward,
        completions: Sequence[Any],
        columns: dict[str, Any],
        seen: dict[str, list[float | None]],
    ) -> list[float | None]:
        name = reward_name(part)
        if name not in seen and isinstance(part, _Composite):
            seen[name] = part._judge(completions, columns, seen)
        elif name not in seen:
            seen[name] = checked_scores(part, completions, **columns)
        return _in_range(name, completions, seen[name])  # Clipped may have asked it first, for any number

    def _judge(
        self, completions: Sequence[Any], columns: dict[str, Any], seen: dict[str, list[float | None]]
    ) -> list[float | None]:
        raise NotImplementedError

    def _measure(
        self, totals: list[float | None], columns: dict[str, Any], seen: dict[str, list[float | None]]
    ) -> dict[str, float]:
        return {}


class WeightedSum(_Composite):
    """One reward out of several: sum of weight x part, in [0, 1]; None where a part cannot judge.

    parts: {reward: weight}, or pairs (reward, weight). Weights are positive and sum to 1; weights exact in
    binary (0.75 and 0.25, not 0.8 and 0.2) keep equal sums equal, which TRL's share of groups without a signal
    depends on. A part with None makes the sum None: adding the rest would score it 0.
    Under TRL and the kit's trainer each part, and each part of a part, is passed on through `log_metric`
    ("reward/<part>", the mean of the judged) and `log_extra` (a column of the completions); besides, the metric
    "frac_cancelled_groups" is the share of groups whose parts vary while the sum does not (`cancelled_groups`).
    Raises ValueError for weights that do not fit, two parts of one name, a part that returns the wrong
    length, NaN or a value outside [0, 1]; the message names part, row and completion.

    >>> from grpo_kit.rewards import ExactAnswer, SoftFormat
    >>> WeightedSum({ExactAnswer(): 0.75, SoftFormat(think=None): 0.25})(["<answer>5</answer>"], answer=["4"])
    [0.25]
    """

    def __init__(self, parts: Mapping[Reward, float] | Sequence[tuple[Reward, float]]) -> None:
        pairs = list(parts.items() if isinstance(parts, Mapping) else parts)
        if any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in pairs):
            raise ValueError(f"parts={parts!r}: give {{reward: weight}}, or pairs (reward, weight)")
        self.weights: list[float] = [float(weight) for _, weight in pairs]
        if not pairs or min(self.weights) <= 0 or not math.isclose(sum(self.weights), 1, abs_tol=1e-9):
            raise ValueError(f"parts has the weights {self.weights}; use positive weights that sum to 1")
        direct = [reward_name(part) for part, _ in pairs]
        if len(set(direct)) < len(direct):
            raise ValueError(f"parts has the names {direct}; each must differ, set __name__ on one")
        super().__init__("weighted_sum", [part for part, _ in pairs])

    def __repr__(self) -> str:
        pairs = zip(self.parts, self.weights, strict=True)
        return f"WeightedSum({{{', '.join(f'{reward_name(part)}: {weight:g}' for part, weight in pairs)}}})"

    def _judge(self, completions, columns, seen):
        rows = zip(*(self._ask(part, completions, columns, seen) for part in self.parts), strict=True)
        return [None if None in row else self._sum(row) for row in rows]

    def _sum(self, row: Sequence[float]) -> float:
        return min(1.0, sum(w * s for w, s in zip(self.weights, row, strict=True)))

    def _measure(self, totals, columns, seen):
        prompts = columns.get("prompts")
        if prompts is None or len(prompts) != len(totals):
            return {}
        share = cancelled_share([seen[reward_name(part)] for part in self.parts], totals, prompts)
        return {} if share is None else {"frac_cancelled_groups": share}


class Gated(_Composite):
    """The reward's score where the gate's is at least `at`, else 0.0: no credit for an answer out of format.

    reward, on: two rewards, the second being the gate; both are logged like the parts of a WeightedSum, in which it
    may stand. None where either cannot judge. A gate that is shut for a whole group leaves it without advantage:
    give the format some weight of its own (the same object may do both), or begin with a lower `at`.
    Raises ValueError for `at` outside (0, 1], and what WeightedSum does.

    >>> from grpo_kit.rewards import ExactAnswer, SoftFormat
    >>> gated = Gated(ExactAnswer(), on=SoftFormat(think=None))
    >>> gated(["<answer>5</answer>", "<answer>5</answer> I hope."], answer=["5", "5"])
    [1.0, 0.0]
    """

    def __init__(self, reward: Reward, *, on: Reward, at: float = 1.0) -> None:
        if not 0 < at <= 1:
            raise ValueError(f"at={at!r} must be in (0, 1]; 1.0 asks for the gate's full score")
        if reward_name(reward) == reward_name(on):
            raise ValueError(f"reward and on are both named {reward_name(on)!r}; set __name__ on one")
        self.at = float(at)
        super().__init__(f"gated_{reward_name(reward)}", [reward, on])

    def __repr__(self) -> str:
        reward, gate = self.parts
        return f"Gated({reward!r}, on={gate!r}, at={self.at:g})"

    def _judge(self, completions, columns, seen):
        scores, gates = (self._ask(part, completions, columns, seen) for part in self.parts)
        return [
            None if score is None or gate is None else score if gate >= self.at else 0.0
            for score, gate in zip(scores, gates, strict=True)
        ]


class Clipped(_Composite):
    """Any reward, TRL's own included, on the scale of [0, 1]: (score - low) / (high - low), clipped; None stays None.

    The reward is called as TRL calls it, by keyword, and logged with the scores it gave.
    Raises ValueError if low < high does not hold, or the reward returns the wrong length or NaN; the message
    names the reward, the row and the completion.

    >>> def shorter(completions, **columns):
    ...     return [-len(text) for text in completions]
    >>> Clipped(shorter, low=-10, high=0)(["", "four", "twelve chars"])
    [1.0, 0.6, 0.0]
    """

    def __init__(self, reward: Reward, *, low: float = 0.0, high: float = 1.0) -> None:
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"low={low!r}, high={high!r}: use finite numbers, low < high")
        self.low, self.high = float(low), float(high)
        super().__init__(f"clipped_{reward_name(reward)}", [reward])

    def __repr__(self) -> str:
        return f"Clipped({self.parts[0]!r}, low={self.low:g}, high={self.high:g})"

    def _ask(self, part, completions, columns, seen):
        name = reward_name(part)
        if isinstance(part, _Composite):
            return super()._ask(part, completions, columns, seen)
        if name not in seen:
            seen[name] = _one_each(name, completions, part(completions=completions, **columns))
        return seen[name]

    def _judge(self, completions, columns, seen):
        scores = self._ask(self.parts[0], completions, columns, seen)
        for row, score in enumerate(scores):
            if score is not None and math.isnan(score):
                raise ValueError(
                    f"reward {reward_name(self.parts[0])!r} gave {score!r} in row {row}, completion "
                    f"{completions[row]!r}; use a number, or None where it cannot judge"
                )
        width = self.high - self.low
        return [None if s is None else float(min(1.0, max(0.0, (s - self.low) / width))) for s in scores]


def all_parts(reward: Reward) -> list[Reward]:
    """The parts of a reward made of others, and their parts, each object once; [] for any other reward.

    >>> from grpo_kit.rewards import ExactAnswer, SoftFormat
    >>> [part.__name__ for part in all_parts(Gated(ExactAnswer(), on=SoftFormat()))]
    ['exact_answer', 'soft_format']
    """
    direct = list(reward.parts) if isinstance(reward, _Composite) else []
    inside = direct + [part for outer in direct for part in all_parts(outer)]
    return list({id(part): part for part in inside}.values())


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

    It is called as trainers do, by keyword.
    Raises ValueError naming the reward, the row and the completion. An exception in the reward passes through.
    """
    name = reward_name(reward)
    return _in_range(
        name, completions, _one_each(name, completions, reward(completions=completions, **columns))
    )


def _one_each(name: str, completions: Sequence[Any], scores: Sequence[float | None]) -> list[float | None]:
    if not hasattr(scores, "__len__"):
        raise ValueError(
            f"reward {name!r} returned {type(scores).__name__}; return one float or None for each completion"
        )
    if len(scores) != len(completions):
        raise ValueError(f"reward {name!r} returned {len(scores)} scores for {len(completions)} completions")
    return list(scores)


def _in_range(name: str, completions: Sequence[Any], scores: list[float | None]) -> list[float | None]:
    for row, score in enumerate(scores):
        if score is not None and not 0 <= score <= 1:  # NaN fails both comparisons
            raise ValueError(
                f"reward {name!r} gave {score!r} in row {row}, completion {completions[row]!r}; "
                "use a value in [0, 1], or None where it cannot judge"
            )
    return scores
