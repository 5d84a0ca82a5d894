"""Writes an Ollama Modelfile. Ollama does not read the template inside a GGUF: its templates are in Go's language."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from grpo_kit.more.export._template import ExportError, Prompting, as_export_errors, render

_ASKED, _ANSWERED, _AGAIN, _OWN = "KITPROBE", "KITANSWER", "KITNEXT", "KITSYSTEM"
# Texts that Go would read as its own, or the Modelfile as the template's end. (Go drops unprintable characters.)
_ESCAPED = {"{{": '{{ "{{" }}', '"""': r'{{ "\"\"\"" }}'}


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
    head, asks, opened, between = _pieces(served, prompting, [])
    try:
        own = _pieces(served, prompting, [{"role": "system", "content": _OWN}])[0]
    except ExportError:
        own = ""  # a template without a system text
    before, held, behind = own.partition(_OWN)
    first = (
        f"{{{{ if .System }}}}{_go(before)}{{{{ .System }}}}{_go(behind)}{{{{ else }}}}{_go(head)}{{{{ end }}}}"
        if held
        else _go(head)
    )
    turn = (
        '{{ range .Messages }}{{ if eq .Role "user" }}'
        + f"{_go(asks)}{{{{ .Content }}}}{_go(opened)}"
        + '{{ else if eq .Role "assistant" }}'
        + f"{{{{ .Content }}}}{_go(between)}"
        + "{{ end }}{{ end }}"
    )
    stops = [served.convert_ids_to_tokens(end) for end in ends] or [served.eos_token]
    return "\n".join(
        [
            f"FROM ./{weights}",
            f'TEMPLATE """{first}{turn}"""',
            f"PARAMETER temperature {temperature:g}",
            f"PARAMETER num_predict {tokens}",
            "PARAMETER top_k 0",
            "PARAMETER top_p 1",
            "PARAMETER repeat_penalty 1",
            *(f'PARAMETER stop "{stop}"' for stop in stops),
            "",
        ]
    )


def _pieces(
    served: PreTrainedTokenizerBase, prompting: Prompting, own: list[dict[str, str]]
) -> tuple[str, str, str, str]:
    """The texts before the conversation, before a question, behind a question, and behind an answer."""
    both = [
        *own,
        {"role": "user", "content": _ASKED},
        {"role": "assistant", "content": prompting.prefill + _ANSWERED},
        {"role": "user", "content": _AGAIN},
    ]
    with as_export_errors():
        text = render(served, both)
    head, _, rest = text.partition(_ASKED)
    opened, _, rest = rest.partition(_ANSWERED)
    between, _, behind = rest.partition(_AGAIN)
    # The text between two messages: the end of an answer, then the beginning of a question.
    asks = head[_common_end(head, between) :]
    if not rest or opened != behind or not between.endswith(asks):
        raise ExportError("the chat template renders a second question unlike the first")
    return head.removesuffix(asks), asks, opened, between.removesuffix(asks)


def _common_end(head: str, between: str) -> int:
    """Start of the longest common end of both texts."""
    n = 0
    while n < min(len(head), len(between)) and head[-1 - n] == between[-1 - n]:
        n += 1
    return len(head) - n


def _go(text: str) -> str:
    """The text as it stands in a Go template inside a Modelfile's three quotes."""
    for found, written in _ESCAPED.items():
        text = text.replace(found, written)
    text = "".join(c if c.isprintable() or c in "\n\t" else f'{{{{ "\\U{ord(c):08x}" }}}}' for c in text)
    return text[:-1] + '{{ "{" }}' if text.endswith("{") else text  # else it would open the text behind it
