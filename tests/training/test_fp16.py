"""fp16=True: autocast over float32 weights and a scaled loss, on a CPU with torch's gradient scaler for it."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from accelerate.state import AcceleratorState
from test_update import kit_step, micro_batches
from tiny_run import difference, make, same, weights

from grpo_kit.models import load_policy
from grpo_kit.record.files import read_metrics
from grpo_kit.training.accelerate_state import AccelerateState
from grpo_kit.training.precision import check_trained_for_fp16
from grpo_kit.watch.flags import gradient_spike
from grpo_kit.watch.red_flag import Setup

SCALE = 2.0**16  # where torch begins
KINDS = {
    "float32": dict(dtype="float32"),
    "adapters over float16": dict(tuning="lora", dtype="float16", lora={"init_lora_weights": False}),
}


@pytest.fixture
def fp16(monkeypatch):
    """f(trainer, scale) -> the trainer, as accelerate sets one up on a card."""

    def on(trainer, scale=SCALE):
        monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        if hasattr(trainer, "accelerate_state"):  # the kit's: what it puts back is of this one
            trainer.accelerate_state = AccelerateState(trainer.accelerator)
        return trainer

    return on


def trainer_of(which, kind, folder, **options):
    torch.manual_seed(0)
    kit = {"kit": {"rollout": "hf"}} if which == "kit" else {}  # trl's own rollouts: both draw the same
    model = load_policy("tiny-random", quiet=True, **KINDS[kind])[0]
    return make(which, folder, model=model, max_steps=3, **{**kit, **options})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.05}, {"entropy_coef": 0.3}], ids=str)
def test_a_run_ends_in_trls_weights(kind, options, fp16, tmp_path):
    """Clipping sees what was unscaled; with an entropy bonus the scores are computed twice."""
    common = dict(optim="sgd", learning_rate=1.0, **options)
    ends = {}
    for which in ("kit", "plain"):
        trainer = fp16(trainer_of(which, kind, tmp_path / which, **common))
        begun = weights(trainer)
        trainer.train()
        assert trainer.accelerator.scaler.get_scale() == SCALE
        ends[which] = (
            weights(trainer),
            [e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e],
        )
    apart, moved = difference(ends["kit"][0], ends["plain"][0]), difference(begun, ends["kit"][0])
    assert moved > 1e-3 and apart < 0.02 * moved
    assert ends["kit"][1] == pytest.approx(ends["plain"][1], rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_float32s_in_any_number_of_chunks(kind, fp16, tmp_path):
    kit = trainer_of("kit", kind, tmp_path, per_device_train_batch_size=6, gradient_accumulation_steps=2)
    _, wanted, _ = kit_step(kit, micro_batches())
    fp16(kit)
    for chunk in (None, 24):
        kit.update.memory.chunk_tokens = chunk
        _, scaled, _ = kit_step(kit, micro_batches())
        for name, gradient in wanted.items():
            error = (scaled[name] / SCALE - gradient).norm() / gradient.norm().clamp(min=1e-8)
            assert error < 0.02, (name, error)


def test_a_step_that_overflows_is_left_out_and_the_scale_falls(fp16, tmp_path, capsys):
    trainer = fp16(trainer_of("kit", "float32", tmp_path), scale=2.0**40)
    begun = weights(trainer)
    trainer.train()
    assert same(begun, weights(trainer)) and trainer.accelerator.scaler.get_scale() == 2.0**37
    assert not read_metrics(tmp_path)["grad_norm"].map(math.isfinite).any()
    assert "gradient spike" not in capsys.readouterr().out


def test_only_under_fp16_an_infinite_gradient_is_no_flag():
    table = pd.DataFrame({"step": range(8), "grad_norm": [1.0] * 6 + [math.inf, 1.0]})
    assert gradient_spike(table, Setup.of({"args": {"fp16": True}})) is None
    assert gradient_spike(table, Setup.of({"args": {"fp16": False}})).step == 6
    table.loc[7, "grad_norm"] = 100.0
    assert gradient_spike(table, Setup.of({"args": {"fp16": True}})).step == 7


def test_a_cpu_is_refused(tmp_path):
    """accelerate would compute in float32 without a word."""
    with pytest.raises(ValueError, match="fp16=True needs a CUDA card"):
        make("kit", tmp_path, fp16=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_trained_weights_of_16_bits_are_refused_before_training(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_kit.training.trainer.settle_precision", lambda *_, **__: None)  # as on a card
    model = load_policy("tiny-random", dtype=dtype, quiet=True)[0]
    with pytest.raises(ValueError, match=f"these are {dtype}: load with dtype='float32'"):
        make("kit", tmp_path, model=model, fp16=True)
    for kind in KINDS.values():
        check_trained_for_fp16(SimpleNamespace(fp16=True), load_policy("tiny-random", quiet=True, **kind)[0])
    check_trained_for_fp16(SimpleNamespace(fp16=False), model)
