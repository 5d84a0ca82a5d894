"""Rules of a card that a CPU does not have, where breaking one changes no number soon (benchmarks.card.mutations)."""

import gc
from contextlib import nullcontext

import few_words
import pytest
import torch
import transformers.integrations.flex_attention as flex
from loop_runs import make, record
from test_cuda import qwen
from test_packed_update import assert_same, ragged, step
from transformers import GenerationConfig

from grpo_kit._support import cuda
from grpo_kit._support.cuda import has_bf16
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine import _update_memory as update_memory
from grpo_kit.engine._attention import float32_product
from grpo_kit.engine.memory._free import free_bytes, releasable_bytes
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.protocols import Hook
from grpo_kit.models._adapters import add_adapters

CARD = torch.device("cuda")


def greedy(engine, prompts, tokens=8):
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=[]
    )
    return engine.generate(prompts, config).completion_ids


def test_new_keys_and_values_get_new_graphs():
    """As many rows and columns as before, but prompts that need a larger cache."""
    model = qwen()
    engine = RolloutEngine(model)
    greedy(engine, [[5, 6, 7]] * 4)
    longer = [list(range(20, 220))] * 4
    assert greedy(engine, longer) == greedy(RolloutEngine(model), longer)


def test_adapters_that_are_switched_off_are_off_in_graphs():
    model = add_adapters(qwen(), "lora", {"init_lora_weights": False}, 0)
    prompts, engine = [[5, 6, 7]] * 4, RolloutEngine(model)
    on = greedy(engine, prompts)
    with model.disable_adapter():
        off = greedy(engine, prompts)
        assert off == greedy(RolloutEngine(model), prompts) != on
    assert greedy(engine, prompts) == on


def pools():
    """Of graphs, by their numbers."""
    return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()} - {
        (0, 0)
    }


def test_all_graphs_take_their_memory_from_one_pool():
    gc.collect()
    torch.cuda.empty_cache()
    before = pools()  # of engines that other tests keep
    engine = RolloutEngine(qwen())
    greedy(engine, [[5, 6, 7]] * 4, tokens=140)
    assert engine._decoder.graphs.captures > 1
    assert len(pools() - before) == 1


def test_memory_that_is_free_is_below_the_cap_and_not_the_graphs(counter):
    cap = torch.cuda.memory_reserved() + 2**28
    counter.put("fraction", cap / torch.cuda.mem_get_info()[1])
    assert free_bytes(CARD) <= 2**28 + releasable_bytes(CARD)
    counter.put("fraction", 1)
    torch.cuda.empty_cache()
    before = releasable_bytes(CARD)
    engine = RolloutEngine(qwen(vocabulary=65536))
    greedy(engine, [[5, 6, 7]] * 16)
    torch.cuda.empty_cache()
    assert engine._decoder.graphs.nbytes() > 2**22 and releasable_bytes(CARD) <= before + 2**21


def test_under_autocast_weights_are_cast_once_a_rollout_to_fixed_addresses():
    dtype = torch.bfloat16 if has_bf16() else torch.float16
    model = qwen()
    engine = RolloutEngine(model)
    with torch.autocast("cuda", dtype):
        greedy(engine, [[5, 6, 7]] * 4)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert engine._casts.nbytes() == 2 * sum(p.numel() for m in linear for p in m.parameters())


def is_fused(counter, autocast):
    """Are two prompts, with shared key heads, computed without their scores? Of one token, so nothing is decoded."""
    engine = RolloutEngine(qwen())
    # the first use, which compares it with the model's own forward pass
    greedy(engine, [[5]], tokens=1)
    counter.reset()
    with nullcontext() if autocast is None else torch.autocast("cuda", autocast):
        greedy(engine, [[5, 6, 7]] * 4 + [[8] * 20] * 4, tokens=1)
    found = counter.operators()
    softmaxes = sum(count for name, count in found.items() if "softmax" in name)
    # the sampler's
    return any("_scaled_dot_product" in name for name in found) and softmaxes == 1


@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_attention_over_prompts_is_one_kernel(autocast, counter):
    """In float32 too, where the flash kernel, the only one that shares key heads, is not to be had."""
    assert is_fused(counter, autocast)


def test_prompts_that_begin_alike_are_one_kernel_and_right(counter):
    """A common beginning is computed once: then queries are fewer than keys."""
    model, start = qwen(), list(range(20, 60))
    prompts = [[*start, 7]] * 2 + [[*start, 8, 9]] * 2
    assert greedy(RolloutEngine(model), prompts) == [
        model.generate(
            torch.tensor([p], device="cuda"),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=600,
        )[0, len(p) :].tolist()
        for p in prompts
    ]


def test_autocast_holds_in_rollout_and_update(tmp_path):
    """Every product of a layer that the run computes has autocast's dtype."""
    wanted = torch.bfloat16 if has_bf16() else torch.float16
    seen, now = {"rollout": set(), "update": set()}, ["rollout"]
    model = few_words.policy()[0].cuda()

    class Look(Hook):
        def before_step(self, trainer):
            now[0] = "rollout"

    trainer = make(
        tmp_path / "run", model=model, seams="fast", steps=2, hooks=[Look()],
        autocast=str(wanted).removeprefix("torch."),
    )  # fmt: skip
    gradients = trainer.update.gradients

    def in_the_update(*given):
        now[0] = "update"
        return gradients(*given)

    trainer.update.gradients = in_the_update
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(
            lambda module, inputs, out: seen[now[0]].add(out.dtype)
        )
    trainer.train()
    assert seen == {"rollout": {wanted}, "update": {wanted}}


def test_the_scaler_changes_no_gradient(tmp_path):
    norms = {}
    for autocast in ("none", "float16"):
        model = few_words.policy()[0].cuda()
        trainer = make(
            tmp_path / autocast,
            model=model,
            seams="fast",
            steps=1,
            autocast=autocast,
            temperature=1.0,
        )
        trainer.train()
        norms[autocast] = record(trainer.folder)[0][0]["grad_norm"]
    assert trainer.scaler.get_scale() > 1
    assert norms["float16"] == pytest.approx(norms["none"], rel=0.05)


def test_the_cards_random_numbers_go_on_as_if_nobody_had_trained(tmp_path):
    model = few_words.policy()[0].cuda()
    trainer = make(tmp_path / "run", model=model, seams="fast", steps=1)
    before = torch.cuda.get_rng_state()
    trainer.train()
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("system", ["WSL", "Linux"])
def test_where_drivers_go_on_in_system_memory_torch_stays_on_the_card(
    system, counter, monkeypatch
):
    """On Windows and WSL nothing raises out of memory, so torch is given a limit below what is free."""
    release = "6.6.0-microsoft-standard" if system == "WSL" else "6.6.0"
    monkeypatch.setattr(cuda.platform, "release", lambda: release)
    gc.collect()
    torch.cuda.empty_cache()
    total = counter.get("total")
    counter.put("total", torch.cuda.memory_reserved() + counter.get("context") + 2**29)
    try:
        assert_limited(system)
    finally:
        counter.put("total", total)


def assert_limited(system):
    cuda.stay_on_the_card()
    nearly_all = int(0.99 * torch.cuda.mem_get_info()[0])
    with pytest.raises(torch.OutOfMemoryError) if system == "WSL" else nullcontext():
        torch.empty(nearly_all, dtype=torch.uint8, device="cuda")


def test_flex_attention_within_its_limit_of_shapes_or_sdpa_with_a_line(
    counter, capsys, monkeypatch
):
    """Torch would go on unfused, with a warning alone; in an update, also where the backward pass compiles."""
    model, shapes = qwen(vocabulary=4096), set()
    update = PackedUpdate(model, Config())
    wanted = step(PaddedUpdate(Config()), model, ragged())
    plain = flex.WrappedFlexAttention()()

    def compiled(query, *given, **more):
        shapes.add(query.shape)
        limits = torch._dynamo.config
        assert (
            limits.fail_on_recompile_limit_hit
            and limits.recompile_limit == update_memory._SHAPES > 8
        )
        if len(shapes) > 1:
            raise torch._dynamo.exc.FailOnRecompileLimitHit("recompile_limit reached")
        return plain(query, *given, **more)

    monkeypatch.setattr(flex.WrappedFlexAttention, "__call__", lambda self: compiled)
    assert_same(step(update, model, ragged()), wanted)
    assert update.memory.attention == "flex_attention"
    longer = ragged()
    longer.completion_ids = [ids * 30 for ids in longer.completion_ids]
    assert_same(step(update, model, longer), step(PaddedUpdate(Config()), model, longer))
    assert update.memory.attention == "sdpa"
    assert "FlexAttention failed (FailOnRecompileLimitHit" in capsys.readouterr().out


def test_scores_are_not_rounded_to_16_bits():
    torch.manual_seed(0)
    dtype = torch.bfloat16 if has_bf16() else torch.float16
    a, b = (torch.randn(2, 3, 8, 64, device="cuda").to(dtype) for _ in range(2))
    found = float32_product(a, b.mT)
    assert found.dtype == torch.float32
    assert torch.allclose(
        found.cpu(), a.float().cpu() @ b.float().cpu().mT, rtol=1e-5, atol=1e-5
    )
