"""Renders conversations to find what a chat template does with earlier thoughts, and reports it in words.

A thinking model writes <think>...</think> and an answer. When the next turn is rendered, its template may drop the
thought, keep it, or insert an empty one. If it drops the thought, the next prompt does not continue the sampled text:
training on one long conversation then trains on texts that the served model never reads.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_kit.more.episodes.observation import THOUGHT
from grpo_kit.prompts import NO_TEMPLATE, PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Words that no template writes or searches for.
_ASKED, _THOUGHT, _ANSWER, _NEXT = "KITASKED", "KITTHOUGHT", "KITANSWER", "KITNEXT"
_QUESTION = {"role": "user", "content": _ASKED}
_TOOL_NAME, _CALL_ID = "kitlook", "abcdefghi"
_CALL = {
    "id": _CALL_ID,
    "type": "function",
    "function": {"name": _TOOL_NAME, "arguments": {"x": "y"}},
}
_PROPERTY = {"x": {"type": "string", "description": "what"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Look.",
        "parameters": {"type": "object", "properties": _PROPERTY, "required": ["x"]},
    },
}
_OPENS, _CLOSES = THOUGHT
# Names under which servers return a thought beside the answer.
FIELDS = ("reasoning_content", "reasoning", "thinking")
_NEXT_TURNS: dict[str, dict[str, Any]] = {
    "a user turn": {"role": "user", "content": _NEXT},
    "a tool result": {
        "role": "tool",
        "name": _TOOL_NAME,
        "tool_call_id": _CALL_ID,
        "content": _NEXT,
    },
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


def audit_turns(tokenizer: PreTrainedTokenizerBase) -> TurnAudit:
    """How the tokenizer's chat template treats the thoughts of earlier turns, found by rendering conversations.

    A thought that is part of the text stands in <think> tags, as in a View.
    Raises ValueError for a tokenizer without chat template, and for a template that cannot render a single question.

    >>> audit_turns(tokenizer)  # doctest: +SKIP
    Thoughts of earlier turns are dropped before a user turn; kept before a tool result and a system turn.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(NO_TEMPLATE)
    render = partial(_rendered, tokenizer)
    try:
        prompt = render([_QUESTION])
        bare_prompt = render([_QUESTION], add_generation_prompt=False)
    except Exception as error:
        raise ValueError(
            f"the chat template cannot render one question of a user: {error}"
        ) from error
    opens = _opens(prompt.removeprefix(bare_prompt))
    rows = {next_turn: _row(render, next_turn) for next_turn in _NEXT_TURNS}
    table = pd.DataFrame.from_dict(rows, orient="index").astype(object)
    return TurnAudit(opens, table.rename_axis("before"), _sentences(opens, table))


# ---- conversations --------------------------------------------------------------------------------------------------


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any
) -> str:
    """The text of a conversation. Templates of vision models accept a text only as a list of parts: the second try."""
    options = {"add_generation_prompt": True, **options}
    in_parts = []
    for message in messages:
        in_parts.append({**message, "content": [{"type": "text", "text": message["content"]}]})
    texts, errors = [], []
    for turns in (messages, in_parts):
        try:
            texts.append(tokenizer.apply_chat_template(turns, tokenize=False, **options))
        except Exception as error:
            errors.append(error)
            continue
        if _ASKED in texts[-1]:
            return texts[-1]
    if not texts:
        raise errors[-1]
    return texts[0]


def _answers(next_turn: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where the thought is, the assistant's message); before a tool result also without a text of its own."""
    message: dict[str, Any] = {"role": "assistant"}
    contents = [_ANSWER]
    if next_turn == "a tool result":
        message["tool_calls"] = [_CALL]
        contents.append("")
    for content in contents:
        yield "in_text", {**message, "content": f"{_OPENS}\n{_THOUGHT}\n{_CLOSES}\n\n{content}"}
        for name in FIELDS:
            yield "in_field", {**message, "content": content, name: _THOUGHT}


def _row(render: Render, next_turn: str) -> dict[str, Any]:
    """One row of TurnAudit.table."""
    if next_turn == "a tool result":
        render = partial(render, tools=[_TOOL])
    first = render([_QUESTION])
    answers = list(_answers(next_turn))
    outcomes = {"in_text": "refused", "in_field": "refused"}
    extends = None
    for place, answer in answers:
        outcome, text = _outcome(render, answer, next_turn)
        outcomes[place] = max(outcomes[place], outcome, key=_RANK.index)
        if outcome in ("kept", "dropped"):
            extends = bool(extends) or (
                outcome == "kept" and _extends(text, first, _THOUGHT, _OPENS)
            )
    outcome, text = _outcome(render, {**answers[0][1], "content": _ANSWER}, next_turn)
    extends_without = empty_block = None
    if outcome == "dropped":  # there was none to keep
        mark = _ANSWER if _ANSWER in text else _TOOL_NAME
        extends_without = _extends(text, first, mark)
        answer_text = text.partition(_ASKED)[2].partition(mark)[0]
        empty_block = bool(_BLOCK.search(answer_text))
    return {
        **outcomes,
        "extends": extends,
        "extends_without": extends_without,
        "empty_block": empty_block,
    }


_RANK = ("refused", "no such turn", "dropped", "kept")


def _outcome(render: Render, answer: dict[str, Any], next_turn: str) -> tuple[str, str]:
    """The fate of the answer's thought, one of _RANK, and the rendered text."""
    try:
        text = render([_QUESTION, answer, _NEXT_TURNS[next_turn]])
    except Exception:  # templates raise anything
        return "refused", ""
    if _NEXT not in text:
        return "no such turn", text
    return ("kept" if _THOUGHT in text else "dropped"), text


def _extends(
    text: str,
    first: str,
    mark: str,
    tag: str = "",
) -> bool:
    """Does the text begin with the first prompt and continue with the completion: the tag, white space, the mark?"""
    if not text.startswith(first):
        return False
    between = text.removeprefix(first).partition(mark)[0].replace(tag, "", 1)
    return not between.strip() or (mark == _TOOL_NAME and not _BLOCK.search(between))


def _opens(header: str) -> str:
    """The tags at the end of the assistant's header, from the first on; "" if other text follows one."""
    tag = _TAG.search(header)
    if not tag:
        return ""
    tail = header[tag.start() :]
    return "" if _TAG.sub("", tail).strip() else tail


# ---- words ----------------------------------------------------------------------------------------------------------


def _sentences(opens: str, table: pd.DataFrame) -> list[str]:
    best = [
        max(row["in_text"], row["in_field"], key=_RANK.index) for _, row in table.iterrows()
    ]
    parts = []
    for outcome in ("dropped", "kept", "refused", "no such turn"):
        turns = [
            turn
            for turn, turn_outcome in zip(table.index, best, strict=True)
            if turn_outcome == outcome
        ]
        if turns:
            words = outcome.replace("no such turn", "not rendered")
            parts.append(f"{words} before {_and(turns)}")
    sentences = [f"Thoughts of earlier turns are {'; '.join(parts)}."]
    forks = list(table.index[table["extends"].eq(False)])
    if forks:
        sentences.append(
            f"Before {_and(forks)} the next prompt does not go on from what was written: each turn is a row of its own."
        )
    if _BLOCK.search(opens):
        sentences.append(
            f"The template itself writes an empty thought, {opens!r}: the model is asked not to think."
        )
    elif opens:
        sentences.append(
            f"The template itself opens {opens!r}: give it as the prefill, and rewards see it."
        )
    blocks = list(table.index[table["empty_block"].eq(True)])
    if blocks:
        sentences.append(
            f"An answer without a thought gets an empty one before {_and(blocks)}."
        )
    return sentences


def _and(names: Sequence[str]) -> str:
    *names, last = names
    return f"{', '.join(names)} and {last}" if names else last
