"""A chat template that renders the training's prompt by itself, with system text, worked examples and prefill.

A client sends the question alone, and the model gets the prompt of its training. A client's own system message
replaces the trained one. A client returns earlier answers without the prefill, which the model
never wrote; the template puts it in front of them again.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

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
            tokenizer,
            question,
            system=self.system,
            prefill=self.prefill,
            examples=self.examples,
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
            served.chat_template += (
                f"{{% if {condition} %}}{{{{ {_literal(end)} }}}}{{% endif %}}"
            )
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
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise anything
        raise PromptError(f"the chat template refuses its messages: {error}") from error


def _served_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Tokens as on servers: rendered, then tokenized without the tokenizer's own BOS."""
    return tokenizer(render(tokenizer, question), add_special_tokens=False)["input_ids"]


_QUESTION, _ANSWER, _SECOND_QUESTION, _SYSTEM = "KITPROBE", "KITANSWER", "KITNEXT", "KITSYSTEM"
# Texts that Go would read as its own, or the Modelfile as the template's end. (Go drops unprintable characters.)
_ESCAPES = {"{{": '{{ "{{" }}', '"""': r'{{ "\"\"\"" }}'}


class _Texts(NamedTuple):
    """The chat template's texts before a conversation, and around its questions and answers."""

    start: str
    before_question: str
    before_answer: str
    after_answer: str


def modelfile(
    served: PreTrainedTokenizerBase,
    prompting: Prompting,
    weights: str,
    *,
    temperature: float,
    tokens: int,
    ends: Sequence[int] = (),
) -> str:
    """The Modelfile beside the GGUF file `weights`. ends: tokens that end a completion; none: the tokenizer's.

    Raises ExportError for a template that renders a second question unlike the first, which Ollama's cannot.
    """
    texts = _texts(served, prompting, [])
    start = _go(texts.start)
    try:
        with_system = _texts(served, prompting, [{"role": "system", "content": _SYSTEM}]).start
    except ExportError:
        with_system = ""  # a template without a system text
    before_system, system, after_system = with_system.partition(_SYSTEM)
    if system:
        own_start = f"{_go(before_system)}{{{{ .System }}}}{_go(after_system)}"
        start = f"{{{{ if .System }}}}{own_start}{{{{ else }}}}{start}{{{{ end }}}}"
    question = f"{_go(texts.before_question)}{{{{ .Content }}}}{_go(texts.before_answer)}"
    answer = f"{{{{ .Content }}}}{_go(texts.after_answer)}"
    messages = (
        f'{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{question}'
        f'{{{{ else if eq .Role "assistant" }}}}{answer}{{{{ end }}}}{{{{ end }}}}'
    )
    stops = [served.convert_ids_to_tokens(end) for end in ends] or [served.eos_token]
    lines = [
        f"FROM ./{weights}",
        f'TEMPLATE """{start}{messages}"""',
        f"PARAMETER temperature {temperature:g}",
        f"PARAMETER num_predict {tokens}",
        "PARAMETER top_k 0",
        "PARAMETER top_p 1",
        "PARAMETER repeat_penalty 1",
        *(f'PARAMETER stop "{stop}"' for stop in stops),
    ]
    return "\n".join(lines) + "\n"


def _texts(
    served: PreTrainedTokenizerBase, prompting: Prompting, system: list[dict[str, str]]
) -> _Texts:
    """The texts of a conversation that begins with these messages."""
    messages = [
        *system,
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": prompting.prefill + _ANSWER},
        {"role": "user", "content": _SECOND_QUESTION},
    ]
    with as_export_errors():
        text = render(served, messages)
    start, _, text = text.partition(_QUESTION)
    before_answer, _, text = text.partition(_ANSWER)
    between, _, before_second_answer = text.partition(_SECOND_QUESTION)
    # The text between an answer and the next question: the answer's end, then the question's beginning.
    common = os.path.commonprefix([start[::-1], between[::-1]])
    before_question = common[::-1]
    if not text or before_answer != before_second_answer:
        raise ExportError("the chat template renders a second question unlike the first")
    return _Texts(
        start.removesuffix(before_question),
        before_question,
        before_answer,
        between.removesuffix(before_question),
    )


def _go(text: str) -> str:
    """The text as it stands in a Go template inside a Modelfile's three quotes."""
    for characters, escape in _ESCAPES.items():
        text = text.replace(characters, escape)
    text = "".join(
        c if c.isprintable() or c in "\n\t" else f'{{{{ "\\U{ord(c):08x}" }}}}' for c in text
    )
    if text.endswith("{"):  # it would open the text behind it
        text = text[:-1] + '{{ "{" }}'
    return text
