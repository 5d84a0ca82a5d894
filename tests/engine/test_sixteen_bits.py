"""Rollouts in bfloat16 on a CPU: the numbers are those of rounded weights and inputs, and the loss weighs by them."""

import pytest
import torch
from loop_runs import make
from rollout_models import ragged_prompts, tiny_model
from transformers import GenerationConfig

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.cpu._layers import why_not_here
from grpo_kit.loop import Config
from grpo_kit.record._jsonl_run import lines_of

here = pytest.mark.skipif(
    why_not_here() is not None, reason="this processor has no bfloat16 products"
)
SAMPLED = GenerationConfig(
    max_new_tokens=7, do_sample=True, top_k=0, eos_token_id=[], pad_token_id=0
)


def round_linears(model):
    """Every linear layer of torch's rounds its weight, its input, and what it sums up before the bias, to bfloat16."""

    def rounded(module, given, _):
        y = given[0].bfloat16().double() @ module.weight.bfloat16().double().t()
        return y.bfloat16().float() + (0 if module.bias is None else module.bias)

    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.register_forward_hook(rounded)


def trainers(model, prompt, completion):
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@here
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_its_log_probabilities_are_those_of_rounded_weights_and_inputs(family):
    model, prompts = tiny_model(family), ragged_prompts()
    made = RolloutEngine(model, bits=16).generate(prompts, SAMPLED, seed=1)
    exact = [trainers(model, p, c) for p, c in zip(prompts, made.completion_ids, strict=True)]
    round_linears(model)
    rounded = [trainers(model, p, c) for p, c in zip(prompts, made.completion_ids, strict=True)]
    sampled = torch.tensor(made.policy_logprobs)
    to_exact = (torch.stack(exact) - sampled).abs().mean()
    to_rounded = (torch.stack(rounded) - sampled).abs().mean()
    assert to_rounded < to_exact / 4, "what is left is which way a sum is rounded"
    assert 1e-4 < to_exact < 0.1


@here
@torch.no_grad()
def test_weights_that_changed_are_rounded_again_and_32_bits_are_as_ever():
    model, prompts = tiny_model(), ragged_prompts()
    sixteen, exact = RolloutEngine(model, bits=16), RolloutEngine(model)
    before = [
        engine.generate(prompts, SAMPLED, seed=1).completion_ids for engine in (sixteen, exact)
    ]
    assert before[1] == RolloutEngine(model).generate(prompts, SAMPLED, seed=1).completion_ids
    # behind the head alone: `data` counts no write
    model.get_output_embeddings().weight.data.neg_()
    after = [
        engine.generate(prompts, SAMPLED, seed=1).completion_ids for engine in (sixteen, exact)
    ]
    assert before[0] != after[0] and before[1] != after[1]
    fresh = RolloutEngine(model, bits=16).generate(prompts, SAMPLED, seed=1)
    assert after[0] == fresh.completion_ids


@here
@torch.no_grad()
def test_adapters_stay_float32():
    model, prompts = tiny_model(lora=True), ragged_prompts()
    made = RolloutEngine(model, bits=16).generate(prompts, SAMPLED, seed=1)
    pairs = zip(prompts, made.completion_ids, made.policy_logprobs, strict=True)
    apart = [(trainers(model, p, c) - torch.tensor(lp)).abs().mean() for p, c, lp in pairs]
    with model.disable_adapter():
        without = [
            trainers(model, p, c) for p, c in zip(prompts, made.completion_ids, strict=True)
        ]
    off = (torch.stack(without) - torch.tensor(made.policy_logprobs)).abs().mean()
    assert torch.stack(apart).mean() < 0.2 < off


@here
def test_a_run_samples_so_and_its_loss_weighs_by_it(tmp_path):
    trainer = make(tmp_path / "a", seams="fast", rollout_bits=16, importance_sampling_cap=2.0)
    trainer.train()
    gaps = [row["rollout/logprob_gap"] for row in lines_of(tmp_path / "a" / "metrics.jsonl")]
    assert len(gaps) == 4 and all(1e-4 < gap < 0.2 for gap in gaps)
    again = make(tmp_path / "b", seams="fast", rollout_bits=16, importance_sampling_cap=2.0)
    again.train()
    for one, other in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


@here
def test_what_cannot_sample_so_refuses(tmp_path):
    half = tiny_model().to(torch.float16)
    with pytest.raises(ValueError, match="bits=16 needs a plain float32"):
        RolloutEngine(half, bits=16).generate(ragged_prompts(), SAMPLED, seed=1)
    with pytest.raises(ValueError, match="rollout_bits=16 is for the engine"):
        make(tmp_path, rollout_bits=16, importance_sampling_cap=2.0)  # transformers' generate


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="rollout_bits=16 samples another policy.*importance_sampling_cap"
    ):
        make(tmp_path, seams="fast", rollout_bits=16)
    with pytest.raises(ValueError, match="rollout_bits=8"):
        Config(rollout_bits=8)
    with pytest.raises(ValueError, match="bits=8"):
        RolloutEngine(tiny_model(), bits=8)
    if why := why_not_here():
        with pytest.raises(ValueError, match="bits=16: this processor"):
            RolloutEngine(tiny_model(), bits=16)
        assert "AVX512-BF16" in why
