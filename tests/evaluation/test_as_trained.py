"""What differs from training when a model is asked stands in one line; it can be asked as it was trained."""

from dataclasses import replace

import pytest
from loop_runs import make, task

import grpo_kit as kit
from grpo_kit.evaluation import _as_trained as as_trained
from grpo_kit.evaluation.accuracy import Evaluation
from grpo_kit.loop import Config

SMALL = {"steps": 2, "temperature": lambda progress: 1.5 - 0.5 * progress, "top_p": 0.5}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    made = make(tmp_path_factory.mktemp("trained") / "run", **SMALL)
    made.train()
    made.save_model(made.folder / "model")
    return made


@pytest.fixture(autouse=True)
def nothing_said():
    as_trained._printed.clear()


def test_a_greedy_evaluation_says_so_once(trainer, capsys):
    for _ in range(2):
        kit.evaluate(trainer.model, trainer.tokenizer, task(), rows=task().held_out[:1])
    assert capsys.readouterr().out == (
        "evaluate asks with greedy decoding; training had temperature 1. This is no error: the result is right for "
        'what was asked. To ask as in training: sampling="as trained".\n'
    )


DIFFERS = "asks with temperature {}, top_p 1; training had temperature 1, top_p 0.5."
AS_TRAINED = {
    "evaluate's samples": 'To ask as in training: sampling="as trained".',
    "readiness": "To ask as in training: temperature=1, no argument sets top_p.",
}
ASKED = {
    "evaluate, cooler": ("evaluate", {"samples": 2, "k": (1,), "temperature": 0.3}, "evaluate's samples", "0.3"),
    "evaluate, hotter": ("evaluate", {"samples": 1, "k": (1,), "temperature": 2}, "evaluate's samples", "2"),
    "evaluate, by a Config": ("evaluate", {"sampling": Config(temperature=0.5)}, "evaluate's samples", "0.5"),
    "readiness, cooler": ("readiness", {"samples": 2, "group_size": 2, "temperature": 0.3}, "readiness", "0.3"),
    "readiness, hotter": ("readiness", {"samples": 2, "group_size": 2, "temperature": 1.5}, "readiness", "1.5"),
    "length_probe": ("length_probe", {"samples": 1, "temperature": 0.7}, "length_probe", "0.7"),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_samples_at_another_temperature_say_so(trainer, capsys, name):
    door, how, what, temperature = ASKED[name]
    getattr(kit, door)(
        trainer.model, trainer.tokenizer, task(), rows=task().held_out[:1], **how
    )
    said = capsys.readouterr().out
    assert f"{what} {DIFFERS.format(temperature)}" in said, said
    assert AS_TRAINED.get(what, AS_TRAINED["readiness"]) in said, said
    fresh, tokenizer = kit.load_policy("tiny-random", quiet=True)
    as_trained._printed.clear()
    getattr(kit, door)(fresh, tokenizer, task(), rows=task().held_out[:1], **how)
    assert "training had" not in capsys.readouterr().out, (
        "of a model without a run nothing is known"
    )


def test_prompt_length_and_sampling_are_compared(trainer, capsys):
    other = replace(task(), prefill="<answer>", system="Be brief.", max_completion_tokens=3)
    kit.evaluate(
        trainer.model,
        trainer.tokenizer,
        other,
        rows=task().held_out[:1],
        max_completion_tokens=4,
    )
    said = capsys.readouterr().out
    assert said.startswith(
        "evaluate asks with greedy decoding, max_completion_tokens 4, system 'Be brief.'; training had "
        "temperature 1, max_completion_tokens 6, system 'Answer in <answer> tags.'. "
    ), said
    assert said.endswith(
        """: sampling="as trained", max_completion_tokens=6, the run's system.\n"""
    )
    kit.chat(trainer.model, trainer.tokenizer, task=task(), temperature=0.7)
    said = capsys.readouterr().out
    assert f"chat {DIFFERS.format(0.7)}" in said


def test_a_model_from_a_run_folder_is_known_and_another_is_not(trainer, capsys):
    loaded, tokenizer = kit.load_policy(trainer.folder / "model", quiet=True)
    kit.evaluate(loaded, tokenizer, task(), rows=task().held_out[:1])
    assert "training had temperature 1" in capsys.readouterr().out
    fresh, tokenizer = kit.load_policy("tiny-random", quiet=True)
    kit.evaluate(fresh, tokenizer, task(), rows=task().held_out[:1])
    assert not capsys.readouterr().out
    with pytest.raises(
        ValueError, match="no run folder says how this model was trained; give the Config"
    ):
        kit.evaluate(fresh, tokenizer, task(), sampling="as trained")
    with pytest.raises(ValueError, match="sampling='trained' must be"):
        kit.evaluate(fresh, tokenizer, task(), sampling="trained")


def test_asked_as_trained_stands_beside_greedy(trainer, capsys, tmp_path):
    how = {"rows": task().held_out, "seed": 5}
    found = kit.evaluate(
        trainer.model, trainer.tokenizer, task(), sampling="as trained", samples=4, **how
    )
    assert "training had" not in capsys.readouterr().out
    by_hand = kit.evaluate(
        trainer.model, trainer.tokenizer, task(), sampling=Config(**SMALL), samples=4, **how
    )
    assert (
        found.as_trained == by_hand.as_trained == found.pass_at[1] and found.as_trained.n == 4
    )
    assert found.strict == kit.evaluate(trainer.model, trainer.tokenizer, task(), **how).strict
    assert "as trained (temperature 1)" in found.table().index
    found.save(tmp_path / "kept.json")
    assert Evaluation.load(tmp_path / "kept.json").as_trained == found.as_trained
    one = kit.evaluate(trainer.model, trainer.tokenizer, task(), sampling="as trained", **how)
    assert not one.pass_at and one.as_trained.n == 4


def test_top_p_reaches_the_sampler(trainer):
    """With top_p near 0 every sample is the greedy one."""
    config = Config(temperature=5.0, top_p=1e-6, max_completion_tokens=6)
    found = kit.evaluate(trainer.model, trainer.tokenizer, task(), sampling=config, samples=2)
    assert found.as_trained.value == found.strict.value


def test_a_task_without_right_and_wrong_has_its_reward(trainer):
    rows = [{"question": f"Name letter {n}."} for n in range(6)]
    letters = kit.tasks.from_rows(
        "letters", rows[2:], rows[:2], reward=task().rewards[-1], max_completion_tokens=6
    )
    found = kit.evaluate(trainer.model, trainer.tokenizer, letters, sampling="as trained")
    assert (
        found.measure == "reward"
        and "reward, as trained (temperature 1)" in found.table().index
    )
