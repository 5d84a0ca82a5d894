"""grpo_kit: GRPO fine-tuning of small language models on one card, in notebooks.

What a notebook calls stands here, one line each. Result and error classes, and what is needed once in a while, live in
the packages: `grpo_kit.tasks`, `grpo_kit.rewards`, `grpo_kit.evaluation`, ...; what goes beyond GRPO on one card, in
`grpo_kit.more`.

A name is imported when it is first asked for: `import grpo_kit` loads none of torch, transformers, trl and peft, which
take seconds.
"""

import logging
import os
from typing import TYPE_CHECKING

from grpo_kit._support import lazy
from grpo_kit._support import __version__ as __version__

# Torch's threads wait for each other in a loop, and on a machine that others use, too, for one that has no core: a
# rollout of seconds took minutes. So they sleep sooner (docs/systems.md). Too late where torch was imported before.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# bitsandbytes would say at every start that its 4-bit CPU kernels are missing; the kit uses 4 bits on CUDA only.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in str(record.msg)
)

# ruff: noqa: I001  the order is the reader's: prompts, rewards, schedules first

# What editors read, and lazy() at run time: the one list of where a name stands.
if TYPE_CHECKING:
    from grpo_kit._support.lazy import check_builds  # is a torchvision of another torch here?

    # Prompts: what the model sees.
    from grpo_kit.prompts import build_prompt  # one question, rendered, ending in the prefill
    from grpo_kit.prompts import build_dataset  # rows as TRL wants them, with the row's columns
    from grpo_kit.prompts import audit_tags  # how tags are cut into tokens, and what changes it

    # Rewards: what a completion is worth.
    from grpo_kit import rewards  # rewards.ExactAnswer(), rewards.check_rewards(...), ...

    # Schedules: a number as a function of progress.
    from grpo_kit.schedules import constant, cosine, exponential, linear, stepwise

    # A task, its model and its machine, before training.
    from grpo_kit import tasks  # tasks.largest(), tasks.from_rows(...), ...
    from grpo_kit.trainer.presets import preset  # a Config that fits this machine
    from grpo_kit.more.memory.plan import plan_memory  # does it fit the card?
    from grpo_kit.models import load_policy  # a model and its tokenizer
    from grpo_kit.evaluation.readiness import readiness  # can GRPO learn anything here?
    from grpo_kit.evaluation.lengths import length_probe  # how long must a completion be?

    # Training.
    from grpo_kit.loop.config import Config  # every number of a run, with its unit
    from grpo_kit.trainer.grpo_trainer import GRPOTrainer  # the loop, with chart and flags
    from grpo_kit.loop.protocols import Hook  # what is done around a run's steps: four methods
    from grpo_kit.loop.processes import Stopped  # what train() raises where it was stopped
    from grpo_kit.trainer.held_out import HeldOut  # accuracy on a small set while it trains
    from grpo_kit.more.bridges.trl import from_trl, to_trl  # from a TRL script, and to one

    # Several turns.
    from grpo_kit.more import episodes  # episodes.grid(), episodes.View(...), ...

    # Watching.
    from grpo_kit.watch.chart import plot_run  # the chart of a run folder
    from grpo_kit.more.bridges.diagnose import diagnose  # the red flags on anybody's log
    from grpo_kit.watch.browse import browse  # its completions
    from grpo_kit.trainer.control_folder import control  # steer a run from elsewhere
    from grpo_kit.record.files import next_run_folder, read_completions, read_metrics
    from grpo_kit.watch.terminal import unfinished_run

    # After training.
    from grpo_kit.engine.complete import complete  # text that the model writes after a prompt
    from grpo_kit.evaluation.accuracy import evaluate  # accuracy on held-out rows
    from grpo_kit.evaluation.comparison import compare  # base beside tuned, with a paired test
    from grpo_kit.evaluation.comparison import results  # the runs of a folder, side by side
    from grpo_kit.more.lab.rescore import rescore  # what another reward would have taught
    from grpo_kit.more.export import export  # a folder that proves itself
    from grpo_kit.more.export.chat import chat  # a question in, the response out
    from grpo_kit.watch.run_card import model_card  # what was trained, and what came of it
    from grpo_kit.more.lab.preferences import scored_samples  # pairs, labels, accepted ones
    from grpo_kit.more.lab.branch import branch, branches  # an exact what-if; the tree of a run
    from grpo_kit.more.lab.power import power  # how many seeds show it, and their cost
    from grpo_kit.more import lab  # lab.compare_arms(arms, seeds), ...
    from grpo_kit import objectives  # every loss by hand

# Names that stood here, and where each is now: what an AttributeError says.
_MOVED = {
    "RolloutEngine": "kit.engine.RolloutEngine",
    "audit_turns": "kit.episodes.audit_turns",
    "check_card": "kit.engine.card.check_card",
    "describe": "kit.models.describe",
    "make_optimizer": "kit.engine.optim.make_optimizer",
    "plot_pass_at_k": "kit.lab.plot_pass_at_k",
    "read_changes": "kit.record.read_changes",
    "read_flags": "kit.watch.read_flags",
    "roundtrip_drift": "kit.prompts.roundtrip_drift",
    "sample": "kit.scored_samples",
    "show_turns": "kit.episodes.show_turns",
    "update_survival": "kit.lab.update_survival",
}

__all__ = lazy.lazy(__name__)
