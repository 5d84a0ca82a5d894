"""A TRL data set and its reward functions as a task of the loop: same prompts, and rewards called as TRL calls them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import TrainerState
from trl import is_conversational

from grpo_kit._support.argument_checks import PROBE
from grpo_kit.loop.config_checks import checked
from grpo_kit.loop.protocols import Task
from grpo_kit.prompts import NO_TEMPLATE, continue_messages, cure_of
from grpo_kit.rewards._parts import all_parts, bare_name, check_calls, range_of

_ROW = "trl_row"  # the data set's row, under a name that no column of it can take
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # TRL keeps them from rewards
_PASSED = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)


class TrlTask(Task):
    """What the loop reads of a task, made of TRL's pieces.

    data: a column "prompt", texts or messages, and the columns that rewards need. held_out: more such rows.
    reward_weights: any numbers. template: more arguments of the chat template. columns: False keeps them from rewards.
    state: the trainer_state that rewards get; whoever trains keeps it up to date.
    Raises ValueError, naming the argument and what would do, for data or rewards that the loop cannot use.
    """

    def __init__(
        self,
        data: Dataset | Sequence[Mapping[str, Any]],
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        held_out: Dataset | Sequence[Mapping[str, Any]] | None = None,
        reward_weights: Sequence[float] | None = None,
        max_completion_tokens: int,
        template: Mapping[str, Any] | None = None,
        columns: bool = True,
    ) -> None:
        rows = _rows_of("train_dataset", data)
        held_out_rows = [] if held_out is None else _rows_of("eval_dataset", held_out)
        self.name, self.max_completion_tokens = "trl", max_completion_tokens
        self.template, self.state = dict(template or {}), TrainerState()
        self.conversational = is_conversational({"prompt": rows[0]["prompt"]})
        self.train = [_row(row, columns) for row in rows]
        self.held_out = [_row(row, columns) for row in held_out_rows]
        # Rewards of any scale: see tasks._measure.
        self.is_correct, self.answer_rewards, self.strategies = None, [], {}
        openings = {_opening(row["prompt"]) for row in [*rows, *held_out_rows]}
        self.prefill = openings.pop() if len(openings) == 1 else ""
        if not isinstance(reward_funcs, (list, tuple)):
            reward_funcs = [reward_funcs]
        self.rewards = [
            _TrlReward(function, self) for function in reward_funcs if function is not None
        ]
        if reward_weights is None:
            reward_weights = [1.0] * len(self.rewards)
        self.reward_weights = []
        if self.rewards:
            self.reward_weights = checked("reward_weights", reward_weights)
        if not self.rewards or len(self.rewards) != len(self.reward_weights):
            raise ValueError(
                f"reward_weights={self.reward_weights!r} for {len(self.rewards)} rewards; give one number each, and at "
                "least one reward"
            )
        for name, split in (("train_dataset", self.train), ("eval_dataset", self.held_out)):
            columns_of_all = set.intersection(*(set(row[_ROW]) for row in split or self.train))
            shared = columns_of_all - {*_NOT_COLUMNS}
            check_calls([reward.function for reward in self.rewards], {*_PASSED, *shared}, name)

    def render(self, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """The text of each row's prompt. A last message of the assistant stays open: the model continues it.

        So does trl.apply_chat_template; TRL's GRPOTrainer closes that message and opens another.
        Raises ValueError for messages that the chat template cannot render.
        """
        return [self._text(tokenizer, row[_ROW]["prompt"]) for row in rows]

    def _text(self, tokenizer: Any, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        if not tokenizer.chat_template:
            raise ValueError(NO_TEMPLATE)
        role = prompt[-1]["role"]
        if role not in ("user", "tool", "assistant"):
            raise ValueError(
                f"prompt ends in a message of {role!r}; let it end in the user's or assistant's"
            )
        if role == "assistant":
            text = continue_messages(tokenizer, prompt, **self.template)
        else:
            text = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, **self.template
            )
        return _once_begun(tokenizer, text)


def _unlogged(name: str, value: Any) -> None:
    """Where a reward logs while held-out rows are measured."""


class _TrlReward:
    """A reward function of TRL, called by the loop with what TRL would give it. It has its name, range and parts.

    Completions of messages are [{"role": "assistant", "content": text}] each.
    """

    def __init__(self, function: Callable[..., Any], task: TrlTask) -> None:
        if (
            isinstance(function, str)
            or not callable(function)
            or hasattr(function, "state_dict")
        ):
            raise ValueError(
                f"reward_funcs has a {type(function).__name__}; the loop takes functions: write one that calls the "
                "reward model on prompts and completions"
            )
        self.function, self.task, self.__name__ = function, task, bare_name(function)
        if range_of(function) is not None:
            self.range = range_of(function)
        if all_parts(function):
            self.made_of_others, self.parts, self.names = True, function.parts, function.names

    def __call__(
        self,
        *,
        completions: list[str],
        completion_ids: Any,
        trl_row: list,
        log_extra: Callable[..., None] = _unlogged,
        log_metric: Callable[..., None] = _unlogged,
        **_: Any,
    ) -> Any:
        """The function's scores, or the coroutine of an asynchronous one. trl_row: the data set's rows."""
        names = [name for name in trl_row[0] if name not in _NOT_COLUMNS]
        if self.task.conversational:
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        return self.function(
            prompts=[row["prompt"] for row in trl_row],
            completions=completions,
            completion_ids=completion_ids,
            trainer_state=self.task.state,
            log_extra=log_extra,
            log_metric=log_metric,
            **{name: [row[name] for row in trl_row] for name in names},
        )


def _rows_of(argument: str, data: Any) -> list[dict[str, Any]]:
    if not isinstance(data, (Dataset, list, tuple)):
        raise ValueError(
            f"{argument} is a {type(data).__name__}; give a datasets.Dataset or a list of rows, such as "
            "Dataset.from_list(list(stream))"
        )
    rows = [dict(row) for row in data]
    if not rows or "prompt" not in rows[0]:
        raise ValueError(
            f"{argument} needs at least one row and a column 'prompt'; rename the column that holds it"
        )
    pictures = [name for name in ("image", "images") if name in rows[0]]
    if pictures:
        raise ValueError(
            f"{argument} has a column {pictures[0]!r}; the loop trains on text: use trl.GRPOTrainer"
        )
    for place, row in enumerate(rows):
        if not _is_prompt(row["prompt"]):
            cure = cure_of(row["prompt"]) or ("; it is empty" if not row["prompt"] else "")
            raise ValueError(
                f"{argument}: row {place} has the prompt {row['prompt']!r:.200}{cure}; give a text, or messages "
                "with 'role' and 'content'"
            )
    kinds = {isinstance(row["prompt"], str) for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"{argument} has texts and messages in 'prompt'; give one of the two")
    return rows


def _is_prompt(prompt: Any) -> bool:
    """Whether it is a text, or messages of roles, at least one."""
    if isinstance(prompt, str):
        return bool(prompt)
    listed = isinstance(prompt, list | tuple) and bool(prompt)
    return listed and all(
        isinstance(message, Mapping) and "role" in message for message in prompt
    )


def _row(row: dict[str, Any], columns: bool) -> dict[str, Any]:
    """A row as the loop reads it: question for messages to a reader, answer for the record, the rest for rewards."""
    loop_row = {"question": row["prompt"], _ROW: row if columns else {"prompt": row["prompt"]}}
    if "answer" in row:
        loop_row["answer"] = row["answer"]
    return loop_row


def _opening(prompt: Any) -> str:
    """The assistant's words that a prompt of messages ends in."""
    if isinstance(prompt, str) or not prompt or prompt[-1]["role"] != "assistant":
        return ""
    return prompt[-1]["content"]


def _once_begun(tokenizer: Any, text: str) -> str:
    """The rendered text without the beginning token that the tokenizer adds by itself.

    Raises ValueError where the tokenizer adds more than that.
    """
    rendered_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer(text)["input_ids"] == rendered_ids:
        return text
    bare = text.removeprefix(tokenizer.bos_token or "")
    if tokenizer(bare)["input_ids"] != rendered_ids:
        raise ValueError(
            "the tokenizer adds special tokens around a prompt that its chat template has rendered; set "
            "tokenizer.add_bos_token and add_eos_token to False, or give prompts as text"
        )
    return bare


def warn_of_bare_prompt(tokenizer: Any, prompt: Any) -> None:
    """Warns of bare text under a chat template: an instruct model then answers as a base model would."""
    if not isinstance(prompt, str) or not tokenizer.chat_template:
        return
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROBE}], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a template that wants other roles: nothing to compare with
        return
    words = text.partition(PROBE)[2].split()
    mark = words[0] if words else ""  # closes the user's turn: "<|im_end|>"
    if mark and mark not in prompt:
        warnings.warn(
            f"train_dataset: the first prompt, {prompt[:60]!r}, holds no {mark!r}, as a chat that this tokenizer's "
            "template renders does. An instruct model then sees no turns: build prompts with grpo_kit.build_prompt, or "
            "give messages. For a base model, tokenizer.chat_template = None says that text is meant.",
            UserWarning,
            stacklevel=4,
        )
