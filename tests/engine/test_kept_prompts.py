"""Prompts that go on from the last call's: what was known is not computed again, and nothing else changes."""

import random

import pytest
import torch
from rollout_models import tiny_model
from transformers import GenerationConfig

from grpo_kit.engine import RolloutEngine

GREEDY = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=2, pad_token_id=0)
SAMPLED = GenerationConfig(
    max_new_tokens=5, do_sample=True, temperature=0.8, top_k=0, eos_token_id=2, pad_token_id=0
)


def conversations(rng, n=6, shared=100):
    """Prompts that share a beginning; some are equal, one is another's beginning."""
    begin = [rng.randrange(3, 500) for _ in range(shared)]
    made = [
        begin + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 20))]
        for _ in range(n - 2)
    ]
    return [*made, made[0], made[1][:-1] or begin]


def new_tokens(prompts, known):
    """Distinct beginnings among the prompts that no known prompt begins with; a prompt's last token is always new."""
    old = {tuple(p[: n + 1]) for p in known for n in range(len(p))}
    return len(
        {tuple(p[: n + 1]) for p in prompts for n in range(len(p))} - old
        | {tuple(p) for p in prompts}
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_turns_are_as_if_computed_anew(family, config):
    rng = random.Random(family)
    model = tiny_model(family)
    kept, before = RolloutEngine(model), []
    prompts = conversations(rng)
    for turn in range(4):
        prompts.sort()
        one = kept.generate(prompts, config, seed=turn, keep=True)
        fresh = RolloutEngine(model).generate(prompts, config, seed=turn)
        assert one.completion_ids == fresh.completion_ids
        for a, b in zip(one.policy_logprobs, fresh.policy_logprobs, strict=True):
            assert a == pytest.approx(b, abs=2e-5)
        assert one.tokens["prefill"] == new_tokens(prompts, before), turn
        before = list(prompts)
        # Go on from what was written, cut one short, let one go, begin another.
        prompts = [p + ids + [rng.randrange(3, 500) for _ in range(rng.randrange(0, 9))]
                   for p, ids in zip(prompts, one.completion_ids, strict=True)][:-1]  # fmt: skip
        prompts.append(before[0][: 104 + turn] + [7])
    assert one.tokens["prefill"] < 150


def test_after_an_update_nothing_is_known():
    model, rng = tiny_model("llama"), random.Random(1)
    engine, prompts = RolloutEngine(model), sorted(conversations(rng))
    first = engine.generate(prompts, GREEDY, keep=True).tokens["prefill"]
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    later = engine.generate(prompts, GREEDY, keep=True)
    assert later.tokens["prefill"] == first
    assert later.completion_ids == RolloutEngine(model).generate(prompts, GREEDY).completion_ids
    assert engine.generate(prompts, GREEDY, keep=True).tokens["prefill"] == len(
        {tuple(p) for p in prompts}
    )


def test_prompts_that_share_nothing_with_the_last_ones():
    model = tiny_model("llama")
    engine = RolloutEngine(model)
    engine.generate([[5] * 120], GREEDY, keep=True)
    made = engine.generate([[6] * 120, [7] * 99], GREEDY, keep=True)
    assert (
        made.completion_ids
        == RolloutEngine(model).generate([[6] * 120, [7] * 99], GREEDY).completion_ids
    )
    assert made.tokens["prefill"] == 219


def test_what_is_kept_goes_with_release_and_with_a_call_that_does_not_keep():
    model = tiny_model("llama")
    engine, prompts = RolloutEngine(model), [[5] * 120, [5] * 110 + [6] * 20]
    engine.generate(prompts, GREEDY, keep=True)
    engine.release()
    assert engine.generate(prompts, GREEDY, keep=True).tokens["prefill"] == new_tokens(
        prompts, []
    )
    longer = [p + [9] for p in prompts]
    assert engine.generate(longer, GREEDY).tokens["prefill"] == 2
    # the shared beginning alone
    assert engine.generate([p + [9] for p in longer], GREEDY).tokens["prefill"] > 10
