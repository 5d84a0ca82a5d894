"""Gemma 2 caps its attention scores; an attention that leaves the cap out computes another model."""

import pytest
import torch

from benchmarks.architectures import tiny
from grpo_kit.models._precision import from_pretrained

IDS = torch.arange(20, 40)[None]


@pytest.mark.parametrize("family", ["gemma2", "llama3"])
def test_a_loaded_model_keeps_its_soft_cap(family, tmp_path):
    """A Llama has none, and attention that would drop it; it stands for a transformers that picks it for Gemma 2."""
    model = tiny(family)
    attention = model.config._attn_implementation
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, {"dtype": torch.float32})
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert loaded.config._attn_implementation == attention
    model.config.attn_logit_softcapping = 50.0
    model.save_pretrained(tmp_path)
    assert (
        from_pretrained(tmp_path, {"dtype": torch.float32}).config._attn_implementation
        == "eager"
    )
