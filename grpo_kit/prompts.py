"""Renders chat messages and a prefill into the text that a model continues; audits how tags are cut into tokens.

Simplifications: text only (no images), one assistant turn to continue. Tasks render prompts to text, because TRL
renders messages with `add_generation_prompt=True` only. That closes an assistant prefill and opens a second
assistant turn behind it, without an error.

Longer than 300 lines because a chat template can spoil a prompt in ten ways, and each gets its own check and message.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import pandas as pd
from transformers import PreTrainedTokenizerBase

from grpo_kit._support.argument_checks import PROBE, check_tokenizer, is_whole, template_tokens
from grpo_kit._support.unsloth import warn_if_late

if TYPE_CHECKING:
    from datasets import Dataset

_OPENING_TAG = re.compile(r"<[A-Za-z][\w-]*>\s*\Z")
_EMPTY_THOUGHT = re.compile(r"\s*<([A-Za-z][\w-]*)>\s*</\1>\s*")
_LONGEST_TAG = 100  # characters
BEFORE = ("\n", " ", "7", "x", ".")
AFTER = ("\n", "\n\n", " ", "7", "x", "The", ">", ".")


NO_TEMPLATE = (
    "tokenizer has no chat template, so nothing says how a question becomes a prompt; use an instruct model, or set "
    "tokenizer.chat_template. A base model is trained on prompts that are text already: kit.from_trl takes rows of "
    "{'prompt': text, ...}"
)


class PromptError(ValueError):
    """A prompt cannot be built as requested; the message names the argument, its value and what would do."""


def build_prompt(
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    *,
    system: str | None = None,
    prefill: str = "",
    examples: Sequence[tuple[str, str]] = (),
) -> str:
    """The text a model continues: system, worked examples, question, and the assistant's opening words.

    examples: (question, full response) pairs, shown as earlier turns. The prompt ends in `prefill` exactly;
    without one it ends in the template's own assistant header.
    A BOS token written by the template is dropped where `tokenizer(prompt)` adds one itself, as in TRL.
    Where the template opens <think> itself, the prefill must begin with that tag, so that rewards see it.
    Raises PromptError (a ValueError) for: no chat template; a question with a special token, or another text with one
    of template_tokens, which would close the turn; a prefill that ends in a space (a newline is fine); a template that
    trims, strips or wraps the prefill, or drops the system text or an example; a prompt whose tokens do not end in the
    prefill; a doubled BOS.

    >>> build_prompt(tokenizer, "2 + 2?", system="Be brief.", prefill="<answer>")[-41:]  # doctest: +SKIP
    '<|im_end|>\\n<|im_start|>assistant\\n<answer>'
    """
    try:
        check_tokenizer(tokenizer)
    except ValueError as error:
        raise PromptError(str(error)) from None
    if not tokenizer.chat_template:
        raise PromptError(NO_TEMPLATE)
    if not isinstance(question, str) or not question.strip():
        raise PromptError(
            f"question={question!r:.200} is no text{cure_of(question)}; give a string that is not blank"
        )
    check_parts(system, prefill, examples)
    # Whatever of a tokenizer may be changed in place, and decides about a prompt.
    state = (str(tokenizer.chat_template), str(tokenizer.special_tokens_map), len(tokenizer))
    return _rendered(tokenizer, state, question, system, prefill, tuple(map(tuple, examples)))


# A step asks for its prompts twice, to sample and for the rewards. No more are kept, for each keeps its tokenizer.
@functools.lru_cache(maxsize=256)
def _rendered(
    tokenizer: Any,
    state: tuple,
    question: str,
    system: str | None,
    prefill: str,
    examples: tuple,
) -> str:
    """The prompt, rendered anew where the tokenizer's state is another."""
    texts = [("question", question), ("prefill", prefill), ("system", system or "")]
    texts += [("examples", text) for text in sum(examples, ())]
    for name, text in texts:
        _check_encodes(name, text)
        _check_no_end(tokenizer, name, text)
    messages = [*opening_messages(system, examples), {"role": "user", "content": question}]
    prompt = _OpenTurn(tokenizer, messages, {}).prompt(prefill)
    _check_nothing_dropped(prompt, messages)
    return _check_tokens(tokenizer, prompt, prefill)


def opening_messages(
    system: str | None, examples: Sequence[tuple[str, str]]
) -> list[dict[str, str]]:
    """System text and worked examples as messages, in front of the first question.

    >>> [message["role"] for message in opening_messages("Be brief.", [("1 + 1?", "2")])]
    ['system', 'user', 'assistant']
    """
    messages = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for question, response in examples:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": response},
        ]
    return messages


def continue_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **template: Any
) -> str:
    """Messages that end in the assistant's opening words -> the text that a model continues, with that turn left open.

    template: further arguments of the chat template (tools, chat_template, its own keywords).
    Tokenize it with add_special_tokens=False: the template has written them.
    Raises PromptError for opening words that are empty or end in a space, a message with one of template_tokens, and a
    template that trims the opening words or writes something in front of them.

    >>> turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<answer>"}]
    >>> continue_messages(tokenizer, turns)[-30:]  # doctest: +SKIP
    '<|im_start|>assistant\\n<answer>'
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise PromptError(
            f"messages={messages!r:.200} must be a list of at least one message, the assistant's the last"
        )
    if not all(
        isinstance(message, Mapping) and {"role", "content"} <= set(message)
        for message in messages
    ):
        cure = cure_of(messages) or "; each is a dict with 'role' and 'content'"
        raise PromptError(
            f"messages={messages!r:.200} are no messages of 'role' and 'content'{cure}"
        )
    *earlier, last = messages
    if last["role"] != "assistant" or not earlier:
        raise PromptError(
            f"the last message is the {last['role']}'s, the first of {len(messages)}; the assistant's is continued"
        )
    opening = last["content"]
    if not isinstance(opening, str) or not opening:
        raise PromptError(
            f"the last message is the assistant's, with content={opening!r}; give the words it begins with as a "
            "string, or leave that message out"
        )
    _check_no_space(opening)
    for message in messages:
        _check_no_end(tokenizer, f"the {message['role']}'s content", message["content"])
    return _OpenTurn(tokenizer, earlier, template).prompt(opening)


def build_dataset(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]] | Dataset,
    *,
    question: str = "question",
    system: str | None = None,
    prefill: str = "",
    examples: Sequence[tuple[str, str]] = (),
) -> Dataset:
    """Rows with a `question` column -> a data set with `prompt`, `prefill` and every column of the rows.

    question: the name of the column that holds the question.
    Raises PromptError for no rows, a missing question column, rows with different columns, rows that already
    have a `prompt` or `prefill` column, and all that `build_prompt` refuses (naming the row).

    >>> build_dataset(tokenizer, [{"question": "2 + 2?", "answer": "4"}]).column_names  # doctest: +SKIP
    ['prompt', 'prefill', 'question', 'answer']
    """
    from datasets import Dataset

    warn_if_late()
    if isinstance(rows, str) or not isinstance(rows, Sequence | Dataset):
        raise PromptError(
            f"rows is a {type(rows).__name__}; use a list of dicts or a datasets.Dataset"
        )
    if len(rows) == 0:
        raise PromptError("rows=[] is empty; give at least one row")
    data = rows if isinstance(rows, Dataset) else from_list(rows)
    if question not in data.column_names:
        raise PromptError(
            f"question={question!r} is no column of rows; they have {data.column_names}"
        )
    for name in ("prompt", "prefill"):
        if name in data.column_names:
            raise PromptError(
                f"rows already have a column {name!r}, which build_dataset writes; rename it"
            )
    prompts = []
    for index, text in enumerate(data[question]):
        try:
            prompts.append(
                build_prompt(tokenizer, text, system=system, prefill=prefill, examples=examples)
            )
        except PromptError as error:
            raise PromptError(f"row {index}: {error}") from error
    built = data.add_column("prompt", prompts).add_column("prefill", [prefill] * len(prompts))
    return built.select_columns(["prompt", "prefill", *data.column_names])


def audit_tags(tokenizer: PreTrainedTokenizerBase, tags: Sequence[str]) -> pd.DataFrame:
    """How each tag is cut into tokens, and whether its neighbours change the cut.

    One row a tag: `pieces` (the tokens' texts), `n_tokens`, `one_token`, `before` and `after` (neighbours
    from BEFORE and AFTER that change the cut), `example` (the first such cut) and `suggestion` (a plainer tag
    with the fewest such neighbours, then the fewest tokens; empty if none is better). A model meets a tag whose
    cut changes under several spellings, and a prefill forces one of them.
    Raises PromptError for an empty tag, and one of more than 100 characters.

    >>> audit_tags(qwen25_tokenizer, ["<answer>"])[["pieces", "after"]].values.tolist()  # doctest: +SKIP
    [[['<', 'answer', '>'], ['\\n', '\\n\\n', 'x', 'The', '>', '.']]]
    """
    if isinstance(tags, str):
        raise PromptError(f"tags={tags!r} is one string; use a list such as [{tags!r}]")
    check_tokenizer(tokenizer)
    return pd.DataFrame(
        [_audit(tokenizer, tag) for tag in tags], columns=list(_audit(tokenizer, "<a>"))
    )


@dataclass(frozen=True)
class Drift:
    """Whether ids -> text -> ids gives the same ids, and the pieces that differ.

    first: index of the first id that differs, None if `same`. before, after: the texts of the differing
    tokens (from `first` to the end of the difference), as they were and as the tokenizer would write them.
    """

    same: bool
    first: int | None
    before: list[str]
    after: list[str]


def roundtrip_drift(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Drift:
    """Decode ids, tokenize the text again, and compare.

    A model may spell a text with other tokens than the tokenizer would. Whoever scores the re-tokenized text
    then trains on tokens that were never sampled. Special tokens are kept, none is added.
    Raises PromptError for an id outside the vocabulary.

    >>> roundtrip_drift(tokenizer, tokenizer("<answer>").input_ids).same  # doctest: +SKIP
    True
    """
    check_tokenizer(tokenizer)
    if isinstance(ids, str):
        raise PromptError(f"ids={ids!r:.100} is a text; give tokenizer(text).input_ids")
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    for position, token in enumerate(ids):
        if not is_whole(token, 0) or token >= len(tokenizer):
            raise PromptError(
                f"ids[{position}]={token} is no token; use 0 to {len(tokenizer) - 1}"
            )
    new_ids = _ids(tokenizer, tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    if new_ids == ids:
        return Drift(same=True, first=None, before=[], after=[])
    head = len(commonprefix([ids, new_ids]))
    tail = len(commonprefix([ids[head:][::-1], new_ids[head:][::-1]]))
    before, after = ids[head : len(ids) - tail], new_ids[head : len(new_ids) - tail]
    return Drift(
        same=False,
        first=head,
        before=_pieces(tokenizer, before),
        after=_pieces(tokenizer, after),
    )


def from_list(rows: Sequence[Mapping[str, Any]], name: str = "rows") -> Dataset:
    """Rows, at least one, with the same columns each, as a data set. name: their name in messages.

    Raises PromptError (a ValueError) for another element than a dict, rows that differ in columns, and a column that
    mixes types.
    """
    from datasets import Dataset

    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise PromptError(
                f"{name}[{index}] is a {type(row).__name__}; use a dict of one row's columns"
            )
    columns = list(rows[0])
    for index, row in enumerate(rows):
        # Dataset.from_list would drop or blank the difference silently
        if set(row) != set(columns):
            raise PromptError(
                f"{name}[{index}] has the columns {sorted(row)}, {name}[0] has {sorted(columns)}"
            )
    try:
        return Dataset.from_dict({column: [row[column] for row in rows] for column in columns})
    except Exception as error:  # pyarrow's errors have no common base below Exception
        raise PromptError(
            f"{name} do not fit one table, a column mixes types: {error}"
        ) from error


def check_parts(system: Any, prefill: Any, examples: Any) -> None:
    """Raises PromptError for what cannot stand around a question: a prefill that ends in a space, other examples."""
    if system is not None and not isinstance(system, str):
        raise PromptError(
            f"system={system!r} is no text; give a string, or None for the template's own"
        )
    if not isinstance(prefill, str):
        raise PromptError(f"prefill={prefill!r} is no text; give a string, or '' for none")
    _check_no_space(prefill)
    if isinstance(examples, str | Mapping) or not isinstance(examples, Iterable):
        raise PromptError(
            f"examples={examples!r:.200}; use a list of (question, response) pairs of strings, or ()"
        )
    for pair in examples:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if is_pair and all(isinstance(text, str) and text for text in pair):
            continue
        cure = ""
        if isinstance(pair, Mapping):
            keys = " and ".join(map(repr, pair))
            cure = f"; of messages and rows take the texts out, they have {keys}"
        elif isinstance(pair, str) and len(examples) == 2:
            cure = f": [({examples[0]!r:.80}, {examples[1]!r:.80})]"
        raise PromptError(
            f"examples holds {pair!r:.200}; use (question, response) pairs of strings{cure}"
        )


def cure_of(question: Any) -> str:
    """What to do with a question that is no text: token ids, messages, also in ShareGPT's form."""
    items = (
        list(question)
        if isinstance(question, Sequence) or hasattr(question, "tolist")
        else [question]
    )
    if items and all(is_whole(item, 0) for item in items) and not is_whole(question, 0):
        return " but token ids; tokenizer.decode(ids) makes text of them"
    keys = {key for item in items if isinstance(item, Mapping) for key in item}
    if {"from", "value"} <= keys:
        return ": these are messages as ShareGPT has them; the question is the human's 'value', the answer the gpt's"
    if {"role", "content"} <= keys:
        return (
            ": these are messages; take the 'content' of the user's last one (earlier turns go into examples, a system "
            "message into system)"
        )
    return ""


def _check_no_end(tokenizer: PreTrainedTokenizerBase, name: str, text: Any) -> None:
    """Raises PromptError for a token of the template's in a text, and for any special token in a question."""
    all_special = template_tokens(tokenizer, ends=tokenizer.added_tokens_decoder).values()
    tokens = [token for token in all_special if isinstance(text, str) and token in text]
    if tokens and name != "question":  # an author's text may use special tokens as tags
        tokens = [token for token in template_tokens(tokenizer).values() if token in text]
    if tokens:
        raise PromptError(
            f"{name}={text!r:.200} holds the special token {tokens[0]!r}, which the model would read as the template's "
            "own and not as text; write it in another way"
        )


def _check_encodes(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{name}={text!r:.200} holds half a surrogate pair at character {error.start}, which is no text; "
            "text.encode('utf-8', 'ignore').decode() takes it out"
        ) from error


def _check_no_space(prefill: str) -> None:
    if prefill[-1:].isspace() and prefill[-1] != "\n":
        raise PromptError(
            f"prefill={prefill!r} ends in a space, which tokenizers keep as part of the next word; "
            f"use {prefill.rstrip()!r} or end it in a newline"
        )


class _OpenTurn:
    """The assistant's turn that the chat template opens behind messages."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, messages: list[Any], template: dict
    ) -> None:
        self.tokenizer, self.messages, self.template = tokenizer, messages, template
        self.opened = self._render(add_generation_prompt=True)

    def prompt(self, prefill: str) -> str:
        """The messages rendered, with the turn open behind the prefill; the template's own opening occurs once."""
        tag = self._tag_of_the_template()
        if tag and not prefill:
            raise PromptError(
                f"prefill='': the chat template opens {tag!r} itself, which no reward would see; "
                f"give prefill={tag!r}, and it stands there once"
            )
        if not prefill or (tag and prefill.startswith(tag)):
            return self.opened + prefill.removeprefix(tag)
        if self._opens_a_thought(prefill):
            return self.opened + prefill
        prompt = self._continue(prefill)
        if prompt != self.opened + prefill:
            self._check_prefill(prefill, prompt)
        return prompt

    def _render(self, **options: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                self.messages, tokenize=False, **options, **self.template
            )
        except Exception as error:
            # templates raise whatever they like, mostly jinja2.TemplateError
            roles = [message["role"] for message in self.messages]
            raise PromptError(
                f"the chat template refuses the roles {roles}: {error}"
            ) from error

    def _continue(self, opening: str) -> str:
        """Render with the assistant's turn left open behind `opening`."""
        turns = [*self.messages, {"role": "assistant", "content": opening}]
        try:
            return self.tokenizer.apply_chat_template(
                turns, tokenize=False, continue_final_message=True, **self.template
            )
        except Exception as error:
            raise PromptError(
                f"prefill={opening!r} does not come through the chat template, which deletes a part of it or "
                f"refuses an open assistant turn; use another prefill or set tokenizer.chat_template ({error})"
            ) from error

    def _header(self) -> str:
        """What the template writes in front of the assistant's words: seen with a harmless one. "": it refuses that."""
        try:
            return self._continue(PROBE).removesuffix(PROBE)
        except PromptError:
            return ""

    def _tag_of_the_template(self) -> str:
        """The opening tag that the template itself writes behind the header ("<think>\\n"); "" for none."""
        tag = _OPENING_TAG.search(self.opened)
        if tag is None or self._header().endswith(tag[0]):
            return ""
        return tag[0]

    def _opens_a_thought(self, prefill: str) -> bool:
        """Does the prefill begin a thought where the template writes an empty thought into every finished answer?

        Qwen3's template then begins its own answers with that tag behind the bare header, which only the text shows.
        """
        tag = re.match(r"<([A-Za-z][\w-]*)>", prefill)
        if not tag or f"</{tag[1]}>" in prefill:
            return False
        thought = _EMPTY_THOUGHT.fullmatch(self._behind_the_opening(self._header()))
        return thought is not None and thought[1] == tag[1]

    def _behind_the_opening(self, header: str) -> str:
        return header[len(commonprefix([header, self.opened])) :]

    def _check_prefill(self, prefill: str, prompt: str) -> None:
        # Compared with a harmless opening, so that a newline of the header is not taken for one of the prefill.
        header = self._header()
        if prompt != header + prefill:
            rendered = prompt[len(commonprefix([prompt, header])) :]
            cure = "use another prefill"
            if rendered == prefill.strip():
                cure = f"use prefill={rendered!r}"
            raise PromptError(
                f"prefill={prefill!r}: the prompt does not end in the prefill, the chat template makes it "
                f"{rendered!r}; {cure} or set tokenizer.chat_template"
            )
        inserted = self._behind_the_opening(header)
        if inserted.strip() and self.opened != self._render(add_generation_prompt=False):
            raise PromptError(
                f"prefill={prefill!r}: the chat template writes {inserted!r} in front of it, which no reward "
                f"would see; use prefill='', or write that text into the prefill, or set tokenizer.chat_template"
            )


def _check_nothing_dropped(prompt: str, messages: list[dict[str, str]]) -> None:
    start = 0
    for message in messages:
        role, text = message["role"], message["content"].strip()
        # Some templates move the system text into a later turn; the turns themselves keep their order.
        place = prompt.find(text, 0 if role == "system" else start)
        if place < 0:
            name = {"system": "system", "assistant": "examples"}.get(role, "question")
            raise PromptError(
                f"{name}: the chat template drops a part of {message['content']!r}; "
                "leave out what it strips (often earlier turns' thinking) or set tokenizer.chat_template"
            )
        if role != "system":
            start = place + len(text)


def _check_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, prefill: str) -> str:
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    ids = tokenizer(prompt).input_ids
    if bos and prompt.startswith(bos) and tokenizer("a").input_ids[:1] == [bos_id]:
        prompt = prompt.removeprefix(bos)
        ids = tokenizer(prompt).input_ids
    if bos and ids[:2] == [bos_id, bos_id]:
        raise PromptError(
            f"the prompt starts with two {bos!r} tokens; take one out of tokenizer.chat_template or the text"
        )
    ends_in_eos = ids[-1:] == [tokenizer.eos_token_id] and not prompt.endswith(
        tokenizer.eos_token
    )
    if ends_in_eos or not tokenizer.decode(ids, clean_up_tokenization_spaces=False).endswith(
        prefill
    ):
        raise PromptError(
            f"prefill={prefill!r}: the tokenized prompt does not end in the prefill but in "
            f"{_pieces(tokenizer, ids[-3:])}; use a tokenizer that neither changes text nor appends a token "
            "(tokenizer.add_eos_token = False)"
        )
    return prompt


def _audit(tokenizer: PreTrainedTokenizerBase, tag: str) -> dict[str, Any]:
    if not isinstance(tag, str) or not tag.strip():
        raise PromptError(f"tags holds {tag!r}; use texts such as '<answer>'")
    _check_encodes("tags", tag)
    if len(tag) > _LONGEST_TAG:
        raise PromptError(
            f"tags holds a text of {len(tag)} characters; a tag has at most {_LONGEST_TAG}"
        )
    before, after, example = _neighbours(tokenizer, tag)
    ids = _ids(tokenizer, tag)
    n_changes = {
        plainer: sum(map(len, _neighbours(tokenizer, plainer)[:2])) for plainer in _plainer(tag)
    }
    best = min(
        n_changes, key=lambda plainer: (n_changes[plainer], len(_ids(tokenizer, plainer)))
    )
    return {
        "tag": tag,
        "pieces": _pieces(tokenizer, ids),
        "n_tokens": len(ids),
        "one_token": len(ids) == 1,
        "before": before,
        "after": after,
        "example": example,
        "suggestion": best if n_changes[best] < len(before) + len(after) else "",
    }


def _neighbours(
    tokenizer: PreTrainedTokenizerBase, tag: str
) -> tuple[list[str], list[str], list[str]]:
    """The neighbours before and after that change the tag's cut, and the pieces of the first such text."""
    ids = _ids(tokenizer, tag)
    texts = {("before", n): n + tag for n in BEFORE} | {("after", n): tag + n for n in AFTER}
    neighbours: dict[str, list[str]] = {"before": [], "after": []}
    example: list[str] = []
    for (side, neighbour), text in texts.items():
        cut = _ids(tokenizer, text)
        tag_ids = {"before": cut[-len(ids) :], "after": cut[: len(ids)]}
        if tag_ids[side] != ids:
            neighbours[side].append(neighbour)
            example = example or _pieces(tokenizer, cut)
    return neighbours["before"], neighbours["after"], example


def _plainer(tag: str) -> list[str]:
    """Other spellings of the same mark, plainest first."""
    closing = "/" in tag
    name = "".join(letter for letter in tag if letter.isalnum())
    if closing:
        return [
            f"[/{name}]",
            f"\n</{name}>",
            f"\n</{name}>\n",
            f"\n[/{name}]\n",
            f"\n\nend {name}\n",
        ]
    capital = name.capitalize()
    return [
        f"{name}:",
        f"{capital}:",
        f"[{name}]",
        f"<{name}>\n",
        f"[{name}]\n",
        f"{capital}:\n",
    ]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids]
