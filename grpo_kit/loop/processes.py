"""Processes: several of them train one model, each on its share of a step's prompts; one alone needs none of this.

Started by torchrun, which ends all where one ends; the last checkpoint then goes on. Every process has all weights and
makes the same updates: a gradient is the sum over processes, once an update. The main one writes the run's folder and
runs the hooks; what they change or stop is sent to the others between two steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_kit.loop.config import Config


class Processes:
    """The processes of a run. rank: this one's number, from 0. count: how many there are.

    Joins the group that torchrun describes in the environment, if nobody has. Raises ValueError where `prompts`, those
    of a step, are no multiple of the count.
    """

    def __init__(self, prompts: int, device: torch.device) -> None:
        self.rank, self.count, self._runs_on_main = 0, 1, False
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and dist.is_available() and not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(days=1))  # the others wait for an evaluation
        if dist.is_available() and dist.is_initialized():
            self.rank, self.count = dist.get_rank(), dist.get_world_size()
        if prompts % self.count:
            raise ValueError(f"prompts_per_step={prompts} must be a multiple of the {self.count} processes")

    def check(self, config: Config, dropout: bool) -> None:
        """Raises ValueError for what makes several processes train otherwise than one. dropout: has the model any?"""
        if self.count == 1:
            return
        uses = {
            "minibatches": config.minibatches > 1,
            "dynamic_sampling": config.dynamic_sampling > 0,
            "dropout": dropout,
        }
        names = [name for name, is_used in uses.items() if is_used]
        if names:
            raise ValueError(
                f"{', '.join(names)} with {self.count} processes is another run than with one: each would cut up its "
                "own prompts, fill up its own groups and draw its own dropout; give minibatches=1, dynamic_sampling=0 "
                "and dropouts of 0 (of adapters: lora={'lora_dropout': 0.0}), or start one process"
            )

    @property
    def is_main(self) -> bool:
        """Does this one write and run the hooks?"""
        return self.rank == 0

    def first(self, prompts: int) -> int:
        """The place of this process's first prompt among those of a step."""
        return self.rank * (prompts // self.count)

    def share(self, rows: Sequence[Any]) -> Sequence[Any]:
        """This process's part of a step's prompts."""
        begin = self.first(len(rows))
        return rows[begin : begin + len(rows) // self.count]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the order of ranks."""
        values: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    def sums(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Each number's sum over the processes."""
        gathered = self.gather(dict(numbers))
        return {name: sum(of_process[name] for of_process in gathered) for name in numbers}

    def from_main(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """make(*arguments) of the main process, for all. What it raises is raised in all."""
        if self.count == 1 or self._runs_on_main:  # a hook saves: the others wait for the hook
            return make(*arguments)
        value = error = None
        if self.is_main:
            self._runs_on_main = True
            try:
                value = make(*arguments)
            except BaseException as raised:
                error = raised
            self._runs_on_main = False
        value_and_error = [value, error]
        dist.broadcast_object_list(value_and_error)
        value, error = value_and_error
        if error is not None:
            raise error
        return value

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make each gradient the sum over the processes. Every parameter must have one."""
        if self.count > 1:
            for parameter in parameters:
                dist.all_reduce(parameter.grad)

    def take_mains(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give the main process's weights to all."""
        if self.count > 1:
            for parameter in parameters:
                dist.broadcast(parameter.data, 0)
