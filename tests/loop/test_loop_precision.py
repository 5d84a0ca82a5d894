"""Memory and precision on the loop: checkpointing, autocast, a scaled loss, bfloat16 weights, dropout."""

import pytest
import torch
from loop_runs import make, record, same, weights

from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.models.renamed import is_checkpointing


def test_checkpointing_recomputes_and_changes_no_gradient(tmp_path):
    plain = make(tmp_path / "plain")
    plain.train()
    trainer = make(tmp_path / "run", gradient_checkpointing=True)
    calls, layer = [], trainer.model.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(is_checkpointing(trainer.model)))
    trainer.train()
    assert sum(calls) == 2 * 4 and not is_checkpointing(trainer.model), "each update's layer ran twice"
    assert same(weights(trainer), weights(plain))


def test_out_of_memory_halves_the_micro_batch_and_moves_nothing(tmp_path, monkeypatch, capsys):
    plain = make(tmp_path / "plain", micro_batch=2)
    plain.train()
    inner = PaddedUpdate._forward

    def small(self, model, batch, places, temperature):
        if len(places) > 2:
            raise torch.OutOfMemoryError("no room")
        return inner(self, model, batch, places, temperature)

    monkeypatch.setattr(PaddedUpdate, "_forward", small)
    trainer = make(tmp_path / "run", micro_batch=8)
    trainer.train()
    said = capsys.readouterr().out
    assert "with 8 completions at once: the update starts over with 4" in said and "over with 2" in said
    assert same(weights(trainer), weights(plain))
    assert [r["clip_ratio"] for r in record(trainer.folder)[0]] == [
        r["clip_ratio"] for r in record(plain.folder)[0]
    ]


@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_bfloat16_autocast_is_near_float32(tmp_path, seams):
    one = make(tmp_path / "one", seams=seams, steps=1)
    one.train()
    other = make(tmp_path / "other", seams=seams, steps=1, autocast="bfloat16")
    before = weights(make(tmp_path / "none", seams=seams))
    other.train()
    row, wanted = record(other.folder)[0][0], record(one.folder)[0][0]
    assert row["grad_norm"] != wanted["grad_norm"]
    assert all(p.dtype == torch.float32 for p in other.trained.values())
    assert not same({n: w for n, w in weights(other).items() if n in before}, before)
    assert 0 < row.get("rollout/logprob_gap", 0.01) < 0.1


@pytest.mark.parametrize("around", [False, True])
def test_no_copy_of_weights_outlives_their_step(tmp_path, around):
    """Autocast keeps copies until its outermost context ends: one around the run, and steps would read old ones."""
    trainer, after = make(tmp_path / "run", steps=3, autocast="bfloat16"), []
    inner = trainer.update.gradients

    def noting(model, batch, *given):
        found = trainer.update.logprobs(model, batch, 1.0)
        torch.clear_autocast_cache()
        after.append(torch.equal(found, trainer.update.logprobs(model, batch, 1.0)))
        return inner(model, batch, *given)

    trainer.update.gradients = noting
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        trainer.train()
    assert after == [True] * 3


def test_float16_scales_the_loss_and_skips_a_step_that_overflows(tmp_path):
    trainer = make(tmp_path / "run", autocast="float16", steps=3)
    assert trainer.scaler.is_enabled() and trainer.scaler.get_scale() == 2**16
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, enabled=True)
    before = {name: p.clone() for name, p in trainer.trained.items()}
    with torch.autocast("cpu", torch.float16):
        trainer.train()
    assert trainer.scaler.get_scale() < 2**60, "the scale was lowered"
    assert all(torch.equal(p, before[name]) for name, p in trainer.trained.items()), (
        "three overflows, no step"
    )


@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_products_of_16_bits_read_the_weights_of_their_step(seams, tmp_path):
    """Not the copies that autocast made in an earlier step, in a notebook's own autocast either."""
    whole = make(tmp_path / "whole", seams=seams, autocast="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        whole.train()
    single = make(tmp_path / "single", seams=seams, autocast="bfloat16", steps=1)
    for steps in (1, 2, 3, 4):
        single.change(steps=steps)
        single.train()
        torch.clear_autocast_cache()
    assert same(weights(single), weights(whole))


def test_a_float16_run_goes_on_with_its_scale(tmp_path):
    whole = make(tmp_path / "whole", autocast="float16")
    whole.train()
    make(tmp_path / "run", autocast="float16", steps=2, save_steps=2).train()
    trainer = make(tmp_path / "run", autocast="float16", steps=4)
    trainer.train(resume=True)
    assert same(weights(trainer), weights(whole))


def test_bfloat16_weights_keep_what_rounding_takes_away(tmp_path):
    """The optimizer that the weights need is chosen, and goes on from a checkpoint with the bits that it keeps."""

    def bfloat16(name, **options):
        model = make(tmp_path / "none").model.to(torch.bfloat16)
        return make(tmp_path / name, model=model, learning_rate=1e-6, **options)

    whole = bfloat16("whole")
    assert whole.optimizer_name == "adamw-8bit-split"
    whole.train()
    with pytest.raises(ValueError, match="would not learn"):
        bfloat16("plain", optimizer="adamw")
    bfloat16("run", save_steps=2, save_total_limit=2).train()
    (tmp_path / "run/checkpoint-4/digests.json").unlink()
    trainer = bfloat16("run")
    trainer.train(resume=True)
    assert trainer.log and same(weights(trainer), weights(whole))
    kept = [v for state in trainer.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    assert any(v.dtype in (torch.int16, torch.uint16) for v in kept)


@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_lora_dropout_is_off_in_sampling_and_scoring_and_on_in_the_update(tmp_path, seams):
    from grpo_kit.models import load_policy

    model, tokenizer = load_policy("tiny-random", tuning="lora", lora={"lora_dropout": 0.5}, quiet=True)
    modes = []
    layer = model.get_base_model().model.layers[0].mlp.down_proj.lora_dropout["default"]
    layer.register_forward_hook(lambda module, *_: modes.append(module.training))
    trainer = make(
        tmp_path / "run", model=model, tokenizer=tokenizer, tuning="lora", seams=seams, iterations=2, steps=2
    )
    scored = []
    inner = trainer.update.logprobs

    def watched(*args):
        modes.clear()
        found = inner(*args)
        scored.append([*modes])
        return found

    trainer.update.logprobs = watched
    trainer.train()
    assert modes[-1] is True, "the update draws"
    assert len(scored) == 2 and all(part and True not in part for part in scored), (
        "old log-probabilities do not"
    )
