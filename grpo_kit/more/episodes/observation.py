"""The model's input each turn: goal, last actions and observation, or the whole conversation; as text and as tokens.

Sampled tokens are never tokenized again. If the next prompt continues the last one, it consists of the last prompt's
tokens, the sampled tokens, and the tokens of the new text. If a view or a template leaves something out, the next
prompt is another text, and the turn becomes a separate row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from grpo_kit._support.argument_checks import PROBE, check_choice, check_whole, template_tokens
from grpo_kit.prompts import PromptError, build_prompt, opening_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEXT, _ANSWER = "KITNEXT", "KITANSWER"

THOUGHT = ("<think>", "</think>")  # the tags around a thought

Example = Sequence[tuple[str, str]]  # one worked episode: (observation, response) of each of its turns


def write_turn(goal: str, actions: Sequence[str], observation: str) -> str:
    """One turn's text for the model: the goal, the last actions, and the observation. "" leaves the goal out.

    >>> print(write_turn("Open the door.", ["up", "left"], "The door is above you."))
    Goal: Open the door.
    You did: up, then left.
    The door is above you.
    """
    lines = [f"Goal: {goal}"] if goal else []
    lines += [f"You did: {', then '.join(actions)}."] if actions else []
    return "\n".join([*lines, observation])


@dataclass(frozen=True)
class View:
    """The model's input each turn.

    chat: False: each prompt is one user message with the last `actions` actions and the observation; turns
    then fork. True: the whole conversation, message after message, through the chat template.
    actions: how many of the last actions a message lists; 0, or None for all. With chat the messages have them anyway.
    repeat_goal: True: the goal is in every turn's message; False: only in the first turn's.
    examples: (goal, worked episode) pairs shown in every prompt, each episode a list of (observation, response).
    thoughts: with chat. "as served": the prompts equal those of a server, so thoughts disappear
    where the template drops them. "kept": earlier turns stay word for word.
    A thought in <think> tags is the model's own: neither the environment nor the list of last actions contains it.
    write: (goal, actions, observation) -> a turn's message.
    Raises ValueError naming the field.
    """

    chat: bool = False
    actions: int | None = 2
    repeat_goal: bool = True
    system: str | None = None
    prefill: str = ""
    examples: tuple[tuple[str, Example], ...] = ()
    thoughts: str = "as served"
    write: Callable[[str, Sequence[str], str], str] = write_turn

    def __post_init__(self) -> None:
        if self.actions is not None:
            check_whole("actions", self.actions, 0, hint=", or None for all")
        check_choice("thoughts", self.thoughts, ("as served", "kept"))
        if self.thoughts == "kept" and not self.chat:
            raise ValueError("thoughts='kept' needs chat=True: other views show no earlier responses")

    def message(self, goal: str, actions: Sequence[str], observation: str) -> str:
        """The user's message of the turn after these actions."""
        first = not actions
        shown = [] if self.chat else list(actions)
        if self.actions is not None:
            shown = shown[len(shown) - min(self.actions, len(shown)) :]
        return self.write(goal if self.repeat_goal or first else "", shown, observation)

    def example_pairs(self) -> list[tuple[str, str]]:
        """The worked episodes as (message, response) pairs, written like the model's own turns."""
        pairs = []
        for goal, turns in self.examples:
            done: list[str] = []
            for observation, response in turns:
                pairs.append((self.message(goal, done, observation), response))
                done.append(self.action_of(response))
        return pairs

    def said(self, response: str) -> str:
        """The text of a response that the environment reads: behind its thought; "" if the thought never ended.

        >>> View().said("<think>\\nA door.\\n</think>\\n\\nopen it"), View().said("open it")
        ('open it', 'open it')
        """
        opens, closes = THOUGHT
        if closes in response:
            return response.rpartition(closes)[2].strip()
        return "" if opens in response else response

    def completion_saying(self, action: str) -> str:
        """A completion of this view with the action and no thought."""
        opens, closes = THOUGHT
        return f"\n{closes}\n\n{action}" if opens in self.prefill and closes not in self.prefill else action

    def action_of(self, response: str) -> str:
        """The response as later turns quote it: without prefill and thought, on one line; "nothing" if empty."""
        return " ".join(self.said(response).removeprefix(self.prefill).split()) or "nothing"


@dataclass
class Conversation:
    """One episode as the model has read it so far."""

    goal: str
    actions: list[str] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # of the last prompt
    text: str = ""  # of the last prompt


class Renderer:
    """Makes the prompts of one view with one tokenizer.

    ends: tokens that end a completion.
    Raises PromptError in the same cases as build_prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, view: View, ends: Sequence[int] = ()) -> None:
        self.tokenizer, self.view = tokenizer, view
        self.ends = frozenset(ends or [tokenizer.eos_token_id])

    # ---- the first turn, and every turn of a view without chat --------------------------------------------------

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """The text before and behind a message in a prompt of one message."""
        before, _, behind = self._built(PROBE).rpartition(PROBE)
        return before, behind

    def _built(self, message: str) -> str:
        view = self.view
        return build_prompt(
            self.tokenizer, message, system=view.system, prefill=view.prefill, examples=view.example_pairs()
        )

    @cached_property
    def _hidden(self) -> dict[int, str]:
        return template_tokens(self.tokenizer, self.ends)

    def _one_message(self, message: str) -> str:
        for token in self._hidden.values():
            if token in message:
                raise PromptError(
                    f"a turn's message holds the special token {token!r}, which the model would read as the template's "
                    f"own: {message!r:.200}"
                )
        if not message:
            raise PromptError("a turn's message is blank; give an observation")
        before, behind = self._frame
        return before + message + behind

    def text_of(self, completion_ids: Sequence[int]) -> str:
        """The completion's text without template_tokens, also without those spelled out in other tokens."""
        visible_ids = [token for token in completion_ids if token not in self._hidden]
        text = self.tokenizer.decode(visible_ids)
        for token in self._hidden.values():
            text = text.replace(token, "")
        return text

    def cut_off(self, completion_ids: Sequence[int]) -> bool:
        """Did it reach the limit before it ended?"""
        return not completion_ids or completion_ids[-1] not in self.ends

    def first(self, goal: str, observation: str) -> Conversation:
        """The episode's first prompt."""
        message = self.view.message(goal, [], observation).strip()
        text = self._one_message(message)
        made = Conversation(goal, messages=[{"role": "user", "content": message}], text=text)
        made.ids = self._ids(text)
        return made

    # ---- later turns ----------------------------------------------------------------------------------------------

    def next(self, made: Conversation, completion_ids: Sequence[int], observation: str) -> None:
        """Appends a completion and the observation to it, and makes the next prompt; changes `made`."""
        view, tokenizer = self.view, self.tokenizer
        written = list(completion_ids if self.cut_off(completion_ids) else completion_ids[:-1])
        completion = self.text_of(completion_ids)
        made.actions.append(view.action_of(view.prefill + completion))
        message = view.message(made.goal, made.actions, observation).strip()
        if not view.chat:
            made.text = self._one_message(message)
            made.ids = self._ids(made.text)
            return
        made.messages += [
            {"role": "assistant", "content": view.prefill + completion},
            {"role": "user", "content": message},
        ]
        behind = self._behind(message)
        gone_on = made.text + tokenizer.decode(written) + behind
        served = gone_on
        if view.thoughts != "kept":
            served = self._chat([*self._before, *made.messages])
        if served == gone_on:
            made.ids = [*made.ids, *written, *self._ids(behind, special=False)]
        else:
            made.ids = self._ids(served)
        made.text = served

    @cached_property
    def _turn_over(self) -> tuple[str, str]:
        """The template's text between an answer and the next message, and between that message and the next answer."""
        asked = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": _ANSWER}]
        text = self._chat([*self._before, *asked, {"role": "user", "content": _NEXT}])
        between, _, behind = text.partition(_ANSWER)[2].partition(_NEXT)
        if not between or _NEXT not in text:
            raise PromptError(
                "the chat template cannot render a second message of the user's; use View(chat=False)"
            )
        return between, behind

    def _behind(self, message: str) -> str:
        between, behind = self._turn_over
        self._one_message(message)  # raises for text that would be read as the template's own
        return between + message + behind

    @cached_property
    def _around(self) -> tuple[str, str]:
        """The text that a rendered conversation loses in front (a BOS that the tokenizer adds); and its prefill."""
        plain, built = (
            self._rendered([*self._before, {"role": "user", "content": PROBE}]),
            self._built(PROBE),
        )
        for bos in ("", self.tokenizer.bos_token or ""):
            if built.startswith(plain.removeprefix(bos)):
                return bos, built[len(plain.removeprefix(bos)) :]
        raise PromptError(
            "the chat template renders an open answer in a way of its own; use View(chat=False)"
        )

    @cached_property
    def _before(self) -> list[dict[str, Any]]:
        """System text and worked episodes as messages."""
        return opening_messages(self.view.system, self.view.example_pairs())

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _chat(self, messages: list[dict[str, Any]]) -> str:
        """Rendered as on a server, with the assistant's turn open behind the prefill."""
        bos, behind = self._around
        return self._rendered(messages).removeprefix(bos) + behind

    def _ids(self, text: str, *, special: bool = True) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]
