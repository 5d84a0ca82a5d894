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

# one worked episode: (observation, response) of each of its turns
Example = Sequence[tuple[str, str]]


def write_turn(goal: str, actions: Sequence[str], observation: str) -> str:
    """One turn's text for the model: the goal, the last actions, and the observation. "" leaves the goal out.

    >>> print(write_turn("Open the door.", ["up", "left"], "The door is above you."))
    Goal: Open the door.
    You did: up, then left.
    The door is above you.
    """
    lines = []
    if goal:
        lines.append(f"Goal: {goal}")
    if actions:
        lines.append(f"You did: {', then '.join(actions)}.")
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
            raise ValueError(
                "thoughts='kept' needs chat=True: other views show no earlier responses"
            )

    def message(self, goal: str, actions: Sequence[str], observation: str) -> str:
        """The user's message of the turn after these actions."""
        if actions and not self.repeat_goal:
            goal = ""
        listed = [] if self.chat else list(actions)
        if self.actions is not None:
            listed = listed[max(0, len(listed) - self.actions) :]
        return self.write(goal, listed, observation)

    def example_pairs(self) -> list[tuple[str, str]]:
        """The worked episodes as (message, response) pairs, written like the model's own turns."""
        pairs = []
        for goal, turns in self.examples:
            actions: list[str] = []
            for observation, response in turns:
                pairs.append((self.message(goal, actions, observation), response))
                actions.append(self.action_of(response))
        return pairs

    def said(self, response: str) -> str:
        """The text of a response that the environment reads: behind its thought; "" if the thought never ended.

        >>> View().said("<think>\\nA door.\\n</think>\\n\\nopen it"), View().said("open it")
        ('open it', 'open it')
        """
        opens, closes = THOUGHT
        if closes in response:
            return response.rpartition(closes)[2].strip()
        if opens in response:
            return ""
        return response

    def completion_saying(self, action: str) -> str:
        """A completion of this view with the action and no thought."""
        opens, closes = THOUGHT
        if opens in self.prefill and closes not in self.prefill:
            return f"\n{closes}\n\n{action}"
        return action

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

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, view: View, ends: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.view = tokenizer, view
        self.ends = frozenset(ends or [tokenizer.eos_token_id])

    # ---- the first turn, and every turn of a view without chat --------------------------------------------------

    @cached_property
    def _probe_prompt(self) -> str:
        """The prompt of one message, the PROBE."""
        view = self.view
        return build_prompt(
            self.tokenizer,
            PROBE,
            system=view.system,
            prefill=view.prefill,
            examples=view.example_pairs(),
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
        before, _, after = self._probe_prompt.rpartition(PROBE)
        return before + message + after

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
        messages = [{"role": "user", "content": message}]
        return Conversation(goal, messages=messages, ids=self._ids(text), text=text)

    # ---- later turns ----------------------------------------------------------------------------------------------

    def next(
        self, conversation: Conversation, completion_ids: Sequence[int], observation: str
    ) -> None:
        """Appends a completion and the observation to the conversation, and makes its next prompt."""
        view = self.view
        response = view.prefill + self.text_of(completion_ids)
        conversation.actions.append(view.action_of(response))
        message = view.message(conversation.goal, conversation.actions, observation).strip()
        # raises for text that would be read as the template's own
        one_message = self._one_message(message)
        if not view.chat:
            conversation.text, conversation.ids = one_message, self._ids(one_message)
            return
        conversation.messages.append({"role": "assistant", "content": response})
        conversation.messages.append({"role": "user", "content": message})
        before, after = self._around_next_message
        added = before + message + after
        words = list(completion_ids)
        if not self.cut_off(completion_ids):
            del words[-1]  # the end token
        continued = conversation.text + self.tokenizer.decode(words) + added
        text = continued
        if view.thoughts != "kept":
            text = self._chat([*self._opening_messages, *conversation.messages])
        if text == continued:
            conversation.ids = [*conversation.ids, *words, *self._ids(added, special=False)]
        else:
            conversation.ids = self._ids(text)
        conversation.text = text

    @cached_property
    def _around_next_message(self) -> tuple[str, str]:
        """The template's text between an answer and the next message, and between that message and the next answer."""
        turn = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": _ANSWER}]
        text = self._chat([*self._opening_messages, *turn, {"role": "user", "content": _NEXT}])
        before, _, after = text.partition(_ANSWER)[2].partition(_NEXT)
        if not before or _NEXT not in text:
            raise PromptError(
                "the chat template cannot render a second message of the user's; use View(chat=False)"
            )
        return before, after

    @cached_property
    def _around_chat(self) -> tuple[str, str]:
        """The text that a rendered conversation loses in front (a BOS that the tokenizer adds); and its prefill."""
        rendered = self._rendered([*self._opening_messages, {"role": "user", "content": PROBE}])
        for bos in ("", self.tokenizer.bos_token or ""):
            start = rendered.removeprefix(bos)
            if self._probe_prompt.startswith(start):
                return bos, self._probe_prompt.removeprefix(start)
        raise PromptError(
            "the chat template renders an open answer in a way of its own; use View(chat=False)"
        )

    @cached_property
    def _opening_messages(self) -> list[dict[str, Any]]:
        """System text and worked episodes as messages."""
        return opening_messages(self.view.system, self.view.example_pairs())

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def _chat(self, messages: list[dict[str, Any]]) -> str:
        """Rendered as on a server, with the assistant's turn open behind the prefill."""
        bos, after = self._around_chat
        return self._rendered(messages).removeprefix(bos) + after

    def _ids(self, text: str, *, special: bool = True) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]
