"""Small runs of kit.GRPOTrainer with all its hooks, on rows and rewards that a test brings."""

import copy

import few_words
from loop_runs import SMALL, letters

from grpo_kit.loop import Config
from grpo_kit.models import load_policy
from grpo_kit.tasks import from_rows
from grpo_kit.trainer.grpo_trainer import GRPOTrainer

ROWS = [{"question": f"Say {i} and {'more ' * (i % 3)}:", "answer": str(i)} for i in range(8)]
OTHER = [{"question": "Say no.", "answer": "no"}]


def own_task(rewards=letters, *, rows=ROWS, max_completion_tokens=6, **options):
    """A task of these rows and rewards; one more row, with every column, is held out."""
    other = [{**rows[0], **row} for row in OTHER]
    return from_rows(
        "own",
        rows,
        other,
        reward=rewards,
        max_completion_tokens=max_completion_tokens,
        **options,
    )


def make(
    folder,
    *,
    rewards=letters,
    rows=ROWS,
    task=None,
    model=None,
    tokenizer=None,
    live=None,
    **options,
):
    """A trainer on a fresh tiny model. options: of GRPOTrainer (on_flag, held_out, keep, hooks), else of Config."""
    fresh, own = few_words.policy()
    # one that somebody loaded by its name
    if model is not None and model.config.vocab_size > len(own):
        own = load_policy("tiny-random", quiet=True)[1]
    given = {
        name: options.pop(name)
        for name in ("on_flag", "held_out", "keep", "hooks")
        if name in options
    }
    return GRPOTrainer(
        fresh if model is None else model, own_task(rewards, rows=rows) if task is None else task,
        Config(**SMALL | options), tokenizer=copy.copy(own) if tokenizer is None else tokenizer, folder=folder,
        live=live, **given,
    )  # fmt: skip
