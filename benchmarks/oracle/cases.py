"""The forced batches: fixed ids, rewards and old log-probabilities, and the losses that are computed on them."""

from __future__ import annotations

import copy
import functools
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.result import RESULTS
from grpo_kit.models import load_policy

FOLDER = RESULTS / "oracle"
BATCH = FOLDER / "batch.npz"
LOSSES = ("grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo")
GROUPS, GROUP_SIZE, LONGEST, PROMPT = 3, 4, 7, 9
TEMPERATURE = 0.8
NOISE = 0.3  # standard deviation of old and reference log-probabilities around the policy's
# a completion's ratio averages its tokens'
EPSILONS = {"token": (0.2, 0.28), "sequence": (0.05, 0.08)}
# rows 5 and 7 have no advantage
REWARDS = [1.0, 0.0, 1.0, 0.25, 1.0, 0.5, 0.0, 0.5, 0.0, 0.1, 0.7, 1.0]
EMPTY = 6  # the row whose completion is masked whole, as one that was cut off may be
SAPO = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
VESPO = {
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


@dataclass(frozen=True)
class Case:
    """One loss on the forced batch.

    loss: a name of LOSSES. level: "token" or "sequence", what the importance ratio is taken over; gspo is TRL's
    loss_type "grpo" at "sequence". beta: the KL's weight; the k3 estimate is multiplied by the ratio (TRL's
    use_bias_correction_kl). tuning: "full" or "lora". micro_batches: how many parts the batch is cut into; each
    part's gradient is added. on_policy: the old log-probabilities are the policy's own, so every ratio is 1.
    settings: parameters of the loss by TRL's names.
    """

    loss: str
    level: str
    beta: float
    tuning: str
    micro_batches: int
    on_policy: bool
    settings: dict[str, float] = field(compare=False)

    @property
    def name(self) -> str:
        """Such as 'dapo, token, beta 0.1, lora, 2 micro-batches'."""
        parts = (
            "1 micro-batch"
            if self.micro_batches == 1
            else f"{self.micro_batches} micro-batches"
        )
        named = f"{self.loss}, {self.level}, beta {self.beta:g}, {self.tuning}, {parts}"
        return f"{named}, on-policy" if self.on_policy else named

    def policy(self) -> Any:
        """A new model on the fixed weights, in training mode, without gradients."""
        return copy.deepcopy(policy_of(self.tuning)).train()

    def batch(self) -> dict[str, Tensor]:
        """The whole batch.

        prompt_ids, prompt_mask: (R, P), padded on the left. completion_ids, completion_mask: (R, T), padded on the
        right. rewards, advantages: (R,). old_logprobs (absent on-policy), ref_logprobs: (R, T), at TEMPERATURE.
        """
        arrays = _recorded()
        batch = {name: torch.from_numpy(arrays[name].copy()) for name in PLAIN}
        for name in ("old_logprobs", "ref_logprobs"):
            batch[name] = torch.from_numpy(arrays[f"{name}/{self.tuning}"].copy())
        if self.on_policy:
            del batch["old_logprobs"]
        return batch

    def parts(self) -> list[dict[str, Tensor]]:
        """The batch, cut into its micro-batches. A group's rows may lie in several."""
        batch, size = self.batch(), GROUPS * GROUP_SIZE // self.micro_batches
        return [
            {name: rows[i * size : (i + 1) * size] for name, rows in batch.items()}
            for i in range(self.micro_batches)
        ]


PLAIN = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "rewards",
    "advantages",
)


def all_cases() -> Iterator[Case]:
    """Every case on record, in order."""
    for loss, tuning, beta in itertools.product(LOSSES, ("full", "lora"), (0.0, 0.1)):
        levels = (
            ("sequence",)
            if loss == "gspo"
            else ("token",)
            if loss == "grpo"
            else ("token", "sequence")
        )
        for level, (micro_batches, on_policy) in itertools.product(
            levels, ((1, False), (2, False), (2, True))
        ):
            low, high = EPSILONS[level]
            high = 1 + low if loss == "cispo" else high  # cispo: the largest ratio itself
            settings = {"epsilon": low, "epsilon_high": high, "max_completion_length": LONGEST}
            settings |= {"sapo": SAPO, "vespo": VESPO}.get(loss, {})
            yield Case(loss, level, beta, tuning, micro_batches, on_policy, settings)


@functools.cache
def policy_of(tuning: str) -> Any:
    """tiny-random with logits ten times as far apart; LoRA's adapters are drawn by NumPy, so no version moves them."""
    lora = {"init_lora_weights": False} if tuning == "lora" else None
    model = load_policy("tiny-random", tuning=tuning, lora=lora, quiet=True)[0]
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                drawn = draw(name).standard_normal(parameter.shape)
                parameter.copy_(torch.from_numpy(0.1 * drawn))
    return model


def draw(name: str) -> np.random.RandomState:
    """NumPy's frozen generator, seeded by a name."""
    return np.random.RandomState(zlib.crc32(name.encode()))


@functools.cache
def _recorded(path: Path = BATCH) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def make_batch() -> dict[str, np.ndarray]:
    """Draw the batch and score it with both policies. Raises ValueError where a ratio lies on a clipping bound."""
    random = draw("batch")
    rows = GROUPS * GROUP_SIZE
    made = {name: np.zeros((rows, PROMPT), np.int64) for name in ("prompt_ids", "prompt_mask")}
    made |= {
        name: np.zeros((rows, LONGEST), np.int64)
        for name in ("completion_ids", "completion_mask")
    }
    rewards = np.array(REWARDS)
    grouped = rewards.reshape(GROUPS, GROUP_SIZE)
    spread = grouped.std(1, ddof=1, keepdims=True) + 1e-4  # TRL's scale_rewards="group"
    made["rewards"] = rewards.astype(np.float32)
    made["advantages"] = (
        ((grouped - grouped.mean(1, keepdims=True)) / spread).ravel().astype(np.float32)
    )
    prompts = [random.randint(20, 4000, 4 + 2 * group) for group in range(GROUPS)]
    for row in range(rows):
        prompt, length = prompts[row // GROUP_SIZE], 1 + (3 * row) % LONGEST
        made["prompt_ids"][row, PROMPT - len(prompt) :] = prompt
        made["prompt_mask"][row, PROMPT - len(prompt) :] = 1
        made["completion_ids"][row, :length] = random.randint(20, 4000, length)
        made["completion_mask"][row, :length] = row != EMPTY
    order = random.permutation(rows)
    made = {name: array[order] for name, array in made.items()}
    for tuning in ("full", "lora"):
        now = _logprobs(policy_of(tuning), made)
        for name in ("old_logprobs", "ref_logprobs"):
            noise = NOISE * draw(f"{name} of {tuning}").standard_normal(now.shape)
            made[f"{name}/{tuning}"] = (now + noise).round(4).astype(np.float32)
        _check_distance(now - made[f"old_logprobs/{tuning}"], made["completion_mask"])
    return made


def _logprobs(model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """(R, T): the completions' log-probabilities by a plain padded forward."""
    ids = torch.from_numpy(np.concatenate([batch["prompt_ids"], batch["completion_ids"]], 1))
    tokens = torch.ones(len(ids), LONGEST, dtype=torch.long)
    mask = torch.cat([torch.from_numpy(batch["prompt_mask"]), tokens], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[
            :, -LONGEST - 1 : -1
        ]
        scores = torch.log_softmax(logits / TEMPERATURE, -1)
    return scores.gather(-1, ids[:, -LONGEST:, None]).squeeze(-1).numpy().astype(np.float64)


def _check_distance(log_ratio: np.ndarray, mask: np.ndarray, least: float = 1e-4) -> None:
    """Raise ValueError where rounding could decide whether a ratio is clipped."""
    sequence = (log_ratio * mask).sum(1) / mask.sum(1).clip(1)
    for level, ratios in (
        ("token", np.exp(log_ratio[mask == 1])),
        ("sequence", np.exp(sequence)),
    ):
        low, high = EPSILONS[level]
        for bound in (1 - low, 1 + low, 1 + high):
            if np.abs(ratios - bound).min() < least:
                raise ValueError(
                    f"a ratio lies within {least} of {bound}; draw the batch by another name"
                )
