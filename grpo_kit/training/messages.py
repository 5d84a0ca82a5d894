"""Stages 3 and 9 of a step, where prompts are messages: an assistant's opening words are continued, turns recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_kit.prompts import continue_messages
from grpo_kit.rewards.response import text_of


def prefill_of(prompt: Any) -> Any:
    """What the assistant's message holds that a prompt of messages ends in; None for any other prompt.

    >>> prefill_of([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<answer>"}])
    '<answer>'
    """
    if isinstance(prompt, str) or not prompt or prompt[-1]["role"] != "assistant":
        return None
    return prompt[-1]["content"]


def with_prefills(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a batch with a column `prefill` where a prompt ends in one and they have none: rewards read it."""
    prefills = [prefill_of(row.get("prompt")) for row in rows]
    if not any(prefills) or "prefill" in rows[0]:
        return rows
    return [{**row, "prefill": prefill or ""} for row, prefill in zip(rows, prefills, strict=True)]


def prompt_ids(
    trainer: Any, trl_tokenize: Callable[..., tuple], prompts: Sequence[Any]
) -> tuple[list[list[int]], Any, dict]:
    """What trl's _tokenize_prompts gives: token ids, images, fields. trl_tokenize: trl's own, for all other prompts.

    Raises PromptError for a prefill that the template spoils, ValueError for one beside images or an environment.
    """
    if not any(prefill_of(prompt) is not None for prompt in prompts):
        return trl_tokenize(prompts)
    beside = {
        "a model that sees images": trainer._is_vlm,
        "environment_factory": trainer.environment_factories is not None,
        "a reward model": any(isinstance(reward, torch.nn.Module) for reward in trainer.reward_funcs),
    }
    if any(beside.values()):
        raise ValueError(
            f"a prompt ends in an assistant message, which with {next(b for b, there in beside.items() if there)} "
            "would be closed and a second one opened; let it end in the user's message"
        )
    template = {
        "tools": trainer.tools or None,
        "chat_template": trainer.chat_template,
        **trainer.chat_template_kwargs,
    }
    tokenizer, ids = trainer.text_tokenizer, []
    for place, prompt in enumerate(prompts):
        if place and prompt == prompts[place - 1]:  # of one group
            ids.append(list(ids[-1]))
        elif prefill_of(prompt) is None:
            ids.append(trl_tokenize([prompt])[0][0])
        else:
            text = continue_messages(tokenizer, prompt, **template)
            ids.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids, None, {}


def without_prefills(tokenizer: Any, prompts: Sequence[Any], completions: list[Any]) -> list[Any]:
    """The completions (B*G) as the model wrote them: a response template, which tools need, parses the prefill too."""
    if getattr(tokenizer, "response_template", None) is None:
        return completions
    made = []
    for prompt, completion in zip(prompts, completions, strict=True):
        prefill = prefill_of(prompt)
        if prefill and completion[0].get("content", "").startswith(prefill):
            first = {**completion[0], "content": completion[0]["content"].removeprefix(prefill)}
            completion = [first, *completion[1:]]
        made.append(completion)
    return made


def prompt_texts(
    tokenizer: Any, rows: Sequence[dict[str, Any]], prompt_ids: torch.Tensor, prompt_mask: torch.Tensor
) -> list[str]:
    """Each row's prompt for the record: a text as it is, messages as the model saw them, template and all.

    prompt_ids, prompt_mask: (N, P).
    """
    ids, masks = prompt_ids.tolist(), prompt_mask.bool().tolist()
    return [
        prompt if isinstance(prompt := row.get("prompt"), str) else _decoded(tokenizer, line, mask)
        for row, line, mask in zip(rows, ids, masks, strict=True)
    ]


def _decoded(tokenizer: Any, ids: list[int], mask: list[bool]) -> str:
    return tokenizer.decode([t for t, kept in zip(ids, mask, strict=True) if kept])


def completion_texts(tokenizer: Any, completions: Sequence[Any], ids: Sequence[list[int]]) -> list[str]:
    """Each completion for the record: its text; of calls, tool results and further turns, all of it with their marks.

    completions: texts, or lists of messages as trl parses them. ids: the tokens of each.

    >>> completion_texts(None, ["8", [{"role": "assistant", "content": "9"}]], [[], []])
    ['8', '9']
    """
    return [
        text_of(completion) if _is_one_text(completion) else tokenizer.decode(line)
        for completion, line in zip(completions, ids, strict=True)
    ]


def _is_one_text(completion: Any) -> bool:
    """Does its one content hold all that was written?"""
    if isinstance(completion, str):
        return True
    return len(completion) == 1 and not any(
        v for k, v in completion[0].items() if k not in ("role", "content")
    )
