"""Small real training runs for the trainer's tests."""

import copy
import functools
import os
import signal
from unittest import mock

import torch
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from trl import GRPOConfig
from trl import GRPOTrainer as PlainTrainer

from grpo_kit import models
from grpo_kit.models import load_policy
from grpo_kit.training.trainer import GRPOTrainer

BOTH = {"plain": PlainTrainer, "kit": GRPOTrainer}


def data(rows=8):
    return Dataset.from_dict(
        {
            "prompt": [f"Say {i} and {'more ' * (i % 3)}:" for i in range(rows)],
            "answer": [str(i) for i in range(rows)],
        }
    )


def letters(completions, **columns):
    """Share of characters that are letters: varies inside a group on a random model."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def settings(folder, **overrides):
    base = dict(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        gradient_accumulation_steps=1,
        max_steps=4,
        max_completion_length=6,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=3,
    )
    config = GRPOConfig(**{**base, **overrides})
    config.bf16_on_cpu = True  # whoever says bf16=True here means it
    return config


@functools.cache
def _tokenizer_read_once():
    return load_policy("tiny-random", quiet=True)[1]


def tiny(**how):
    """load_policy("tiny-random"), five times as fast: of the tokenizer's files, which are read once, it has a copy.

    What Python holds of the tokenizer is its own; the vocabulary and how text is cut are shared by all copies.
    """
    tokenizer = copy.copy(_tokenizer_read_once())
    held = vars(tokenizer)
    held |= {name: copy.copy(value) for name, value in held.items() if isinstance(value, (dict, list, set))}
    with mock.patch.object(models.AutoTokenizer, "from_pretrained", lambda folder: tokenizer):
        return load_policy("tiny-random", quiet=True, **how)


def make(
    which,
    folder,
    *,
    task=None,
    tuning="full",
    model=None,
    rewards=letters,
    dataset=None,
    eval_dataset=None,
    lora=None,
    kit=None,
    trl=None,
    chat_template="its own",
    **overrides,
):
    """A trainer of either kind on a fresh tiny model.

    task: what ours trains on instead of rewards and data, its length too.
    kit: options that only ours takes; trl: those that both take. dataset: "no data" gives none.
    """
    fresh, tokenizer = tiny(tuning=tuning, lora=lora)
    if chat_template != "its own":
        tokenizer.chat_template = chat_template
    options = {"warmup": 0, "live": None, **(kit or {})} if which == "kit" else {}
    torch.manual_seed(0)
    rows = data() if dataset is None and task is None else None if isinstance(dataset, str) else dataset
    given = {"reward_funcs": rewards, "train_dataset": rows}
    if task is not None:
        given = {"task": task, "train_dataset": rows}
        overrides = {"max_completion_length": task.max_completion_tokens, **overrides}
    return BOTH[which](
        model=fresh if model is None else model,
        args=settings(folder, **overrides),
        **given,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        **{**options, **(trl or {})},
    )


def press_stop():
    """What the notebook's stop button does."""
    os.kill(os.getpid(), signal.SIGINT)


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def difference(a, b):
    return max((a[n] - b[n]).abs().max().item() for n in a)


def interrupted_once(trainer, where, at_step):
    """Press stop once, in the given phase of the step that follows `at_step` finished steps."""
    pressed = []

    def press():
        if trainer.state.global_step == at_step and not pressed:
            pressed.append(True)
            press_stop()

    if where == "rollout":
        inner = trainer._generate_single_turn

        def generate(*args, **kwargs):
            out = inner(*args, **kwargs)
            press()
            return out

        trainer._generate_single_turn = generate
    elif where == "backward":
        inner = trainer._compute_loss

        def compute_loss(*args, **kwargs):
            loss = inner(*args, **kwargs)
            if loss.requires_grad:  # not where the kit only has its metrics
                loss.register_hook(lambda grad: press())
            return loss

        trainer._compute_loss = compute_loss
    else:
        inner = trainer.create_optimizer

        def create_optimizer(*args, **kwargs):
            optimizer = inner(*args, **kwargs)
            if not isinstance(
                optimizer, AcceleratedOptimizer
            ):  # later calls return accelerate's wrapper of it
                optimizer.register_step_post_hook(lambda *_: press())  # weights changed, step not yet counted
            return optimizer

        trainer.create_optimizer = create_optimizer
    return pressed


def ragged_batch(prompts=3, group=4, width=7, *, with_old=False, with_ref=False, seed=0):
    """Prompts of several lengths, completions of 0 (masked) to 7 tokens, rows shuffled as TRL does."""
    g = torch.Generator().manual_seed(seed)
    longest = 9
    rows = []
    for p in range(prompts):
        prompt = torch.randint(20, 4000, (4 + 2 * p,), generator=g)
        for i in range(group):
            n = 0 if (p, i) == (1, 2) else int(torch.randint(1, width + 1, (1,), generator=g))
            rows.append((prompt, torch.randint(20, 4000, (n,), generator=g)))
    rows = [rows[i] for i in torch.randperm(len(rows), generator=g)]
    batch = {
        "prompt_ids": torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0)) for p, _ in rows]),
        "prompt_mask": torch.stack(
            [torch.nn.functional.pad(torch.ones_like(p), (longest - len(p), 0)) for p, _ in rows]
        ),
        "completion_ids": torch.stack([torch.nn.functional.pad(c, (0, width - len(c))) for _, c in rows]),
        "completion_mask": torch.stack(
            [torch.nn.functional.pad(torch.ones_like(c), (0, width - len(c))) for _, c in rows]
        ),
        "advantages": torch.randn(len(rows), generator=g),
    }
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    noise = lambda: -10.8 + 0.3 * torch.randn(len(rows), width, generator=g)  # noqa: E731
    if with_old:
        batch["old_per_token_logps"] = noise()
    if with_ref:
        batch["ref_per_token_logps"] = noise()
    return batch
