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
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[
        :, -width - 1 : -1
    ]
    return objectives.token_logprobs(logits, part["completion_ids"], temperature=TEMPERATURE)


def textbook_loss(case: Case) -> tuple[float, dict[str, Tensor]]:
    """The loss by its name in grpo_kit.objectives."""
    model, parts = case.policy(), case.parts()
    tokens, loss_of = case.batch()["completion_mask"].sum(), getattr(objectives, case.loss)
    adds_up = case.loss in ("dapo", "cispo", "vespo")  # their micro-batches do
    total = 0.0
    for part in parts:
        logprobs = logprobs_of(model, part)
        old = part.get("old_logprobs", logprobs.detach())
        options = options_of(case)
        if adds_up:
            options["num_tokens"] = tokens
        if case.beta:
            options |= {
                "beta": case.beta,
                "ref_logprobs": part["ref_logprobs"],
                "correct_kl": True,
            }
        loss = loss_of(logprobs, old, part["advantages"], part["completion_mask"], **options)
        loss = loss if adds_up else loss / len(parts)
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def options_of(case: Case) -> dict[str, Any]:
    """The case's settings by the names of grpo_kit.objectives."""
    settings = case.settings
    options: dict[str, Any] = {} if case.loss == "gspo" else {"level": case.level}
    if case.loss == "cispo":
        options["max_ratio"] = settings["epsilon_high"]
    elif case.loss not in ("sapo", "vespo"):
        options |= {"epsilon": settings["epsilon"], "epsilon_high": settings["epsilon_high"]}
    if case.loss == "dr_grpo":
        options["max_completion_tokens"] = settings["max_completion_length"]
    own = (f"{case.loss}_", len(case.loss) + 1)
    return options | {
        name[own[1] :]: value for name, value in settings.items() if name.startswith(own[0])
    }
