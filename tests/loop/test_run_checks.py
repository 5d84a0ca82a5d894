"""Bad data, rewards and settings: a clear error before any training; what is odd is said once, and nothing is lost."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import standard_runs
import torch
from loop_runs import letters, make, record, same, task, weights

from grpo_kit.loop.protocols import Hook, Task
from grpo_kit.models import load_policy
from grpo_kit.record.files import RunFolderError, run_settings
from grpo_kit.rewards import Gated, SoftFormat
from grpo_kit.rewards._parts import check_calls, required_columns
from grpo_kit.tasks import from_rows

ROWS = [{"question": f"Say {i}.", "answer": str(i)} for i in range(8)]


OTHER = [{"question": "Say no.", "answer": "1", "gold": "a"}]


def rows(**columns):
    return [row | columns for row in ROWS]


def own(*rewards, rows=ROWS, **options):
    """A task with these rewards, or the loop's tests' own."""
    made = from_rows("own", rows, OTHER, reward=letters, max_completion_tokens=6, **options)
    return (
        replace(made, rewards=[*rewards], reward_weights=[1 / len(rewards)] * len(rewards))
        if rewards
        else made
    )


def asks_for_gold(completions, gold, **columns):
    return letters(completions)


def only_completions(completions):
    return letters(completions)


def asks_for_state(completions, trainer_state, **columns):
    return letters(completions)


def named_letters(completions, **columns):
    return letters(completions)


named_letters.__name__ = "letters"  # another reward of the same name
half = SoftFormat(think=None)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([asks_for_gold], r"'asks_for_gold' asks for the column.*\['gold'\].*task 'own' does not have"),
        ([only_completions], r"'only_completions' has the parameters \(completions\).*answer.*add \*\*columns"),
        ([asks_for_state], r"'asks_for_state' asks for \['trainer_state'\]"),
        ([Gated(letters, on=half), Gated(named_letters, on=half)], r"several parts named \['letters'\]"),
        (["ExactAnswer"], "reward 'ExactAnswer' cannot be called"),
    ],
)  # fmt: skip
def test_a_reward_that_the_call_does_not_fit_is_refused(rewards, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "run", task=own(*rewards))
    assert not (tmp_path / "run").exists()


def test_rewards_that_fit_are_taken(tmp_path):
    class Scorer:
        columns = ("gold",)

        def __call__(self, completions, **columns):
            return [len(columns["gold"])] * len(completions)

    def with_defaults(completions, answer, prompts=None, missing=3, **columns):
        assert missing == 3 and prompts is not None
        return letters(completions)

    made = own(Scorer(), with_defaults, asks_for_gold, rows=rows(gold="a"))
    make(tmp_path / "run", task=made, steps=1).train()
    assert required_columns(Scorer()) == ["gold"] and required_columns(with_defaults) == [
        "answer"
    ]
    check_calls([min], {"completions"}, "task 'own'")  # a built-in without a signature


LONG = {"question": "word " * 1020, "answer": "9"}


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize(
    "question", ["word " * 1020, "\U0001f9d9" * 600], ids=["long", "few characters"]
)
def test_a_prompt_too_long_for_the_model_is_named_before_training(question, split, tmp_path):
    made = own()
    bad = replace(
        made, **{split: [*getattr(made, split), {"question": question, "answer": "9"}]}
    )
    with pytest.raises(ValueError, match="the prompt of '.* has .* tokens.*context of 1024"):
        make(tmp_path / "run", task=bad)


def test_a_template_that_cannot_render_a_row_says_so_before_training(tmp_path):
    model, tokenizer = load_policy("tiny-random", quiet=True)
    tokenizer.chat_template = (
        "{% if '3' in messages[-1]['content'] %}{{ raise_exception('no questions about 3') }}{% endif %}"
        "{{ messages[-1]['content'] }}"
    )
    with pytest.raises(ValueError, match="no questions about 3"):
        make(tmp_path / "run", model=model, tokenizer=tokenizer, task=own())
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template"):
        make(tmp_path / "run", model=model, tokenizer=tokenizer, task=own())


def test_answers_longer_than_a_completion_may_be_are_said(tmp_path):
    long = [*ROWS[:6], {"question": "Say much.", "answer": "much and " * 9}]
    with pytest.warns(
        UserWarning, match="of 7 right answers 1 have more than max_completion_tokens=6"
    ):
        make(tmp_path / "a", task=own(rows=long))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path / "b", task=own())


def test_too_few_prompts_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="has 8 train rows, and prompts_per_step=9 needs as many"
    ):
        make(tmp_path / "run", task=own(), prompts_per_step=9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_trained_weights_of_16_bits_under_a_scaled_loss_are_refused(dtype, tmp_path):
    model, _ = load_policy("tiny-random", dtype=dtype, quiet=True)
    with pytest.raises(
        ValueError, match=f"autocast='float16' trains float32 weights only, these are {dtype}"
    ):
        make(tmp_path / "run", model=model, autocast="float16")
    model, _ = load_policy("tiny-random", dtype=dtype, tuning="lora", quiet=True)
    make(tmp_path / "run", model=model, autocast="float16")


# ---- said once, and nothing is lost -----------------------------------------------------------------------------


def test_a_reward_outside_0_to_1_is_said_once_and_trains(tmp_path, capsys):
    def points(completions, **columns):
        return [10 * score - 5 for score in letters(completions)]

    def stated(completions, **columns):
        return [2 * score for score in letters(completions)]

    stated.range = (0, 2)
    trainer = standard_runs.make(
        tmp_path / "run", task=own(points, stated, letters), live=False
    )
    trainer.train()
    said = capsys.readouterr().out
    assert said.count("any finite scale is fine") == said.count("reward 'points' gave") == 1
    assert run_settings(trainer.folder)["reward_ranges"] == {"stated": [0, 2]}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_left_out_and_said(bad, tmp_path, capsys):
    trainer = make(tmp_path / "run", steps=3)
    inner, before = trainer.update.gradients, {}

    def spoilt(model, batch, loss, temperature, backward):
        value = inner(model, batch, loss, temperature, backward)
        if trainer.step == 1:
            next(iter(trainer.trained.values())).grad[0, 0] = bad
            before.update(weights(trainer))
        return value

    class Look(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == 2:
                assert same(weights(trainer), before), "weights and moments stay"

    trainer.update.gradients = spoilt
    trainer.hooks.append(Look())
    trainer.train()
    said = capsys.readouterr().out
    assert said.count("Step 2: the gradient's norm is") == 1 and "the weights stay" in said
    assert all(p.isfinite().all() for p in trainer.trained.values()) and not same(
        weights(trainer), before
    )


def test_a_step_without_any_advantage_moves_the_weights_by_momentum(tmp_path):
    """Its gradient is zero, not missing: AdamW's moments and weight decay act, as in TRL."""
    calls = []

    def once(completions, **columns):
        calls.append(1)
        return letters(completions) if len(calls) == 1 else [0.5] * len(completions)

    trainer = make(tmp_path / "run", task=own(once), steps=2, weight_decay=0.1)
    seen = []

    class Keep(Hook):
        def after_step(self, trainer, row, batch):
            seen.append({name: p.detach().clone() for name, p in trainer.trained.items()})

    trainer.hooks.append(Keep())
    trainer.train()
    assert record(trainer.folder)[0][1]["grad_norm"] == 0.0
    assert all(not torch.equal(p, seen[0][name]) for name, p in seen[1].items())


def test_an_extra_column_is_never_an_earlier_steps(tmp_path):
    calls = []

    def logs_once(completions, log_extra, **columns):
        calls.append(1)
        if len(calls) == 1:
            log_extra("note", ["first step"] * len(completions))
        return letters(completions)

    trainer = make(tmp_path / "run", task=own(logs_once), steps=2)
    trainer.train()
    assert [line.get("note") for line in record(trainer.folder)[1]] == ["first step"] * 8 + [
        None
    ] * 8


def test_a_folder_that_no_run_can_begin_in_is_refused_by_the_constructor(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(RunFolderError, match="is no folder that can be written"):
            make(folder)
    make(tmp_path / "run").train()
    with pytest.raises(
        RunFolderError, match="already holds a run, without a checkpoint.*run-2"
    ):
        make(tmp_path / "run")
    make(tmp_path / "saved", save_steps=4).train()
    make(tmp_path / "saved").train(resume=True)


def test_a_model_that_was_trained_before_is_announced(tmp_path, capsys):
    first = make(tmp_path / "first", steps=2)
    first.train()
    assert (
        "trained before" not in capsys.readouterr().out
        and run_settings(first.folder)["starts_from"] is None
    )
    second = standard_runs.make(tmp_path / "second", model=first.model, live=False)
    assert (
        f"This model was trained before: 2 steps in {tmp_path / 'first'}."
        in capsys.readouterr().out
    )
    second.train()
    assert run_settings(second.folder)["starts_from"] == f"2 steps in {tmp_path / 'first'}"


def test_the_constructor_leaves_an_earlier_trainer_whole(tmp_path):
    """A cell that fails, and the cell before it."""
    trainer = make(tmp_path / "first")
    with pytest.raises(ValueError, match="asks for the column"):
        make(tmp_path / "second", task=own(asks_for_gold), model=trainer.model)
    trainer.train()
    whole = make(tmp_path / "whole")
    whole.train()
    assert same(weights(trainer), weights(whole)) and task() is trainer.task


LEFT_OUT = ["held_out", "system", "answers_are", "file", "reward_weights", "examples"]


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_task_of_another_class_is_told_what_it_lacks(left_out, tmp_path):
    names = [name for name in Task.__annotations__ if name != left_out]
    parts = {name: getattr(task(), name, Task.__dict__.get(name)) for name in names}
    bare = SimpleNamespace(**parts, render=task().render)
    with pytest.raises(ValueError, match=f"has no {left_out}; .*loop.protocols.Task"):
        make(tmp_path / "run", task=bare)
