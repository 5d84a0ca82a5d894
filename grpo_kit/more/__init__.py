"""What goes beyond the mission: the kit does not import it, and it imports the kit.

export   a trained model as a folder that proves itself; a chat with it
lab      several settings and seeds compared; preferences, another reward on old rollouts, a branch of a run
bridges  TRL's scripts, vLLM, trackers
"""

from typing import TYPE_CHECKING

from grpo_kit.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.more import bridges, export, lab

__all__ = lazy(__name__)
