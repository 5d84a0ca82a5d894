"""The packed update of architectures that no list names: the padded one's gradient, or the plain way is taken."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.architectures import alone, gradient, off, random_batch, tiny, with_lora
from grpo_kit.engine import _first_use as first_use
from grpo_kit.engine._supported_models import is_tested
from grpo_kit.engine.cpu._tree_attention import TreePlan, dense_attention, tree_attention
from grpo_kit.engine.fast import fast
from grpo_kit.engine.packed_update import PackedUpdate, pack_rows, why_not_packed
from grpo_kit.engine.tree import build_tree
from grpo_kit.loop import Config
from grpo_kit.loop.padded_update import PaddedUpdate

FAST = [
    "qwen3-moe",
    "mistral",
    "ministral",
    "gemma2",
    "gemma3",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "gpt-oss",
]
CONFIG = Config(max_completion_tokens=12)


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    monkeypatch.setattr(first_use, "cache_folder", lambda: tmp_path)


def packed_update(model, way):
    update = PackedUpdate(model, CONFIG)
    if way != "tree":
        update.memory.attention, update.memory.by_layer = way, not is_tested(model)
    return update


@pytest.mark.parametrize("family", FAST)
@pytest.mark.parametrize("way", ["tree", "sdpa"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_packed_gradient_is_the_padded_one(family, way, lora):
    model, batch = tiny(family), random_batch()
    model = with_lora(model) if lora else model
    assert why_not_packed(model) is None
    wanted = gradient(model, batch, PaddedUpdate(CONFIG))
    found = gradient(model, batch, packed_update(model, way))
    assert (found - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("family", ["mistral", "gemma2", "olmo3"])
def test_flex_attention_scores_as_each_row_alone(family):
    model, batch = tiny(family), random_batch()
    with torch.no_grad():
        found = packed_update(model, "flex_attention").logprobs(model, batch, 0.7)
        assert off(found, alone(model, batch, 0.7)) < 1e-4


ROWS = [([n] * 2 + [5] * n, [7, 8, 9, k]) for n in (2, 330, 700) for k in (1, 2)]


@pytest.mark.parametrize("window", [1, 8, 100, 2000])
def test_a_plan_within_a_window_sees_what_the_dense_mask_sees(window):
    """Keys outside the window of all queries are not computed, those of some are masked."""
    whole = TreePlan(build_tree(ROWS))
    packed = pack_rows([(tuple(p), c) for p, c in ROWS], torch.device("cpu"))
    assert torch.equal(whole.within(window).sees(), packed.dense_mask(window)[0, 0])
    assert torch.equal(whole.sees(), packed.dense_mask()[0, 0])
    assert {block.kind for block in whole.blocks} == {"whole", "causal", "masked"}
    before, after = (
        sum((b.last - b.first) * (b.stop - b.start) for b in plan.blocks)
        for plan in (whole, whole.within(window))
    )
    assert (after < 0.7 * before) == (window <= 100) and after <= before


@pytest.mark.parametrize("window", [8, 100, None])
@pytest.mark.parametrize("sinks", [False, True])
def test_rectangles_within_a_window_and_with_sinks_are_plain_attention(window, sinks):
    draw, plan = torch.Generator().manual_seed(0), TreePlan(build_tree(ROWS)).within(window)
    shapes = [(1, 4, plan.tokens, 8), (1, 2, plan.tokens, 8), (1, 2, plan.tokens, 8), (4,)]
    given = [
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    of = given if sinks else given[:3]
    found = tree_attention(*given[:3], plan, 0.3, given[3] if sinks else None)
    wanted = dense_attention(*given[:3], plan.sees(), 0.3, sinks=given[3] if sinks else None)
    assert torch.allclose(found, wanted, atol=1e-5)
    by = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(found, of, by), torch.autograd.grad(wanted, of, by), strict=True
    ):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_one_whose_update_is_off_takes_the_padded_one(monkeypatch):
    monkeypatch.setattr(TreePlan, "within", lambda self, window: self)
    seams = fast(tiny("olmo3"), CONFIG)
    assert isinstance(seams.update, PaddedUpdate) and "packed update: differs" in seams.why_not


def small(kind, **sizes):
    """A random model of a type whose config or modules are not like Llama's."""
    own = {
        "vocab_size": 500,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    } | sizes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **own), dtype=torch.float32
        ).eval()


UNLIKE = {
    "gpt_neox": {"intermediate_size": 64},  # its config names no number of key heads
    "persimmon": {"intermediate_size": 64},
    "stablelm": {
        "intermediate_size": 64,
        "num_key_value_heads": 6,
    },  # its layers hand their attention no keywords on
    "phi": {"intermediate_size": 64},
    "cohere": {"intermediate_size": 64},
}


@pytest.mark.parametrize("kind", UNLIKE)
@pytest.mark.parametrize("way", ["tree", "sdpa"])
def test_types_unlike_llama_keep_both_fast_parts(kind, way):
    model, batch = small(kind, **UNLIKE[kind]), random_batch()
    seams = fast(model, CONFIG)
    assert isinstance(seams.update, PackedUpdate) and seams.why_not is None
    wanted = gradient(model, batch, PaddedUpdate(CONFIG))
    assert (
        gradient(model, batch, packed_update(model, way)) - wanted
    ).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize(
    "kind, why",
    [
        ("falcon", "engine: failed (the model's modules do not run in it)."),
        (
            "rwkv",
            "has no rotary positions; padding changes a row",
        ),
        ("mamba2", "have another state than keys and values"),
    ],
)
def test_the_line_of_a_plain_way_has_no_internal_error(kind, why):
    sizes = {
        "rwkv": {"attention_hidden_size": 48},
        "mamba2": {"num_heads": 12, "head_dim": 8, "n_groups": 2},
    }
    said = f"{fast(small(kind, **sizes.get(kind, {})), CONFIG).why_not}."
    assert (
        re.search(why.replace("(", r"\(").replace(")", r"\)"), said) and "Error" not in said
    ), said


def test_a_new_type_is_fast_without_a_word():
    seams = fast(tiny("gemma2"), CONFIG)
    assert isinstance(seams.update, PackedUpdate) and seams.why_not is None
