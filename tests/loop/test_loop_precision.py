"""Memory and precision on the loop: checkpointing, autocast, a scaled loss, bfloat16 weights, dropout."""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import few_words
import loop_runs
import pandas as pd
import pytest
import torch
from loop_runs import letters, make, record, same, task, weights
from transformers import GenerationConfig

import grpo_kit as kit
from benchmarks.architectures import random_batch, tiny
from grpo_kit import objectives
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine import _first_use as first_use
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.config_checks import LOSSES
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.models._model_facts import is_checkpointing
from grpo_kit.models.token_lists import why_not_padded
from grpo_kit.more.lab.rescore import rescore
from grpo_kit.more.lab.rounding import update_survival
from grpo_kit.watch.monitor import red_flags


def test_checkpointing_recomputes_and_changes_no_gradient(tmp_path):
    plain = make(tmp_path / "plain")
    plain.train()
    trainer = make(tmp_path / "run", gradient_checkpointing=True)
    assert why_not_padded(trainer.model, gradient=True) is None, (
        "asked before passes are counted"
    )
    calls, layer = [], trainer.model.model.layers[0]
    layer.mlp.register_forward_pre_hook(
        lambda *_: calls.append(is_checkpointing(trainer.model))
    )
    trainer.train()
    assert sum(calls) == 2 * 4 and not is_checkpointing(trainer.model), (
        "each update's layer ran twice"
    )
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
    assert (
        "with 8 completions at once: the update starts over with 4" in said
        and "over with 2" in said
    )
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


def no_letters(completions, **columns):
    """Without any signal in the first two steps."""
    no_letters.calls += 1
    return letters(completions) if no_letters.calls > 2 else [0.0] * len(completions)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seams": "fast"},
        {"iterations": 2},
        {"minibatches": 2},
        {"tuning": "lora"},
        {"save_steps": 1},
    ],
)
def test_float16_begins_with_steps_without_a_signal(tmp_path, options):
    no_letters.calls = 0
    silent = replace(task(), rewards=[no_letters], reward_weights=[1.0])
    trainer = make(tmp_path / "run", task=silent, autocast="float16", **options)
    trainer.train()
    rows = record(trainer.folder)[0]
    assert [row["grad_norm"] for row in rows[:2]] == [0.0, 0.0] and rows[-1]["grad_norm"] > 0
    assert [row["update/left_out"] for row in rows] == [
        0.0
    ] * 4 and trainer.scaler.get_scale() == 2**16


def overflowing(at):
    """A model whose numbers pass float16's largest in that part, and float32's nowhere."""
    model = few_words.policy()[0]
    with torch.no_grad():
        layer = model.model.layers[0]
        weights = {
            "mlp": layer.mlp.up_proj,
            "attention": layer.self_attn.v_proj,
            "head": model.lm_head,
        }[at].weight
        weights.mul_(1e7)
    return model


@pytest.mark.parametrize("at", ["mlp", "attention", "head"])
@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_a_model_that_overflows_in_float16_is_refused_before_the_first_rollout(
    tmp_path, at, seams
):
    with pytest.raises(
        ValueError, match="autocast='float16': .* overflow.* give autocast='bfloat16' or 'none'"
    ):
        make(tmp_path / "run", model=overflowing(at), seams=seams, autocast="float16")
    assert not (tmp_path / "run").exists()
    make(tmp_path / "run", model=overflowing(at), seams=seams, autocast="bfloat16")


@pytest.mark.parametrize("autocast", ["none", "bfloat16", "float16"])
def test_updates_that_are_left_out_are_counted_and_a_run_of_them_is_a_red_flag(
    tmp_path, autocast, capsys
):
    """The loss becomes NaN in the second step, for good: nothing moves, and it is said."""
    trainer = make(tmp_path / "run", steps=8, autocast=autocast)
    inner, moved = trainer.update.gradients, []

    def broken(model, batch, loss, temperature, backward):
        before = [p.clone() for p in trainer.trained.values()]
        moved.append(before)
        spoil = (lambda share: backward(share * float("nan"))) if trainer.step else backward
        return inner(model, batch, loss, temperature, spoil)

    trainer.update.gradients = broken
    trainer.train()
    assert all(
        torch.equal(a, b) for a, b in zip(moved[2], trainer.trained.values(), strict=True)
    )
    rows = record(trainer.folder)[0]
    assert [row["update/left_out"] for row in rows] == [0.0] + [1.0] * 7
    assert capsys.readouterr().out.count("This update is left out") == 7
    (flag,) = [flag for flag in red_flags(pd.DataFrame(rows)) if flag.name == "not finite"]
    assert flag.step == 2 and "gradient norm" in flag.saw


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
    kept = [
        v
        for state in trainer.optimizer.state.values()
        for v in state.values()
        if torch.is_tensor(v)
    ]
    assert any(v.dtype in (torch.int16, torch.uint16) for v in kept)


@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_lora_dropout_is_off_in_sampling_and_scoring_and_on_in_the_update(tmp_path, seams):
    from grpo_kit.models import load_policy

    model, tokenizer = load_policy(
        "tiny-random", tuning="lora", lora={"lora_dropout": 0.5}, quiet=True
    )
    modes = []
    layer = model.get_base_model().model.layers[0].mlp.down_proj.lora_dropout["default"]
    layer.register_forward_hook(lambda module, *_: modes.append(module.training))
    trainer = make(
        tmp_path / "run",
        model=model,
        tokenizer=tokenizer,
        tuning="lora",
        seams=seams,
        iterations=2,
        steps=2,
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


# ---- torch's default dtype -------------------------------------------------------------------------------------------


def trained(folder, **options):
    trainer = make(folder, steps=2, **options)
    trainer.train()
    rows, completions = record(folder)
    return [rows, completions, weights(trainer)]


def rescored(folder):
    make(folder, steps=2).train()
    found = rescore(folder, letters)
    return [found.completions.to_json(), found.groups.to_json(), found.direction]


def of_another_family(family):
    model, batch = tiny(family), random_batch()
    how = GenerationConfig(
        max_new_tokens=6,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        top_p=0.9,
        eos_token_id=[],
        pad_token_id=0,
    )
    made = RolloutEngine(model).generate(batch.prompt_ids, how, seed=0)
    with torch.no_grad():
        return [
            made.completion_ids,
            made.policy_logprobs,
            PackedUpdate(model, Config()).logprobs(model, batch, 1.0),
        ]


def every_loss():
    logprobs, old = (
        torch.linspace(low, 0, 8, dtype=torch.float32).view(2, 4) for low in (-2.0, -2.1)
    )
    mask, advantages = (
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        torch.tensor([1.3, -0.7], dtype=torch.float32),
    )
    functions = [getattr(objectives, name) for name in LOSSES]
    functions[[*LOSSES].index("dr_grpo")] = functools.partial(
        objectives.dr_grpo, max_completion_tokens=5
    )
    given = [function(logprobs, old, advantages, mask) for function in functions]
    wanted = torch.tensor([True, False])
    kto = objectives.kto(
        logprobs[:, 0], old[:, 0], wanted, 0.1, desirable_weight=1.337, undesirable_weight=0.77
    )
    return [*given, kto, objectives.group_advantages(logprobs[0], 2)]


def accuracy():
    model, tokenizer = few_words.policy()
    return [
        repr(kit.evaluate(model, tokenizer, task(), temperature=t).table()) for t in (0.0, 1.0)
    ]


COMPUTED = {
    "plain": lambda folder: trained(folder, beta=0.04, iterations=2, entropy_bonus=0.01),
    "fast": lambda folder: trained(folder, seams="fast", beta=0.04),
    "lora": lambda folder: trained(folder, seams="fast", tuning="lora"),
    "bfloat16 products": lambda folder: trained(
        folder, seams="fast", autocast="bfloat16", scale="batch", importance_sampling_cap=2.0
    ),
    "evaluation": lambda folder: accuracy(),
    "rescore": rescored,
    "mistral": lambda folder: of_another_family("mistral"),
    "gpt-oss": lambda folder: of_another_family("gpt-oss"),
    "losses": lambda folder: every_loss(),
    "plan": lambda folder: repr(kit.plan_memory("cpu")),
    "schedules": lambda folder: [kit.cosine(1, 0)(step / 7) for step in range(8)],
    "survival": lambda folder: update_survival([1e-6], steps=3).to_json(),
    "loaded": lambda folder: dict(
        kit.load_policy("tiny-random", tuning="lora", quiet=True)[0].state_dict()
    ),
}


def as_text(name, folder):
    """What is computed, to the last bit."""
    plain = lambda value: [str(value.dtype), value.double().tolist()]  # noqa: E731
    return json.dumps(COMPUTED[name](folder), default=plain)


@functools.cache
def in_float32(name):
    with tempfile.TemporaryDirectory() as folder:
        return as_text(name, Path(folder) / "run")


CAMPAIGN = [
    pytest.param(dtype, marks=pytest.mark.campaign) for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("dtype", [torch.float64, *CAMPAIGN], ids=str)
@pytest.mark.parametrize("name", COMPUTED)
def test_nothing_depends_on_torchs_default_dtype(name, dtype, tmp_path, monkeypatch):
    """An interrupted load may leave another one."""
    monkeypatch.setattr(first_use, "cache_folder", lambda: tmp_path)
    few_words.policy(), loop_runs._policy("full"), loop_runs._policy("lora")
    wanted = in_float32(name)
    torch.set_default_dtype(dtype)
    try:
        assert as_text(name, tmp_path / "run") == wanted
    finally:
        torch.set_default_dtype(torch.float32)
