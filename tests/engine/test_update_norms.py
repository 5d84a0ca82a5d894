"""Norms in one kernel: the modules' numbers and gradients, only where transformers' own would run, and only inside."""

import pytest
import torch
from rollout_models import FAMILIES, tiny_model
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from grpo_kit.engine._update_memory import norms_in_one_kernel

IDS = torch.arange(3, 23)[None]


def found(model, autocast=False):
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        table = model(input_ids=IDS).logits.float().log_softmax(-1)
        table[0, :-1].gather(1, IDS[0, 1:, None]).sum().backward()
    return [table.detach(), *(p.grad.float() for p in model.parameters())]


def apart(some, others):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_they_give_the_modules_numbers_and_gradients(family):
    model = tiny_model(family)
    wanted = found(model)
    with norms_in_one_kernel(model):
        assert apart(found(model), wanted) < 1e-5
    assert apart(found(model), wanted) == 0


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_16_bits_they_are_no_further_from_float32_than_the_modules(family, autocast):
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter / (6 if parameter.dim() > 1 else 1)).bfloat16())
    exact = found(model)
    model = model if autocast else model.bfloat16()
    modules = apart(found(model, autocast), exact)
    with norms_in_one_kernel(model):
        assert apart(found(model, autocast), exact) < 1.5 * modules  # 1.28 in torch 2.8


def test_dtypes_that_differ_and_replaced_norms_are_the_modules_own():
    model = tiny_model("qwen2")
    model.model.norm.weight.data = model.model.norm.weight.double()

    class Doubled(Qwen2RMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    model.model.layers[0].input_layernorm.__class__ = Doubled
    model.lm_head.double()
    wanted = found(model)
    with norms_in_one_kernel(model):
        assert apart(found(model), wanted) < 1e-5


def test_the_modules_come_back_after_an_error():
    model, before = tiny_model("qwen2"), Qwen2RMSNorm.forward
    with pytest.raises(ZeroDivisionError), norms_in_one_kernel(model):
        assert Qwen2RMSNorm.forward is not before
        raise ZeroDivisionError
    assert Qwen2RMSNorm.forward is before
