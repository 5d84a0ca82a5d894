"""Names inside torch and transformers that engine and update lean on: an upgrade that moves one fails here."""

import inspect

import torch
import transformers
import transformers.models.llama.modeling_llama as llama
import transformers.models.qwen2.modeling_qwen2 as qwen2
import transformers.models.qwen3.modeling_qwen3 as qwen3

from grpo_kit.models.renamed import cache_name


def test_checkpointed_layers_call_what_the_packed_update_sets():
    assert "self._gradient_checkpointing_func(" in inspect.getsource(transformers.modeling_layers)


def test_what_the_rollout_engine_reaches_for():
    """It runs transformers' layers with its own attention and cache, and torch's fused attention on a CPU."""
    schema = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema
    assert [r.name for r in schema.returns] == ["output", "logsumexp"]
    for module, attention in ((llama, "Llama"), (qwen2, "Qwen2"), (qwen3, "Qwen3")):
        source = inspect.getsource(module)
        assert "ALL_ATTENTION_FUNCTIONS.get_interface(" in source
        assert f"{cache_name(getattr(module, f'{attention}Attention').forward)}.update(" in source
        assert (
            source.count("**kwargs,\n        )") >= 1
        )  # what the decoder is called with reaches the attention
