"""Optimizers: what survives of a small update, exact masters, checkpoints, schedules, clipping, refusals."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import few_words
import pytest
import torch
from accelerate import Accelerator
from bitsandbytes.optim import AdamW8bit
from loop_runs import make, record
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from grpo_kit.engine.optim import split_adamw
from grpo_kit.engine.optim.choose import OPTIMIZERS, make_optimizer, share_that_moves
from grpo_kit.engine.optim.split_adamw import SplitAdamW8bit, join, split
from grpo_kit.models import load_policy
from grpo_kit.more.lab.rounding import ARMS, update_survival

RUN_ON_CPU = [name for name, choice in OPTIMIZERS.items() if not choice.cuda_only]
# several chunks and blocks, and less than one
SHAPES = ((64, 70), (3, 5, 7), (333,), (1,), (300, 300))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(split_adamw, "_CHUNK", 1024)


def parameters(dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    start = [(0.03 * torch.randn(shape, generator=g)).bfloat16() for shape in SHAPES]
    return [torch.nn.Parameter(p.to(dtype)) for p in start]


def steps(optimizer, params, first, last):
    """Gradients are a function of the step alone."""
    for step in range(first, last):
        g = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = (1e-4 * torch.randn(p.shape, generator=g)).bfloat16().to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


# ---- the master weight ----------------------------------------------------------------------------------------------


def test_split_and_join_are_exact_for_every_kind_of_float():
    random_bits = torch.randint(
        -(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)
    )
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])
    odd = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-40, 3.4e38, float("inf"), -float("inf"), float("nan")]
    )
    cuda_nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    x = torch.cat([random_bits.to(torch.int32).view(torch.float32), ties, odd, cuda_nan])
    high, low = split(x)
    back, number = join(high, low), ~x.isnan()
    assert torch.equal(back[number].view(torch.int32), x[number].view(torch.int32))
    assert high[~number].isnan().all() and back[~number].isnan().all()
    tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[number & ~tie], x[number & ~tie].bfloat16())
    assert torch.equal(
        high[-13:-10].float(), torch.tensor([1 + 2**-7, 1 + 2**-6, -(1 + 2**-7)])
    )


def test_bfloat16_weights_are_the_rounded_float32_run(small_chunks):
    """The independent run: bitsandbytes' own AdamW8bit over float32 weights, decay and bias correction included."""
    narrow, wide = parameters(), parameters(torch.float32)
    ours = SplitAdamW8bit(narrow, lr=1e-6, weight_decay=0.1)
    steps(ours, narrow, 0, 30)
    steps(AdamW8bit(wide, lr=1e-6, weight_decay=0.1), wide, 0, 30)
    for p, q in zip(narrow, wide, strict=True):
        assert torch.equal(ours.master(p), q.detach())
        assert torch.equal(p.detach(), q.detach().bfloat16())
    assert not torch.equal(wide[0], wide[0].bfloat16().float())  # there was something to round


# ---- what survives --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def survival():
    return update_survival(
        [1e-6, 1e-5], weights=0.03 * torch.randn(2**13, generator=torch.manual_seed(1))
    )


def test_plain_bfloat16_loses_the_update_and_the_compensated_ones_keep_it(survival):
    kept = survival.pivot(index="optimizer", columns="learning_rate", values="kept")
    assert kept.loc["adamw, float32 weights"].tolist() == [1.0, 1.0]
    lost = kept.loc["adamw, bfloat16 rounded to nearest"]
    assert 0 < lost[1e-6] < 0.02 and lost[1e-6] < lost[1e-5] < 0.1
    for name in ("adamw-8bit, float32 weights", "adamw-8bit-split, bfloat16 weights"):
        assert kept.loc[name].between(0.98, 1.02).all(), name
    assert abs(kept.loc["adamw, bfloat16 rounded at random", 1e-5] - 1) < 0.1
    table = survival[survival.learning_rate == 1e-6].set_index("optimizer")
    assert table.error["adamw-8bit-split, bfloat16 weights"] < 0.05
    assert table.error["adamw, bfloat16 rounded at random"] > 1


def test_what_is_kept_reaches_the_stored_weights_with_time():
    """Steps under half a bfloat16 spacing wait in the optimizer: in 40 times the steps they are there."""
    arms = {name: ARMS[name] for name in ARMS if "split" in name}
    weights = 0.03 * torch.randn(2**11, generator=torch.manual_seed(1))
    now, later = (
        update_survival([1e-5], weights=weights, steps=n, arms=arms).in_weights.item()
        for n in (5, 200)
    )
    assert now < 0.5 < 0.95 < later < 1.05


def test_survival_is_one_for_a_run_on_itself_and_takes_real_gradients():
    gradients = torch.randn(5, 64, generator=torch.manual_seed(2))
    table = update_survival([1e-3], weights=torch.randn(64), gradients=gradients)
    assert table.kept[0] == pytest.approx(1, abs=1e-9) and table.error[0] == 0
    with pytest.raises(ValueError, match=r"\(5, 64\), \(63,\)"):
        update_survival(weights=torch.randn(63), gradients=gradients)
    with pytest.raises(ValueError, match="steps=0"):
        update_survival(steps=0)


def policy(name, **options):
    dtype = str(OPTIMIZERS[name].weights).removeprefix("torch.")
    return load_policy(few_words.folder(), dtype=dtype, quiet=True, **options)[0]


@pytest.mark.parametrize("name", RUN_ON_CPU)
def test_weight_decay_falls_on_what_transformers_decays(name):
    model = policy(name)
    optimizer = make_optimizer(name, model, learning_rate=1e-6, weight_decay=0.1)
    decayed = {
        id(p) for g in optimizer.param_groups if g["weight_decay"] == 0.1 for p in g["params"]
    }
    wanted = set(Trainer.get_decay_parameter_names(None, model))
    assert {
        n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in decayed
    } == wanted
    held = [p for g in optimizer.param_groups for p in g["params"]]
    # tied embeddings once
    assert len(held) == len(set(map(id, held))) == len(list(model.parameters()))


@pytest.mark.parametrize("name", RUN_ON_CPU)
def test_state_has_the_bytes_it_states(name):
    n = 2**16
    model = torch.nn.Linear(256, n // 256, bias=False, dtype=OPTIMIZERS[name].weights)
    optimizer = make_optimizer(name, model, learning_rate=1.0)
    steps(optimizer, list(model.parameters()), 0, 1)
    (state,) = optimizer.state.values()
    tensors = [v for k, v in state.items() if torch.is_tensor(v) and not k.startswith("qmap")]
    assert sum(t.nbytes for t in tensors) / n == pytest.approx(
        OPTIMIZERS[name].state_bytes, rel=0.01
    )


@pytest.mark.parametrize("name", RUN_ON_CPU)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_checkpoint_continues_bit_for_bit(name, tuning, tmp_path):
    def fresh():
        torch.manual_seed(0)
        model = policy(name, tuning=tuning)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, trained, make_optimizer(name, model, learning_rate=1e-5, weight_decay=0.1)

    _, whole, optimizer = fresh()
    steps(optimizer, whole, 0, 6)
    model, first, optimizer = fresh()
    steps(optimizer, first, 0, 3)
    # as transformers' Trainer does
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    saved = {n: p.clone() for n, p in model.state_dict().items()}
    model, second, optimizer = fresh()
    model.load_state_dict(saved)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    steps(optimizer, second, 3, 6)
    assert all(torch.equal(p, q) for p, q in zip(whole, second, strict=True))
    if name == "adamw-8bit-split" and tuning == "full":
        assert {p.dtype for p in second} == {torch.bfloat16}
        bits = [optimizer.state[p]["low_bits"] for p in second]
        assert all(b.dtype == torch.int16 for b in bits) and any(b.any() for b in bits)


def test_a_checkpoint_without_the_low_bits_would_not_continue():
    """The test above can fail: drop the bits and the runs part."""
    whole, again = parameters(), parameters()
    optimizer = SplitAdamW8bit(whole, lr=1e-5)
    steps(optimizer, whole, 0, 3)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    resumed = SplitAdamW8bit(again, lr=1e-5)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    for p, q in zip(whole, again, strict=True):
        q.data.copy_(p.data)
        resumed.state[q]["low_bits"].zero_()
    steps(optimizer, whole, 3, 6)
    steps(resumed, again, 3, 6)
    assert not torch.equal(optimizer.master(whole[0]), resumed.master(again[0]))


@pytest.mark.parametrize("name", RUN_ON_CPU)
def test_schedule_and_clipping_reach_it_through_accelerate(name):
    """Half the rate gives half the step; a clipped gradient is what the optimizer sees."""
    moved, clipped = {}, {}
    for rate in (1.0, 0.5, 0.0):
        model = policy(name)
        optimizer = make_optimizer(name, model, learning_rate=1e-2)
        accelerator = Accelerator(cpu=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, rate=rate: rate)
        model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)
        before = model.model.layers[0].mlp.up_proj.weight.detach().float().clone()
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        clipped[rate] = accelerator.clip_grad_norm_(model.parameters(), 1e-3).item()
        after = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm().item()
        assert clipped[rate] > 100 and after == pytest.approx(1e-3, rel=0.02)
        prepared.step()
        prepared.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        moved[rate] = (
            (model.model.layers[0].mlp.up_proj.weight.detach().float() - before)
            .abs()
            .mean()
            .item()
        )
    assert (
        moved[0.0] == 0
        and moved[0.5] == pytest.approx(moved[1.0] / 2, rel=0.02)
        and moved[1.0] > 0
    )


def test_a_grpo_run_moves_bfloat16_weights_as_a_float32_run_and_resumes(tmp_path):
    """The trainer's own path: temperature, clipping, schedule, checkpoint; 3 + 3 steps equal 6."""

    def trainer(folder):
        config = dict(
            optimizer="adamw-8bit-split",
            learning_rate=lambda progress: 1e-5 * (1 - progress / 2),
        )
        return make(
            tmp_path / folder,
            model=policy("adamw-8bit-split"),
            steps=6,
            save_steps=3,
            save_total_limit=2,
            **config,
        )

    whole = trainer("whole")
    before = {name: p.detach().clone() for name, p in whole.trained.items()}
    whole.train()
    rates = [row["learning_rate"] for row in record(whole.folder)[0]]
    assert rates == sorted(rates, reverse=True) and rates[0] == 1e-5
    assert {p.dtype for p in whole.trained.values()} == {torch.bfloat16}
    change = {n: whole.optimizer.master(p) for n, p in whole.trained.items()}
    assert all(not torch.equal(change[n], before[n].float()) for n in before)
    assert any(not torch.equal(p, before[n]) for n, p in whole.trained.items())

    (tmp_path / "whole/checkpoint-6").rename(tmp_path / "six")
    again = trainer("whole")
    again.train(resume=True)
    assert all(torch.equal(p, whole.trained[n]) for n, p in again.trained.items())


def test_share_that_moves_counts_what_a_step_really_changes():
    p = (torch.randn(50_000, generator=torch.manual_seed(3)) * 0.01).bfloat16()
    for rate in (1e-6, 1e-5, 1e-4):
        moved = ((p.double() + rate).bfloat16() != p) | ((p.double() - rate).bfloat16() != p)
        # A power of two has half the spacing below it, which the count leaves out.
        assert share_that_moves([p], rate) == pytest.approx(
            moved.double().mean().item(), abs=0.01
        )


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit"])
def test_refuses_to_round_the_update_away(name):
    model = load_policy(few_words.folder(), dtype="bfloat16", quiet=True)[0]
    with pytest.raises(
        ValueError, match=r"learning_rate=1e-06 would not learn.*adamw-8bit-split"
    ):
        make_optimizer(name, model, learning_rate=1e-6)
    make_optimizer(name, model, learning_rate=1e-2)  # large enough for bfloat16


@pytest.mark.parametrize("name", RUN_ON_CPU)
def test_float32_adapters_over_a_bfloat16_base_are_fine(name):
    base = load_policy(few_words.folder(), dtype="bfloat16", quiet=True)[0]
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    optimizer = make_optimizer(name, model, learning_rate=1e-6)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == set(map(id, trained))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"name": "adamw8bit"}, r"name='adamw8bit'.*adamw-8bit-split"),
        ({"learning_rate": -1e-6}, r"learning_rate=-1e-06"),
        ({"learning_rate": float("nan")}, r"learning_rate=nan"),
        ({"weight_decay": -0.1}, r"weight_decay=-0.1"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"eps": -1.0}, r"eps=-1.0"),
    ],
)
def test_wrong_settings_are_named(options, message):
    settings = {"name": "adamw", "learning_rate": 1e-6, **options}
    with pytest.raises(ValueError, match=message):
        make_optimizer(settings.pop("name"), torch.nn.Linear(4, 4), **settings)


def test_weights_it_cannot_serve_are_named():
    with pytest.raises(ValueError, match="no trainable parameter"):
        make_optimizer("adamw", torch.nn.Linear(4, 4).requires_grad_(False), learning_rate=1e-6)


@pytest.mark.parametrize("name", RUN_ON_CPU)
@pytest.mark.parametrize("learning_rate", [0.0, 1e-6, 1e-3, 1e-2])
def test_weights_of_float16_are_trained_by_nothing(name, learning_rate):
    """AdamW's eps is 0 there: four steps of 1e-3 took an entropy of 10.8 to 0.14. No optimizer here takes them."""
    mixed = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, dtype=torch.float16)
    )
    for half in (mixed[1], mixed):
        with pytest.raises(
            ValueError, match="float16.*dtype='float32'.*'bfloat16'.*'lora'"
        ) as refusal:
            make_optimizer(name, half, learning_rate=learning_rate)
        assert "8bit" not in str(refusal.value), "no optimizer that refuses them too"
    mixed[1].requires_grad_(False)
    if name != "adamw-8bit-split":
        make_optimizer(name, mixed, learning_rate=learning_rate)


def test_flash_says_what_is_missing():
    installed = importlib.util.find_spec("flashoptim") is not None
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match="needs CUDA" if installed else r"pip install \"grpo-kit\[flash\]"
    ):
        make_optimizer("flash-adamw", layer, learning_rate=1e-6)


# ---- flashoptim, where it and triton are installed: its kernels under Triton's interpreter -----------------------

FLASH = """
import io, json, torch
from benchmarks.flash_on_cpu import flash_adamw, flash_arm
from grpo_kit.more.lab.rounding import update_survival

weights = 0.03 * torch.randn(2**12, generator=torch.manual_seed(1))
arms = {"24": flash_arm(24), "32": flash_arm(32)}
result = {}
for rms in (1e-3, 1e-7):
    table = update_survival([1e-6], weights=weights, steps=40, gradient_rms=rms, arms=arms).set_index("optimizer")
    result[f"{rms:g}"] = table.kept.to_dict()

def step(optimizer, params, number):
    for p in params:
        p.grad = 1e-4 * torch.randn(p.shape, generator=torch.manual_seed(number)).bfloat16()
    optimizer.step()

def fresh():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(0.03 * torch.randn(s).bfloat16()) for s in ((64, 70), (33,), (5, 7))]
    return params, flash_adamw(params, lr=1e-4, weight_decay=0.1, master_weight_bits=32)

whole, optimizer = fresh()
for number in range(3):
    step(optimizer, whole, number)
file = io.BytesIO()
torch.save([optimizer.state_dict(), whole], file)
file.seek(0)
state, params = torch.load(file, weights_only=True)
again, resumed = fresh()
for p, q in zip(again, params):
    p.data.copy_(q.data)
resumed.load_state_dict(state)
for number in range(3, 6):
    step(optimizer, whole, number)
    step(resumed, again, number)
result["resumes"] = all(
    torch.equal(p, q) and torch.equal(optimizer.state[p]["error_bits"], resumed.state[q]["error_bits"])
    for p, q in zip(whole, again)
)
print(json.dumps(result))
"""


def test_flash_keeps_all_with_32_bits_and_not_with_its_default_nor_for_tiny_gradients():
    for package in ("flashoptim", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    root = str(Path(__file__).parents[2])
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    out = subprocess.run(
        [sys.executable, "-c", FLASH], env=env, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr[-2000:]
    result = json.loads(out.stdout.splitlines()[-1])
    assert result["resumes"]
    assert result["0.001"]["32"] == pytest.approx(1, abs=0.01)
    assert result["0.001"]["24"] < 0.95
    assert result["1e-07"]["32"] > 2  # float16 scales: why gradients must not be tiny
