"""The textbook losses of grpo_kit.objectives on the forced batch: a padded forward, no trainer, nothing of TRL.

An example of another implementation, as `compare_losses` takes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.oracle.cases import TEMPERATURE, Case
from grpo_kit import objectives


def logprobs_of(model: Any, part: dict[str, Tensor]) -> Tensor:
    """(R, T): log-probabilities of the completions, with their graph."""
    ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
    mask = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
    width = part["completion_ids"].size(1)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -width - 1 : -1]
    return objectives.token_logprobs(logits, part["completion_ids"], temperature=TEMPERATURE)


def textbook_loss(case: Case) -> tuple[float, dict[str, Tensor]]:
    """The loss by its name in grpo_kit.objectives. Raises ValueError for a loss or a level that is not there."""
    loss_of = getattr(objectives, case.loss, None)
    if loss_of is None:
        raise ValueError(f"grpo_kit.objectives has no {case.loss}")
    if case.level == "sequence" and case.loss != "gspo":
        raise ValueError(f"grpo_kit.objectives has {case.loss} with a ratio of each token alone")
    model, parts = case.policy(), case.parts()
    tokens = case.batch()["completion_mask"].sum()
    total = 0.0
    for part in parts:
        logprobs = logprobs_of(model, part)
        old = part.get("old_logprobs", logprobs.detach())
        high = "max_ratio" if case.loss == "cispo" else "epsilon_high"
        options: dict[str, Any] = {high: case.settings["epsilon_high"]}
        if case.loss != "cispo":
            options["epsilon"] = case.settings["epsilon"]
        if case.loss == "dr_grpo":
            options["max_completion_tokens"] = case.settings["max_completion_length"]
        if case.loss in ("dapo", "cispo"):  # their micro-batches add up
            options["num_tokens"] = tokens
        if case.beta:
            options |= {"beta": case.beta, "ref_logprobs": part["ref_logprobs"], "correct_kl": True}
        loss = loss_of(logprobs, old, part["advantages"], part["completion_mask"], **options)
        loss = loss if case.loss in ("dapo", "cispo") else loss / len(parts)
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
