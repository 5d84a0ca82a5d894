"""A chat template that renders the training's prompt by itself, with system text, worked examples and prefill.

A client sends the question alone, and the model gets the prompt of its training. A client's own system message
replaces the trained one. A client returns earlier answers without the prefill, which the model
never wrote; the template puts it in front of them again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_kit._support.argument_checks import PROBE
from grpo_kit.prompts import NO_TEMPLATE, PromptError, build_prompt
from grpo_kit.tasks import Task

_CLOSED = "{% set kit_open = add_generation_prompt %}{% set add_generation_prompt = false %}"


class ExportError(ValueError):
    """A model was not exported; the message gives the reason, the place of the written files, and what would do."""


@contextmanager
def as_export_errors() -> Iterator[None]:
    """Raises a ValueError of the block as an ExportError with the same message."""
    try:
        yield
    except ValueError as error:
        raise ExportError(str(error)) from None


@dataclass(frozen=True)
class Prompting:
    """The text around a question in training, from a task."""

    system: str | None = None
    prefill: str = ""
    examples: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, task: Any) -> Prompting:
        """From a task; empty for None."""
        if task is None:
            return cls()
        return cls(task.system, task.prefill, tuple(task.examples))

    def prompt(self, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
        """The training's prompt of one question."""
        return build_prompt(
            tokenizer, question, system=self.system, prefill=self.prefill, examples=self.examples
        )


def with_serving_template(
    tokenizer: PreTrainedTokenizerBase, prompting: Prompting
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer whose chat template renders [user: question] to the training's prompt, token for token.

    Raises ExportError if the template renders an open answer in its own way.
    """
    trained = prompting.prompt(tokenizer, PROBE)
    served = copy.copy(tokenizer)  # its own template, the same vocabulary
    # Jinja drops a template's last line end.
    template = _head(prompting) + tokenizer.get_chat_template().removesuffix("\n")
    # The template's own opening of an answer is continued, or left out if it opens <think> and training did not.
    for opening, condition in ("", "add_generation_prompt"), (_CLOSED, "kit_open"):
        served.chat_template = opening + template
        end = _missing_end(served, trained)
        if end:
            served.chat_template += f"{{% if {condition} %}}{{{{ {_literal(end)} }}}}{{% endif %}}"
        if end is not None:
            break
    else:
        raise ExportError(
            f"the chat template renders {render(served, PROBE)[-80:]!r} where training had {trained[-80:]!r}; set "
            "tokenizer.chat_template to one that leaves an answer open"
        )
    expected = trained_ids(tokenizer, trained)
    if _served_ids(served, PROBE) != expected:
        served.chat_template = "{{ bos_token }}" + served.chat_template
    served_ids = _served_ids(served, PROBE)
    if served_ids != expected:
        raise ExportError(
            f"the chat template alone gives {tokenizer.decode(served_ids)[-200:]!r}, training "
            f"{trained[-200:]!r}; set tokenizer.chat_template to one that renders both alike"
        )
    return served


def _missing_end(served: PreTrainedTokenizerBase, trained: str) -> str | None:
    """The text that training has behind the rendered question; None if the rendered text differs."""
    rendered, bos = render(served, PROBE), served.bos_token or ""
    if bos and not trained.startswith(bos):
        rendered = rendered.removeprefix(bos)  # the tokenizer adds it
    return trained.removeprefix(rendered) if trained.startswith(rendered) else None


def trained_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """A prompt's tokens as in training."""
    return tokenizer(prompt)["input_ids"]


def check_questions(
    tokenizer: PreTrainedTokenizerBase,
    served: PreTrainedTokenizerBase,
    prompting: Prompting,
    questions: Sequence[str],
) -> None:
    """Raises ExportError for the first question that the serving template renders to other tokens than training's."""
    for question in questions:
        expected = trained_ids(tokenizer, prompting.prompt(tokenizer, question))
        served_ids = _served_ids(served, question)
        if served_ids != expected:
            raise ExportError(
                f"question={question!r:.100}: the chat template alone gives {served.decode(served_ids)[-200:]!r}, "
                f"training {served.decode(expected)[-200:]!r}; set tokenizer.chat_template to one that keeps a "
                "question as it is"
            )


def check_trained_prompts(
    trained: Any, tokenizer: PreTrainedTokenizerBase, prompting: Prompting, task: Any
) -> None:
    """Raises ExportError if the first prompts of a trainer's own task, `trained`, differ from the given task's.

    Several turns, and tasks that were made of TRL's pieces, are not checked.
    """
    if not isinstance(trained, Task) or hasattr(task, "play"):
        return
    rows = trained.train[:3]
    for row, text in zip(rows, trained.render(tokenizer, rows), strict=True):
        prompt = prompting.prompt(tokenizer, row["question"])
        if prompt != text:
            name = "task=None" if task is None else f"task {task.name!r}"
            raise ExportError(
                f"{name} renders the prompt ...{prompt[-80:]!r} and the trainer was trained on ...{text[-80:]!r}; give "
                "the task that it was trained on"
            )


def _head(prompting: Prompting) -> str:
    """Puts system text and worked examples in front of the messages, and the prefill in front of earlier answers."""
    if prompting == Prompting():
        return ""
    examples, system = [], []
    for question, answer in prompting.examples:
        examples.append({"role": "user", "content": question})
        examples.append({"role": "assistant", "content": answer})
    if prompting.system is not None:
        system = [{"role": "system", "content": prompting.system}]
    lines = []
    if prompting.prefill:
        prefill = _literal(prompting.prefill)
        lines.append(
            "{% set kit = namespace(messages=[]) %}{% for m in messages %}"
            "{% if m['role'] == 'assistant' and m['content'] is string and not loop.last "
            f"and not m['content'].startswith({prefill}) %}}"
            f"{{% set kit.messages = kit.messages + [{{'role': 'assistant', 'content': {prefill} + m['content']}}] %}}"
            "{% else %}{% set kit.messages = kit.messages + [m] %}{% endif %}{% endfor %}"
            "{% set messages = kit.messages %}"
        )
    lines.append(
        "{% if messages and messages[0]['role'] == 'system' %}"
        f"{{% set messages = messages[:1] + {_literal(examples)} + messages[1:] %}}"
        f"{{% else %}}{{% set messages = {_literal([*system, *examples])} + messages %}}{{% endif %}}"
    )
    return "".join(lines)


def _literal(value: Any) -> str:
    """The value as a Jinja literal, which is JSON."""
    return json.dumps(value, ensure_ascii=False)


def render(tokenizer: PreTrainedTokenizerBase, question: str | list[dict[str, str]]) -> str:
    """A question, or messages, rendered by the chat template alone, with an open answer. Raises PromptError."""
    messages = question
    if isinstance(question, str):
        messages = [{"role": "user", "content": question}]
    if not tokenizer.chat_template:
        raise PromptError(NO_TEMPLATE)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise anything
        raise PromptError(f"the chat template refuses its messages: {error}") from error


def _served_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Tokens as on servers: rendered, then tokenized without the tokenizer's own BOS."""
    return tokenizer(render(tokenizer, question), add_special_tokens=False)["input_ids"]
