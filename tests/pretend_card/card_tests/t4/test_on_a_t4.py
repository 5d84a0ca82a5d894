"""A card before Ampere: no bfloat16, no flash kernel; float16 takes its place."""

import pytest
import torch
import torch.nn.functional as F
from loop_runs import make, record
from test_cuda import qwen
from test_packed_update import ragged, step
from test_rules_of_a_card import is_fused

from grpo_kit._support.cuda import has_bf16
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.models import load_policy

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() >= (8, 0),
    reason="this card has bfloat16 and the flash kernel",
)


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        (torch.float16, False, "efficient"),
        (torch.float16, True, "efficient"),
        (torch.bfloat16, False, None),
    ],
)
def test_attention_has_no_flash_kernel(counter, dtype, masked, kernel):
    q = torch.randn(1, 4, 16, 64, device="cuda").to(dtype)
    mask = torch.ones(16, 16, dtype=torch.bool, device="cuda").tril() if masked else None
    counter.reset()
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    found = [name for name in counter.operators() if "_scaled_dot_product" in name]
    assert found == ([f"aten::_scaled_dot_product_{kernel}_attention"] if kernel else [])


@pytest.mark.parametrize("autocast", ["none", "float16"])
def test_prompts_and_update_take_the_memory_efficient_kernel(autocast, counter):
    """Key heads are shared. FlexAttention is not taken, though Triton is there: it fails below capability 8.0."""
    assert is_fused(counter, torch.float16 if autocast == "float16" else None)
    model = qwen(vocabulary=4096)
    update = PackedUpdate(model, Config())
    assert update.memory.attention == "sdpa"
    counter.reset()
    step(update, model, ragged(), autocast=autocast)
    assert "aten::_scaled_dot_product_efficient_attention_backward" in counter.operators()
    assert "aten::_softmax" not in counter.operators()


def test_it_says_that_it_has_no_bfloat16():
    assert not has_bf16()
    assert load_policy("tiny-random", dtype=None, quiet=True)[0].dtype != torch.bfloat16


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_run_in_float16(tuning, tmp_path, capsys):
    model = load_policy("tiny-random", tuning=tuning, dtype="float32", quiet=True)[0].cuda()
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    trainer = make(tmp_path / "run", model=model, seams="fast", autocast="float16", steps=3)
    trainer.train()
    assert "failed on this machine" not in capsys.readouterr().out
    after = [p.detach() for p in model.parameters() if p.requires_grad]
    assert any(not torch.equal(p, q) for p, q in zip(after, before, strict=True))
    assert max(row["rollout/logprob_gap"] for row in record(trainer.folder)[0]) < 0.05
