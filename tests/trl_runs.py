"""The same small run by trl's trainer and by the kit's, sampled alike, and what both must agree on."""

from pathlib import Path

import pytest
import torch
from tiny_run import make
from transformers import LlamaForSequenceClassification

from grpo_kit.models import load_policy

QWEN = (Path(__file__).parent / "fixtures" / "qwen2.5_chat_template.jinja").read_text(encoding="utf-8")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
FOUR = {"per_device_train_batch_size": 4, "num_generations": 2}  # rows of a step: quick
# What depends on the clock.
_OWN = ("time", "runtime", "per_second", "flos")


def both(tmp_path, *, before=None, kit=None, **options):
    """{"plain": trainer, "kit": trainer} after train(); before(trainer) is called first, and may train itself.

    The kit's makes its completions as trl does (rollout="hf"), so that the random draws are the same.
    """
    trainers = {}
    for which in ("plain", "kit"):
        mine = {**FOUR, **options}
        mine = {key: value() if key == "model" else value for key, value in mine.items()}
        trainer = make(which, tmp_path / which, kit={"rollout": "hf", **(kit or {})}, **mine)
        if before is not None:
            before(trainer)
        trainer.train()
        trainers[which] = trainer
    return trainers


def assert_alike(trainers, *, numbers=True):
    """The same entries at the same steps, the same metrics in each, and the same numbers."""
    plain, kit = (trainers[which].state.log_history for which in ("plain", "kit"))
    assert [entry["step"] for entry in plain] == [entry["step"] for entry in kit]
    for theirs, ours in zip(plain, kit, strict=True):
        assert set(theirs) <= set(ours), set(theirs) - set(ours)
        for name in [n for n in theirs if numbers and not any(own in n for own in _OWN)]:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5, nan_ok=True), name


def scripted(*turns):
    """before= of both(): the first turn of each rollout writes turns[0](row), row 0, 1, ...; later ones turns[1]."""

    def set_up(trainer):
        def write(prompt_ids, *args, **kwargs):
            text = turns[len(prompt_ids) < trainer.args.generation_batch_size]
            return [trainer._tokenizer(text(row))["input_ids"] for row in range(len(prompt_ids))], None

        trainer._generate_single_turn = write

    return set_up


def reward_model(path):
    """A tiny sequence-classification model with one score, and its tokenizer, in a folder; returns the folder."""
    model, tokenizer = load_policy("tiny-random", quiet=True)
    config = type(model.config)(**{**model.config.to_dict(), "num_labels": 1})
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second

    Returns:
        their sum
    """
    return a + b


class Counter:
    """An environment: a number that the model adds to."""

    def reset(self, **row):
        self.total = 0
        return f"start {row.get('start', '')}"

    def add(self, a: int, b: int) -> int:
        """Add two numbers to the total.

        Args:
            a: the first
            b: the second

        Returns:
            the total
        """
        self.total += a + b
        return self.total

    def get_reward(self) -> float:
        return self.total / 3
