"""The packed update beside the padded one on a ragged batch: loss, gradient of every parameter, what is left out.

That the padded one is TRL's, loss by loss, is tested by the oracle (tests/loop/test_loop_oracle.py).
"""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations.flex_attention import WrappedFlexAttention

from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.batch import Batch
from grpo_kit.loop.config import StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.models import load_policy
from grpo_kit.models._model_facts import base_model

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def models():
    made = {}

    def of(tuning):
        if tuning not in made:
            torch.manual_seed(0)
            lora = {"init_lora_weights": False} if tuning == "lora" else None
            made[tuning] = load_policy("tiny-random", tuning=tuning, lora=lora, quiet=True)[0]
        return made[tuning]

    return of


def ragged(*, zero=(), old=False, reference=False):
    """Three groups of four, prompts and completions of several lengths, one of them masked whole."""
    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(20, 4000, (n,), generator=g).tolist()  # noqa: E731
    prompts = [draw(4 + 2 * (row // 4)) if row % 4 == 0 else None for row in range(12)]
    prompts = [prompts[row // 4 * 4] for row in range(12)]
    completions = [draw(int(torch.randint(1, 8, (1,), generator=g))) for _ in range(12)]
    order = torch.randperm(12, generator=g).tolist()
    batch = Batch(
        rows=[{}] * 12,
        groups=[row // 4 for row in order],
        prompt_ids=[prompts[row] for row in order],
        completion_ids=[completions[row] for row in order],
        completions=[""] * 12,
        cut_off=[row == 6 for row in order],
        advantages=[
            0.0 if place in zero else a
            for place, a in enumerate(torch.randn(12, generator=g).tolist())
        ],
    )
    noise = lambda: -10.8 + 0.3 * torch.randn(12, batch.width, generator=g)  # noqa: E731
    batch.old_logprobs, batch.ref_logprobs = (
        noise() if old else None,
        noise() if reference else None,
    )
    return batch


def step(update, model, batch, **fields):
    """(loss, gradients, PolicyLoss) of one update."""
    config = Config(mask_truncated_completions=True, max_completion_tokens=7, **fields)
    update.config = config
    numbers, device = (
        StepNumbers(0, 0.0, TEMPERATURE, 0.0, config.beta),
        next(model.parameters()).device,
    )
    loss = PolicyLoss(batch, config, numbers, device=device)
    model.train()
    model.zero_grad(set_to_none=True)
    value = update.gradients(model, batch, loss, TEMPERATURE, lambda share: share.backward())
    return (
        value,
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        loss,
    )


def assert_same(got, wanted):
    assert math.isclose(got[0], wanted[0], rel_tol=1e-4, abs_tol=1e-6)
    assert got[1].keys() == wanted[1].keys() and len(wanted[1]) > 2
    for name, gradient in wanted[1].items():
        error = (got[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-8)
        assert error < 1e-4, (name, error)
    found, expected = (one[2].measured(False) for one in (got, wanted))
    for name in ("tokens", "entropy", "clip_ratio", "kl"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


def both(models, batch, *, tuning="full", chunk_tokens=None, **fields):
    model = models(tuning)
    packed = PackedUpdate(model, Config())
    packed.memory.chunk_tokens = chunk_tokens
    got = step(packed, model, batch, **fields)
    assert_same(got, step(PaddedUpdate(Config()), model, batch, **fields))
    return got


@pytest.mark.parametrize("chunk_tokens", [1, 24, 40, None])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_any_chunk_size_gives_the_same_gradient(models, tuning, chunk_tokens):
    """Of 24 positions: several chunks, no group whole."""
    fields = {"loss": "grpo", "beta": 0.1, "entropy_bonus": 0.3}
    both(
        models,
        ragged(old=True, reference=True),
        tuning=tuning,
        chunk_tokens=chunk_tokens,
        **fields,
    )


def test_log_probabilities_without_gradients_are_the_padded_ones(models):
    batch, model = ragged(), models("full")
    packed, padded = PackedUpdate(model, Config()), PaddedUpdate(Config())
    packed.memory.chunk_tokens = 24
    found, wanted = (one.logprobs(model.eval(), batch, TEMPERATURE) for one in (packed, padded))
    assert found.shape == wanted.shape == (12, batch.width) and torch.allclose(
        found, wanted, atol=1e-5
    )


def scored_tokens(monkeypatch):
    """Scored tokens of every packed forward from now on."""
    seen, inner = [], PackedUpdate._forward

    def forward(self, model, rows, width, temperature):
        seen.append(sum(len(completion) for _, completion in rows))
        return inner(self, model, rows, width, temperature)

    monkeypatch.setattr(PackedUpdate, "_forward", forward)
    return seen


@pytest.mark.parametrize(
    "loss", ["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
)
def test_zero_advantages_are_skipped_and_change_nothing(models, loss, monkeypatch):
    batch, seen = ragged(zero=(0, 3, 4, 9), old=True), scored_tokens(monkeypatch)
    packed = PackedUpdate(models("full"), Config())
    value, gradients, made = step(packed, models("full"), batch, loss=loss)
    needed = [i for i in range(12) if i not in (0, 3, 4, 9) and not batch.cut_off[i]]
    assert (
        seen == [sum(len(batch.completion_ids[i]) for i in needed)] and made.needed() == needed
    )
    monkeypatch.setattr(PolicyLoss, "needed", lambda self: [*range(12)])
    wanted = step(PaddedUpdate(Config()), models("full"), batch, loss=loss)
    for name, gradient in wanted[1].items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm().clamp(min=1e-8), (
            name
        )


@pytest.mark.parametrize(
    "fields", [{"beta": 0.1}, {"entropy_bonus": 0.3}], ids=lambda f: next(iter(f))
)
def test_nothing_is_skipped_where_it_would_change_the_gradient(models, fields, monkeypatch):
    seen = scored_tokens(monkeypatch)
    batch = ragged(zero=(0, 3, 4, 9), old=True, reference="beta" in fields)
    both(models, batch, **fields)
    assert seen == [
        sum(
            len(i)
            for i, cut in zip(batch.completion_ids, batch.cut_off, strict=True)
            if not cut
        )
    ]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_the_chunk_and_loses_nothing(models, where, monkeypatch, capsys):
    batch, model, inner = ragged(old=True), models("full"), PackedUpdate._forward
    wanted = step(PaddedUpdate(Config()), model, batch)
    limit = 40

    def small_card(self, model, rows, width, temperature):
        scores = inner(self, model, rows, width, temperature)
        if sum(len(p) + len(c) for p, c in rows) > 2 * limit:
            full = torch.OutOfMemoryError("CUDA out of memory")
            if where == "forward":
                raise full
            model.model.embed_tokens.weight.grad = torch.ones_like(
                model.model.embed_tokens.weight
            )

            def fail(gradient):
                raise full

            scores[0].register_hook(fail)
        return scores

    monkeypatch.setattr(PackedUpdate, "_forward", small_card)
    packed = PackedUpdate(model, Config())
    assert_same(step(packed, model, batch), wanted)
    assert "the step starts over" in capsys.readouterr().out and packed.memory.chunk_tokens


def test_out_of_memory_at_the_smallest_chunk_says_what_to_do(models, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PackedUpdate, "_forward", full)
    packed = PackedUpdate(models("lora"), Config())
    with pytest.raises(torch.OutOfMemoryError, match="plan_memory"):
        step(packed, models("lora"), ragged())
    assert packed.memory.checkpointed_layers == 2  # it tried that first


def test_checkpointing_some_layers_changes_nothing(models, monkeypatch):
    batch, model = ragged(), models("full")
    wanted = step(PaddedUpdate(Config()), model, batch)
    packed, calls, layers = PackedUpdate(model, Config()), [], model.model.layers
    budget = packed.memory._budget
    monkeypatch.setattr(packed.memory, "_budget", lambda *sizes: (budget(*sizes)[0], 1))
    handles = [
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1)) for layer in layers
    ]
    got = step(packed, model, batch)
    for handle in handles:
        handle.remove()
    assert_same(got, wanted)
    assert len(calls) == len(layers) + 1, "one layer was computed again"
    packed.memory.checkpointed_layers = 0
    packed.memory._checkpoint_layers()


def test_flex_attention_gives_the_same_gradient(models, monkeypatch):
    """All groups in one row under a block mask, by FlexAttention's reference (its CUDA kernel is not run here)."""
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    model, batch = models("full"), ragged(old=True)
    packed = PackedUpdate(model, Config())
    packed.memory.attention, packed.memory.chunk_tokens = "flex_attention", 60
    assert_same(step(packed, model, batch), step(PaddedUpdate(Config()), model, batch))
    assert packed.memory.attention == "flex_attention"
    assert base_model(model).config._attn_implementation == "sdpa"


def test_where_flex_attention_fails_the_dense_mask_takes_over(models, capsys):
    model, batch = models("full"), ragged(old=True)
    packed = PackedUpdate(model, Config())
    packed.memory.attention = "flex_attention"  # has no backward on a CPU
    assert_same(step(packed, model, batch), step(PaddedUpdate(Config()), model, batch))
    assert packed.memory.attention == "sdpa" and "using SDPA" in capsys.readouterr().out
