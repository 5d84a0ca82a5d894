"""A tweak is obeyed or refused: assigned, by change(), and again in a run that is resumed."""

import re

import pytest
import standard_runs
from loop_runs import make, record, same, weights

from grpo_kit.loop import Config
from grpo_kit.loop.protocols import Hook
from grpo_kit.schedules import linear


class At(Hook):
    def __init__(self, step, act):
        self.step, self.act = step, act

    def before_step(self, trainer):
        if trainer.step == self.step:
            self.act(trainer)


def test_an_assignment_is_obeyed_from_the_next_step_on_and_written_with_it(tmp_path):
    act = lambda trainer: setattr(trainer.config, "learning_rate", 5e-3)  # noqa: E731
    trainer = make(tmp_path / "run", hooks=[At(1, act)])
    trainer.train()
    rows = record(trainer.folder)[0]
    assert [row["learning_rate"] for row in rows] == [1e-2, 5e-3, 5e-3, 5e-3]
    assert [row.get("changes") for row in rows] == [
        None,
        {"learning_rate": [1e-2, 5e-3]},
        None,
        None,
    ]


def test_a_change_is_made_again_by_a_resumed_run_and_another_may_come(tmp_path):
    act = lambda trainer: trainer.change(temperature=linear(1.5, 0.5), epsilon=0.1)  # noqa: E731
    whole = make(tmp_path / "whole", hooks=[At(2, act)])
    whole.train()
    broken = make(tmp_path / "run", hooks=[At(2, act)], save_steps=1, save_total_limit=9)
    broken.train()
    for step in (3, 4):
        (tmp_path / f"run/checkpoint-{step}/digests.json").unlink()
    again = make(tmp_path / "run")
    again.train(resume=True)
    assert same(weights(again), weights(whole))
    strip = lambda rows: [{k: v for k, v in row.items() if k != "changes"} for row in rows]  # noqa: E731
    assert strip(record(again.folder)[0]) == strip(record(whole.folder)[0])
    other = make(tmp_path / "run", steps=5, learning_rate=1e-3)
    # the name is the folder's, not the step's
    (tmp_path / "run/checkpoint-2").rename(tmp_path / "run/checkpoint-9")
    (tmp_path / "run/checkpoint-9").rename(tmp_path / "run/checkpoint-2")
    other.train(resume=True)
    rows = record(other.folder)[0]
    assert rows[2]["changes"]["learning_rate"] == [1e-2, 1e-3] and rows[2]["changes"][
        "steps"
    ] == [4, 5]
    assert len(rows) == 5 and rows[-1]["learning_rate"] == 1e-3


@pytest.mark.parametrize(
    "name, value, words",
    [
        (
            "group_size",
            8,
            "group_size=8 cannot be changed while a run goes on; what can: steps",
        ),
        ("loss", "grpo", "loss='grpo' cannot be changed"),
        ("learning_rate", -1, "learning_rate=-1 must be a number"),
        ("temperature", 0, "temperature=0 must be a number above 0"),
        (
            "lerning_rate",
            1e-3,
            "lerning_rate=0.001: Config has no such field; did you mean 'learning_rate'",
        ),
        ("beta", 0.1, "made with beta=0, so it has no reference"),
        ("reward_weights", [1.0], "the task has 3 rewards"),
    ],
)
def test_what_cannot_change_is_refused_by_name_and_changes_nothing(
    tmp_path, name, value, words
):
    found = []

    def act(trainer):
        before = trainer.config.values()
        with pytest.raises((ValueError, TypeError), match=words):
            trainer.change(**{name: value})
        found.append(trainer.config.values() == before)

    trainer = make(tmp_path / "run", hooks=[At(1, act)], steps=2)
    trainer.train()
    assert found == [True]


def test_a_run_goes_on_with_the_numbers_that_cannot_change(tmp_path):
    make(tmp_path / "run", save_steps=2).train()
    with pytest.raises(
        ValueError, match="cannot be changed while a run goes on:\n  group_size: 4, now 2\n"
    ):
        make(tmp_path / "run", group_size=2).train(resume=True)


def test_more_steps_after_the_last(tmp_path, capsys):
    trainer = make(tmp_path / "run")
    trainer.train()
    trainer.train()
    assert "All 4 steps are done" in capsys.readouterr().out
    trainer.change(steps=6)
    trainer.train()
    assert [row["step"] for row in record(trainer.folder)[0]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "field, value",
    [
        ("steps", 0),
        ("loss", "ppo"),
        ("scale", "std"),
        ("top_p", 1.5),
        ("reward_weights", []),
        ("autocast", 16),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        Config(**{field: value})


def test_every_field_has_a_unit_and_prompts_are_those_of_seed_and_step():
    from grpo_kit.loop.config import FIELDS
    from grpo_kit.loop.processes import rows_of_step

    assert all(each.metadata["unit"] for each in FIELDS.values())
    config, rows = (
        Config(prompts_per_step=3, group_size=2, seed=1),
        [{"question": i} for i in range(10)],
    )
    passes = [
        [row["question"] for row in rows_of_step(rows, config, step)] for step in range(6)
    ]
    first, second = sum(passes[:3], []), sum(passes[3:], [])
    assert len({*first}) == len({*second}) == 9 and first != second, (
        "each row once a pass, in an order of its own"
    )
    assert passes[4] == [row["question"] for row in rows_of_step(rows, config, 4)]


def test_a_preset_is_a_config():
    from grpo_kit import preset

    cfg = preset("cpu")
    full, lora = cfg, preset(cfg, tuning="lora", steps=3)
    assert (full.steps, full.group_size, full.learning_rate, full.optimizer) == (
        32,
        8,
        1e-5,
        "adamw",
    )
    assert (lora.steps, lora.learning_rate, lora.optimizer) == (3, 1e-4, None)
    with pytest.raises(ValueError, match="lerning_rate"):
        preset(cfg, lerning_rate=1)
    assert [preset(name).steps for name in ("smoke", "t4", "gpu24")] == [2, 100, 100]


def test_a_run_goes_on_with_its_model_and_may_be_evaluated_otherwise():
    """Another model, tuning or dtype is refused by name; what the loop does not read is taken as it is now."""
    from dataclasses import replace

    from grpo_kit import preset
    from grpo_kit.loop.run_settings import take_up

    begun = preset("smoke").values()
    for name, value in {
        "model": "other",
        "tuning": "lora",
        "dtype": "bfloat16",
        "group_size": 2,
    }.items():
        assert take_up(replace(preset("smoke"), **{name: value}), begun, begun)[1] == {
            name: [begun[name], value]
        }
    now = {
        "held_out": 3,
        "eval_batch": 1,
        "task": None,
        "task_options": {},
        "preset": None,
        "model": None,
    }
    config = replace(preset("smoke"), **now)
    known, refused = take_up(config, begun | {"steps": 7}, begun)
    assert {name: getattr(config, name) for name in now} == now and config.steps == known[
        "steps"
    ] == 7
    assert known == config.values() and not refused, "nothing of it is a change"


def test_printed_lines_count_to_the_steps_that_are_asked_for_now(tmp_path, capsys):
    more = At(2, lambda trainer: trainer.change(steps=6))
    standard_runs.make(tmp_path / "run", live=False, hooks=[more]).train()
    found = re.findall(r"step (\d+)/(\d+)", capsys.readouterr().out)
    assert dict(found) == {str(step): "4" if step < 3 else "6" for step in range(1, 7)}
