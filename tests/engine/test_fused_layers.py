"""Layers in few kernels, as a card decodes: the numbers of the modules, which do what is not plain."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig
from rollout_models import (
    FAMILIES,
    config,
    generate,
    modules_called,
    plain_logits,
    ragged_prompts,
    tiny_model,
)
from test_complete import Numbers
from test_plain_layers import close, dora, merged, subclassed, with_hook, with_own_forward
from test_rollout_graphs import engine_of

from grpo_kit._support import cuda
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine import _first_use as first_use
from grpo_kit.engine._decode import Decoder
from grpo_kit.engine.card import check_card
from grpo_kit.engine.card._fused_layers import FusedLayers
from grpo_kit.engine.complete import complete
from grpo_kit.models._model_facts import MODEL_TYPES, base_model

PROMPTS = ragged_prompts()
ENDS = config(do_sample=True, max_new_tokens=24, eos_token_id=list(range(2, 14)))


def by_modules(model, *args, **kwargs):
    """The same with transformers' modules."""
    with modules_called(model):
        engine = engine_of(model, graphs=False)
        made = engine.generate(*args, **kwargs)
    assert engine._decoder.fused is None
    return made


def test_every_known_model_type_is_tested():
    assert set(FAMILIES) == set(MODEL_TYPES)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_the_modules_and_of_a_plain_forward(family, lora):
    """Rows that end at random, in groups of unequal size: holes are filled, buckets shrink."""
    model = tiny_model(family, lora=lora)
    engine = engine_of(model, graphs=False)
    made = engine.generate(PROMPTS, ENDS, seed=3)
    assert engine._decoder.fused is not None and len(set(map(len, made.completion_ids))) > 3
    slow = by_modules(model, PROMPTS, ENDS, seed=3)
    assert made.completion_ids == slow.completion_ids
    close(made.policy_logprobs, slow.policy_logprobs, 1e-5)
    close(made.entropies, slow.entropies, 1e-5)
    for prompt, ids, logprobs in zip(
        PROMPTS, made.completion_ids, made.policy_logprobs, strict=True
    ):
        wanted = torch.log_softmax(plain_logits(model, prompt, ids), -1)
        close([logprobs], [wanted.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()], 1e-5)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [False, True])
def test_in_16_bits_they_are_no_further_from_float32_than_the_modules(family, lora, autocast):
    """bfloat16 weights under float32 adapters: of the same tokens, the mean distance to exact log-probabilities."""
    exact = tiny_model(family, lora=lora)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(
                parameter.bfloat16() / (6 if parameter.dim() > 1 and "lora" not in name else 1)
            )
    model = copy.deepcopy(exact)
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.bfloat16()
    tokens = config(max_new_tokens=12, do_sample=True, eos_token_id=[])

    def distance(run):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            made = run()
        far = []
        for prompt, ids, logprobs in zip(
            PROMPTS, made.completion_ids, made.policy_logprobs, strict=True
        ):
            wanted = torch.log_softmax(plain_logits(exact, prompt, ids), -1)
            far.append(
                (
                    wanted.gather(1, torch.tensor(ids)[:, None])[:, 0] - torch.tensor(logprobs)
                ).abs()
            )
        return torch.cat(far).mean().item()

    engine = engine_of(model, graphs=False)
    fused = distance(lambda: engine.generate(PROMPTS, tokens, seed=3))
    assert engine._decoder.fused is not None
    assert 0 < fused < 1.25 * distance(lambda: by_modules(model, PROMPTS, tokens, seed=3))


def test_adapters_several_switched_disabled_and_of_some_layers():
    model = tiny_model(lora=True)
    torch.manual_seed(1)
    model.add_adapter(
        "second",
        LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    engine, seen = engine_of(model, graphs=True), []
    for active in ("default", "second", ["default", "second"], []):
        model.base_model.set_adapter(active)
        with model.disable_adapter() if not active else torch.no_grad():
            seen.append(engine.generate(PROMPTS, config()).completion_ids)
            assert engine._decoder.fused is not None
            assert seen[-1] == generate(model, PROMPTS, config())
    assert len({str(ids) for ids in seen}) == 4


@pytest.mark.parametrize("lora", [False, True])
def test_what_training_changes_is_read_again_and_graphs_stay(lora):
    model = tiny_model("qwen3", lora=lora)
    engine = engine_of(model, graphs=True)
    engine.generate(PROMPTS, config())
    captured = engine._decoder.graphs.captures
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    made = engine.generate(PROMPTS, config()).completion_ids
    assert made == generate(model, PROMPTS, config())
    assert engine._decoder.graphs.captures == captured and engine._decoder.graphs.replays > 0
    engine.release()
    assert engine.nbytes() == 0
    assert engine.generate(PROMPTS, config()).completion_ids == made


@pytest.mark.parametrize("change", [dora, with_hook, with_own_forward, subclassed, merged])
def test_what_is_not_plain_is_left_to_the_modules(change):
    settings = config(eos_token_id=499)
    before = generate(tiny_model(), PROMPTS, settings)
    model = change(tiny_model())
    wanted = generate(model, PROMPTS, settings)
    engine = engine_of(model, graphs=False)
    assert wanted != before and engine.generate(PROMPTS, settings).completion_ids == wanted
    assert engine._decoder.fused is None


def test_a_hook_that_comes_and_goes_between_rollouts():
    """The same graphs' shapes, by the modules and by few kernels: neither is replayed for the other."""
    model = tiny_model("qwen2")
    engine = engine_of(model, graphs=True)
    plain = engine.generate(PROMPTS, config()).completion_ids
    hook = model.model.layers[0].mlp.register_forward_hook(
        lambda module, inputs, output: output * 3
    )
    changed = engine.generate(PROMPTS, config()).completion_ids
    assert changed == generate(model, PROMPTS, config()) != plain
    hook.remove()
    assert engine.generate(PROMPTS, config()).completion_ids == plain


def test_products_in_another_dtype_than_the_weights_are_the_modules():
    model = tiny_model()
    assert FusedLayers.parts_of(model) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert FusedLayers.parts_of(model) is None


def test_a_head_with_a_bias_is_the_modules():
    model = tiny_model()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(500))
    engine = engine_of(model, graphs=False)
    assert engine.generate(PROMPTS, config()).completion_ids == generate(
        model, PROMPTS, config()
    )
    assert engine._decoder.fused is None


@pytest.mark.parametrize("rows", [1, 2, 5, 9, 17, 33])
def test_any_number_of_rows(rows):
    model = tiny_model("qwen2")
    prompts = [[7, 8, 9 + row] + [5] * (row % 4) for row in range(rows)]
    settings = config(max_new_tokens=5, eos_token_id=499)
    assert engine_of(model, graphs=False).generate(
        prompts, settings
    ).completion_ids == generate(model, prompts, settings)


# ---- where they fail on a card ------------------------------------------------------------------------------------


def broken(self, *args, **kwargs):
    raise RuntimeError("no kernel image is available")


def not_a_number(self, ids, *args, **kwargs):
    return torch.full((len(ids), 500), torch.nan)


@pytest.mark.parametrize("fault", [broken, not_a_number])
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_card_they_give_way_to_the_modules_with_a_line(
    fault, graphs, monkeypatch, tmp_path, capsys, recwarn
):
    monkeypatch.setattr(cuda, "may_fail", lambda device: True)
    monkeypatch.setattr(first_use, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(FusedLayers, "logits", fault)
    model = tiny_model()
    wanted = generate(model, PROMPTS, config())
    engine = engine_of(model, graphs=graphs)
    assert engine.generate(PROMPTS, config()).completion_ids == wanted
    assert not engine.in_few_kernels and not [
        w for w in recwarn if "CUDA graphs" in str(w.message)
    ]
    # known by now
    assert engine_of(model, graphs=False).generate(PROMPTS, config()).completion_ids == wanted
    assert capsys.readouterr().out.count("Decoding in few kernels failed on this machine") == 1
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError):
        engine.generate(PROMPTS, config())


def test_on_a_cpu_what_they_raise_is_raised(monkeypatch):
    monkeypatch.setattr(FusedLayers, "logits", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        engine_of(tiny_model(), graphs=False).generate(PROMPTS, config())


def test_silently_wrong_ones_give_way_before_the_engine_does(monkeypatch, tmp_path, capsys):
    """In complete() and in the comparison of a card, which keeps it for the next process."""
    monkeypatch.setattr(cuda, "may_fail", lambda device: True)
    monkeypatch.setattr(first_use, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(
        RolloutEngine,
        "_new_decoder",
        lambda self: Decoder(base_model(self.model), bucketed=True),
    )
    right = FusedLayers.logits
    monkeypatch.setattr(FusedLayers, "logits", lambda *a, **k: 0.8 * right(*a, **k))
    model = tiny_model()
    found = {one.part: one.outcome for one in check_card(model)}
    assert found["decoding in few kernels"] == "differs" and found["engine"] == "equal"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        complete(tiny_model(), Numbers(), ["5 6 7"], max_completion_tokens=4)
    assert capsys.readouterr().out.count("Decoding in few kernels failed on this machine") == 2
