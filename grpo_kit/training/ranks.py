"""The processes of one run (`accelerate launch`, torchrun): who they are, and what is made one of what each has.

Where each process has all weights (`Ranks.together`) rollouts and update are the kit's own on each, as with one
process; gradients are averaged once a step. No DistributedDataParallel is around the model: its reductions come with
every backward pass, and processes that cut their rows into unequal numbers of chunks would never meet.
Where weights are sharded (`Ranks.sharded`) both are trl's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.tensor import DTensor

_BUCKET = 64 * 2**20  # bytes of gradients that travel at once
_groups: dict[int, Any] = {}  # of each default process group: its group for words


class Ranks:
    """Of one trainer: count processes, of which this one is number index. main: it keeps the records.

    sharded: who shards the weights ("FSDP2", "DeepSpeed ZeRO-3"), None where each process has all of them. words: the
    group for small talk on the CPU, None where there is one process.
    With one process every method gives back what it was given, and nothing is sent.
    """

    def __init__(self, args: Any) -> None:
        state = PartialState()  # args has set it up
        self.count, self.index = state.num_processes, state.process_index
        self.main = self.index == 0
        self.sharded: str | None = None
        self.words = _group_for_words(args.ddp_timeout) if self.count > 1 else None
        self._alone = False

    @property
    def together(self) -> bool:
        """Several processes, each of which has all weights."""
        return self.count > 1 and self.sharded is None

    # ---- small talk: Python objects and a few numbers -------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """What each process has, in their order."""
        if self.count == 1 or self._alone:
            return [value]
        found = [None] * self.count
        dist.all_gather_object(found, value, group=self.words)
        return found

    def any(self, flag: bool) -> bool:
        """Does one of them say so?"""
        return any(self.gather(bool(flag)))

    def first(self, value: Any) -> Any:
        """The first value that is not None."""
        return next((found for found in self.gather(value) if found is not None), None)

    def sum(self, *values: float) -> tuple[float, ...]:
        """Each of the numbers, added up."""
        if self.count == 1 or self._alone:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.words)
        return tuple(total.tolist())

    def from_main(self, make: Callable[[], Any]) -> Any:
        """What the main process makes, for all; what it raises is raised by all."""
        if self.count == 1:
            return make()
        made: list[Any] = [None, None]
        if self.main:
            try:
                made[0] = make()
            except Exception as error:
                made[1] = error
        dist.broadcast_object_list(made, src=0, group=self.words)
        if made[1] is not None:
            raise made[1]
        return made[0]

    def divide(self, ask: Callable[[Sequence[Any]], list[Any]], rows: Sequence[Any]) -> list[Any]:
        """One answer a row, as ask(rows) gives, each process having asked about every count-th of them."""
        mine = rows[self.index :: self.count]
        parts = self.gather(ask(mine) if len(mine) else [])
        return [parts[i % self.count][i // self.count] for i in range(len(rows))]

    def all_or_none(self, work: Callable[[], Any], passes: tuple[type[BaseException], ...]) -> Any:
        """What work() gives, once it has given something in each process; else every one raises. passes: not said here.

        Raises what it raised here, or RuntimeError with what it raised elsewhere.
        """
        failed = made = None
        try:
            made = work()
        except passes:
            raise
        except Exception as error:
            failed = error
        elsewhere = self.first(None if failed is None else f"{type(failed).__name__}: {failed}")
        if elsewhere is not None:
            raise failed or RuntimeError(f"in another process: {elsewhere}")
        return made

    # ---- weights and gradients ------------------------------------------------------------------------------------

    def same_weights(self, model: torch.nn.Module) -> None:
        """Every process gets the main one's parameters and buffers."""
        if self.together:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, src=0)

    def average_gradients(self, model: torch.nn.Module) -> None:
        """Of the parameters that have a gradient in any process; where one has none of it, it counts as 0."""
        trained = [p for p in model.parameters() if p.requires_grad]
        there = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
        dist.all_reduce(there, op=dist.ReduceOp.MAX, group=self.words)
        trained = [p for p, has in zip(trained, there.tolist(), strict=True) if has]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for gradients in _buckets([p.grad for p in trained]):
            flat = torch.cat([g.reshape(-1) for g in gradients])
            dist.all_reduce(flat)
            flat /= self.count
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    @contextmanager
    def alone(self, accelerator: Any) -> Iterator[None]:
        """Inside, gathers and sums, trl's too, are of this process alone: a chunk is nobody else's business."""
        if not self.together:
            yield
            return
        own = {
            "gather": lambda tensor: tensor,
            "reduce": lambda tensor, *args, **kwargs: tensor,
            "pad_across_processes": lambda tensor, *args, **kwargs: tensor,
        }
        vars(accelerator).update(own)
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            for name in own:
                vars(accelerator).pop(name, None)


def who_shards(trainer: Any) -> str | None:
    """Who of these the trainer's weights are sharded by; None where every process has all of them."""
    accelerator = trainer.accelerator
    if trainer.is_deepspeed_enabled:
        return f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    if trainer.is_fsdp_enabled:
        return f"FSDP{getattr(accelerator.state.fsdp_plugin, 'fsdp_version', 1)}"
    if any(isinstance(p, DTensor) for p in trainer.model.parameters()):
        return "tensor parallel"
    parallel = getattr(accelerator, "parallelism_config", None)
    return "parallelism_config" if parallel is not None and parallel.total_size > 1 else None


def _group_for_words(timeout: float) -> Any:
    """Over gloo: it needs no card, and tells at once where a process is gone."""
    world = id(dist.group.WORLD)
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return _groups[world]


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """In order, of one type and at most so many bytes each, but for a larger one alone."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        more = gradient.numel() * gradient.element_size()
        if bucket and (gradient.dtype != bucket[0].dtype or size + more > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += more
    if bucket:
        yield bucket
