"""Gemma 2 caps its attention scores; an attention that leaves the cap out computes another model."""

import torch

from benchmarks.architectures import tiny
from grpo_kit.models.dtypes import keep_soft_cap

IDS = torch.arange(20, 40)[None]


@torch.no_grad()
def picked(family, attention):
    """The model's own logits, those after attention was picked for it, and the one that it then has."""
    model = tiny(family)
    own = model(IDS).logits
    model.config._attn_implementation = attention
    return own, keep_soft_cap(model)(IDS).logits, model.config._attn_implementation


def test_a_soft_cap_is_kept_where_sdpa_was_picked():
    own, kept, attention = picked(
        "gemma2", "sdpa"
    )  # newer transformers raise under sdpa, 5.17 leaves the cap out
    assert attention == "eager" and torch.equal(own, kept)


def test_a_model_without_one_keeps_its_attention():
    own, kept, attention = picked("mistral", "sdpa")
    assert attention == "sdpa" and torch.equal(own, kept)
