"""Tasks: data, prompt and rewards of one problem, one file each."""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.more.code.code import code
    from grpo_kit.more.episodes.reasoning_gym import (
        from_reasoning_gym,
        from_reasoning_gym_tries,
    )
    from grpo_kit.more.tasks.from_file import from_file
    from grpo_kit.more.tasks.gsm8k import gsm8k
    from grpo_kit.more.tasks.interval_scheduling import interval_scheduling
    from grpo_kit.more.tasks.science import science
    from grpo_kit.tasks.countdown import countdown
    from grpo_kit.tasks.from_rows import from_rows
    from grpo_kit.tasks.largest import largest
    from grpo_kit.tasks.task import Task, strategy_rewards

__all__ = lazy(__name__)
