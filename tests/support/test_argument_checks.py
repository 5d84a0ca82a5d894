"""Checks of numbers: one table of what each refuses, and that the places which check a number use the same words."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_kit._support.argument_checks import (
    check_above_zero,
    check_choice,
    check_model,
    check_number,
    check_task,
    check_temperature,
    check_text,
    check_tokenizer,
    check_whole,
    is_number,
    nearest,
)
from grpo_kit.engine.complete import complete
from grpo_kit.more.export.chat import chat
from grpo_kit.more.lab._arm import arm_of
from grpo_kit.objectives import token_logprobs
from grpo_kit.trainer.presets import preset

NO_NUMBERS = [math.nan, math.inf, -math.inf, True, False, "1", None, [1.0]]
SAMPLED = (
    " must be a number above 0, such as 1.0; at 0 (greedy) all samples of a prompt are alike"
)
GREEDY = " must be 0 (greedy) or a number above 0, such as 1.0"


def refusal(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("value", [1, 0.1, np.float32(0.5), np.int64(2), 1e-300])
def test_numbers_above_zero_pass_everywhere(value):
    assert is_number(value)
    check_above_zero("rate", value)
    assert check_temperature(value) == check_temperature(value, greedy=True) == float(value)
    assert type(check_temperature(value)) is float


@pytest.mark.parametrize("value", [*NO_NUMBERS, -1, -0.5], ids=repr)
def test_what_is_no_temperature_is_refused_by_name(value):
    assert refusal(lambda: check_temperature(value, "heat")) == f"heat={value!r}{SAMPLED}"
    assert (
        refusal(lambda: check_temperature(value, "heat", greedy=True))
        == f"heat={value!r}{GREEDY}"
    )
    assert (
        refusal(lambda: check_above_zero("rate", value))
        == f"rate={value!r} must be a number above 0"
    )


def test_zero_is_greedy_decoding():
    assert check_temperature(0, greedy=True) == check_temperature(-0.0, greedy=True) == 0.0
    assert refusal(lambda: check_temperature(0)) == f"temperature=0{SAMPLED}"
    assert refusal(lambda: check_above_zero("rate", 0, hint=", or None")).endswith(
        " above 0, or None"
    )


def test_whole_numbers():
    found = check_whole("n", np.int64(3))
    assert found == 3 and type(found) is int
    assert check_whole("n", 0, 0) == 0
    for value in [*NO_NUMBERS, 0, -1, 1.0, 2.5]:
        assert (
            refusal(lambda value=value: check_whole("n", value))
            == f"n={value!r} must be a whole number of at least 1"
        )
    assert (
        refusal(lambda: check_whole("n", 99, 100, hint="!"))
        == "n=99 must be a whole number of at least 100!"
    )


def test_numbers_from_a_least_one_on():
    assert (
        check_number("beta", 0, 0) == 0.0 and check_number("margin", np.float32(-0.5)) == -0.5
    )
    for value in [*NO_NUMBERS, -0.1]:
        words = f"beta={value!r} must be a number of at least 0!"
        assert refusal(lambda value=value: check_number("beta", value, 0, hint="!")) == words
    assert refusal(lambda: check_number("margin", "1")) == "margin='1' must be a number"


@pytest.mark.parametrize("value", ["d", "A", None, ["a"], {"a": 1}], ids=repr)
def test_choices(value):
    check_choice("letter", "c", {"a": 1, "b": 2, "c": 3})
    check_choice("letter", None, ("a", None))
    words = f"letter={value!r} is not known; use 'a', 'b' or 'c'" + "; did you mean 'a'?" * (
        value == "A"
    )
    assert refusal(lambda: check_choice("letter", value, {"a": 1, "b": 2, "c": 3})) == words


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", -1.0, 0], ids=repr)
def test_the_losses_which_know_torch_alone_use_the_same_words(value):
    """objectives/ may import nothing of the kit, so it has a check of its own."""
    logits, ids = torch.zeros(1, 2), torch.tensor([0])
    said = refusal(lambda: token_logprobs(logits, ids, temperature=value))
    assert said == refusal(lambda: check_temperature(value))


@pytest.mark.parametrize("value", [math.nan, True, "1", -1.0], ids=repr)
def test_callers_refuse_the_same(value):
    assert (
        refusal(lambda: preset("smoke", temperature=value)) == f"temperature={value!r}{SAMPLED}"
    )
    lab = refusal(lambda: arm_of("smoke", {"eval_temperatures": [0.5, value]}))
    assert lab == f"eval_temperatures[1]={value!r}{SAMPLED}"
    decoded = refusal(
        lambda: complete(None, None, ["a"], max_completion_tokens=1, temperature=value)
    )
    assert decoded == f"temperature={value!r}{GREEDY}"


def test_chat_is_greedy_at_zero(tmp_path):
    from grpo_kit.models import load_policy

    model, tokenizer = load_policy("tiny-random", quiet=True)
    assert chat(model, tokenizer, temperature=0).temperature == 0.0
    assert (
        refusal(lambda: chat(model, tokenizer, temperature=math.nan))
        == f"temperature=nan{GREEDY}"
    )


def test_a_true_is_no_one_among_choices():
    check_choice("think", True, (True, False))
    assert "think=1 is not known" in refusal(lambda: check_choice("think", 1, (True, False)))


@pytest.mark.parametrize("value, words", [
    ("tiny-random", "model='tiny-random' is a name; load it: model, tokenizer = kit.load_policy('tiny-random')"),
    ((1, 2), "model is a pair, as kit.load_policy gives it; take it apart: model, tokenizer = kit.load_policy(...)"),
    (None, "model=None is no model of transformers; model, tokenizer = kit.load_policy(...) loads both"),
])  # fmt: skip
def test_what_is_no_model_says_how_it_is_loaded(value, words):
    assert refusal(lambda: check_model(value)) == words
    assert refusal(lambda: check_tokenizer(value)) == words.replace(
        "model", "tokenizer", 1
    ).replace("no model of", "no tokenizer of")


def test_a_model_is_no_tokenizer():
    model = SimpleNamespace(parameters=list, chat_template="")
    check_model(model)
    assert "is no tokenizer of transformers" in refusal(lambda: check_tokenizer(model))
    check_tokenizer(SimpleNamespace(chat_template=None))


def largest():
    """A function that makes a task."""


@pytest.mark.parametrize("value, words", [
    ("largest", "task='largest' is a name; make the task: kit.tasks.largest()"),
    (largest, "task=largest is a function; call it: largest()"),
    ([{"question": "?"}], "kit.tasks.from_rows makes one"),
    (None, "task=None is no task"),
])  # fmt: skip
def test_what_is_no_task_says_how_one_is_made(value, words):
    assert words in refusal(lambda: check_task(value))


def test_texts_and_near_names():
    assert check_text("name", "a") == "a" and check_text("name", "", blank=True) == ""
    assert (
        refusal(lambda: check_text("name", " ")) == "name=' ' must be a text that is not blank"
    )
    assert (
        refusal(lambda: check_text("name", 3, blank=True, hint="!")) == "name=3 must be a text!"
    )
    assert nearest("Larges", ["largest", None]) == "; did you mean 'largest'?"
    assert nearest("zzz", ["largest"]) == nearest(3, ["3"]) == ""
