"""Rewards made of other rewards, whose parts stay visible: weighted sums, gates, clipping.

Longer than 300 lines because sums, gates and clips ask each other for ranges and parts, which is seen side by side.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_kit._support.argument_checks import is_number
from grpo_kit.rewards._parts import Reward, all_parts, judges_answer, range_of, reward_names
from grpo_kit.rewards.cheat_cases import Case
from grpo_kit.rewards.scoring import Scores, check_scores, score, total

Verdicts = list[bool | None]  # per completion: paid in full? None where that cannot be judged
# (a reward that judges the answer, its scores) -> per completion, the score that is full pay
FullPay = Callable[[Reward, Scores], Sequence[float]]
_ROUNDING = 1e-6


class _Composite:
    """A reward made of others, its parts. Each part is called once a batch; its scores are logged under its name."""

    made_of_others = True

    def __init__(self, name: str, parts: Sequence[Reward]) -> None:
        self.__name__ = name
        self.parts: list[Reward] = list(parts)
        every_part = all_parts(self)
        self.names: list[str] = reward_names(every_part)
        self._name_of = dict(zip(map(id, every_part), self.names, strict=True))
        if name in self.names:
            raise ValueError(
                f"a part is named {name!r}, as what it would be a part of; set __name__ on it, metrics are kept by name"
            )
        columns = (column for part in every_part for column in getattr(part, "columns", ()))
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(columns))

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        part_scores: dict[str, list[float | None]] = {}
        # A part may log values of its own.
        loggers = {"log_metric": log_metric, "log_extra": log_extra}
        columns |= {key: log for key, log in loggers.items() if log is not None}

        def scores_of(part: Reward, *, finite: bool = True) -> list[float | None]:
            name = self._name_of[id(part)]
            if name not in part_scores and isinstance(part, _Composite):
                part_scores[name] = part._judge(scores_of)
            elif name not in part_scores:
                # Clipped accepts infinite scores; elsewhere see check_scores
                part_scores[name] = score(part, completions, name, False, **columns)
            check_scores(part_scores[name], completions, part, name, finite=finite)
            return part_scores[name]

        totals = self._judge(scores_of)
        for name in self.names:
            scores = part_scores[name]
            numbers = [score for score in scores if score is not None]
            if log_metric is not None and numbers:
                log_metric(f"reward/{name}", sum(numbers) / len(numbers))
            if log_extra is not None:
                log_extra(f"reward/{name}", list(scores))
        if log_metric is not None:
            direct_scores = [part_scores[self._name_of[id(part)]] for part in self.parts]
            for name, value in self._metrics(totals, direct_scores, columns).items():
                log_metric(name, value)
        return totals

    def cheats(self, honest: Case) -> list[Case]:
        """The cheats of all parts."""
        cases: dict[tuple[str, str, str], Case] = {}
        for part in all_parts(self):
            if hasattr(part, "cheats") and not isinstance(part, _Composite):
                for case in part.cheats(honest):
                    cases[case.name, case.prefill, case.completion] = case
        return list(cases.values())

    def _judge(self, scores_of: Callable[[Reward], list[float | None]]) -> list[float | None]:
        raise NotImplementedError

    def _metrics(
        self,
        totals: list[float | None],
        parts: list[list[float | None]],
        columns: dict[str, Any],
    ) -> dict[str, float]:
        return {}


class WeightedSum(_Composite):
    """One reward from several: the sum of weight x part, in [0, 1] if the parts are; None where a part cannot judge.

    parts: {reward: weight}, or pairs (reward, weight). Weights are positive and sum to 1; sums are rounded to 6
    digits, so that equal ones are equal. A part with None makes the sum None: adding the rest would score it 0.
    Under TRL and the kit's trainer each part, and each part of a part, is passed on through `log_metric`
    ("reward/<part>", the mean of the judged) and `log_extra` (a column of the completions); besides, the metric
    "frac_cancelled_groups" is the share of groups whose parts vary while the sum does not (`cancelled_groups`).
    Raises ValueError for weights that do not fit and for a reward given twice; RewardError (a ValueError), naming part,
    row and completion, for a part that raises or returns the wrong length, NaN, an infinite value or one outside the
    range that the part states.

    >>> from grpo_kit.rewards import ExactAnswer, SoftFormat
    >>> WeightedSum({ExactAnswer(): 0.75, SoftFormat(think=None): 0.25})(["<answer>5</answer>"], answer=["4"])
    [0.25]
    """

    sums = True

    def __init__(self, parts: Mapping[Reward, float] | Sequence[tuple[Reward, float]]) -> None:
        pairs = list(parts.items()) if isinstance(parts, Mapping) else list(parts)
        if any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in pairs):
            raise ValueError(
                f"parts={parts!r}: give {{reward: weight}}, or pairs (reward, weight)"
            )
        if any(not is_number(weight) and weight == weight for _, weight in pairs):
            raise ValueError(f"parts={parts!r}: each weight must be a number, such as 0.75")
        self.weights: list[float] = [float(weight) for _, weight in pairs]
        if (
            not pairs
            or min(self.weights) <= 0
            or not math.isclose(sum(self.weights), 1, abs_tol=1e-9)
        ):
            raise ValueError(
                f"parts has the weights {self.weights}; use positive weights that sum to 1"
            )
        if len({id(part) for part, _ in pairs}) < len(pairs):
            raise ValueError(f"parts={parts!r} has one reward twice; add its weights up")
        super().__init__("weighted_sum", [part for part, _ in pairs])

    def __repr__(self) -> str:
        weight_of = zip(self.parts, self.weights, strict=True)
        parts = [f"{self._name_of[id(part)]}: {weight:g}" for part, weight in weight_of]
        return f"WeightedSum({{{', '.join(parts)}}})"

    def _judge(self, scores_of):
        rows = zip(*map(scores_of, self.parts), strict=True)
        return [total(row, self.weights) for row in rows]

    def _metrics(self, totals, parts, columns):
        from grpo_kit.rewards.cancel import cancelled_share

        prompts = columns.get("prompts")
        if prompts is None or len(prompts) != len(totals):
            return {}
        share = cancelled_share(parts, totals, prompts)
        if share is None:
            return {}
        return {"frac_cancelled_groups": share}


class Pay(NamedTuple):
    """The scores of a reward, one entry a completion.

    scores: the reward's. verdicts: is the answer paid in full? credit: the mean score of the parts that judge the
    answer, or the reward's score if no part does. None where the reward cannot judge.
    """

    scores: Scores
    verdicts: Verdicts
    credit: Scores


def score_in_full(
    reward: Reward,
    completions: Sequence[Any],
    columns: Mapping[str, Any],
    *,
    name: str | None = None,
    full_pay: FullPay | None = None,
    left_out: Sequence[Reward] = (),
) -> Pay:
    """The reward's scores, obtained by calling `ask`, and whether it pays each completion's answer in full.

    Full is the top of the scale: 1.0, or `high` of a reward that states `range = (low, high)`, with 1e-6 of slack. In a
    WeightedSum all parts that judge the answer must pay in full. A Gated reward pays only behind an open gate. None
    where it cannot judge. A reward that judges no answer is taken whole. full_pay: overrides what counts as full.
    left_out: parts that judge the answer and count neither for the verdict nor for the credit.
    Raises RewardError.

    >>> from grpo_kit.rewards import ExactAnswer, SoftFormat
    >>> score_in_full(WeightedSum({ExactAnswer(): 0.75, SoftFormat(): 0.25}), ["<answer>5</answer>"], {"answer": ["5"]})
    Pay(scores=[0.875], verdicts=[True], credit=[1.0])
    """
    logged: dict[str, Scores] = {}
    # It reports its parts' scores, so none is called twice.
    if isinstance(reward, WeightedSum | Gated):
        columns = {**columns, "log_extra": logged.__setitem__}

    def scores_of(part: Reward) -> Scores:
        return logged[f"reward/{reward._name_of[id(part)]}"]

    def pay(judge: Reward, scores: Scores) -> Pay:
        parts = judge.parts if isinstance(judge, WeightedSum | Gated) else []
        judges = [part for part in parts if judges_answer(part) and part not in left_out]
        if not judges:
            _, highest = range_of(judge) or (0.0, 1.0)
            bars = [highest] * len(scores)
            if full_pay is not None and judges_answer(judge):
                bars = full_pay(judge, scores)
            return Pay(scores, _where_judged(_reaches, scores, bars), scores)
        pays = [pay(part, scores_of(part)) for part in judges]
        verdicts = _where_judged(lambda *row: all(row), *(part.verdicts for part in pays))
        credit = _where_judged(_mean, *(part.credit for part in pays))
        if isinstance(judge, Gated):
            least = [judge.least] * len(scores)
            is_open = _where_judged(operator.ge, scores_of(parts[1]), least)
            verdicts = _where_judged(operator.and_, verdicts, is_open)
            credit = _where_judged(_behind_gate, credit, is_open)
        return Pay(scores, verdicts, credit)

    return pay(reward, score(reward, completions, name, **columns))


def _where_judged(function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """function of each row of the columns; None where one of the row's values is None."""
    return [None if None in row else function(*row) for row in zip(*columns, strict=True)]


def _mean(*scores: float) -> float:
    return round(math.fsum(scores) / len(scores), 6)


def _reaches(score: float, bar: float) -> bool:
    return score >= bar - _ROUNDING


def _behind_gate(score: float, is_open: bool, shut: float = 0.0) -> float:
    return score if is_open else min(score, shut)


def all_in_full(verdicts: Sequence[Verdicts]) -> Verdicts:
    """Do all rewards that can judge a completion pay it in full? None where no reward can judge it.

    >>> all_in_full([[True, True, None], [True, False, None], [None, True, None]])
    [True, False, None]
    """
    judged = [
        [verdict for verdict in row if verdict is not None]
        for row in zip(*verdicts, strict=True)
    ]
    return [all(row) if row else None for row in judged]


class Gated(_Composite):
    """The reward's score where the gate's is at least `at`, else 0.0: no credit for an answer out of format.

    reward, on: two rewards; the second is the gate. Both are logged like the parts of a WeightedSum. A Gated reward may
    be a part of one. None where either cannot judge. A gate shut for a whole group leaves the group without advantage:
    give the format some weight of its own (the same object may do both), or begin with a lower `at`.
    at: how high the gate's score must be within its range, in (0, 1]. The range is the stated one, else [0, 1]: 0.5 of
    (-1, 1) is a score of 0. Behind a shut gate the score is the low end of a stated range, else min(score, 0).
    Raises ValueError for `at` outside (0, 1], and the errors of WeightedSum.

    >>> from grpo_kit.rewards import ExactAnswer, SoftFormat
    >>> gated = Gated(ExactAnswer(), on=SoftFormat(think=None))
    >>> gated(["<answer>5</answer>", "<answer>5</answer> I hope."], answer=["5", "5"])
    [1.0, 0.0]
    """

    def __init__(self, reward: Reward, *, on: Reward, at: float = 1.0) -> None:
        if not 0 < at <= 1:
            raise ValueError(f"at={at!r} must be in (0, 1]; 1.0 asks for the gate's full score")
        if reward is on:
            raise ValueError(f"reward and on are the same {reward!r}; a gate is another reward")
        self.at = float(at)
        super().__init__(f"gated_{reward_names([reward])[0]}", [reward, on])

    @property
    def least(self) -> float:
        """The lowest score that opens the gate."""
        low, high = range_of(self.parts[1]) or (0.0, 1.0)
        if self.at == 1:  # exactly the full score
            return high
        return low + self.at * (high - low)

    def __repr__(self) -> str:
        reward, gate = self.parts
        return f"Gated({reward!r}, on={gate!r}, at={self.at:g})"

    def _judge(self, scores_of):
        scores, gates = map(scores_of, self.parts)
        lowest, _ = range_of(self.parts[0]) or (0.0, 1.0)
        least = self.least
        return _where_judged(
            lambda score, gate: _behind_gate(score, gate >= least, lowest), scores, gates
        )


class Clipped(_Composite):
    """Any reward, TRL's own included, scaled to [0, 1]: (score - low) / (high - low), clipped; None stays None.

    The reward is called as in TRL, by keyword, and logged with its own scores.
    Raises ValueError if low < high does not hold, or the reward returns the wrong length or NaN; the message
    names the reward, the row and the completion.

    >>> def shorter(completions, **columns):
    ...     return [-len(text) for text in completions]
    >>> Clipped(shorter, low=-10, high=0)(["", "four", "twelve chars"])
    [1.0, 0.6, 0.0]
    """

    def __init__(self, reward: Reward, *, low: float = 0.0, high: float = 1.0) -> None:
        if not is_number(low) or not is_number(high) or not low < high:
            raise ValueError(f"low={low!r}, high={high!r}: use finite numbers, low < high")
        self.low, self.high = float(low), float(high)
        super().__init__(f"clipped_{reward_names([reward])[0]}", [reward])

    def __repr__(self) -> str:
        return f"Clipped({self.parts[0]!r}, low={self.low:g}, high={self.high:g})"

    def _judge(self, scores_of):
        scores = scores_of(self.parts[0], finite=False)
        return _where_judged(self._scaled, scores)

    def _scaled(self, score: float) -> float:
        return min(1.0, max(0.0, (score - self.low) / (self.high - self.low)))
