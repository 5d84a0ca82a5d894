"""Checks of arguments that many rooms take, one a fact: numbers, texts, models, tokenizers and their tokens, tasks.

A bool, a text and a NaN never count as numbers here; numpy's numbers do.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any

_PROBE = "KITPROBE"  # a word that no template holds
COLDEST, HOTTEST, FASTEST = 0.01, 10, 1  # beyond: samples alike, noise, weights gone after a step
SLOWEST = 1e-9  # AdamW moves a weight by about the rate; below, float32 rounds that away at most weights
LARGEST_REWARD = 1e15  # and weight of one: training squares rewards in float32, which ends at 3e38


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number.

    >>> [is_number(value) for value in (1, 0.5, float("inf"), True, "1")]
    [True, True, False, False, False]
    """
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number of at least `least`; 2.0 is not.

    >>> [is_whole(value, 1) for value in (1, 0, 2.0, True)]
    [True, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least


def check_whole(name: str, value: Any, least: int = 1, *, hint: str = "") -> int:
    """The value as an int. Raises ValueError, naming the argument, unless it is a whole number of at least `least`.

    hint: the end of the message, such as ", or None for all".

    >>> check_whole("samples", 0)
    Traceback (most recent call last):
    ValueError: samples=0 must be a whole number of at least 1
    """
    if not is_whole(value, least):
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}{hint}")
    return int(value)


def check_number(name: str, value: Any, least: float = -math.inf, *, hint: str = "") -> float:
    """The value as a float. Raises ValueError, naming the argument, unless it is a finite number of at least `least`.

    hint: the end of the message, such as "; 0 means no reference model".

    >>> check_number("beta", 0, 0)
    0.0
    """
    if not is_number(value) or value < least:
        least_words = "" if least == -math.inf else f" of at least {least}"
        raise ValueError(f"{name}={value!r} must be a number{least_words}{hint}")
    return float(value)


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises ValueError, naming the argument and the choices, unless the value is one of the choices.

    choices: two or more, such as the keys of a dict.

    >>> check_choice("keep", "first", ("last", "best"))
    Traceback (most recent call last):
    ValueError: keep='first' is not known; use 'last' or 'best'
    """
    known = list(choices)
    if not any(value is one or type(value) is type(one) and value == one for one in known):
        *others, last = map(repr, known)
        raise ValueError(
            f"{name}={value!r:.200} is not known; use {', '.join(others)} or {last}{nearest(value, known)}"
        )


def nearest(value: Any, known: Iterable[Any]) -> str:
    """The end of a message that suggests one of the known names for a misspelt one; "" where none is near.

    >>> nearest("Larges", ["largest", "code", None])
    "; did you mean 'largest'?"
    """
    names = {one.lower(): one for one in known if isinstance(one, str)}
    near = difflib.get_close_matches(str(value).lower(), names, 1) if isinstance(value, str) else []
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def check_text(name: str, value: Any, *, hint: str = "", blank: bool = False) -> str:
    """The value. Raises ValueError, naming the argument, unless it is a text; blank: one without a letter will do.

    hint: the end of the message, such as ", or None for none".

    >>> check_text("name", 3)
    Traceback (most recent call last):
    ValueError: name=3 must be a text that is not blank
    """
    if not isinstance(value, str) or not (blank or value.strip()):
        raise ValueError(f"{name}={value!r:.200} must be a text{'' if blank else ' that is not blank'}{hint}")
    return value


def check_above_zero(name: str, value: Any, *, hint: str = "") -> None:
    """Raises ValueError, naming the argument, unless the value is a finite number above 0.

    hint: the end of the message, such as ", or None for no limit".

    >>> check_above_zero("learning_rate", -1.0)
    Traceback (most recent call last):
    ValueError: learning_rate=-1.0 must be a number above 0
    """
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name}={value!r} must be a number above 0{hint}")


def check_temperature(value: Any, name: str = "temperature", *, greedy: bool = False) -> float:
    """The temperature as a float.

    greedy: 0 is allowed and means the likeliest token each time. Sampling, scoring and training need a value above 0.
    Raises ValueError, naming the argument, unless it is a finite number above 0, or 0 with `greedy`.

    >>> check_temperature(0, greedy=True)
    0.0
    """
    if is_number(value) and (value > 0 or greedy and value == 0):
        return float(value)
    if greedy:
        raise ValueError(f"{name}={value!r} must be 0 (greedy) or a number above 0, such as 1.0")
    raise ValueError(
        f"{name}={value!r} must be a number above 0, such as 1.0; at 0 (greedy) all samples of a prompt are alike"
    )


def check_model(model: Any) -> None:
    """Raises ValueError, with what would do, for what is no loaded model: a name, or load_policy's pair.

    >>> check_model("tiny-random")
    Traceback (most recent call last):
    ValueError: model='tiny-random' is a name; load it: model, tokenizer = kit.load_policy('tiny-random')
    """
    if not hasattr(model, "parameters"):
        raise ValueError(_not_loaded("model", model))


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ValueError, with what would do, for what is no tokenizer: a name, a model, or load_policy's pair."""
    if not hasattr(tokenizer, "chat_template") or hasattr(tokenizer, "parameters"):
        raise ValueError(_not_loaded("tokenizer", tokenizer))


def template_tokens(tokenizer: Any, ends: Collection[int] = ()) -> dict[int, str]:
    """The special tokens around texts, by id: begin, end, padding, and what the chat template writes between messages.

    ends: ids that end a completion too. Other special tokens are text: a task may use them as its tags ("<answer>",
    "[TOOL_CALLS]"), and rewards see them.

    >>> template_tokens(qwen25_tokenizer)  # doctest: +SKIP
    {151643: '<|endoftext|>', 151644: '<|im_start|>', 151645: '<|im_end|>'}
    """
    added = getattr(
        tokenizer, "added_tokens_decoder", {}
    )  # a tokenizer that is not transformers' may have none
    special = {number: token.content for number, token in added.items() if token.special}
    if special.keys() <= set(ends):
        return special
    around = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    between = _between_messages(tokenizer)
    return {
        number: token
        for number, token in special.items()
        if number in ends or token in around or token in between
    }


def _between_messages(tokenizer: Any) -> str:
    """What the chat template writes from the end of an answer to the next question; "" without a template.

    The text behind the question is left out: a template may open the answer with a tag of its thoughts.
    """
    turns = [{"role": role, "content": _PROBE} for role in ("user", "assistant", "user")]
    try:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # no template, or one that refuses these roles
        return ""
    return "".join(rendered.split(_PROBE)[2:])


def _not_loaded(name: str, value: Any) -> str:
    call = "model, tokenizer = kit.load_policy"
    if isinstance(value, tuple | list) and len(value) == 2:
        return f"{name} is a pair, as kit.load_policy gives it; take it apart: {call}(...)"
    if isinstance(value, str | os.PathLike):
        return f"{name}={os.fspath(value)!r} is a name; load it: {call}({os.fspath(value)!r})"
    return f"{name}={value!r:.60} is no {name} of transformers; {call}(...) loads both"


def check_task(task: Any) -> None:
    """Raises ValueError, with what would do, for what is no task: a name, a function that makes one, or rows.

    >>> check_task("largest")
    Traceback (most recent call last):
    ValueError: task='largest' is a name; make the task: kit.tasks.largest()
    """
    if isinstance(task, str):
        raise ValueError(f"task={task!r} is a name; make the task: kit.tasks.{task}()")
    if callable(task) and hasattr(task, "__name__"):
        raise ValueError(f"task={task.__name__} is a function; call it: {task.__name__}()")
    if not hasattr(task, "train") or not hasattr(task, "name"):
        raise ValueError(
            f"task={task!r:.100} is no task; kit.tasks has some, and of your rows kit.tasks.from_rows makes one"
        )
