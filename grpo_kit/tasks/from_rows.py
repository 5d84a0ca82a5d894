"""Your own data as a task: rows and a reward function.

Longer than 300 lines because every form that data comes in has to give the same rows, which is seen side by side.
"""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from grpo_kit._support.argument_checks import check_known, is_number, nearest
from grpo_kit.prompts import cure_of
from grpo_kit.rewards._parts import Reward, bare_name, reaches_rewards, with_parts
from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.response import gold_text, own_answer, python_value
from grpo_kit.tasks._measure import labels_of
from grpo_kit.tasks.task import Strategy, Task, most_frequent_answer

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_WORKED = re.compile(r"####[ \t]*[^\s#][^\n]*\s*\Z")  # a solution, then "#### 18"
_NARROW = {pa.float16(): np.float16, pa.float32(): np.float32}

# a datasets.Dataset is an iterable of dicts
Rows = Iterable[dict] | Mapping[str, Sequence] | pd.DataFrame


def from_rows(
    name: str,
    train: Rows,
    held_out: Rows | None = None,
    *,
    reward: Reward | Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    question: str = "question",
    answer: str = "answer",
    answer_after: str | None = None,
    correct: Callable[[str, dict], bool] | None = None,
    strategies: dict[str, Strategy] | None = None,
    system: str | None = None,
    prefill: str = "",
    examples: Sequence[tuple[str, str]] = (),
    max_completion_tokens: int = 256,
    answer_tag: str = "answer",
    **unknown: Any,
) -> Task:
    """A task from your rows and a reward (or several).

    train: a list of dicts, a dict of lists, a pandas DataFrame or a datasets.Dataset. All give the same rows: values of
    numpy and torch become Python's (see rewards.response.python_value), and a data set is read as it is stored,
    whatever its format.
    held_out: rows never trained on; None moves every fifth row of train there.
    question, answer: names of the columns, which are kept and copied to "question" and "answer". The question is text,
    the answer text or a number (2.0, as a table writes a whole number beside a gap, becomes "2").
    answer_after: a mark in the answer column, such as GSM8K's "####". The answer is the text behind its last place;
    the column "solution" keeps the text before it.
    reward_weights: of any sum, made to add up to 1, which a line says; default equal.
    correct: (answer text, row) -> right? By default an answer is right if the rewards that judge it (those that need
    a column of the row) pay in full: 1.0, or `high` of a reward with `range = (low, high)`, or, on a larger scale with
    no stated range, the score of the row's own answer. A reward that cannot pay the rows' own answers in full is named
    in a warning and left out. If no reward judges the answer, it is right if it is the text of the row's answer. If no
    row has an answer and no reward states its range, nothing is right or wrong: results are the mean reward
    (tasks._measure).
    examples: as Task has them. Where the rows' answers are labels, an example with a label that no row has is named in
    a warning.
    strategies: default "always the most frequent answer". Rows without an answer column get "".
    Raises ValueError naming the column, the split and the row that do not fit, such as a missing answer (None, NaN),
    a list of answers, or a question that is no text.

    >>> def says_yes(completions, **columns):
    ...     return [float("yes" in text) for text in completions]
    >>> from_rows("yes", [{"question": str(i), "answer": "yes"} for i in range(10)], reward=says_yes)
    Task('yes', train=8, held_out=2)
    """
    arguments = ["name", "train", "held_out", *from_rows.__kwdefaults__]
    check_known("from_rows has no such argument", unknown, arguments)
    if isinstance(reward, Mapping):
        raise ValueError(
            f"task {name!r}: reward={reward!r:.100} is a dict; kit.rewards.WeightedSum(...) makes one reward of it"
        )
    if isinstance(train, str | os.PathLike):
        raise ValueError(
            f"task {name!r}: train={os.fspath(train)!r} is a path; give its rows, such as "
            "[json.loads(line) for line in open(path, encoding='utf-8-sig')] of a .jsonl file"
        )
    if isinstance(reward, str) or not isinstance(reward, Sequence):
        reward = [reward]
    rewards = list(reward)
    _check_functions(name, rewards)
    rows = _rows(name, "train", train, question, answer, answer_after)
    if held_out is None:
        rows, held_out_rows = _split(name, rows)
    else:
        held_out_rows = _rows(name, "held_out", held_out, question, answer, answer_after)
    _check_worked_answers(name, [*rows, *held_out_rows], rewards)
    if reward_weights is None:
        reward_weights = [1] * len(rewards)
    task = Task(
        name=name,
        train=rows,
        held_out=held_out_rows,
        rewards=rewards,
        reward_weights=_adding_up_to_1(name, reward_weights, len(rewards)),
        is_correct=correct,
        strategies=most_frequent_answer(rows) if strategies is None else strategies,
        system=system,
        prefill=prefill,
        examples=tuple(examples) if isinstance(examples, list) else examples,
        max_completion_tokens=max_completion_tokens,
        answer_tag=answer_tag,
    )
    _check_examples(task)
    return task


def _check_examples(task: Task) -> None:
    """Warns of a worked example whose answer is no label of a row; of other answers than labels none is expected."""
    labels = labels_of([*task.train, *task.held_out] if task.examples else ())
    for _, response in task.examples:
        answer = own_answer(response, "", task.answer_tag)
        if labels and answer is not None and answer not in labels:
            names = ", ".join(map(repr, sorted(labels)[:8]))
            warnings.warn(
                f"task {task.name!r}: examples has the answer {answer!r}, and no row has it, so that every prompt "
                f"shows a label that is never right. The rows have {names}; answer an example with one of them, or "
                f"take it out{nearest(answer, labels)}",
                stacklevel=3,
            )


def _check_functions(name: str, rewards: list[Any]) -> None:
    for reward in rewards:
        if isinstance(reward, type):
            bare_name(reward)  # says what to do
        if not callable(reward) or hasattr(reward, "state_dict"):
            raise ValueError(
                f"task {name!r}: reward={reward!r:.100} is no function of completions; wrap a reward model in one "
                "that gives values in [0, 1]"
            )


def _split(name: str, rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """(train, held out): every fifth question is held out, so that a repeated one is on one side only."""
    questions = dict.fromkeys(row["question"] for row in rows)
    if len(questions) < 5:
        raise ValueError(
            f"task {name!r}: train has {len(questions)} different questions in {len(rows)} rows, too few to split; "
            "give held_out"
        )
    held_out = set(list(questions)[4::5])
    train = [row for row in rows if row["question"] not in held_out]
    return train, [row for row in rows if row["question"] in held_out]


def _adding_up_to_1(name: str, weights: Any, count: int) -> Any:
    """The weights over their sum, which a line says unless they are alike. Task refuses other counts and no numbers."""
    if not isinstance(weights, list | tuple) or not weights or len(weights) != count:
        return weights
    if not all(map(is_number, weights)):
        return weights
    total = sum(weights)
    if min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError(
            f"task {name!r}: reward_weights={weights!r} must be at least 0, and not all of them 0"
        )
    if abs(total - 1) <= 1e-9:
        return weights
    shares = [weight / total for weight in weights]
    if len({*weights}) > 1:
        words = ", ".join(f"{share:.4g}" for share in shares)
        print(
            f"reward_weights={weights!r} add up to {total:g}; task {name!r} has {words}.",
            flush=True,
        )
    return shares


def _check_worked_answers(name: str, rows: list[dict], rewards: list[Reward]) -> None:
    """Raises ValueError for GSM8K's worked solutions as answers: a reward that compares answers would pay nothing."""
    if not any(isinstance(part, AnswerReward) for part in with_parts(rewards)):
        return
    for row in rows:
        if _WORKED.search(row["answer"]):
            raise ValueError(
                f"task {name!r}: the answer {row['answer'][-80:]!r} is a worked solution with '####' before its "
                "result, as GSM8K has them, and no answer of a model would equal all of it; read the result by "
                "answer_after='####'"
            )


def _rows(
    name: str, split: str, records: Rows, question: str, answer: str, after: str | None
) -> list[dict[str, Any]]:
    rows = []
    answered = False
    for place, record in enumerate(_records(name, split, records)):
        row_name = f"task {name!r}: {split} row {place}"
        if not isinstance(record, Mapping):
            raise ValueError(
                f"{row_name} is a {type(record).__name__}; use a dict of its columns"
            )
        record = {column: _without_nan(python_value(value)) for column, value in record.items()}
        _check_record(row_name, record, question, answer)
        gold = _answer(row_name, record, answer)
        if place == 0:
            answered = answer in record
        if (answer in record) != answered:
            raise ValueError(
                f"{row_name} and row 0 do not both have the column {answer!r}; give '' where none is known"
            )
        # A data set's own `prompt` or `completion` is copied to question and answer, and needed no more.
        copied = {column for column in (question, answer) if not reaches_rewards(column)}
        row = {column: value for column, value in record.items() if column not in copied}
        if after is not None:
            solution, mark, gold = gold.rpartition(after) if after else ("", "", "")
            if not mark or not gold.strip():
                raise ValueError(
                    f"{row_name}, column {answer!r}: nothing stands behind answer_after={after!r} in "
                    f"{record.get(answer)!r:.200}"
                )
            row["solution"], gold = solution.strip(), gold.strip()
        rows.append(row | {"question": record[question], "answer": gold})
    if not rows:
        raise ValueError(f"task {name!r}: {split} is empty; give at least one row")
    return rows


def _check_record(row_name: str, record: Mapping[str, Any], question: str, answer: str) -> None:
    """Raises ValueError where a column is missing, or the question is no text."""
    for argument, column in (("question", question), ("answer", answer)):
        if column not in record and column != "answer":
            raise ValueError(
                f"{row_name} has no column {argument}={column!r}; it has {sorted(map(str, record))}{_other(record)}"
            )
    text = record[question]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"{row_name} has the question {text!r:.200} in column {question!r}, a {type(text).__name__}; "
            f"use text, or drop the row{cure_of(text)}"
        )


def _other(row: Mapping[str, Any]) -> str:
    """How a row without the column is read: by another column's name, or out of its messages."""
    for value in row.values():
        if isinstance(value, list) and cure_of(value):
            return f"{cure_of(value)}, in a column 'question' of its own"
    for name in ("prompt", "problem", "query", "instruction", "input", "Question"):
        if name in row:
            return f"; question={name!r} reads that one"
    return ""


def _records(name: str, split: str, rows: Rows) -> Iterable[Any]:
    """The rows one by one, from every form that from_rows accepts."""
    if isinstance(rows, pd.DataFrame):
        rows = {column: _cells(values) for column, values in rows.items()}
    # Where nobody has imported it, which takes a second, rows are none of its.
    datasets = sys.modules.get("datasets")
    if datasets and isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        return _as_stored(rows)
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise ValueError(
            f"task {name!r}: {split}={rows!r:.100} is a {type(rows).__name__}; use a list of dicts, a dict of lists, a "
            "DataFrame or a datasets.Dataset"
        )
    if not isinstance(rows, Mapping):
        return rows
    if datasets and any(
        isinstance(split_rows, datasets.Dataset) for split_rows in rows.values()
    ):
        raise ValueError(
            f"task {name!r}: {split} is a DatasetDict; give one of its splits {sorted(rows)}, and another as held_out"
        )
    lengths = {}
    for column, values in rows.items():
        lengths[column] = None
        if hasattr(values, "__len__") and not isinstance(values, str):
            lengths[column] = len(values)
    if None in lengths.values() or len(set(lengths.values())) > 1:
        raise ValueError(
            f"task {name!r}: {split} is a dict whose values are no lists of one length ({lengths}); give a dict of "
            "lists (column -> values), or a list of dicts"
        )
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


def _without_nan(value: Any) -> Any:
    """The value with None for NaN inside dicts: pandas' way to fill the keys that a dict lacks."""
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        result[key] = _without_nan(item)
        if pd.api.types.is_scalar(item) and pd.isna(item):
            result[key] = None
    return result


def _cells(column: pd.Series) -> list[Any]:
    """The values of a column; those of pandas' to_dict would be a float32 as a float64: 0.10000000149011612."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return list(np.asarray(column))
    kind = getattr(column.dtype, "pyarrow_dtype", None)
    return [_as_written(value, kind) for value in column.array]


def _as_stored(rows: Dataset | IterableDataset) -> Iterable[dict[str, Any]]:
    """The rows of a data set, whatever its format: a tensor would hold a float64 as a float32. A transform is run."""
    kinds = _kinds(rows.features.arrow_schema if rows.features else ())
    if not (hasattr(rows, "format") and rows.format["type"] == "custom"):
        rows = rows.with_format(None)
    for row in rows:
        yield {column: _as_written(value, kinds.get(column)) for column, value in row.items()}


def _as_written(value: Any, kind: pa.DataType | None) -> Any:
    """An Arrow value of a kind, whose floats of fewer than 64 bits are decimals again."""
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, float) and kind in _NARROW:
        return python_value(_NARROW[kind](value))
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_as_written(item, kind.value_type) for item in value]
    if isinstance(value, dict) and isinstance(kind, pa.StructType):
        kinds = _kinds(kind)
        return {key: _as_written(item, kinds.get(key)) for key, item in value.items()}
    return value


def _kinds(fields: Iterable[pa.Field]) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in fields}


def _answer(row_name: str, row: Mapping[str, Any], column: str) -> str:
    value = row.get(column, "")
    try:
        text = gold_text(value)
    except ValueError as error:
        raise ValueError(f"{row_name}, column {column!r}: {error}") from error
    if isinstance(value, str):
        return value
    if text is None:
        raise ValueError(
            f"{row_name} has the answer {value!r} in column {column!r}; drop the row, or give '' where nothing is "
            "known that a reward could compare with"
        )
    return text
