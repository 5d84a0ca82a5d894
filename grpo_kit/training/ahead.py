"""Between stages 2 and 4 of a step: completions that end early are judged while the others are still being written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl.data_utils import is_conversational

from grpo_kit.rewards.ahead import begin, drop, that_begin
from grpo_kit.rollout.output_buffer import Ended


class Ahead:
    """Begins one trainer's rewards (rewards.ahead) on completions of the kit's engine that have ended.

    They begin with the very text and columns that they are called with later. A completion whose row or text is not
    known for certain is left to the call: several processes, images, tools, environments, a rollout_func, templates
    that parse what was written, and other engines. spare: cores that decoding leaves free; 0 begins nothing.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.spare = spare_cores(trainer.accelerator.device)
        self._rewards: list[Any] = []
        self._rows: list[dict[str, Any]] | None = None

    @contextmanager
    def of(self, inputs: list[dict[str, Any]]) -> Iterator[None]:
        """Around sampling and judging these rows, one a completion: whatever happens, nothing begun outlives it."""
        self._rewards = that_begin(self.trainer.reward_funcs)
        self._rows = inputs if self._rewards and self.spare and self._certain(inputs) else None
        try:
            yield
        finally:
            self._rows = None
            drop(self._rewards)

    def listener(self, completions: int) -> Ended | None:
        """What the engine tells of completions that ended; None where there is nobody to tell."""
        return self._ended if self._rows is not None and len(self._rows) == completions else None

    def _certain(self, inputs: list[dict[str, Any]]) -> bool:
        trainer = self.trainer
        parsed = any(
            getattr(trainer.text_tokenizer, name, None) is not None
            for name in ("response_template", "response_schema")
        )
        return not (
            trainer.accelerator.num_processes > 1
            or trainer.tools
            or trainer.environment_factories is not None
            or trainer.rollout_func is not None
            or (parsed and is_conversational({"prompt": inputs[0].get("prompt", "")}))
            or {"image", "images"} & set(inputs[0])
        )

    def _ended(self, found: dict[int, list[int]]) -> None:
        rows = [self._rows[place] for place in found]
        ids = list(found.values())
        completions = self.trainer.processing_class.batch_decode(ids, skip_special_tokens=True) if ids else []
        if rows and is_conversational({"prompt": rows[0]["prompt"]}):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        taken = ("prompt", "completion", "completion_ids", "workers")
        names = [name for name in self._rows[0] if name not in taken]
        begin(
            self._rewards,
            completions,
            workers=self.spare,
            prompts=[row["prompt"] for row in rows],
            completion_ids=ids,
            trainer_state=self.trainer.state,
            **{name: [row[name] for row in rows] for name in names},
        )


def spare_cores(device: torch.device) -> int:
    """Cores that decoding leaves to others: beside a card all but one, on a CPU those that torch does not use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, cores - (torch.get_num_threads() if device.type == "cpu" else 1))
