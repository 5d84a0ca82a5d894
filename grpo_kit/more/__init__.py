"""What goes beyond the mission: the kit does not import it, and it imports the kit.

code      programs as answers: tasks, rewards, the sandbox that runs what a model wrote
episodes  several turns: environments, what the model reads each turn, tool calls
tasks     further tasks
lab       several settings and seeds compared; preferences, another reward on old rollouts, a branch of a run
export    a trained model as a folder that proves itself; a chat with it
bridges   TRL's scripts, vLLM, trackers, the red flags on other people's logs
memory    does a config fit the card?
doctor    what this machine has, each part of the kit tried on it
commands  the command line
"""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.more import (
        bridges,
        code,
        commands,
        doctor,
        episodes,
        export,
        lab,
        memory,
        tasks,
    )

__all__ = lazy(__name__)
