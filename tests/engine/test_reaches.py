"""What engine and update lean on inside torch and transformers: an upgrade that moves it fails here."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kit.models._model_facts import cache_name

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
}


def model_of(kind):
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SMALL, num_key_value_heads=2, head_dim=8)
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_checkpointed_layers_call_what_the_packed_update_sets(kind):
    model, calls = model_of(kind).train(), []
    first = model.model.layers[0]
    first.gradient_checkpointing = True
    first._gradient_checkpointing_func = lambda forward, *args: (
        calls.append(1) or forward(*args)
    )
    model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    assert calls == [1]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_layers_call_the_attention_and_the_cache_that_the_engine_gives(kind, monkeypatch):
    """It runs transformers' layers with its own; what the decoder is called with reaches the attention."""
    seen, updates = [], []

    def attention(module, query, key, value, mask, **given):
        seen.append((given["mark"], query.shape, key.shape))
        return torch.zeros(query.shape).transpose(1, 2), None

    class Cache(DynamicCache):
        def update(self, keys, values, layer, *args, **kwargs):
            updates.append(layer)
            return super().update(keys, values, layer, *args, **kwargs)

    model = model_of(kind)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "of_the_test", attention)
    model.config._attn_implementation = "of_the_test"
    model.model(
        torch.tensor([[1, 2, 3]]),
        use_cache=True,
        mark=7,
        **{cache_name(model.model.forward): Cache()},
    )
    assert seen == [(7, (1, 4, 3, 8), (1, 2, 3, 8))] * 2 and updates == [0, 1]


def test_torchs_fused_attention_on_a_cpu_returns_the_sums_too():
    schema = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema
    assert [r.name for r in schema.returns] == ["output", "logsumexp"]
