"""TRL's own loss on the forced batch: the record, and what a new version of TRL is compared by. Imports trl."""

from __future__ import annotations

import atexit
import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.oracle.cases import GROUP_SIZE, GROUPS, TEMPERATURE, Case
from grpo_kit.models import load_policy
from grpo_kit.models._model_facts import CHECKPOINTING

TRL_NAMES = {"old_logprobs": "old_per_token_logps", "ref_logprobs": "ref_per_token_logps"}


@functools.cache
def _folder() -> Path:
    """A temporary folder for trainers, deleted when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="oracle-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def make_trainer(case: Case) -> GRPOTrainer:
    """A trainer on the case's policy and settings. Raises ValueError where TRL refuses them."""
    model = case.policy()
    reference = _folder() / f"reference-{case.tuning}"
    if case.beta and case.tuning == "full":  # TRL loads a reference of its own
        if not reference.exists():
            copy.deepcopy(model).save_pretrained(reference)
        model.config._name_or_path = str(reference)
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=_folder()),
        per_device_train_batch_size=GROUPS * GROUP_SIZE // case.micro_batches,
        gradient_accumulation_steps=case.micro_batches, num_generations=GROUP_SIZE, max_steps=1, beta=case.beta,
        loss_type="grpo" if case.loss == "gspo" else case.loss, importance_sampling_level=case.level,
        temperature=TEMPERATURE, report_to=[], bf16=False, use_cpu=True, disable_tqdm=True,
        **case.settings | {CHECKPOINTING: False},
    )  # fmt: skip
    return GRPOTrainer(
        model,
        lambda completions, **_: [0.0] * len(completions),
        args,
        Dataset.from_dict({"prompt": ["a"] * GROUPS * GROUP_SIZE}),
        processing_class=_tokenizer(),
    )


@functools.cache
def _tokenizer() -> Any:
    tokenizer = load_policy("tiny-random", quiet=True)[1]
    tokenizer.chat_template = None  # the one prompt is text, and never sampled from
    return tokenizer


def as_trl(case: Case) -> list[dict[str, torch.Tensor]]:
    """The case's micro-batches with TRL's keys."""
    tokens = case.batch()["completion_mask"].sum()
    renamed = [
        {TRL_NAMES.get(name, name): rows for name, rows in part.items()}
        for part in case.parts()
    ]
    for part in renamed:
        del part["rewards"]
        if not case.beta:
            del part["ref_per_token_logps"]
        part["num_items_in_batch"] = tokens
    return renamed


def trl_loss(case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """TRL's own loss on padded rows, summed over the case's micro-batches, and its gradients."""
    trainer, window = make_trainer(case), as_trl(case)
    trainer.current_gradient_accumulation_steps = len(window)
    model = trainer.model.train()
    total = 0.0
    for i, part in enumerate(window):
        trainer.accelerator.gradient_state._set_sync_gradients(i == len(window) - 1)
        loss = trainer._compute_loss(model, part)
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
