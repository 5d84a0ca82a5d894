"""From completion to response (prefill + completion), and from response to the answer in it.

Longer than 300 lines because all that a reward reads of a response is one list of short functions.
"""

from __future__ import annotations

import functools
import html
import inspect
import re
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime, time
from decimal import Decimal
from typing import Any

import numpy as np

from grpo_kit.rewards._parts import Reward, keyword_parameters

# A minus belongs to the number unless it could be a subtraction from the text before it.
_NUMBER = re.compile(
    r"(?:(?<![\w)])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)

# Invisible characters, each a piece of a character class.
_INVISIBLE = (
    # white space of every width (no-break, thin, ideographic), control characters
    r"\s\x00-\x1f\x7f-\x9f"
    # zero width: spaces, joiners, marks of direction, a byte order mark
    r"\u200b-\u200f\u2060-\u2064\ufeff\u180e"
    r"\u061c\u202a-\u202e\u2066-\u206f"  # direction of the text around
    # soft hyphen, grapheme joiner, vowels and selectors without a shape
    r"\xad\u034f\u17b4\u17b5\u180b-\u180d\u180f"
    # letters that are blank: Hangul fillers, the Braille cell without dots
    r"\u115f\u1160\u3164\uffa0\u2800"
    # variation selectors, annotation, blank notes
    r"\ufe00-\ufe0f\ufff0-\ufffb\U0001d159\U0001d173-\U0001d17a"
    # shorthand format controls, tags and the other selectors
    r"\U0001bca0-\U0001bca3\U000e0000-\U000e0fff"
)
_VISIBLE = re.compile(f"[^{_INVISIBLE}]")
_BREAK = re.compile(r"<br ?/?>", re.IGNORECASE)


def is_blank(text: str, *, words: bool = False) -> bool:
    """Whether the text looks empty: white space, zero-width and blank characters, also as HTML (&nbsp;, <br>).

    words: punctuation and signs alone ("...", "---") count as empty, too: no letter and no digit of any script.

    >>> is_blank(" \u200b&nbsp;"), is_blank("?"), is_blank("...", words=True), is_blank("水", words=True)
    (True, False, True, False)
    """
    visible = _VISIBLE.findall(_BREAK.sub("", html.unescape(text)))
    if words:
        return not any(map(str.isalnum, visible))
    return not visible


def on_response(
    fn: Callable[..., list[float | None]] | None = None,
    *,
    range: tuple[float, float] | None = None,
) -> Reward | Callable[[Callable[..., list[float | None]]], Reward]:
    """Turn `fn(responses, **columns)` into a reward; fn receives prefill + completion, ready to read.

    The reward has the signature (completions, *, prefill=None, **columns), keeps fn's `__name__` and lists in
    `columns` the data set columns that have no default in fn. The prefill comes from the data set's `prefill`
    column, so the reward works under plain TRL too. fn receives only the keywords it names, or all if it takes **kwargs
    (except a column with the name of its first parameter).
    range: (low, high) of the scores, if not [0, 1]: `@on_response(range=(-1, 1))`. A score outside raises an error
    by name, and charts and flags use the range. Any other reward states it as an attribute: `reward.range = (-1, 1)`.

    >>> @on_response
    ... def closes_answer(responses):
    ...     return [float("</answer>" in r) for r in responses]
    >>> closes_answer(["82</answer>", "82"], prefill=["<answer>", "<answer>"], step=3)
    [1.0, 0.0]
    """
    if fn is None:
        return functools.partial(on_response, range=range)
    parameters = list(inspect.signature(fn).parameters.values())
    first_name = parameters[0].name
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters[1:])
    keywords = keyword_parameters(fn)
    keywords.pop(first_name, None)

    @functools.wraps(fn)
    def reward(
        completions: Sequence[Any], *, prefill: Any = None, **columns: Any
    ) -> list[float | None]:
        arguments = {
            name: values
            for name, values in columns.items()
            if name in keywords or (takes_all and name != first_name)
        }
        if "prefill" in keywords:
            arguments["prefill"] = prefill
        return fn(
            [start + text for text, start in pair_prefill(completions, prefill)], **arguments
        )

    # Without this, inspect.signature shows fn's own signature, which is not the reward's.
    del reward.__wrapped__
    if range is not None:
        reward.range = range
    reward.columns = tuple(
        name for name, is_required in keywords.items() if is_required and name != "prefill"
    )
    return reward


class ResponseReward:
    """Base of the kit's rewards: no columns, one score a response, and a repr that shows how the reward was made."""

    columns: tuple[str, ...] = ()

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        prefill: Sequence[str | None] | str | None = None,
        **columns: Any,
    ) -> list[float | None]:
        return [self._score(text, start) for text, start in pair_prefill(completions, prefill)]

    def __repr__(self) -> str:
        return shown(self, vars(self))

    def _score(self, completion: str, prefill: str) -> float | None:
        raise NotImplementedError


def shown(instance: Any, values: Mapping[str, Any]) -> str:
    """The call that made an object: its class, and the arguments whose values are not the defaults."""
    arguments = []
    for name, parameter in inspect.signature(type(instance)).parameters.items():
        if name not in values or values[name] == parameter.default:
            continue
        value = values[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments += map(repr, value)
        elif parameter.kind is parameter.VAR_KEYWORD:
            arguments += [f"{key}={item!r}" for key, item in value.items()]
        elif (
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and parameter.default is parameter.empty
        ):
            arguments.append(repr(value))
        else:
            arguments.append(f"{name}={value!r}")
    return f"{type(instance).__name__}({', '.join(arguments)})"


def pair_prefill(
    completions: Sequence[Any], prefill: Sequence[str | None] | str | None
) -> list[tuple[str, str]]:
    """(completion, prefill) of each row, both as text.

    completions: str, or TRL's conversational [{"role": ..., "content": ...}], whose last content counts.
    prefill: one per completion, one for all, or None.
    Raises ValueError if the numbers of prefills and completions differ.

    >>> pair_prefill(["82</answer>"], "<answer>")
    [('82</answer>', '<answer>')]
    """
    if isinstance(completions, str):  # otherwise every letter would be one
        raise ValueError(f"completions={completions!r:.100} is one text; give a list of them")
    texts = [text_of(completion) for completion in completions]
    if prefill is None or isinstance(prefill, str):
        prefill = [prefill] * len(texts)
    if len(prefill) != len(texts):
        raise ValueError(
            f"prefill has {len(prefill)} rows for {len(texts)} completions; give one per completion"
        )
    return [(text, start or "") for text, start in zip(texts, prefill, strict=True)]


def check_tag(name: str, tag: Any) -> None:
    """Raises ValueError, naming the argument, for a tag's name that is blank or has its brackets.

    >>> check_tag("tag", "<answer>")
    Traceback (most recent call last):
    ValueError: tag='<answer>' must be the name of a tag without brackets, such as 'answer'
    """
    bare = ""
    if isinstance(tag, str):
        bare = tag.strip("</> ")
    if not bare or {*tag} & {*"<>/\n"}:
        raise ValueError(
            f"{name}={tag!r} must be the name of a tag without brackets, such as {bare or 'answer'!r}"
        )


def extract_answer(response: str, tag: str = "answer") -> str | None:
    """The text of the one <tag>...</tag> block, stripped; None if there is not exactly one.

    Two blocks (hedging), a repeated or missing tag, the wrong order and a blank block (see is_blank) all give None.

    >>> extract_answer("so <answer> 82 </answer>")
    '82'
    >>> extract_answer("<answer>82</answer><answer>47</answer>") is None
    True
    """
    return own_answer(response, "", tag)


def answer_span(response: str, tag: str = "answer") -> tuple[int, int] | None:
    """Start and end of the text in the one well-formed block; None if there is not exactly one."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if response.count(opening) != 1 or response.count(closing) != 1:
        return None
    start, end = response.index(opening) + len(opening), response.index(closing)
    if start > end:
        return None
    return start, end


def own_answer(completion: str, prefill: str, tag: str = "answer") -> str | None:
    """extract_answer(prefill + completion), but None where the model wrote none of the answer.

    Otherwise a prefill that holds the answer would be rewarded whatever the completion is.

    >>> own_answer("82</answer>", "<answer>"), own_answer("</answer>", "<answer>82")
    ('82', None)
    """
    response = prefill + completion
    span = answer_span(response, tag)
    if span is None or is_blank(response[max(span[0], len(prefill)) : span[1]]):
        return None
    return response[slice(*span)].strip()


def last_number(text: str) -> str | None:
    """The last number in the text, without thousands separators; None if there is none.

    >>> last_number("18 - 5 = 13, or $1,300.50.")
    '1300.50'
    """
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def python_value(value: Any) -> Any:
    """A table's value in Python's own types: numbers, times and arrays of numpy and torch, also in lists and dicts.

    A float of fewer than 64 bits becomes the shortest decimal that rounds to it: 0.1, not 0.10000000149011612.

    >>> python_value({"target": np.int64(16), "share": np.float32(0.1), "numbers": np.array([3, 5])})
    {'target': 16, 'share': 0.1, 'numbers': [3, 5]}
    """
    if type(value) is dict:
        return {key: python_value(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(python_value, value))
    if not hasattr(value, "dtype") or not hasattr(value, "ndim"):
        return value
    if value.ndim:
        return [python_value(item) for item in value]
    kind, item = str(value.dtype).removeprefix("torch."), value.item()
    if kind in ("float16", "float32"):
        return float(str(getattr(np, kind)(item)))
    if kind == "bfloat16":  # numpy has none
        decimals = (float(f"{item:.{digits}g}") for digits in range(1, 5))
        return next(
            (decimal for decimal in decimals if value.new_tensor(decimal) == value), item
        )
    # A whole number here counts nanoseconds.
    if kind.startswith(("datetime64", "timedelta64")) and isinstance(item, int):
        return value.astype(f"{value.dtype.kind}8[us]").item()
    return item


def gold_text(value: Any) -> str | None:
    """A right answer as text, stripped; None where there is none (None, NaN, blank text).

    A table changes how a value is written, so 2.0 is "2", Decimal("0.10") is "0.1", and midnight is its date.
    Raises ValueError for a list, a dict and the like, which have no single text.

    >>> gold_text(2.0), gold_text(" 82 "), gold_text(float("nan"))
    ('2', '82', None)
    """
    value = python_value(value)
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, bytes | Mapping | Set) or hasattr(value, "__len__"):
        raise ValueError(
            f"{value!r:.200} is a {type(value).__name__}, not one answer; keep it in a column of its own for the "
            "reward, and give a text, a number or None"
        )
    is_nan = isinstance(value, float | Decimal) and value != value
    if value is None or is_nan or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, datetime) and value.timetz() == time.min:
        return str(value.date())
    if isinstance(value, Decimal) and value.is_finite():
        return f"{value.normalize():f}"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def column(columns: dict[str, Any], name: str, *, reward: str, rows: int) -> Sequence[Any]:
    """The data set column that a reward needs; ValueError naming the reward and the column if it is missing."""
    if name not in columns:
        raise ValueError(
            f"reward {reward!r} needs the data set column {name!r}; columns given: {sorted(columns)}"
        )
    values = columns[name]
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise ValueError(
            f"column {name}={values!r:.100} in {reward!r} must be a list, one value a completion"
        )
    if len(values) != rows:
        raise ValueError(
            f"column {name!r} has {len(values)} rows for {rows} completions in {reward!r}"
        )
    return values


def text_of(completion: Any) -> str:
    """A completion as text: the text itself, or the content of the last of its messages.

    Raises ValueError for anything else.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and not completion:
        return ""
    if isinstance(completion, Sequence) and isinstance(completion[-1], dict):
        message = completion[-1]
        if "content" not in message and {"from", "value"} <= message.keys():
            raise ValueError(
                f"completion={completion!r:.200} has messages as ShareGPT has them; give the text in 'value'"
            )
        content = message.get("content") or ""
        if isinstance(content, str):
            return content
        return "".join(block.get("text") or "" for block in content)
    raise ValueError(
        f"completion={completion!r} is neither text nor messages; use str or [{{'role': ..., 'content': ...}}]"
    )
