"""Each arm of benchmarks.rollout_bits samples, and differs from the exact one by its rounding alone."""

import pytest
import torch
from rollout_models import ragged_prompts, tiny_model
from transformers import GenerationConfig

from benchmarks.rollout_bits import sampling_in
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.cpu import _layers


def entropies(bits):
    greedy = GenerationConfig(
        max_new_tokens=4, do_sample=False, eos_token_id=[], pad_token_id=0
    )
    with sampling_in(bits) as engines:
        engine = RolloutEngine(tiny_model("llama").eval(), bits=engines)
        return torch.tensor(engine.generate(ragged_prompts(), greedy, seed=0).entropies)


@pytest.mark.skipif(_layers.why_not_here() is not None, reason="no products of bfloat16 here")
def test_each_arm_samples_by_its_own_rounding():
    exact, sixteen, eight = map(entropies, (32, 16, 8))
    gaps = [(found - exact).abs().max().item() for found in (sixteen, eight)]
    assert 0 < gaps[0] < 0.1 and 0 < gaps[1] < 0.1 and gaps[0] != gaps[1]
    assert torch.equal(entropies(32), exact), "the engine is as it was"
