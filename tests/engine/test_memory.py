"""What is predicted against what autograd and the tensors themselves show."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from benchmarks.memory import PeakMemory, fake_case, measure_chunk
from grpo_kit.engine.memory._activations import (
    ChunkMemory,
    update_budget,
)
from grpo_kit.engine.packed_update import tiled_logprobs
from grpo_kit.models import load_policy
from grpo_kit.models._model_facts import config_of
from grpo_kit.more.memory._request import USABLE, Request, counted
from grpo_kit.more.memory.plan import advice, plan_memory
from grpo_kit.trainer.presets import preset

GIB = 2**30
SHAPES = {
    "llama small": LlamaConfig(
        hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2
    ),
    "SmolLM2": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2
    ),
    "qwen3 small": Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    ),
}
# weights' dtype, autocast to bfloat16, LoRA
PRECISIONS = {
    "float32": (torch.float32, False, False),
    "bfloat16": (torch.bfloat16, False, False),
    "float32 under autocast": (torch.float32, True, False),
    "bfloat16 under autocast": (torch.bfloat16, True, False),
    "LoRA float32": (torch.float32, False, True),
    "LoRA bfloat16 under autocast": (torch.bfloat16, True, True),
}
QWEN = Qwen2Config(
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)
FLASH = replace(preset("gpu24"), dtype="bfloat16", optimizer="flash-adamw")
SPLIT = replace(FLASH, optimizer="adamw-8bit-split")
TOO_BIG = replace(preset("gpu24"), dtype="float32", optimizer="adamw")


def one_layer(config, dtype, lora):
    """A decoder layer as the model has it, and its rotary embedding."""
    small = type(config)(
        **{**config.to_dict(), "num_hidden_layers": 1, "vocab_size": 8, "layer_types": None}
    )
    small._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(small, dtype=dtype)
    layer = model.model.layers[0]
    if lora:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        inject_adapter_in_model(LoraConfig(r=16, target_modules=names), layer)
        for name, p in layer.named_parameters():
            p.requires_grad_("lora" in name)
            p.data = p.data.float() if "lora" in name else p.data
    return layer.train(), model.model.rotary_emb


def saved_bytes(config, dtype, autocast, lora, tokens, *, mask, checkpoint=False):
    """Bytes a token of the storages that autograd saves in one layer's forward; weights and their casts left out."""
    layer, rotary = one_layer(config, dtype, lora)
    layer.gradient_checkpointing = checkpoint
    layer._gradient_checkpointing_func = partial(
        torch.utils.checkpoint.checkpoint, use_reentrant=False
    )
    hidden = torch.randn(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    positions = torch.arange(tokens)[None]
    rotation = rotary(hidden, positions)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    shared = {t.untyped_storage().data_ptr() for t in rotation}
    shapes = {p.numel() for p in layer.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        cast = tensor.ndim == 2 and tensor.numel() in shapes and tokens not in tensor.shape
        if storage.data_ptr() not in weights | shared and not cast:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    dense = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril() if mask else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            layer(
                hidden,
                attention_mask=dense,
                position_embeddings=rotation,
                position_ids=positions,
            )
    return sum(size for size, _ in saved.values()) / tokens


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layers_activations_are_what_autograd_saves(shape, precision):
    config, (dtype, autocast, lora) = SHAPES[shape], PRECISIONS[precision]
    tokens = 130
    measured = saved_bytes(config, dtype, autocast, lora, tokens, mask=True)
    memory = ChunkMemory(
        config,
        dtype.itemsize,
        trainable="lora" if lora else "full",
        compute_itemsize=2 if autocast else None,
        mask_keys=tokens,
    )
    assert memory.layer_bytes() == pytest.approx(measured, rel=0.02)


def test_without_a_dense_mask_keys_are_not_repeated_for_a_power_of_two_of_heads():
    config = SHAPES["llama small"]
    measured = saved_bytes(config, torch.bfloat16, False, False, 128, mask=False)
    assert ChunkMemory(config, 2).layer_bytes() == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpointed_layer_keeps_its_input(dtype):
    config = SHAPES["SmolLM2"]
    measured = saved_bytes(config, dtype, False, False, 128, mask=False, checkpoint=True)
    assert ChunkMemory(config, dtype.itemsize).checkpoint_bytes() == measured


@pytest.mark.parametrize(
    ("checkpointed", "gradients"), [(0, False), (2, False), (2, True), (4, False)]
)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_the_peak_of_a_chunk_is_what_its_tensors_take(tuning, checkpointed, gradients):
    """Real tensors: four layers of SmolLM2's shape and its vocabulary, with the head that an update has on a card."""
    config = LlamaConfig(
        **{**SHAPES["SmolLM2"].to_dict(), "num_hidden_layers": 4, "vocab_size": 49152}
    )
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if tuning == "lora":
        from peft import get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    measured = measure_chunk(
        model,
        tokens=160,
        scored=130,
        checkpointed=checkpointed,
        gradients=gradients,
        autocast=False,
    )
    peak = ChunkMemory(config, 4, trainable=tuning, mask_keys=160).peak(
        tokens=160,
        scored_tokens=130,
        checkpointed_layers=checkpointed,
        gradients=gradients,
        gradient_bytes=trained,
    )
    predicted = measured["weights"] + peak.kept + peak.working + peak.gradients * trained
    assert predicted == pytest.approx(measured["update"], rel=0.05)


def test_the_tracker_counts_what_lives():
    memory = PeakMemory()
    with memory:
        kept = torch.zeros(1000)
        (kept + 1).sum()
    assert memory.now == 4000
    assert 8000 <= memory.peak <= 8008


@pytest.mark.parametrize(
    "case",
    [
        ("bfloat16", "flash-adamw", "full", 28),
        ("float32", "adamw", "full", 28),
        ("bfloat16", "adamw", "lora", 0),
        ("bfloat16", "adamw", "lora", 28),
    ],
)
def test_the_plan_of_gpu24_is_within_a_tenth_of_fake_tensors(case):
    rows = fake_case(*case)
    assert rows
    assert all(abs(row["error_percent"]) < 5 for row in rows), rows


@pytest.mark.parametrize("entropy_bonus", [False, True])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_the_head_is_what_its_tensors_take_with_and_without_an_entropy_bonus(
    tuning, entropy_bonus
):
    config = LlamaConfig(vocab_size=8000, hidden_size=64)
    head = torch.nn.Linear(64, 8000, bias=False)
    head.weight.requires_grad_(tuning == "full")
    hidden, labels = (
        torch.randn(2048, 64, requires_grad=True),
        torch.zeros(2048, dtype=torch.long),
    )
    memory = PeakMemory()
    memory.hold(head.weight)
    with memory:
        logprobs, entropies = tiled_logprobs(
            head, hidden, labels, 0.7, entropy_gradient=entropy_bonus
        )
        (logprobs.sum() + (entropies.sum() if entropy_bonus else 0)).backward()
    measured = memory.peak - head.weight.numel() * 4
    memory = ChunkMemory(config, 4, trainable=tuning, entropy_bonus=entropy_bonus)
    assert memory.head_bytes(2048) == pytest.approx(measured, rel=0.05)


def test_a_plan_knows_an_entropy_bonus():
    plain, bonus = (
        request_of(preset("gpu24", tuning="lora", entropy_bonus=x))
        .plan(4096, 28)
        .parts["update"]
        for x in (0.0, 0.01)
    )
    assert sum(bonus.values()) - sum(plain.values()) == pytest.approx(
        1024 * 151936 * 3 * 4, rel=0.1
    )


def test_the_head_is_a_tile_or_the_vocabularys_gradient():
    tile, gradient = 1024 * 151936 * 3 * 4, 151936 * 1536 * 2
    hidden = 4096 * 1536 * (2 + 2)
    assert ChunkMemory(QWEN, 2).head_bytes(4096) == tile + gradient + hidden
    assert ChunkMemory(QWEN, 2, trainable="lora").head_bytes(4096) == tile + hidden
    # less than the gradient that it adds
    few = 100 * 151936 * 2 + gradient + 100 * 1536 * (2 + 2)
    assert ChunkMemory(QWEN, 2).head_bytes(100) == few


# ---- the budget ---------------------------------------------------------------------------------------------------


def need(tokens, checkpointed):
    peak = ChunkMemory(QWEN, 2).peak(tokens=tokens, checkpointed_layers=checkpointed)
    return peak.kept + peak.working


@pytest.mark.parametrize("free", [3, 5, 8, 12, 20, 40])
def test_the_budget_is_the_least_checkpointing_and_then_the_most_tokens(free):
    tokens, checkpointed = update_budget(free * GIB, QWEN, 2, longest=767, total=34_808)
    spend = 0.9 * free * GIB
    assert tokens >= 4096
    assert need(tokens, checkpointed) <= spend
    if tokens < 34_808:
        assert need(tokens + 1, checkpointed) > spend
    if checkpointed:
        assert need(4096, checkpointed - 1) > spend


def test_a_budget_too_small_for_good_sizes_checkpoints_everything_and_takes_what_fits():
    tokens, checkpointed = update_budget(2 * GIB, QWEN, 2, longest=767, total=34_808)
    assert checkpointed == 28
    assert 767 < tokens < 4096
    assert need(tokens, 28) <= 1.8 * GIB < need(tokens + 1, 28)


@pytest.mark.parametrize("free", [-GIB, 0, 1])
def test_one_completion_is_always_taken(free):
    assert update_budget(free, QWEN, 2, longest=767, total=34_808) == (767, 28)


def test_all_of_a_small_step_at_once():
    assert update_budget(80 * GIB, QWEN, 2, longest=100, total=1000) == (1000, 0)


def test_a_completion_longer_than_the_preferred_size_decides_the_checkpointing():
    tokens, checkpointed = update_budget(8 * GIB, QWEN, 2, longest=8000, total=8000)
    assert tokens == 8000
    assert need(8000, checkpointed) <= 7.2 * GIB < need(8000, checkpointed - 1)


# ---- the plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-random", "smollm2-135m-instruct"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_weights_are_counted_as_the_loaded_model_has_them(name, tuning):
    cfg = replace(preset("cpu"), model=name)
    model, _ = load_policy(name, tuning=tuning, quiet=True)
    bytes_ = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan_memory(cfg, tuning=tuning).parts["update"]["weights"] == bytes_


def request_of(cfg, gpu_gb=24, *, tuning=None, attention="flex_attention"):
    """What a plan is computed from, so that a test may cut the update itself."""
    cfg = preset(cfg, **({} if tuning is None else {"tuning": tuning}))
    tokens = cfg.max_completion_tokens or cfg.make_task().max_completion_tokens
    counts = counted(cfg.model, 16)
    return Request(
        cfg, config_of(cfg.model), 256, tokens, attention, 16, gpu_gb * USABLE * GIB, counts
    )


def test_gpu24_full_as_computed_by_hand():
    plan = request_of(FLASH).plan(4351, 18)
    parameters = 1_543_714_304  # Qwen2.5-1.5B's, as its model card rounds: 1.54B
    update = plan.parts["update"]
    assert update["weights"] == update["gradients"] == 2 * parameters
    assert update["optimizer"] == pytest.approx(4.13 * parameters)
    assert plan.parts["rollout"]["keys and values"] == 28_672 * (8 * 256 + 64 * 256)
    assert (
        plan.parts["rollout"]["gradients"] == plan.parts["optimizer step"]["activations"] == 0
    )
    rest = sum(value for part, value in update.items() if part != "reserve")
    assert update["reserve"] == pytest.approx(0.6 * GIB + 0.05 * rest)
    assert rest / GIB < 19


def test_float32_weights_carry_a_cast_copy():
    parts = plan_memory(replace(TOO_BIG, optimizer="adamw-8bit")).parts
    parameters = 1_543_714_304
    assert parts["rollout"]["cast weights"] == pytest.approx(2 * parameters, rel=0.001)
    assert parts["rollout"]["optimizer"] == pytest.approx(2.03 * parameters)
    assert plan_memory(FLASH).parts["rollout"]["cast weights"] == 0


def test_torchs_adamw_needs_a_float_a_parameter_more_while_it_steps():
    step = plan_memory(TOO_BIG).parts["optimizer step"]
    assert step["optimizer's own"] == 4 * 1_543_714_304
    assert plan_memory(FLASH).parts["optimizer step"]["optimizer's own"] == 0


def test_lora_needs_far_less_than_full():
    full, lora = (
        request_of(FLASH).plan(4351, 28),
        request_of(FLASH, tuning="lora").plan(4351, 28),
    )
    assert lora.parts["update"]["optimizer"] == 8 * lora.parts["update"]["gradients"] / 4
    assert 3 < lora.peak_gib < 6.5 < 12 < full.peak_gib < 16


def test_a_reference_model_is_the_weights_again():
    plan = plan_memory(replace(FLASH, beta=0.01))
    assert plan.parts["update"]["reference model"] == plan.parts["update"]["weights"]
    lora = plan_memory(replace(FLASH, beta=0.01), tuning="lora")
    assert "reference model" not in lora.table().index


@pytest.mark.parametrize("tuning", ["full", "lora", "qlora"])
def test_what_fits_gets_no_advice(tuning):
    plan = plan_memory(FLASH, tuning=tuning)
    assert plan.fits
    assert plan.advice == []
    assert plan.peak_gib <= plan.usable_gib == pytest.approx(0.92 * 24)


def test_what_does_not_fit_gets_advice_by_how_much_it_saves():
    plan = plan_memory(TOO_BIG)
    assert not plan.fits
    saved = [float(line.split(" saves ")[1].split()[0]) for line in plan.advice]
    assert saved == sorted(saved, reverse=True)
    line = next(line for line in plan.advice if line.startswith("optimizer='adamw-8bit-split'"))
    same = plan.chunk_tokens, plan.checkpointed_layers
    assert float(line.split(" saves ")[1].split()[0]) == pytest.approx(
        plan.peak_gib - request_of(SPLIT).plan(*same).peak_gib, abs=0.06
    )


def test_following_the_advice_makes_it_fit():
    promised = [
        line.split(" saves ")[0]
        for line in plan_memory(TOO_BIG).advice
        if line.endswith("and fits")
    ]
    follow = {
        "tuning='lora'": lambda: plan_memory(TOO_BIG, tuning="lora"),
        "tuning='qlora'": lambda: plan_memory(TOO_BIG, tuning="qlora"),
        "model='Qwen/Qwen2.5-0.5B-Instruct'": lambda: plan_memory(
            replace(TOO_BIG, model="Qwen/Qwen2.5-0.5B-Instruct")
        ),
        "optimizer='adamw-8bit-split' with bfloat16 weights": lambda: plan_memory(SPLIT),
        "optimizer='adamw-8bit'": lambda: plan_memory(replace(TOO_BIG, optimizer="adamw-8bit")),
    }
    assert promised
    assert all(follow[name]().fits for name in promised)


def test_a_dense_mask_costs_and_flex_attention_is_advised():
    flex, dense = request_of(FLASH, 23), request_of(FLASH, 23, attention="sdpa")
    plan = dense.plan(4351, 12)
    assert (
        plan.parts["update"]["activations"] > flex.plan(4351, 12).parts["update"]["activations"]
    )
    assert any(line.startswith("attention='flex_attention'") for line in advice(dense, plan))


def test_a_table_a_text_and_a_page():
    plan = plan_memory(TOO_BIG)
    table = plan.table()
    assert list(table) == ["rollout", "update", "optimizer step"]
    assert table.loc["total"].max() == pytest.approx(plan.peak_gib)
    assert table.drop("total").sum().tolist() == pytest.approx(table.loc["total"].tolist())
    assert "does not fit: " in str(plan)
    assert all(line in plan._repr_html_() for line in plan.advice)
    assert "<table" in plan._repr_html_()


def test_the_chart_has_a_bar_a_moment_and_the_cards_line():
    plan = plan_memory(FLASH)
    figure = plan.plot()
    (axes,) = figure.axes
    assert [tick.get_text().split("\n")[0] for tick in axes.get_yticklabels()] == list(
        plan.table()
    )
    assert axes.get_xlabel() == "GiB"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(
        plan.table().drop("total").index
    )
    assert any(plan.usable_gib == pytest.approx(line.get_xdata()[0]) for line in axes.lines)
    ends = sorted(patch.get_x() + patch.get_width() for patch in axes.patches)
    assert ends[-1] == pytest.approx(plan.peak_gib)
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_config_stands_for_a_model_that_cannot_be_looked_up():
    cfg = replace(FLASH, model="./nothing")
    with pytest.raises(ValueError, match="./nothing"):
        plan_memory(cfg)
    assert plan_memory(cfg, config=QWEN).peak_gib == pytest.approx(plan_memory(FLASH).peak_gib)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tuning": "half"}, "tuning='half'"),
        ({"attention": "flash"}, "attention='flash'"),
        ({"gpu_gb": 0}, "gpu_gb=0"),
        ({"gpu_gb": float("nan")}, "gpu_gb=nan"),
        ({"prompt_tokens": 0}, "prompt_tokens=0"),
        ({"rank": 1.5}, "rank=1.5"),
    ],
)
def test_what_cannot_be_planned_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        plan_memory("gpu24", **options)


def test_unknown_names_and_sizes_are_named():
    with pytest.raises(ValueError, match="cfg=None must be a Config or the name of a preset"):
        plan_memory(None)
    with pytest.raises(ValueError, match="gpt2"):
        from transformers import GPT2Config

        ChunkMemory(GPT2Config(), 2)
    with pytest.raises(ValueError, match="itemsize=8"):
        ChunkMemory(QWEN, 8)
    with pytest.raises(ValueError, match="trainable='some'"):
        ChunkMemory(QWEN, 2, trainable="some")
    with pytest.raises(ValueError, match="longest=0"):
        update_budget(GIB, QWEN, 2, longest=0)
