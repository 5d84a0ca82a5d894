"""RewardLogs: what rewards report beside their scores, under names that the record does not use itself."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from grpo_kit.record.files import METRIC_COLUMNS
from grpo_kit.rewards.scoring import RewardError

# The record's own numbers, the groups of its own numbers, and the columns of its completions.
_METRICS = {*METRIC_COLUMNS, "changes", "refused"}
_GROUPS = {
    "reward", "rewards", "eval", "rollout", "update", "diversity", "script", "groups", "scale", "episodes", "flags",
    "clip_ratio",
}  # fmt: skip
_COLUMNS = {
    "step", "group", "prompt", "prefill", "completion", "answer", "tokens", "logprobs", "reward", "advantage",
    "temperature",
}  # fmt: skip


class RewardLogs:
    """log_extra and log_metric of one call of the rewards, for a batch: it has a length and a dict, `extra`.

    Rewards that are sums (they have `names`) report their parts by reward/<part>.
    """

    def __init__(self, batch: Any, rewards: Sequence[Any]) -> None:
        self._batch, self._metrics = batch, {}
        self._parts = {f"reward/{name}" for reward in rewards for name in getattr(reward, "names", ())}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A column of the completions. Raises ValueError for one that the record has."""
        if column not in self._parts and (column in _COLUMNS or column.startswith("reward/")):
            raise ValueError(
                f"log_extra({column!r}, ...): the record has {column!r} itself; choose another name"
            )
        self._batch.extra[column] = list(map(_encodable, values))

    def log_metric(self, name: str, value: Any) -> None:
        """A number of the step; of several the mean. Raises ValueError for one that the record has."""
        if name not in self._parts and (name in _METRICS or name.partition("/")[0] in _GROUPS):
            raise ValueError(
                f"log_metric({name!r}, ...): the record has {name!r} itself; choose another name"
            )
        self._metrics.setdefault(name, []).append(float(value))

    def metrics(self) -> dict[str, float]:
        """The numbers. Raises RewardError for a column that has not one value a completion."""
        for column, values in self._batch.extra.items():
            if len(values) != len(self._batch):
                raise RewardError(
                    f"log_extra({column!r}, ...) was given {len(values)} values for {len(self._batch)} completions; "
                    "give one for each, once a call"
                )
        return {name: fmean(values) for name, values in self._metrics.items()}


def _encodable(value: Any) -> Any:
    """The value; in a text, half a surrogate pair becomes its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value
