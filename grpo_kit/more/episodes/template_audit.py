"""Renders conversations to find what a chat template does with earlier thoughts, and reports it in words.

A thinking model writes <think>...</think> and an answer. When the next turn is rendered, its template may drop the
thought, keep it, or insert an empty one. If it drops the thought, the next prompt does not continue the sampled text:
training on one long conversation then trains on texts that the served model never reads.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_kit.prompts import NO_TEMPLATE, PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Words that no template writes or searches for.
_ASKED, _THOUGHT, _ANSWER, _NEXT = "KITASKED", "KITTHOUGHT", "KITANSWER", "KITNEXT"
_CALL = {"type": "function", "function": {"name": "kitlook", "arguments": {"x": "y"}}}
_PROPERTY = {"x": {"type": "string", "description": "what"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "kitlook",
        "description": "Look.",
        "parameters": {"type": "object", "properties": _PROPERTY, "required": ["x"]},
    },
}
# Names under which servers return a thought beside the answer.
FIELDS = ("reasoning_content", "reasoning", "thinking")
_NEXT_TURNS: dict[str, dict[str, Any]] = {
    "a user turn": {"role": "user", "content": _NEXT},
    "a tool result": {"role": "tool", "name": "kitlook", "tool_call_id": "abcdefghi", "content": _NEXT},
    "a system turn": {"role": "system", "content": _NEXT},
}
_TAG = re.compile(r"</?[A-Za-z][\w-]*>")
_BLOCK = re.compile(r"<([A-Za-z][\w-]*)>\s*</\1>")

Render = Callable[..., str]


@dataclass(frozen=True, repr=False)
class TurnAudit:
    """How a chat template treats thoughts. Made by audit_turns().

    table: a row for each kind of next message ("a user turn", "a tool result", "a system turn"), with
    in_text: "kept" or "dropped" for a thought in the message's text; "refused" if the template raises,
    "no such turn" if the template leaves that message out.
    in_field: the same for a thought passed beside the text, under a name of FIELDS.
    extends, extends_without: does the next prompt begin with this one and its completion, with and without a thought?
    None if there is no next prompt.
    empty_block: does the template insert an empty thought into an answer that had none?
    opens: text that the template writes behind the assistant's header. sentences: all of this in words.
    """

    opens: str
    table: pd.DataFrame
    sentences: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return "\n".join([*self.sentences, "", self.table.fillna("").to_string()])

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.sentences)
        return f"<ul>{lines}</ul>{self.table.fillna('').to_html()}"


def audit_turns(
    tokenizer: PreTrainedTokenizerBase, *, tags: tuple[str, str] = ("<think>", "</think>")
) -> TurnAudit:
    """How the tokenizer's chat template treats the thoughts of earlier turns, found by rendering conversations.

    tags: the tags around a thought that is part of the text.
    Raises ValueError for a tokenizer without chat template, and for a template that cannot render a single question.

    >>> audit_turns(tokenizer)  # doctest: +SKIP
    Thoughts of earlier turns are dropped before a user turn; kept before a tool result and a system turn.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(NO_TEMPLATE)
    render = _renderer(tokenizer)
    try:
        opened = render([_user()])
        bare = render([_user()], add_generation_prompt=False)
    except Exception as error:
        raise ValueError(f"the chat template cannot render one question of a user: {error}") from error
    opens = _opens(opened, bare)
    rows = {next_: _row(render, next_, tags) for next_ in _NEXT_TURNS}
    table = pd.DataFrame.from_dict(rows, orient="index").astype(object)
    return TurnAudit(opens, table.rename_axis("before"), _sentences(opens, table))


# ---- conversations --------------------------------------------------------------------------------------------------


def _renderer(tokenizer: PreTrainedTokenizerBase) -> Render:
    """Messages -> text. Templates of vision models accept a text only as a list of parts: the second try."""

    def render(
        messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **more: Any
    ) -> str:
        made = lambda turns: tokenizer.apply_chat_template(  # noqa: E731
            turns, tokenize=False, add_generation_prompt=add_generation_prompt, **more
        )
        try:
            text = made([dict(message) for message in messages])
            if _ASKED in text:
                return text
        except Exception:
            text = None
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            seen = made(parts)
        except Exception:
            if text is None:
                raise
            return text
        return seen if text is None or _ASKED in seen else text

    return render


def _user() -> dict[str, Any]:
    return {"role": "user", "content": _ASKED}


def _answers(next_: str, tags: tuple[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where the thought is, the assistant's message); before a tool result also without a text of its own."""
    calls = {"tool_calls": [{**_CALL, "id": "abcdefghi"}]} if next_ == "a tool result" else {}
    for text in (_ANSWER, "") if calls else (_ANSWER,):
        yield (
            "in_text",
            {"role": "assistant", "content": f"{tags[0]}\n{_THOUGHT}\n{tags[1]}\n\n{text}", **calls},
        )
        for name in FIELDS:
            yield "in_field", {"role": "assistant", "content": text, name: _THOUGHT, **calls}


def _row(render: Render, next_: str, tags: tuple[str, str]) -> dict[str, Any]:
    """One row of TurnAudit.table."""
    tools = {"tools": [_TOOL]} if next_ == "a tool result" else {}
    after = _NEXT_TURNS[next_]
    first = render([_user()], **tools)
    found = {"in_text": "refused", "in_field": "refused"}
    extends = None
    for where, message in _answers(next_, tags):
        outcome, text = _outcome(render, [_user(), message, after], tools)
        if _RANK.index(outcome) > _RANK.index(found[where]):
            found[where] = outcome
        if outcome in ("kept", "dropped"):
            extends = bool(extends) or (outcome == "kept" and _goes_on(text, first, _THOUGHT, tags))
    plain = next(message for _, message in _answers(next_, tags))
    plain = {**plain, "content": _ANSWER}
    outcome, text = _outcome(render, [_user(), plain, after], tools)
    without = block = None
    if outcome == "dropped":  # there was none to keep
        mark = _ANSWER if _ANSWER in text else "kitlook"
        without = _goes_on(text, first, mark, ())
        block = bool(_BLOCK.search(_between(text, mark)))
    return {**found, "extends": extends, "extends_without": without, "empty_block": block}


_RANK = ("refused", "no such turn", "dropped", "kept")


def _outcome(render: Render, messages: list[dict[str, Any]], tools: dict[str, Any]) -> tuple[str, str]:
    try:
        text = render(messages, **tools)
    except Exception:  # templates raise anything
        return "refused", ""
    if _NEXT not in text:
        return "no such turn", text
    return ("kept" if _THOUGHT in text else "dropped"), text


def _goes_on(text: str, first: str, mark: str, tags: Sequence[str]) -> bool:
    """Does the text begin with the first prompt and continue with the completion: tags, white space, the mark?"""
    if not text.startswith(first):
        return False
    between = text[len(first) :].split(mark, 1)[0]
    for tag in tags[:1]:
        between = between.replace(tag, "", 1)
    return not between.strip() or mark == "kitlook" and not _BLOCK.search(between)


def _between(text: str, mark: str) -> str:
    """The text from the question to the mark."""
    return text.split(_ASKED, 1)[-1].split(mark, 1)[0]


def _opens(opened: str, bare: str) -> str:
    """Tags that the template itself writes behind the header."""
    added = opened.removeprefix(bare) if opened.startswith(bare) else opened
    tags = list(_TAG.finditer(added))
    rest = added[tags[0].start() :] if tags else ""
    return rest if rest and not _TAG.sub("", rest).strip() else ""


# ---- words ----------------------------------------------------------------------------------------------------------


def _sentences(opens: str, table: pd.DataFrame) -> list[str]:
    best = {next_: max((row["in_text"], row["in_field"]), key=_RANK.index) for next_, row in table.iterrows()}
    named = lambda outcome: [n for n in best if best[n] == outcome]  # noqa: E731
    parts = [
        f"{'not rendered' if outcome == 'no such turn' else outcome} before {_and(named(outcome))}"
        for outcome in ("dropped", "kept", "refused", "no such turn")
        if named(outcome)
    ]
    said = [f"Thoughts of earlier turns are {'; '.join(parts)}."]
    forks = [n for n in best if table.loc[n, "extends"] is False]
    if forks:
        said.append(
            f"Before {_and(forks)} the next prompt does not go on from what was written: each turn is a row of its own."
        )
    if opens and _BLOCK.search(opens):
        said.append(
            f"The template itself writes an empty thought, {opens!r}: the model is asked not to think."
        )
    elif opens:
        said.append(f"The template itself opens {opens!r}: give it as the prefill, and rewards see it.")
    blocks = [n for n in best if table.loc[n, "empty_block"] is True]
    if blocks:
        said.append(f"An answer without a thought gets an empty one before {_and(blocks)}.")
    return said


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
