"""ReboundConfig: a line where a notebook's config, task or reward was made again and the trainer was not."""

from __future__ import annotations

import sys
from typing import Any

from grpo_kit.loop.config_changes import differences
from grpo_kit.loop.grpo_config import Config
from grpo_kit.loop.hooks import Hook
from grpo_kit.record.kernel import in_notebook
from grpo_kit.rewards.parts import with_parts
from grpo_kit.tasks.same_task import reward_digest, task_digest


class ReboundConfig(Hook):
    """As training begins, compares the trainer's config, task and rewards with what the notebook's variables hold."""

    def __init__(self, config: Config, task: Any) -> None:
        rewards = with_parts(getattr(task, "rewards", ()))
        kinds = [(config, None), (task, task_digest), *((one, reward_digest) for one in rewards)]
        held = {id(value): (value, kind) for value, kind in kinds}
        self._held = {name: held[id(value)] for name, value in _variables().items() if id(value) in held}

    def begin(self, trainer: Any) -> None:
        """Say which differ: those of the trainer are obeyed."""
        variables = _variables()
        for name, (was, digest) in self._held.items():
            now = variables.get(name)
            if now is was or now is trainer.config or type(now) is not type(was):
                continue
            told = _differ(trainer.config, now) if digest is None else ""
            if told or digest and digest(now) != digest(was):
                again = "cell that makes" if digest is None else "cells that make task and"
                print(
                    f"{name!r} was made again after this trainer, which goes by the earlier one{told}. To train by the "
                    f"new {name!r}, run the {again} the trainer again.",
                    flush=True,
                )


def _differ(config: Config, other: Config) -> str:
    """The fields in which another config differs, in words."""
    ours, theirs = config.values(), other.values()
    for mine in ("task", "task_options", "max_completion_tokens"):  # filled in by the trainer's task
        if theirs[mine] in (None, {}):
            theirs[mine] = ours[mine]
    found = differences(ours, theirs).items()
    return ": " * bool(found) + ", ".join(f"{field}={was!r}, not {value!r}" for field, (was, value) in found)


def _variables() -> dict[str, Any]:
    """Of the notebook, outputs apart; none elsewhere."""
    every = sys.modules["IPython"].get_ipython().user_ns if in_notebook() else {}
    return {name: value for name, value in every.items() if not name.startswith("_")}
