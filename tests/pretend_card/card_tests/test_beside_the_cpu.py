"""Three steps by the fast ways on a card are three steps by the plain ways on the CPU, within rounding."""

import copy

import pytest
import torch
from loop_runs import make
from test_packed_update import ragged

from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.grpo_config import StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.models import load_policy
from grpo_kit.optim.choose import make_optimizer

KINDS = {  # tuning, dtype, autocast, optimizer, how far apart the weights may be as a share of their change
    "float32": ("full", "float32", "none", "adamw", 1e-3),
    "bfloat16, split optimizer": ("full", "bfloat16", "bfloat16", "adamw-8bit-split", 0.3),
    "LoRA": ("lora", "bfloat16", "bfloat16", "adamw", 0.3),
}


def three_steps(model, update_of, optimizer_name, autocast, device):
    """The trained weights after three updates on the same drawn completions, float32 on the host."""
    config = Config(autocast=autocast, max_completion_tokens=7)
    update = update_of(model, config)
    optimizer = make_optimizer(optimizer_name, model, learning_rate=1e-4)
    for number in range(3):
        batch = ragged()
        loss = PolicyLoss(batch, config, StepNumbers(number, 0.0, 1.0, 0.0, 0.0), device=device)
        model.zero_grad(set_to_none=True)
        update.gradients(model, batch, loss, 1.0, lambda share: share.backward())
        optimizer.step()
    read = getattr(optimizer, "master", lambda p: p.detach().float())
    return {n: read(p).float().cpu() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_the_cpus(kind):
    tuning, dtype, autocast, optimizer, most = KINDS[kind]
    lora = {"lora": {"init_lora_weights": False}} if tuning == "lora" else {}
    model = load_policy("tiny-random", tuning=tuning, dtype=dtype, quiet=True, **lora)[0].cpu().train()
    before = {n: p.detach().clone().float() for n, p in model.named_parameters() if p.requires_grad}
    on_card = copy.deepcopy(model).cuda()
    wanted = three_steps(model, lambda m, c: PaddedUpdate(c), optimizer, autocast, torch.device("cpu"))
    found = three_steps(on_card, PackedUpdate, optimizer, autocast, torch.device("cuda"))
    moved = sum((wanted[n] - before[n]).square().sum() for n in wanted).sqrt()
    apart = sum((wanted[n] - found[n]).square().sum() for n in wanted).sqrt()
    assert moved > 0 and apart / moved < most, float(apart / moved)


def test_a_greedy_run_is_the_cpus(tmp_path):
    """Engine, update and optimizer; at a temperature near 0 no draw of a generator decides anything."""
    rows = {}
    for device in ("cpu", "cuda"):
        model = load_policy("tiny-random", quiet=True)[0].to(device)
        trainer = make(
            tmp_path / device, model=model, seams="fast", steps=3, temperature=1e-3, learning_rate=1e-4
        )
        trainer.train()
        rows[device] = {n: p.detach().float().cpu() for n, p in trainer.trained.items()}
    apart = max((rows["cpu"][n] - rows["cuda"][n]).abs().max().item() for n in rows["cpu"])
    assert apart < 1e-4, apart
