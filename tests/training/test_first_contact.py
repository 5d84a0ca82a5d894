"""The first step beside TRL's plain path: what is wrong is caught, what is right moves nothing."""

import json

import pytest
import torch
from tiny_run import data, interrupted_once, letters, make, same, weights
from transformers import GenerationConfig

from benchmarks.first_contact import ALONE, CLEAN, FAULTS, PlainTrainer, apart, changed, trained
from benchmarks.result import RESULTS
from grpo_kit import cuda as hardware
from grpo_kit.loop.interrupts import Stopped
from grpo_kit.models import load_policy
from grpo_kit.optim.check_adamw import MOST, beside_adamw
from grpo_kit.rollout.compare_logprobs import few, gap
from grpo_kit.rollout.decode import Decoder
from grpo_kit.rollout.engine import RolloutEngine
from grpo_kit.training import plain_pass
from grpo_kit.training.contact_findings import CHECKS
from grpo_kit.training.plain_pass import relative

# Bit for bit, but what is trained on is put off in the middle of a run there, where packing has moved a weight already:
# by rounding, which Adam makes larger (1.0e-5 on one machine), and which is far less than a step of the rate, 1e-2.
ALMOST = {("update", "exception at step 2"): 1e-4}


@pytest.fixture
def card(monkeypatch):
    """The CPU checks itself, as a card does."""
    monkeypatch.setattr(hardware, "may_fail", lambda device: True)


@pytest.fixture(scope="module")
def plain():
    return trained(PlainTrainer)


def checks(folder):
    return [json.loads(line) for line in (folder / CHECKS).read_text().splitlines()]


# ---- faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part, name", FAULTS, ids=lambda value: value.replace(" ", "-"))
def test_a_fault_is_caught_and_the_run_is_trls(part, name, plain):
    run = trained(fault=FAULTS[part, name], **ALONE[part])
    assert run.off == [part]
    assert apart(run, plain) <= ALMOST.get((part, name), 0.0)
    for words in (
        "First contact with this machine",
        "found:",
        "instead:",
        "model: llama",
        "torch 2",
        "issue",
    ):
        assert words in run.said
    assert ("First step checked" in run.said) == (name == "exception at step 2")


def test_where_the_engine_is_off_evaluations_go_without_it_too(card, tmp_path):
    trainer = make("kit", tmp_path, max_steps=1)
    assert RolloutEngine.unsupported(trainer.model, GenerationConfig()) is None
    with FAULTS["engine", "wrong mask"](trainer):
        trainer.train()
    assert "failed here before" in RolloutEngine.unsupported(trainer.model, GenerationConfig())


@pytest.mark.parametrize("part", ["engine", "update", "optimizer"])
def test_without_the_check_the_fault_would_have_been_trained_on(part, plain):
    """Else the comparison above would show nothing."""
    wrong = {"engine": "wrong mask", "update": "wrong mask", "optimizer": "wrong sign"}[part]
    run = trained(fault=FAULTS[part, wrong], checks=False, **ALONE[part])
    assert not run.found and apart(run, plain) > 1e-5


def test_wrong_packed_scores_of_the_reference_are_trls(plain):
    """They are asked for before any gradient; a buffer that holds wrong ones would be trained on."""
    options = {"beta": 0.1, "num_iterations": 2, "learning_rate": 1e-2}
    run = trained(fault=FAULTS["update", "wrong mask"], **ALONE["update"], **options)
    # TRL's trainer would look for the reference under a name.
    wanted = trained(checks=False, rollout="hf", pack=False, **options)
    assert run.off == ["scores"] and apart(run, wanted) < 1e-6 < 1e-4 < apart(wanted, plain)


def test_the_second_pass_over_a_buffer_keeps_its_ratio():
    """TRL scores old log-probabilities beforehand; the packed update left that to its first pass, which failed."""
    options = {"num_iterations": 2, "learning_rate": 1e-2, "max_steps": 4}
    run = trained(fault=FAULTS["update", "exception"], **ALONE["update"], **options)
    assert run.off == ["update"] and apart(run, trained(PlainTrainer, **options)) < 1e-6


# ---- nothing wrong --------------------------------------------------------------------------------------------


# The others are in the benchmark.
QUICK = [
    "LoRA with dropout, float32",
    "full, bfloat16 weights",
    "full, bfloat16 autocast",
    "beta 0.1",
    "num_iterations 2",
]


@pytest.mark.parametrize("name", QUICK)
def test_what_is_right_is_left_alone(name):
    """One line, and weights that are bit for bit those of a run that does not check."""
    checked, unchecked = (trained(checks=there, **CLEAN[name]) for there in (True, False))
    assert checked.off == [] and {line["outcome"] for line in checked.found} == {"equal"}
    assert checked.said.count("First step checked beside TRL's plain path (4 completions)") == 1
    assert apart(checked, unchecked) == 0 and not unchecked.found


def test_metrics_are_logged_once(card, tmp_path, monkeypatch):
    checked = make("kit", tmp_path / "a", max_steps=2)
    checked.train()
    monkeypatch.setattr(hardware, "may_fail", lambda device: False)
    unchecked = make("kit", tmp_path / "b", max_steps=2)
    unchecked.train()
    clock = ("time", "runtime", "per_second")
    entries = [
        [{n: v for n, v in entry.items() if not any(c in n for c in clock)} for entry in t.state.log_history]
        for t in (checked, unchecked)
    ]
    assert entries[0] == entries[1] and same(weights(checked), weights(unchecked))


def test_a_cpu_does_not_check_itself(tmp_path, capsys):
    make("kit", tmp_path, max_steps=1).train()
    assert not (tmp_path / CHECKS).exists() and "First step" not in capsys.readouterr().out


def test_each_train_checks_again(card, tmp_path, capsys):
    trainer = make("kit", tmp_path, max_steps=4)
    interrupted_once(trainer, "backward", 2)
    with pytest.raises(Stopped):
        trainer.train()
    trainer.train()
    assert [line["step"] for line in checks(tmp_path) if line["part"] == "update"] == [1, 3]
    assert capsys.readouterr().out.count("First step checked") == 2


def test_a_step_without_a_signal_leaves_the_gradient_to_the_next(card, tmp_path, capsys):
    def late(completions, trainer_state=None, **columns):
        return letters(completions) if trainer_state.global_step else [1.0] * len(completions)

    make("kit", tmp_path, max_steps=3, rewards=late, kit={"optimizer": "adamw-8bit"}).train()
    found = {line["part"]: line["step"] for line in checks(tmp_path)}
    assert found == {"engine": 1, "update": 2, "optimizer": 2}
    assert capsys.readouterr().out.count("First step checked") == 1


def test_what_cannot_be_computed_the_plain_way_is_not_called_wrong(card, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(plain_pass, "plain_logprobs", full)
    trainer = make("kit", tmp_path, max_steps=1)
    trainer.train()
    assert trainer.rollout == "kit"
    assert {line["part"]: line["outcome"] for line in checks(tmp_path)} == {
        "engine": "not checked",
        "update": "equal",
    }
    assert "could not be checked (OutOfMemoryError" in capsys.readouterr().out


# ---- what stays an error --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_interrupts_and_a_full_memory_are_not_the_engines_fault(error, card, tmp_path):
    trainer = make("kit", tmp_path, max_steps=1)

    def fail(*args):
        raise error

    with changed(Decoder, "_step", lambda _: fail), pytest.raises(error):
        trainer.train()
    assert trainer.rollout == "kit"


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_interrupts_and_a_full_memory_are_not_the_updates_fault(error, card, tmp_path):
    trainer = make("kit", tmp_path, max_steps=1)

    def fail(*args):
        raise error

    with changed(trainer.update, "_label_logprobs", lambda _: fail), pytest.raises(error):
        trainer.train()
    assert not trainer.logprobs.plain


def test_a_model_that_is_nan_stays_an_error(card, tmp_path):
    model = load_policy("tiny-random", quiet=True)[0]
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    trainer = make("kit", tmp_path, model=model, max_steps=1)
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.train()
    assert trainer.rollout == "kit"


def test_a_prompt_that_is_too_long_stays_the_users(card, tmp_path):
    trainer = make("kit", tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="exceeds the model's context"):
        trainer._generate_single_turn([[5] * 10**6] * 4, None, {}, 4)
    assert trainer.rollout == "kit"


def test_a_reward_that_raises_stays_the_users(card, tmp_path):
    def broken(completions, **columns):
        raise KeyError("answer")

    trainer = make("kit", tmp_path, rewards=broken, max_steps=1)
    with pytest.raises(Exception, match="answer"):
        trainer.train()
    assert trainer.rollout == "kit"


# ---- parts ----------------------------------------------------------------------------------------------------


def test_flex_attention_gives_way_to_a_dense_mask_first(card, tmp_path, monkeypatch, capsys):
    trainer = make("kit", tmp_path, max_steps=1)
    inner = trainer.update._label_logprobs
    monkeypatch.setattr(trainer.update.memory, "attention", "flex_attention")

    def wrong_in_flex(model, ids, mask, positions, labels):
        if trainer.update.memory.attention == "sdpa":
            return inner(model, ids, mask, positions, labels)
        logprobs, entropies = inner(model, ids, None, positions, labels)
        return logprobs * 1.3, entropies

    monkeypatch.setattr(trainer.update.memory, "attention_of", lambda model: torch.enable_grad())
    monkeypatch.setattr(trainer.update, "_label_logprobs", wrong_in_flex)
    trainer.train()
    assert [(c["part"], c["outcome"]) for c in checks(tmp_path) if c["part"] != "engine"] == [
        ("update", "differs"), ("flex", "off"), ("update", "equal"),
    ]  # fmt: skip
    assert not trainer.logprobs.plain and trainer.update.memory.attention == "sdpa"


def test_flex_attention_that_raises_is_in_the_record_too(card, tmp_path, monkeypatch, capsys):
    trainer = make("kit", tmp_path, max_steps=1)
    inner = trainer.update._label_logprobs
    monkeypatch.setattr(trainer.update.memory, "attention", "flex_attention")

    def raises_in_flex(*inputs):
        if trainer.update.memory.attention == "sdpa":
            return inner(*inputs)
        raise type("BackendCompilerFailed", (RuntimeError,), {"__module__": "torch._dynamo.exc"})(
            "no such kernel"
        )

    monkeypatch.setattr(trainer.update.memory, "attention_of", lambda model: torch.enable_grad())
    monkeypatch.setattr(trainer.update, "_label_logprobs", raises_in_flex)
    trainer.train()
    found = {c["part"]: c for c in checks(tmp_path)}
    assert found["flex"]["outcome"] == "off" and "no such kernel" in found["flex"]["why"]
    assert found["update"]["outcome"] == "equal" and not trainer.logprobs.plain
    assert capsys.readouterr().out.count("FlexAttention in the packed update failed") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_optimizers_agree_with_adamw_and_wrong_ones_do_not(dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = (2**14, 64)
    weights = [torch.randn(n, generator=generator).mul(0.05).to(dtype) for n in sizes]
    grads = [torch.randn(n, generator=generator).mul(1e-3).to(dtype) for n in sizes]
    common = {"learning_rate": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": [0.1, 0.0]}
    names = ["adamw-8bit-split"] if dtype == torch.bfloat16 else ["adamw", "adamw-8bit"]
    before = [w.clone() for w in weights]
    for name in names:
        error = beside_adamw(name, weights, grads, **common)
        assert error <= (1e-5 if name == "adamw" else MOST / 2) and (error > 0 or name == "adamw")
        for fault, least in (("wrong sign", 1.5), ("wrong scale", 1.5), ("NaN", float("inf"))):
            with FAULTS["optimizer", fault](None):
                assert name == "adamw" or beside_adamw(name, weights, grads, **common) >= least
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True)), "copies were updated"


def test_an_optimizer_that_was_off_stays_off_when_the_run_is_resumed(card, tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "kit": {"optimizer": "adamw-8bit"}}
    with FAULTS["optimizer", "exception"](None):
        make("kit", tmp_path, **options).train()
    later = make("kit", tmp_path, **{**options, "max_steps": 3})
    later.train(resume_from_checkpoint=True)
    assert type(later.optimizer.optimizer) is torch.optim.AdamW and later.state.global_step == 3


@pytest.mark.parametrize("scheduler", ["linear", "reduce_lr_on_plateau"])
def test_the_schedule_goes_on_with_the_other_optimizer(scheduler, card, tmp_path):
    """Rates are those that the run would have had."""
    rates = []
    for broken in (True, False):
        trainer = make(
            "kit", tmp_path / str(broken), lr_scheduler_type=scheduler, max_steps=3, eval_dataset=data(4),
            eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, metric_for_best_model="eval_reward",
            kit={"optimizer": "adamw-8bit" if broken else "adamw", "warmup": 0.5},
        )  # fmt: skip
        if broken:
            with FAULTS["optimizer", "exception"](trainer):
                trainer.train()
        else:
            trainer.train()
        rates.append([e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e])
    assert rates[0] == rates[1] and len(rates[0]) == 3


def test_rows_are_two_of_two_prompts_the_longest_included():
    assert few(["a"] * 4 + ["b"] * 4 + ["c"], [1, 9, 3, 4, 0, 2, 0, 0, 1]) == [1, 3, 5]
    assert few(["a"], [0]) == []


def test_gaps_and_errors_of_numbers_that_are_none_are_infinite():
    good, bad = [torch.ones(3)], [torch.tensor([1.0, torch.nan, 1.0])]
    for measure in (gap, relative):
        assert measure(bad, good) == float("inf") and measure(good, good) == 0


def limits_of(trainer):
    return trainer.first_contact._limits()


def test_limits_go_by_the_least_precise_arithmetic(tmp_path):
    exact = limits_of(make("kit", tmp_path / "a"))
    narrow = limits_of(make("kit", tmp_path / "b", bf16=True))
    half = load_policy("tiny-random", dtype="bfloat16", quiet=True)[0]
    assert exact.logprobs < narrow.logprobs and limits_of(make("kit", tmp_path / "c", model=half)) == narrow
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert limits_of(make("kit", tmp_path / "d")) == narrow
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_the_committed_table_has_every_fault_caught_and_nothing_else():
    result = json.loads((RESULTS / "first_contact.json").read_text())
    assert [(row["part"], row["fault"]) for row in result["faults"]] == list(FAULTS)
    for row in result["faults"]:
        within = ALMOST.get((row["part"], row["fault"]), 0.0)
        assert row["off"] == [row["part"]] and row["largest difference from TRL's weights"] <= within
    assert [row["run"] for row in result["clean"]] == list(CLEAN)
    for row in result["clean"]:
        assert not row["off"] and not row["not checked"] and len(row["said"]) == 1
        assert row["largest difference from the run without checks"] == 0
    for row in json.loads((RESULTS / "first_contact_margins.json").read_text())["margins"]:
        over = [n for n, value in row.items() if f"{n}, at most" in row and value > row[f"{n}, at most"]]
        assert bool(over) == (row["fault"] != "none"), row
