"""Three steps by the fast ways on a card are three steps by the plain ways on the CPU, within rounding."""

import copy

import few_words
import pytest
import torch
from loop_runs import make
from test_cuda import qwen
from test_packed_update import ragged

from grpo_kit._support.cuda import has_bf16
from grpo_kit.engine.optim.choose import make_optimizer
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.config import StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.loop.protocols import Hook
from grpo_kit.models import load_policy
from grpo_kit.more.episodes import EpisodeTask
from grpo_kit.trainer.grpo_trainer import GRPOTrainer

# tuning, dtype, autocast, optimizer, how far apart the weights may be as a share of their change
KINDS = {
    # 1.6e-6 on the pretend card, 0.0025 on an H200
    "float32": ("full", "float32", "none", "adamw", 5e-3),
    "bfloat16, split optimizer": ("full", "bfloat16", "bfloat16", "adamw-8bit-split", 0.3),
    "float16, scaler": ("full", "float32", "float16", "adamw", 0.1),
    "LoRA": ("lora", "bfloat16", "bfloat16", "adamw", 0.3),
    "QLoRA": ("qlora", None, "16 bits", "adamw", 0.3),
}


def three_steps(model, update_of, optimizer_name, autocast, device):
    """The trained weights after three updates on the same drawn completions, float32 on the host; steps left out."""
    config = Config(autocast=autocast, max_completion_tokens=7)
    update = update_of(model, config)
    optimizer = make_optimizer(optimizer_name, model, learning_rate=1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=autocast == "float16")
    left_out = 0
    for number in range(3):
        batch = ragged()
        loss = PolicyLoss(batch, config, StepNumbers(number, 0.0, 1.0, 0.0, 0.0), device=device)
        model.zero_grad(set_to_none=True)
        update.gradients(model, batch, loss, 1.0, lambda share: scaler.scale(share).backward())
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        left_out += scaler.get_scale() < before
    read = getattr(optimizer, "master", lambda p: p.detach().float())
    return {
        n: read(p).float().cpu() for n, p in model.named_parameters() if p.requires_grad
    }, left_out


def policy(tuning, dtype, folder):
    """A tiny model on the card, the same at each call; 4-bit weights are read from a folder, 64 of a row to a scale."""
    lora = {} if tuning == "full" else {"lora": {"init_lora_weights": False}}
    if tuning == "qlora":
        pytest.importorskip("bitsandbytes")
        load_policy("tiny-random", quiet=True)[1].save_pretrained(folder)
        qwen(vocabulary=4096).save_pretrained(folder)
    name = folder if tuning == "qlora" else "tiny-random"
    return load_policy(name, tuning=tuning, dtype=dtype, quiet=True, **lora)[0].cuda().train()


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_the_cpus(kind, tmp_path):
    tuning, dtype, autocast, optimizer, most = KINDS[kind]
    autocast = ("bfloat16" if has_bf16() else "float16") if autocast == "16 bits" else autocast
    if "bfloat16" in (dtype, autocast) and not has_bf16():
        pytest.skip("a card without bfloat16")
    model, on_card = policy(tuning, dtype, tmp_path).cpu(), policy(tuning, dtype, tmp_path)
    before = {
        n: p.detach().clone().float() for n, p in model.named_parameters() if p.requires_grad
    }
    wanted, skipped = three_steps(
        model, lambda m, c: PaddedUpdate(c), optimizer, autocast, torch.device("cpu")
    )
    found, also = three_steps(on_card, PackedUpdate, optimizer, autocast, torch.device("cuda"))
    assert skipped == also < 3 and share_apart(before, wanted, found) < most


def share_apart(before, one, other):
    """How far two sets of weights are apart, as a share of how far the first has moved."""
    moved, apart = (
        sum((one[n] - them[n]).square().sum() for n in one).sqrt().item()
        for them in (before, other)
    )
    assert moved > 0
    return apart / moved


class Look(Hook):
    """What was sampled, by step."""

    def __init__(self):
        self.seen = []

    def after_step(self, trainer, row, batch):
        self.seen.append((batch.prompt_ids, batch.completion_ids, batch.rewards))


def on_both(run):
    """(what was sampled, weights) of run(model, tokenizer, hooks) on the host and on the card, and weights before.

    Draws are a hash of seed, row and step on either.
    """
    for device in ("cpu", "cuda"):
        model, tokenizer = few_words.policy()
        torch.set_float32_matmul_precision("highest")
        before = {n: p.detach().float().cpu() for n, p in model.named_parameters()}
        look = Look()
        trainer = run(model.to(device), tokenizer, [look], device)
        trainer.train()
        yield look.seen, {n: p.detach().float().cpu() for n, p in trainer.trained.items()}
    yield before


def test_a_run_is_the_cpus(tmp_path):
    """Engine, update and optimizer: the same tokens are drawn, and the weights move alike."""

    def run(model, tokenizer, hooks, device):
        small = {"steps": 3, "learning_rate": 1e-4}
        return make(tmp_path / device, model=model, seams="fast", hooks=hooks, **small)

    (sampled, one), (also, other), before = on_both(run)
    assert sampled == also and share_apart(before, one, other) < 0.01


class Letters:
    """Pays for letters, turn after turn."""

    def reset(self, row):
        return f"begin {row['question']}"

    def step(self, text):
        return f"you said {text}", sum(c.isalpha() for c in text) / max(len(text), 1), False


@pytest.mark.parametrize("temperature", [1.0, 1e-2])
def test_episodes_are_the_cpus(temperature, tmp_path):
    """Turn by turn the same prompts, moves and rewards. Near temperature 0 all episodes of a group are one."""
    sizes = {"steps": 2, "prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 6}
    config = Config(**sizes, learning_rate=1e-4, temperature=temperature, seed=3)
    rows = [{"question": word} for word in ("one", "two", "three", "four")]
    task = EpisodeTask("letters", rows[:3], rows[3:], Letters, max_turns=3, success=9.0)

    def run(model, tokenizer, hooks, device):
        return GRPOTrainer(
            model, task, copy.copy(config), tokenizer=tokenizer, folder=tmp_path / device, live=None, hooks=hooks,
        )  # fmt: skip

    (turns, one), (also, other), before = on_both(run)
    assert turns == also and len(turns[0][0]) == 24
    if temperature == 1:
        assert share_apart(before, one, other) < 0.01
