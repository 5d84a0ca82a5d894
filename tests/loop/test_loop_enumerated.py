"""The loop against exact enumeration: a model small enough that all of its completions can be listed."""

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_kit.engine import RolloutEngine
from grpo_kit.loop import Batch, Config
from grpo_kit.loop.batch import generate
from grpo_kit.loop.config import StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.loop.score import give_advantages

VOCABULARY, END, LONGEST, TEMPERATURE, GROUP = 4, 3, 2, 0.8, 2
PROMPT = [1, 2, 0]
COMPLETIONS = [[END], *([a, b] for a in range(3) for b in range(VOCABULARY))]  # 13
REWARDS = [0.3, *(((7 * i) % 11) / 10 for i in range(12))]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, eos_token_id=END, pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # far from uniform
    return model


class Tokenizer:
    eos_token_id, pad_token_id = END, 0

    def __call__(self, texts):
        return {"input_ids": [PROMPT for _ in texts]}

    def batch_decode(self, rows, **kwargs):
        return [" ".join(map(str, row)) for row in rows]


class Task:
    prefill = ""

    def render(self, tokenizer, rows):
        return [row["question"] for row in rows]


def batch_of(numbers):
    return Batch(
        rows=[{}] * len(numbers),
        groups=[0] * len(numbers),
        prompt_ids=[PROMPT] * len(numbers),
        completion_ids=[COMPLETIONS[i] for i in numbers],
        completions=[""] * len(numbers),
        cut_off=[COMPLETIONS[i][-1] != END for i in numbers],
        rewards=[REWARDS[i] for i in numbers],
    )


def probabilities(model):
    """(13,) of whole completions at TEMPERATURE, with their graph, by one forward pass and no code of the kit's."""
    found = []
    for tokens in COMPLETIONS:
        ids = torch.tensor([PROMPT + tokens])
        table = torch.log_softmax(model(input_ids=ids).logits[0] / TEMPERATURE, -1)
        found.append(
            sum(table[len(PROMPT) - 1 + t, token] for t, token in enumerate(tokens)).exp()
        )
    return torch.stack(found)


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("scale", ["none", "group"])
def test_the_expected_update_is_the_objectives_exact_gradient(model, scale):
    """Over all 13^2 groups. Dr. GRPO without scaling: (G - 1) / (G L) times the gradient of the expected reward."""
    config = Config(
        loss="dr_grpo",
        scale=scale,
        group_size=GROUP,
        max_completion_tokens=LONGEST,
        micro_batch=GROUP,
    )
    numbers = StepNumbers(0, 0.0, TEMPERATURE, 0.0, 0.0)
    p = probabilities(model)
    assert p.sum().item() == pytest.approx(1)
    model.zero_grad()
    (p * torch.tensor(REWARDS)).sum().backward()
    exact = -gradients(model) * (GROUP - 1) / GROUP / LONGEST
    update, weight = PaddedUpdate(config), p.detach()
    model.zero_grad()
    for a, b in itertools.product(range(len(COMPLETIONS)), repeat=GROUP):
        batch = batch_of([a, b])
        give_advantages(batch, config)
        loss = PolicyLoss(batch, config, numbers)
        update.gradients(
            model,
            batch,
            loss,
            TEMPERATURE,
            lambda share, w=weight[a] * weight[b]: (w * share).backward(),
        )
    found = gradients(model)
    agree = torch.dot(found, exact) / found.norm() / exact.norm()
    if scale == "none":
        assert torch.allclose(found, exact, rtol=1e-4, atol=1e-7)
    else:
        assert 0.5 < agree < 1 - 1e-4, "another objective: hard and easy prompts count alike"


@pytest.mark.parametrize("way", ["generate", "engine"])
def test_samples_have_the_probabilities_that_the_update_scores(model, way):
    """4,000 samples at the temperature: total variation from the exact distribution, whose expectation is 0.02."""
    config = Config(group_size=4000, max_completion_tokens=LONGEST)
    numbers = StepNumbers(0, 0.0, TEMPERATURE, 0.0, 0.0)
    torch.manual_seed(0)
    if way == "generate":
        made = generate(
            model.eval(), Tokenizer(), Task(), [{"question": "?"}], config, numbers
        ).completion_ids
    else:
        from grpo_kit.loop.batch import generation_config

        how = generation_config(Tokenizer(), [END], config, numbers)
        made = (
            RolloutEngine(model.float()).generate([PROMPT] * 4000, how, seed=1).completion_ids
        )
        model.double()
    counts = torch.tensor([made.count(tokens) for tokens in COMPLETIONS]) / len(made)
    assert counts.sum() == 1
    assert (counts - probabilities(model).detach()).abs().sum() / 2 < 0.04
