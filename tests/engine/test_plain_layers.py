"""Layers as plain functions: the same numbers as the modules', for whatever is plain, and the modules for the rest."""

import copy
import ctypes

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from rollout_models import (
    FAMILIES,
    config,
    generate,
    modules_called,
    plain_logits,
    ragged_prompts,
    tiny_model,
)
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.cpu._kv_prefill import weight_version
from grpo_kit.engine.cpu._layers import plain_layers
from grpo_kit.models._model_facts import MODEL_TYPES

PROMPTS = ragged_prompts()


def base_of(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def close(one, other, tolerance=1e-5):
    for a, b in zip(one, other, strict=True):
        assert a == pytest.approx(b, abs=tolerance)


def by_modules(model, *args, **kwargs):
    """What the engine does with a model that it may not read as plain functions."""
    with modules_called(model):
        return RolloutEngine(model).generate(*args, **kwargs)


def test_every_known_model_type_is_tested():
    assert set(FAMILIES) == set(MODEL_TYPES)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_the_modules_and_of_a_plain_forward(family, lora):
    """Rows that end at random, in groups of unequal size: what is left shrinks, and prompts are dropped."""
    model = tiny_model(family, lora=lora)
    settings = config(do_sample=True, max_new_tokens=24, eos_token_id=list(range(2, 14)))
    engine = RolloutEngine(model)
    made = engine.generate(PROMPTS * 1, settings, seed=3)
    assert engine._decoder._layers is not None
    assert len(set(map(len, made.completion_ids))) > 3
    slow = by_modules(model, PROMPTS, settings, seed=3)
    assert made.completion_ids == slow.completion_ids
    close(made.policy_logprobs, slow.policy_logprobs)
    close(made.entropies, slow.entropies)
    for prompt, ids, logprobs in zip(
        PROMPTS, made.completion_ids, made.policy_logprobs, strict=True
    ):
        wanted = torch.log_softmax(plain_logits(model, prompt, ids), -1)
        close([logprobs], [wanted.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 100])
@pytest.mark.parametrize("unique", [False, True])
def test_any_number_of_rows(rows, unique):
    model = tiny_model("qwen2")
    prompts = [
        [7, 8, 9 + row if unique else 9] + [5] * (row % 4 if unique else 0)
        for row in range(rows)
    ]
    settings = config(max_new_tokens=5, eos_token_id=499)
    assert RolloutEngine(model).generate(prompts, settings).completion_ids == generate(
        model, prompts, settings
    )


def test_the_weights_own_head_dimension_and_tied_head():
    model = tiny_model("qwen3", tie_word_embeddings=True, head_dim=32)
    assert plain_layers(model) is not None
    assert RolloutEngine(model).generate(PROMPTS, config()).completion_ids == generate(
        model, PROMPTS, config()
    )


def test_adapters_several_switched_and_disabled():
    model = tiny_model(lora=True)
    torch.manual_seed(1)
    model.add_adapter(
        "second",
        LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    settings = config()
    engine = RolloutEngine(model)
    seen = []
    for active in ("default", "second", ["default", "second"]):
        model.base_model.set_adapter(active)
        seen.append(engine.generate(PROMPTS, settings).completion_ids)
        assert engine._decoder._layers is not None
        assert seen[-1] == generate(model, PROMPTS, settings)
    with model.disable_adapter():
        seen.append(engine.generate(PROMPTS, settings).completion_ids)
        assert seen[-1] == generate(model, PROMPTS, settings)
    assert len({str(ids) for ids in seen}) == 4


def dora(model):
    """By peft alone: transformers' own add_adapter asks for a newer peft than there may be."""
    torch.manual_seed(2)
    lora = LoraConfig(r=2, target_modules=["v_proj"], use_dora=True, init_lora_weights=False)
    return inject_adapter_in_model(lora, copy.deepcopy(model))


def with_hook(model):
    model.model.layers[1].mlp.up_proj.register_forward_hook(
        lambda module, inputs, output: output * 2
    )
    return model


def with_own_forward(model):
    norm = model.model.norm
    norm.forward = lambda x: type(norm).forward(norm, x).flip(-1)
    return model


def subclassed(model):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[0].self_attn.o_proj.__class__ = Doubled
    return model


def merged(model):
    lora = LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)
    model = inject_adapter_in_model(lora, model)
    for layer in model.model.layers:
        layer.self_attn.v_proj.merge()
    return model


def fewer_layers(model):
    """Whatever a checkpoint holds, transformers runs as many as the config says."""
    model.config.num_hidden_layers = 1
    return model


@pytest.mark.parametrize("change", [dora, with_hook, with_own_forward, subclassed, merged])
def test_what_is_not_plain_is_left_to_the_modules(change):
    plain = tiny_model()
    settings = config(eos_token_id=499)
    before = generate(plain, PROMPTS, settings)
    model = change(tiny_model())
    assert plain_layers(model) is None
    wanted = generate(model, PROMPTS, settings)
    assert wanted != before  # so that it would be seen
    assert RolloutEngine(model).generate(PROMPTS, settings).completion_ids == wanted


@pytest.mark.parametrize("what", [LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding])
def test_a_class_that_somebody_changed_is_left_to_itself(what, monkeypatch):
    model, settings = tiny_model("llama"), config(eos_token_id=499)
    before, inner = generate(model, PROMPTS, settings), what.forward

    def forward(self, *args, **kwargs):
        out = inner(self, *args, **kwargs)
        return tuple(2 * x for x in out) if isinstance(out, tuple) else -2 * out

    monkeypatch.setattr(what, "forward", forward)
    assert plain_layers(model) is None
    wanted = generate(model, PROMPTS, settings)
    assert wanted != before
    assert RolloutEngine(model).generate(PROMPTS, settings).completion_ids == wanted


def test_a_hook_on_every_module_is_called():
    model, called = tiny_model(), []
    handle = register_module_forward_hook(
        lambda module, inputs, output: called.append(type(module))
    )
    try:
        RolloutEngine(model).generate(PROMPTS, config())
    finally:
        handle.remove()
    assert torch.nn.Linear in called
    assert plain_layers(model) is not None


def test_layers_that_the_config_leaves_out():
    plain, settings = tiny_model(), config(eos_token_id=499)
    before = generate(plain, PROMPTS, settings)
    model = fewer_layers(tiny_model())
    wanted = generate(model, PROMPTS, settings)
    assert wanted != before
    engine = RolloutEngine(model)
    assert engine.generate(PROMPTS, settings).completion_ids == wanted
    assert len(engine._decoder._layers.layers) == 1


def test_weights_that_only_seem_plain_are_left_to_the_modules():
    class Packed(torch.nn.Parameter):
        pass

    model = tiny_model()
    projection_ = model.model.layers[0].mlp.up_proj
    projection_.weight = Packed(projection_.weight.detach())
    assert plain_layers(model) is None


def test_hidden_states_that_somebody_looked_at_are_no_hindrance():
    model = tiny_model()
    with torch.no_grad():
        model(torch.tensor([[5, 6]]), output_hidden_states=True)
    if not model.model.layers[0]._forward_hooks:
        pytest.skip("this transformers leaves no hooks")
    assert plain_layers(model) is not None


def test_other_activations_dtypes_and_autocast_are_left_to_the_modules():
    assert plain_layers(tiny_model()) is not None
    assert plain_layers(tiny_model(hidden_act="gelu")) is None
    assert plain_layers(tiny_model().to(torch.bfloat16)) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain_layers(tiny_model()) is None


def test_the_hook_of_gradient_checkpointing_is_no_hindrance():
    model = tiny_model(lora=True)
    model.enable_input_require_grads()
    assert plain_layers(base_of(model)) is not None


# ---- what is kept of prompts -------------------------------------------------------------------------------------

BEGIN = torch.randint(3, 500, (120,), generator=torch.Generator().manual_seed(4)).tolist()
TAILS = [[5], [6, 7], [6, 8, 9], list(range(60, 80)), [6]]


def computed(engine, prompts, settings):
    """Tokens that went through the layers as prompts, and the completions."""
    made = engine.generate(prompts, settings)
    return made.tokens["prefill"], made.completion_ids


def by_data(weight):
    weight.data.mul_(-1)  # no version counts it, and all bits but the signs stay


def by_swapping_rows(weight):
    weight.data[:] = weight.data.flip(0)


def by_numpy(weight):
    weight.detach().numpy()[1, 2] += 3.0


def by_memory(weight):
    (ctypes.c_float * 1).from_address(weight.data_ptr())[0] = 2.5


def by_optimizer(weight):
    optimizer = torch.optim.SGD([weight], lr=3.0)
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_prompts_share_is_computed_once_and_kept(family):
    model, settings = tiny_model(family), config(eos_token_id=499)
    prompts = [BEGIN + tail for tail in TAILS for _ in range(2)]
    engine = RolloutEngine(model)
    first = computed(engine, prompts, settings)
    # "6" is part of two others
    assert first == (120 + 1 + 2 + 2 + 20, generate(model, prompts, settings))
    again = computed(engine, prompts, settings)
    assert again == (25, first[1])
    # A batch that shares less of it uses what it can, and takes nothing away from the next.
    shorter = [BEGIN[:110] + tail for tail in ([5], [6, 7])]
    assert computed(engine, shorter, settings) == (3, generate(model, shorter, settings))
    assert computed(engine, prompts, settings) == again
    other = [[9, *prompt] for prompt in prompts]
    assert computed(engine, other, settings) == (146, generate(model, other, settings))
    engine.release()
    assert computed(engine, prompts, settings) == first


@pytest.mark.parametrize(
    "change", [by_data, by_swapping_rows, by_numpy, by_memory, by_optimizer]
)
@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj"])
def test_a_weight_that_moved_is_seen_whoever_moved_it(change, name):
    model, settings = tiny_model(), config(eos_token_id=499)
    prompts = [BEGIN + tail for tail in TAILS]
    engine = RolloutEngine(model)
    engine.generate(prompts, settings)
    assert computed(engine, prompts, settings)[0] == 25
    change(model.model.layers[0].get_submodule(name).weight)
    now = computed(engine, prompts, settings)
    assert now == (145, generate(model, prompts, settings))


def by_buffer(model):
    model.model.rotary_emb.inv_freq.div_(4)


def by_norm(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 1.0


def by_scale(model):
    model.model.layers[0].self_attn.scaling *= 2


@pytest.mark.parametrize("change", [by_buffer, by_norm, by_scale])
def test_what_is_no_weight_is_seen_too(change):
    model, settings = tiny_model(), config(eos_token_id=499)
    prompts = [BEGIN + tail for tail in TAILS]
    engine = RolloutEngine(model)
    engine.generate(prompts, settings)
    change(model)
    assert computed(engine, prompts, settings) == (145, generate(model, prompts, settings))


def test_a_released_prefix_is_not_kept_again_while_weights_move_between_batches():
    model, settings = tiny_model(), config(eos_token_id=499)
    prompts = [BEGIN + tail for tail in TAILS]
    engine = RolloutEngine(model)
    engine.generate(prompts, settings)
    for _ in range(2):
        engine.release()
        by_optimizer(model.model.layers[0].mlp.up_proj.weight)
        engine.generate(prompts, settings)
        assert engine._decoder._tree_prefill._cache is None


def test_weights_of_inference_mode_and_parameters_without_dimensions():
    with torch.inference_mode():
        model = tiny_model()
    model.register_parameter("alone", torch.nn.Parameter(torch.tensor(2.0)))
    prompts = [BEGIN + tail for tail in TAILS]
    engine, settings = RolloutEngine(model), config(eos_token_id=499)
    first = engine.generate(prompts, settings).completion_ids
    before = weight_version(model)
    assert engine.generate(prompts, settings).completion_ids == first
    with torch.no_grad():
        model.alone.mul_(2)
    assert weight_version(model) != before


def test_loading_weights_and_adapters_that_are_switched_are_seen():
    model, settings = tiny_model(lora=True), config(eos_token_id=499)
    prompts = [BEGIN + tail for tail in TAILS]
    engine = RolloutEngine(model)
    other = {name: -value for name, value in model.state_dict().items()}

    def tokens():
        count, made = computed(engine, prompts, settings)
        assert made == generate(model, prompts, settings)
        return count

    assert [tokens(), tokens()] == [145, 25]
    with model.disable_adapter():
        assert [tokens(), tokens(), tokens()] == [
            145,
            145,
            25,
        ]  # kept from when nothing has moved for a batch
    model.load_state_dict(other)
    assert [tokens(), tokens(), tokens()] == [145, 145, 25]


def test_fingerprints_differ_where_a_single_bit_does():
    model = tiny_model()
    before = weight_version(model)
    assert weight_version(model) == before
    weight = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    bits = weight.view(np.int32)
    bits[3, 4] ^= 1
    assert weight_version(model) != before
    bits[3, 4] ^= 1
    assert weight_version(model) == before
    weight[[1, 2]] = weight[[2, 1]]
    assert weight_version(model) != before
