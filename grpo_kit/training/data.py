"""Data and rewards as they are given to the trainer: made into what trl takes, or refused before training starts."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from torch.nn import Module

from grpo_kit.models.context import check_context, context_length
from grpo_kit.prompts import NO_TEMPLATE, from_list
from grpo_kit.rewards.parts import all_parts, check_column_names, check_columns, range_of, reward_names
from grpo_kit.rewards.scoring import PendingAsync, PendingScores
from grpo_kit.training.messages import prefill_of
from grpo_kit.training.trl_internals import is_async_callable, is_function

_AT_ONCE = 1000  # prompts tokenized together
_ANSWERS = 256  # rows whose right answers are measured
_OPEN_TAG = re.compile(r"<(\w+)>\s*\Z")
_PROBE = "KITPROBE"  # a word that no template holds


class Given:
    """The rewards and data sets that one trainer is given: as trl takes them, or refused before any training.

    rewards: reward_funcs. options: what else trl's trainer is given. asked: the rewards as trl gets them, functions
    called by scoring under names that differ.
    Raises ValueError for what cannot work, naming the argument and what would do.
    """

    def __init__(self, rewards: Any, options: Mapping[str, Any]) -> None:
        rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
        rewards = [r for r in rewards if r is not None]
        _check_kinds(rewards, options.get("reward_processing_classes"))
        self._functions = [r for r in rewards if is_function(r)]
        names = iter(reward_names(self._functions))
        self.asked = [_asked(r, next(names)) if is_function(r) else r for r in rewards]
        self._environments = options.get("environment_factory") is not None
        self._more_columns = options.get("rollout_func") is not None  # it may add some that rewards ask for
        self._warned = False
        _check_calls(self._functions, environments=self._environments)

    def take(self, data: Any, name: str, *, least: int = 1) -> Any:
        """The data set as trl takes it: a list of dicts is made into one, a dict of data sets is for evaluation.

        name: the argument's. least: unique prompts of one rollout buffer, with fewer of which trl trains 0 steps and
        only warns. An IterableDataset is checked for the columns that it declares.
        """
        data = _as_data(data, name)
        for label, part in _parts(data, name):
            self._check(part, label, least)
        return data

    def _check(self, data: Dataset | IterableDataset, name: str, least: int) -> None:
        _check_size(data, name, least)
        columns = data.column_names
        if columns is None:
            return
        if "prompt" not in columns and not self._environments:
            raise ValueError(
                f"{name} has columns {columns} but no 'prompt'; build it with grpo_kit.build_dataset"
            )
        shown = {"prompt", "prefill"}
        if not (isinstance(data, Dataset) and "prompt" in columns and isinstance(data[0]["prompt"], str)):
            shown |= {"image", "images"}  # beside messages, for a model that sees
        check_column_names([column for column in columns if column not in shown], name)
        prefilled = isinstance(data, Dataset) and "prompt" in columns and prefill_of(data[0]["prompt"])
        if not self._more_columns:
            check_columns(self._functions, [*columns, "prefill"] if prefilled else columns, name)

    def check_prompts(self, trainer: Any, data: Any, name: str) -> None:
        """Refuse prompts that cannot be rendered, or leave no room for a completion.

        trl never truncates, the model would read past its end. data: what take() gave. Prompts of a Dataset are
        checked, as text or as messages; not those that an environment, a rollout_func or images change, nor an
        IterableDataset's. Warns once of texts that hold nothing of the tokenizer's chat template.
        """
        for label, part in _parts(data, name):
            if isinstance(part, Dataset) and not (
                self._environments or self._more_columns or trainer._is_vlm
            ):
                _check_answers_fit(trainer, part, label)
                _check_lengths(trainer, part, label)
                self._warned = self._warned or _warn_of_bare_prompts(trainer, part[0]["prompt"], label)


def _asked(reward: Callable, name: str) -> PendingScores:
    return PendingAsync(reward, name) if is_async_callable(reward) else PendingScores(reward, name)


def _parts(data: Any, name: str) -> list[tuple[str, Any]]:
    """The data sets in it, by the words for them."""
    if isinstance(data, dict):
        return [(f"{name}[{key!r}]", part) for key, part in data.items() if part is not None]
    return [] if data is None else [(name, data)]


def _as_data(data: Any, name: str) -> Any:
    if data is None or isinstance(data, (Dataset, IterableDataset)):
        return data
    if isinstance(data, (list, tuple)) and data:
        return from_list(data, name)
    if isinstance(data, dict):  # a DatasetDict too
        if name == "eval_dataset" and data:
            return {key: _as_data(value, f"{name}[{key!r}]") for key, value in data.items()}
        raise ValueError(
            f"{name} is a {type(data).__name__} of {sorted(map(str, data))}; give one of them, such as "
            f"data[{next(iter(data), 'train')!r}]"
        )
    kind = type(data).__name__
    cure = "Dataset.from_pandas(frame)" if kind == "DataFrame" else "a list of dicts"
    rows = " without rows" if isinstance(data, (list, tuple)) else ""
    raise ValueError(f"{name} is a {kind}{rows}; use a datasets.Dataset, an IterableDataset or {cure}")


def _check_kinds(rewards: Sequence[Any], tokenizers: Any) -> None:
    """Refuse what trl cannot ask: objects that are not called, and reward models whose tokenizer nobody names.

    tokenizers: reward_processing_classes. Raises ValueError naming the reward and what would do.
    """
    given = tokenizers if isinstance(tokenizers, (list, tuple)) else [tokenizers] * len(rewards)
    for i, reward in enumerate(rewards):
        kind = type(reward).__name__
        if not callable(reward) and not isinstance(reward, str):
            raise ValueError(
                f"reward_funcs[{i}] is a {kind}, which cannot be called; give f(completions, **columns) -> list of "
                "numbers, a sequence-classification model of transformers, or the name of one"
            )
        config = getattr(reward, "config", None) if isinstance(reward, Module) else None
        if config is not None and not config._name_or_path and (i >= len(given) or given[i] is None):
            raise ValueError(
                f"reward_funcs[{i}] is a {kind} that was not loaded from a folder or the hub, so its tokenizer is not "
                "known; give it as reward_processing_classes, a list with one entry a reward (None for functions)"
            )


def _check_calls(rewards: Sequence[Callable], *, environments: bool) -> None:
    """Refuse rewards that would fail after a rollout: parts of one name, or parameters that trl's call does not fit.

    rewards: those that trl calls as functions. environments: is there an environment_factory?
    """
    named = {id(p): n for r in rewards for p, n in zip(all_parts(r), getattr(r, "names", ()), strict=False)}
    twice = sorted(name for name, count in Counter(named.values()).items() if count > 1)
    if twice:
        raise ValueError(
            f"reward_funcs has several parts named {twice}; metrics are kept by name, so set __name__ on one"
        )
    given = ["completions", "prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"]
    given += ["environments"] * environments
    for reward in rewards:
        range_of(reward)
        try:
            parameters = inspect.signature(reward).parameters
        except (TypeError, ValueError):  # some built-in callables have none
            continue
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        by_name = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        refused = [name for name in given if name not in by_name and not takes_all]
        if refused:
            raise ValueError(
                f"reward {reward_names([reward])[0]!r} has the parameters ({', '.join(parameters)}), but is called "
                f"with {', '.join(refused)} and the data set's columns too, by keyword; add **columns to its parameters"
            )


def _check_size(data: Any, name: str, least: int) -> None:
    if not isinstance(data, Dataset):
        return
    if len(data) == 0:
        raise ValueError(f"{name} is empty; give it at least one prompt{' a step' if least > 1 else ''}")
    if len(data) < least:
        raise ValueError(
            f"{name} has {len(data)} prompts, but one step needs {least} different ones "
            "(generation_batch_size / num_generations); add rows or lower the batch"
        )


def _check_answers_fit(trainer: Any, data: Dataset, name: str) -> None:
    """Warn where right answers of the trainer's task are longer than a completion may be."""
    from grpo_kit.tasks.task import Task

    limit, rows = trainer.max_completion_length, data[:_ANSWERS]
    if not isinstance(trainer.task, Task) or "answer" not in rows:
        return
    opened = _OPEN_TAG.search(rows["prefill"][0]) if "prefill" in rows else None
    closing = f"</{opened[1]}>" if opened else ""
    texts = [f"{answer}{closing}" for answer in rows["answer"]]
    lengths = [len(ids) for ids in trainer.text_tokenizer(texts, add_special_tokens=False)["input_ids"]]
    over = sum(length > limit for length in lengths)
    if over:
        warnings.warn(
            f"{name}: of {len(lengths)} right answers {over} have more than {limit} tokens (the longest "
            f"{max(lengths)}), so that they can only be cut off; kit.length_probe measures what is needed",
            UserWarning,
            stacklevel=4,
        )


def _check_lengths(trainer: Any, data: Dataset, name: str) -> None:
    context, completion = context_length(trainer.model), trainer.max_completion_length
    for first in range(0, len(data), _AT_ONCE):
        prompts = data[first : first + _AT_ONCE]["prompt"]
        for row, ids in enumerate(_ids(trainer, prompts, name, first), start=first):
            if not ids:
                raise ValueError(f"{name} row {row}: its prompt has no tokens; give it at least one")
            check_context(
                context, len(ids), completion, where=f"{name} row {row}: its prompt", length="max_completion_length",
                mend="drop the row or shorten the completion",
            )  # fmt: skip


def _ids(trainer: Any, prompts: list[Any], name: str, first: int) -> list[list[int]]:
    try:
        return trainer._tokenize_prompts(prompts)[0]
    except Exception:  # templates raise whatever they like
        for row, prompt in enumerate(prompts, start=first):
            try:
                trainer._tokenize_prompts([prompt])
            except Exception as error:
                if not isinstance(prompt, str) and not trainer.text_tokenizer.chat_template:
                    raise ValueError(f"{name} row {row}: {NO_TEMPLATE}") from error
                raise ValueError(f"{name} row {row}: {error}") from error
        raise


def _warn_of_bare_prompts(trainer: Any, prompt: Any, name: str) -> bool:
    """Warns, and says whether, of bare text for an instruct model, which then answers as a base model would."""
    tokenizer = trainer.text_tokenizer
    if not isinstance(prompt, str) or not tokenizer.chat_template:
        return False
    try:
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": _PROBE}], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a template that wants other roles: nothing to compare with
        return False
    mark = next(iter(shown.partition(_PROBE)[2].split()), "")  # what closes the user's turn: "<|im_end|>"
    if not mark or mark in prompt:
        return False
    warnings.warn(
        f"{name}: the first prompt, {prompt[:60]!r}, holds no {mark!r}, as a chat that this tokenizer's template "
        "renders does. An instruct model then sees no turns: build prompts with grpo_kit.build_prompt, or give "
        "messages. Prompts for a base model are text: tokenizer.chat_template = None then says that they are meant so.",
        UserWarning,
        stacklevel=4,
    )
    return True
