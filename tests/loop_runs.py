"""Tiny runs of the loop: a task that also pays for letters, four steps, a second each."""

import copy
import functools
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import few_words
import torch

from examples.older_weights import OlderWeights
from grpo_kit.engine.fast import fast
from grpo_kit.loop import Config, Loop
from grpo_kit.loop.batch import generate
from grpo_kit.models import load_policy
from grpo_kit.record._jsonl_run import lines_of
from grpo_kit.tasks import largest

SMALL = {
    "steps": 4,
    "prompts_per_step": 2,
    "group_size": 4,
    "learning_rate": 1e-2,
    "warmup": 0,
    "seed": 3,
}
KINDS = {
    "full": {},
    "lora": {"tuning": "lora", "learning_rate": 1e-2},
    "two iterations": {"iterations": 2, "beta": 0.04},
    "two minibatches": {"minibatches": 2, "temperature": lambda progress: 1.2 - 0.4 * progress},
    "fast": {"seams": "fast"},
    "older weights": {"seams": "fast", "older": {"sync_every": 3}, "tuning": "lora"},
    "a buffer": {"older": {"sync_every": 2, "buffer": "fifo", "lead": 1}},
}


def letters(completions, **columns):
    """Share of characters that are letters: it varies inside a group of a random model."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


@functools.cache
def task():
    """Which number is the largest, where half of the reward is for letters."""
    made = largest(n_train=16, n_held_out=4, max_completion_tokens=6)
    weights = [weight / 2 for weight in made.reward_weights] + [0.5]
    return replace(made, rewards=[*made.rewards, letters], reward_weights=weights)


@functools.cache
def _policy(tuning):
    return few_words.policy(tuning)


def make(
    folder, *, tuning="full", seams="plain", older=None, watch=None, hooks=(), task=None, model=None,
    tokenizer=None, **config,
):  # fmt: skip
    """A trainer on a fresh tiny model. older: options of OlderWeights. watch: wraps the sampler inside of it."""
    fresh, own = _policy(tuning)
    model = copy.deepcopy(fresh) if model is None else model
    if model.config.vocab_size > len(own):  # a model that somebody loaded by its name
        own = load_policy("tiny-random", quiet=True)[1]
    config = Config(**(SMALL | config))
    given = {}
    if seams == "fast":
        found = fast(model, config)
        given = {"sample": found.sample, "update": found.update}
    if older is not None:
        inner = given.get("sample", generate)
        given["sample"] = OlderWeights(watch(inner) if watch else inner, **older)
    return Loop(
        model,
        task or globals()["task"](),
        config,
        tokenizer=tokenizer or own,
        folder=folder,
        hooks=hooks,
        **given,
    )


def weights(trainer):
    """A copy of the trained weights, and of the optimizer's moments, by name."""
    found = {name: p.detach().clone() for name, p in trainer.trained.items()}
    for place, state in trainer.optimizer.state_dict()["state"].items():
        found |= {
            f"{place}/{name}": value.clone()
            for name, value in state.items()
            if torch.is_tensor(value)
        }
    return found


def same(one, other):
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )


def record(folder):
    """What the folder has of the run, less what a clock tells."""
    clocks = {"seconds", "step_seconds", "rollout/sync_seconds"}
    rows = [
        {k: v for k, v in row.items() if k not in clocks}
        for row in lines_of(Path(folder) / "metrics.jsonl")
    ]
    return rows, list(lines_of(Path(folder) / "completions.jsonl"))


def press_stop():
    """What the notebook's stop button does."""
    os.kill(os.getpid(), signal.SIGINT)


def press_after(seconds):
    """Press it from another thread."""
    timer = threading.Timer(seconds, press_stop)
    timer.daemon = True
    timer.start()
    return timer
