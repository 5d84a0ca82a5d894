"""ReboundConfig: a line where a notebook's config cell was run again and the cell that makes the trainer was not."""

from __future__ import annotations

import sys
from typing import Any

from grpo_kit.loop.config_changes import differences
from grpo_kit.loop.grpo_config import Config
from grpo_kit.loop.hooks import Hook
from grpo_kit.record.kernel import in_notebook


class ReboundConfig(Hook):
    """As training begins, compares the trainer's config with the one that its notebook's variable holds by then."""

    def __init__(self, config: Config) -> None:
        self._names = [name for name, value in _variables().items() if value is config]

    def begin(self, trainer: Any) -> None:
        """Say which settings differ: those of the trainer are obeyed."""
        variables = _variables()
        for name in self._names:
            now = variables.get(name)
            if not isinstance(now, Config) or now is trainer.config:
                continue
            ours, theirs = trainer.config.values(), now.values()
            for mine in ("task", "task_options", "max_completion_tokens"):  # filled in by the trainer's task
                if theirs[mine] in (None, {}):
                    theirs[mine] = ours[mine]
            if differ := differences(ours, theirs):
                told = ", ".join(f"{field}={was!r}, not {value!r}" for field, (was, value) in differ.items())
                print(
                    f"{name!r} was made again after this trainer, which goes by the earlier one: {told}. To train by "
                    f"the new {name!r}, run the cell that makes the trainer again.",
                    flush=True,
                )


def _variables() -> dict[str, Any]:
    """Of the notebook; none elsewhere."""
    return dict(sys.modules["IPython"].get_ipython().user_ns) if in_notebook() else {}
