"""Stage 4 of a step, beside scoring: what rewards log, and the scores of those that scoring does not call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_kit.record.files import METRIC_COLUMNS
from grpo_kit.rewards.scoring import PendingScores, RewardError, check_scores, off_scale
from grpo_kit.training.batch import Batch

# Where the kit's and trl's own numbers and columns are; what a reward logs goes beside them, under other names.
_METRICS = {*METRIC_COLUMNS, "step_time", "policy_loss", "cispo_clip_ratio"}
_GROUPS = {
    "reward", "rewards", "eval", "completions", "rollout", "update", "diversity", "script", "groups", "clip_ratio",
    "sampling", "tools", "flags", "scale",
}  # fmt: skip
_COLUMNS = {"step", "group", "prompt", "prefill", "completion", "reward", "advantage", "temperature"} | {
    "answer", "tokens", "logprobs",
}  # fmt: skip


class Logged:
    """Holds one trainer's log_metric, log_extra, reward models and environments to names and numbers that can be kept.

    say: a line for the person who watches.
    """

    def __init__(self, trainer: Any, say: Callable[[str], None]) -> None:
        self._trainer, self._say = trainer, say
        self._seen: dict[str, tuple[float, float]] = {}  # of each reward
        self._said: set[str] = set()

    def metric(self, name: str, value: Any) -> float:
        """The value of a reward's log_metric; ValueError for no number, and for a name of the record's own."""
        if name not in self._inside() and (name in _METRICS or name.partition("/")[0] in _GROUPS):
            raise ValueError(
                f"log_metric({name!r}, ...): the record has {name!r} itself; choose another name"
            )
        return float(value)

    def extra(self, column: str, values: Sequence[Any]) -> list[Any]:
        """The values of a reward's log_extra column, as files can hold them: half a surrogate pair becomes its escape.

        Raises ValueError where the record has a column of that name.
        """
        if column not in self._inside() and (column in _COLUMNS or column.startswith("reward/")):
            raise ValueError(
                f"log_extra({column!r}, ...): the record has {column!r} itself; choose another name"
            )
        return [v.encode("utf-8", "backslashreplace").decode() if isinstance(v, str) else v for v in values]

    def check(self, batch: Batch, pending: Mapping[str, Sequence[Any]]) -> None:
        """Raises RewardError for a log_extra column that has not one value a completion, and for scores.

        batch: with completions and parts. The scores of a reward model or an environment are held to what scoring holds
        functions to; scores outside [0, 1] are printed once a reward. pending: the columns that rewards logged.
        """
        for column, values in pending.items():
            if len(values) != len(batch.rows):
                raise RewardError(
                    f"log_extra({column!r}, ...) was given {len(values)} values for {len(batch.rows)} completions; "
                    "give one for each, once a call"
                )
        rewards, names = self._trainer.reward_funcs, self._trainer.reward_func_names
        for column, reward, name in zip(batch.parts.T, rewards, names, strict=True):
            given = [None if score != score else score for score in column.tolist()]
            if isinstance(reward, PendingScores):
                reward = reward.reward
            else:
                texts = batch.completions  # this process's
                check_scores(given, texts if len(texts) == len(given) else [""] * len(given), reward, name)
            self._say_scale(given, reward, name)

    def _say_scale(self, scores: list[float | None], reward: Any, name: str) -> None:
        there = [score for score in scores if score is not None]
        if there and name not in self._said:
            low, high = self._seen.get(name, (there[0], there[0]))
            self._seen[name] = seen = min(low, *there), max(high, *there)
            if said := off_scale(name, reward, scores, seen):
                self._said.add(name)
                self._say(f"{said}; choose reward_weights by its scale.")

    def _inside(self) -> set[str]:
        """What sums log of their parts."""
        return {f"reward/{name}" for name in names_inside(self._trainer)}


def names_inside(trainer: Any) -> list[str]:
    """Names of the parts of a trainer's rewards that are sums (WeightedSum reports them by `names`)."""
    sums = [getattr(reward, "reward", reward) for reward in trainer.reward_funcs]
    return [name for reward in sums for name in getattr(reward, "names", [])]
