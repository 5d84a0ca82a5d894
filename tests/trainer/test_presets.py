"""Presets: every number has a unit and a reason, tuning and task are followed, and `auto` picks right."""

import dataclasses
import inspect
import re
from types import SimpleNamespace

import few_words
import pytest
import torch

from grpo_kit import GRPOTrainer, plan_memory, tasks
from grpo_kit.engine.optim.choose import make_optimizer
from grpo_kit.loop.config import FIELDS, Config, Preset
from grpo_kit.loop.config_checks import LOSSES
from grpo_kit.models import load_policy
from grpo_kit.rewards import ExactAnswer, SoftFormat
from grpo_kit.schedules import linear
from grpo_kit.tasks import from_rows
from grpo_kit.tasks._by_name import NAMES as TASKS
from grpo_kit.trainer.presets import NAMES, TABLE, preset


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("KIT_PROFILE", raising=False)


def _card(monkeypatch, gib, bf16=True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gib is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some Card")
    properties = SimpleNamespace(total_memory=(gib or 0) * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    # As torch says it: an older card "supports" bfloat16 by way of float32.
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: bf16 or including_emulation,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tuning", ["full", "lora", "qlora"])
def test_every_number_of_a_preset_has_unit_and_reason(name, tuning):
    made = preset(name, tuning=tuning)
    table, sets = made.table(), {field for field, where, *_ in TABLE if name in where.split()}
    assert list(table.columns) == ["value", "unit", "reason"]
    assert (
        {"preset", "tuning", "autocast"} | sets
        == set(table.index)
        == set(made.reasons) - set(LOSSES[made.loss])
    )
    assert (table["reason"].str.len() > 0).all() and (table["unit"].str.len() > 0).all()
    assert all(n in str(made) and n in made._repr_html_() for n in sets)
    (model,) = (line for line in str(made).splitlines() if line.startswith("model "))
    assert model.split()[1] == made.model and model.endswith(made.why("model"))


def test_every_preset_sets_the_same_fields_and_says_each_once():
    full = [
        [field for field, where, *_ in TABLE if name in where.split() and "lora" not in where]
        for name in NAMES
    ]
    assert all(sorted(set(fields)) == sorted(fields) == sorted(full[0]) for fields in full)
    assert set(full[0]) < set(FIELDS)


def test_changes_are_marked_in_the_table_and_leave_the_preset_alone():
    mine = preset("cpu", steps=64, task="countdown", top_p=0.9)
    assert mine.steps == 64 and mine.why("steps") == "set by you (was 32)"
    assert mine.why("top_p") == "set by you (was 1.0)", "also of a field that no preset sets"
    assert "iterations" not in mine.table().index
    assert mine.task_options == {}  # largest's arguments are none of countdown's
    replaced = dataclasses.replace(preset("cpu"), seed=7)
    assert "set by you" in replaced.why("seed")
    mine.task_options["highest"] = 30
    preset("cpu").task_options["n_train"] = 1
    assert preset("cpu").task_options == {"n_train": 512}


def test_a_config_is_changed_as_its_preset_would_have_been():
    """What was set by hand stays, what the preset set follows another tuning or task; the given one is left alone."""
    mine = preset("cpu", steps=64, beta=0.1)
    lora = preset(mine, tuning="lora")
    assert (
        lora == preset("cpu", tuning="lora", steps=64, beta=0.1) and lora.learning_rate == 1e-4
    )
    assert preset(lora, tuning="full") == mine == preset(mine) is not mine
    assert preset(preset("cpu", learning_rate=3e-4), tuning="lora").learning_rate == 3e-4
    assert preset(mine, task="countdown").task_options == {} and mine.task == "largest"
    assert preset(preset("cpu", task_options={"n_train": 9}), steps=1).task_options == {
        "n_train": 9
    }
    bare = Config(steps=3)
    assert preset(bare, group_size=4) == Preset(steps=3, group_size=4) and bare.group_size == 8


@pytest.mark.parametrize(
    ("gib", "bf16", "name", "why"),
    [
        (None, False, "cpu", "no CUDA card"),
        (11, False, "cpu", "Some Card has 11 GiB, t4 needs 14"),
        (14.6, False, "t4", "Some Card has 15 GiB, gpu24 needs 20"),  # a T4
        (16, True, "t4", "Some Card has 16 GiB, gpu24 needs 20"),
        (22, True, "gpu24", "Some Card has 22 GiB"),  # what a 24 GB A10G reports
        (80, True, "gpu24", "Some Card has 80 GiB"),
        (
            32,
            False,
            "t4",
            "32 GiB but no bfloat16 of its own, which gpu24 trains in; t4 computes in float32",
        ),  # a V100
    ],
)
def test_auto_picks_by_the_card_and_says_why(monkeypatch, gib, bf16, name, why):
    _card(monkeypatch, gib, bf16)
    picked = preset()
    assert picked.preset == name and why in picked.why("preset")


def test_environment_decides_for_auto_only(monkeypatch):
    monkeypatch.setenv("KIT_PROFILE", "smoke")
    assert preset().preset == preset(
        "auto"
    ).preset == "smoke" and "KIT_PROFILE" in preset().why("preset")
    assert preset("cpu").preset == "cpu"
    monkeypatch.setenv("KIT_PROFILE", "auto")
    _card(monkeypatch, None)
    assert preset().preset == "cpu"
    monkeypatch.setenv("KIT_PROFILE", "cpuu")
    with pytest.raises(
        ValueError, match="'cpuu' is not known; use auto, smoke, cpu, t4, gpu24"
    ):
        preset()


@pytest.mark.parametrize("name", NAMES)
def test_rate_dtype_and_optimizer_are_those_of_the_tuning(name):
    full, lora, qlora = (preset(name, tuning=tuning) for tuning in ("full", "lora", "qlora"))
    assert lora.learning_rate > full.learning_rate and lora.optimizer is None, (
        "adapters take what they need"
    )
    assert full.optimizer is not None and preset(name) == full
    assert dataclasses.replace(qlora, tuning="lora") == lora
    assert full.warmup_steps == max(2, full.steps // 10 + (full.steps % 10 > 0))
    assert full.autocast == ("bfloat16" if torch.cuda.is_available() else "none")
    assert (full.loss, full.epsilon_high) == ("dapo", 0.28)
    assert full.max_completion_tokens is full.reward_weights is None, "the task's"


def _own(**options):
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(9)]
    return from_rows("own", rows, max_completion_tokens=40, **options)


def _trainer(tmp_path, config, task):
    model, tokenizer = few_words.policy()
    return GRPOTrainer(
        model, task, config, tokenizer=tokenizer, folder=tmp_path / "run", live=None
    )


def test_the_task_decides_weights_and_length(tmp_path):
    own = _own(reward=[ExactAnswer(), SoftFormat()], reward_weights=[0.75, 0.25])
    trainer = _trainer(tmp_path, preset("cpu"), own)
    assert (trainer.config.max_completion_tokens, trainer.reward_weights) == (40, [0.75, 0.25])
    trainer = _trainer(tmp_path, preset("cpu", reward_weights=[0.5, 0.5]), own)
    assert trainer.reward_weights == [0.5, 0.5]
    for name, tokens in {"smoke": 8, "cpu": 12, "t4": 128, "gpu24": 256}.items():
        cfg = preset(name, held_out=4)
        assert (
            cfg.max_completion_tokens is None
            and cfg.make_task().max_completion_tokens == tokens
        )


def test_the_record_says_whose_the_task_is(tmp_path):
    config = preset("smoke")
    trainer = _trainer(tmp_path, config, _own(reward=ExactAnswer()))
    assert trainer.config is config and config.task is None and config.task_options == {}
    assert config.why("task") == "the one that the trainer was given"
    assert preset(config).task == "largest" and preset(config).max_completion_tokens is None, (
        "nothing set by hand"
    )
    named = preset("smoke", held_out=4)
    assert _trainer(tmp_path, named, named.make_task()).config.task == "largest"
    trainer.config.freeze()
    again = _trainer(tmp_path, config, named.make_task()).config
    assert again is not config and (again.task, again.max_completion_tokens) == (None, 8), (
        "a running one is copied"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tuning": "lora"},
            "tuning='lora': this model has no adapters; load it with load_policy",
        ),
        (
            {"dtype": "bfloat16"},
            "dtype='bfloat16': this model's weights are float32; load it with load_policy",
        ),
    ],
)
def test_a_model_that_was_loaded_otherwise_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        _trainer(tmp_path, preset("smoke", **change), _own(reward=ExactAnswer()))


def test_a_run_may_have_a_length_of_its_own(tmp_path):
    """The config's wins over the task's."""
    own = _own(reward=ExactAnswer())
    short = preset("cpu", max_completion_tokens=8, held_out=4)
    assert short.make_task().max_completion_tokens == 8
    assert _trainer(tmp_path, short, own).config.max_completion_tokens == 8
    assert preset(short, max_completion_tokens=9).max_completion_tokens == 9


def test_fields_of_config_win():
    config = preset("smoke", beta=0.1, steps=7, iterations=2, temperature=linear(1.2, 0.8))
    assert (config.beta, config.steps, config.iterations, config.temperature) == (
        0.1,
        7,
        2,
        linear(1.2, 0.8),
    )


@pytest.mark.parametrize("bf16", [True, False])
def test_a_card_computes_in_bfloat16_only_where_it_has_it(monkeypatch, bf16):
    monkeypatch.setattr("grpo_kit.trainer.presets.has_bf16", lambda: bf16)
    assert preset("t4").autocast == ("bfloat16" if bf16 else "none")
    assert preset("t4", autocast="float16").autocast == "float16"


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_suits_the_weights(name):
    """At its own learning rate, and on every machine."""
    p = preset(name)
    model = load_policy(few_words.folder(), dtype=p.dtype, quiet=True)[0]
    make_optimizer(p.optimizer, model, learning_rate=p.learning_rate)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="optimizer='adam9' is not known"):
        preset("cpu", optimizer="adam9")


def test_the_task_has_the_presets_sizes():
    task = preset("smoke").make_task()
    sizes = (len(task.train), len(task.held_out), task.max_completion_tokens)
    assert task.name == "largest" and sizes == (32, 8, 8)
    numbers = {len(row["numbers"]) for row in preset("gpu24", held_out=20).make_task().held_out}
    assert numbers == {2, 3}


@pytest.mark.parametrize("name", NAMES)
def test_enough_rows_for_one_pass(name):
    p = preset(name, held_out=4)
    assert len(p.make_task().train) >= p.steps * p.prompts_per_step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"steps": 1.5}, "steps=1.5 must be a whole"),
        ({"steps": True}, "steps=True must be a whole"),
        ({"group_size": 1}, "group_size=1 must be a whole number of at least 2"),
        ({"save_steps": -1}, "save_steps=-1"),
        ({"temperature": 0.0}, "temperature=0.0 must be a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"beta": -0.1}, "beta=-0.1 must be a number of at least 0"),
        (
            {"dtype": "fp32"},
            "dtype='fp32' is not known; use None, 'float32', 'bfloat16' or 'float16'",
        ),
        ({"task": "chess"}, "task='chess' is not known; use 'largest'"),
        ({"task_options": 3}, "task_options=3 must be a dict"),
        ({"step": 3}, "step=3: Config has no such field; did you mean 'steps'?"),
        ({"lora_learning_rate": 1e-4}, "no such field; did you mean 'learning_rate'?"),
        ({"tuning": "half"}, "tuning='half' is not known"),
    ],
)
def test_refusals_name_field_and_value(change, message):
    with pytest.raises(ValueError, match=message):
        preset("cpu", **change)


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"gsm8k"}))  # its data is not here
def test_another_task_gets_the_tokens_its_answers_take(name):
    own, asked = getattr(tasks, name)().max_completion_tokens, {}
    for other in NAMES:
        if name == preset(other).task:
            assert preset(other, task=name) == preset(other)
            continue
        made = preset(other, task=name, held_out=8)
        assert made.max_completion_tokens is None
        assert preset(other, task=name, max_completion_tokens=7).max_completion_tokens == 7
        row = made.table().loc["max_completion_tokens"]
        assert list(row) == ["the task's", "tokens", "see the task"]
        assert "for this task (was" in made.table().loc["task_options", "reason"]
        asked[
            repr((made.task, made.task_options, made.held_out, made.max_completion_tokens))
        ] = made
    for made in asked.values():  # most presets ask for the same one
        task = made.make_task()
        assert len(task.held_out) == 8 and task.max_completion_tokens == own


@pytest.mark.parametrize(
    ("name", "options", "tokens"),
    [
        ("countdown", {"think": True}, 256),
        ("countdown", {"think": False}, 24),
        ("countdown", {"numbers": (2, 3), "think": True}, 192),
        ("code", {"max_completion_tokens": 300}, 300),
    ],
)
def test_arguments_that_ask_for_longer_answers_get_them(name, options, tokens):
    assert getattr(tasks, name)(**options).max_completion_tokens == tokens
    made = preset("cpu", task=name, task_options=options)
    assert made.make_task().max_completion_tokens == tokens


def _tokens(made):
    return made.make_task().max_completion_tokens


def test_the_length_of_a_preset_does_not_stick_to_other_tasks():
    """gpu24 reasons in 256 tokens; whoever asks it for another task gets that task's length, with its arguments."""
    assert _tokens(preset("gpu24")) == 256
    assert _tokens(preset("gpu24", task="largest")) == 12
    assert (
        _tokens(preset("gpu24", task="code", task_options={"max_completion_tokens": 72})) == 72
    )
    assert _tokens(preset("gpu24", task_options={"numbers": (2, 2), "think": True})) == 128


def test_the_length_is_the_tasks_until_it_is_set():
    card = preset("gpu24")
    assert _tokens(preset("gpu24", task_options={"think": False})) == 24
    assert _tokens(dataclasses.replace(card, task_options={"think": False})) == 24
    other = dataclasses.replace(card, task="largest", task_options={})
    assert _tokens(other) == 12
    assert _tokens(dataclasses.replace(other, task="countdown", steps=3)) == 24
    assert _tokens(dataclasses.replace(preset("smoke"), steps=3)) == 8

    mine = dataclasses.replace(card, max_completion_tokens=100)
    assert (
        _tokens(mine)
        == _tokens(dataclasses.replace(mine, task_options={"think": False}))
        == 100
    )
    assert "set by you (was the task's)" in mine.table().loc["max_completion_tokens", "reason"]
    assert _tokens(preset("gpu24", task="largest", max_completion_tokens=512)) == 512
    assert (
        _tokens(preset("gpu24", task_options={"think": False}, max_completion_tokens=512))
        == 512
    )


def test_arguments_of_another_task_are_refused_by_name():
    with pytest.raises(
        ValueError, match="task_options has balanced, think, which task 'largest' does not take"
    ):
        dataclasses.replace(preset("gpu24"), task="largest")
    with pytest.raises(
        ValueError, match="task_options has bogus, which task 'countdown' does not take"
    ):
        preset("gpu24", task_options={"bogus": 1})


# bfloat16 (T4: float32) FLOP/s and bytes/s that the makers give; products that add up in float32.
PEAKS = {
    "RTX 4090": (165e12, 1008e9),
    "A10G": (70e12, 600e9),
    "L4": (121e12, 300e9),
    "T4": (8.1e12, 320e9),
}


@pytest.mark.parametrize(
    ("name", "cards", "parameters", "itemsize"),
    [("gpu24", ("RTX 4090", "A10G", "L4"), 1_543_714_304, 2), ("t4", ("T4",), 494_032_768, 4)],
)
def test_seconds_a_step_are_planned_from_a_cards_peaks(name, cards, parameters, itemsize):
    """6 FLOPs a parameter and token of the update; in decoding all weights and, halfway, the keys and values."""
    p = preset(name)
    tokens = p.prompts_per_step * (256 + p.group_size * _tokens(p))
    cached = plan_memory(p).parts["rollout"]["keys and values"]
    half = cached * (p.prompts_per_step * 256 + p.completions_per_step * _tokens(p) / 2)
    half /= p.prompts_per_step * 256 + p.completions_per_step * _tokens(p)
    seconds = {
        card: 6 * parameters * tokens / flops
        + _tokens(p) * (parameters * itemsize + half) / speed
        for card, (flops, speed) in PEAKS.items()
    }
    reason = p.table().loc["steps", "reason"]
    assert reason.endswith("planned, not measured")
    assert [int(n) for n in re.findall(r"(\d+)(?: s each| of a[n ])", reason)] == [
        round(seconds[c]) for c in cards
    ]
    third = [3 * p.steps * seconds[card] / 60 for card in cards]
    assert max(third) * 0.9 < int(re.search(r"(\d+) minutes", reason)[1]) < max(third) * 1.1


def test_t4_fits_a_16_gb_card():
    """In what a T4 reports, 14.7 GiB; and where flex_attention does not run on it."""
    small, large = preset("t4"), preset("t4", model="Qwen/Qwen2.5-1.5B-Instruct")
    for attention in ("flex_attention", "sdpa"):
        for p, tuning in ((small, "full"), (small, "lora"), (large, "lora")):
            plan = plan_memory(p, tuning=tuning, attention=attention)
            assert plan.fits and plan.usable_gib < 14.75 and plan.peak_gib < 14.2
            assert plan.parts["rollout"]["cast weights"] == 0  # float32 throughout
    assert not plan_memory(large).fits
    update = plan_memory(small).parts["update"]
    assert (
        update["weights"] == update["gradients"] == update["optimizer"] / 2 == 4 * 494_032_768
    )
    assert (
        "7.4 GiB" in small.table().loc["optimizer", "reason"]
        and round(16 * 494_032_768 / 2**30, 1) == 7.4
    )
    assert "5.8 GiB" in small.table().loc["model", "reason"]
    assert round(plan_memory(large, tuning="lora").parts["update"]["weights"] / 2**30, 1) == 5.8
    kept = plan_memory(small).parts["rollout"]["keys and values"] / 2**30
    assert f"keep {kept:.1f} GiB" in small.table().loc["max_completion_tokens", "reason"]


@pytest.mark.parametrize(
    ("name", "bytes_"),
    [
        ("gpu24", 1_543_714_304 * (2 + 4.03)),
        ("t4", 494_032_768 * (4 + 8)),
        ("cpu", 134_515_008 * (4 + 8)),
    ],
)
def test_disk_is_said_where_checkpoints_are_saved(name, bytes_):
    one, reason = bytes_ / 2**30, preset(name).table().loc["save_steps", "reason"]
    assert f"{one:.1f} GiB" in reason and f"{2 * one:.1f}" in reason
    assert f"a checkpoint takes {one:.1f} GiB, and {2 * one:.1f} until" in str(
        plan_memory(name)
    )
    adapters = plan_memory(name, tuning="lora").checkpoint_gib
    assert 0 < adapters < 0.3


def test_a_preset_is_made_without_its_task(monkeypatch):
    """No rows are drawn or fetched for it, of whatever task."""
    for name in ("gsm8k", "largest", "countdown"):
        takes = inspect.signature(getattr(tasks, name))

        def never(**options):
            raise AssertionError("a preset makes no task")

        never.__signature__ = takes
        monkeypatch.setattr(tasks, name, never)
        preset(
            "gpu24",
            task=name,
            task_options={"n_train": 10**9} if "n_train" in takes.parameters else {},
        )
    with pytest.raises(AssertionError, match="makes no task"):
        preset("gpu24", task="largest").make_task()


def test_a_card_without_bfloat16_is_not_advised_to_take_it():
    large = preset("t4", model="Qwen/Qwen2.5-1.5B-Instruct")
    assert not any("bfloat16" in line for line in plan_memory(large).advice)
    assert any("tuning='lora'" in line and "fits" in line for line in plan_memory(large).advice)
    assert any(
        "bfloat16" in line
        for line in plan_memory(preset("gpu24", dtype="float32", optimizer="adamw")).advice
    )
