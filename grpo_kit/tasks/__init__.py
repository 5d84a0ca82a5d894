"""Tasks: data, prompt and rewards of one problem, one file each."""

from grpo_kit.tasks.arithmetic import arithmetic
from grpo_kit.tasks.code import code
from grpo_kit.tasks.countdown import countdown
from grpo_kit.tasks.events import events
from grpo_kit.tasks.gsm8k import gsm8k
from grpo_kit.tasks.largest import largest
from grpo_kit.tasks.own import from_rows
from grpo_kit.tasks.reasoning_gym import from_reasoning_gym, from_reasoning_gym_tries
from grpo_kit.tasks.science import science
from grpo_kit.tasks.task import Task, strategy_rewards
from grpo_kit.tasks.tools import tools

__all__ = [
    "Task",
    "arithmetic",
    "code",
    "countdown",
    "events",
    "from_reasoning_gym",
    "from_reasoning_gym_tries",
    "from_rows",
    "gsm8k",
    "largest",
    "science",
    "strategy_rewards",
    "tools",
]
