"""Writes an Ollama Modelfile. Ollama does not read the template inside a GGUF: its templates are in Go's language."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from grpo_kit.more.export._template import ExportError, Prompting, as_export_errors, render

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


def _texts(served: PreTrainedTokenizerBase, prompting: Prompting, system: list[dict[str, str]]) -> _Texts:
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
    text = "".join(c if c.isprintable() or c in "\n\t" else f'{{{{ "\\U{ord(c):08x}" }}}}' for c in text)
    if text.endswith("{"):  # it would open the text behind it
        text = text[:-1] + '{{ "{" }}'
    return text
