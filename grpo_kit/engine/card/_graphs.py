"""CUDA graphs of the decode step: one launch instead of a thousand kernels one by one. CUDA only.

A graph reads and writes fixed addresses. It is dropped, never patched, as soon as anything it was captured over
moved: weights, buffers, adapters, autocast. Autocast's copies of the weights do not move either (_autocast_cache.py),
so graphs live from rollout to rollout.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch


def signature(model: torch.nn.Module) -> tuple:
    """Everything a captured graph depends on: the address and dtype of every weight and buffer, adapters, autocast.

    Values may change in place (an optimizer step): a graph reads them again. Addresses and kinds may not.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    peft = sys.modules.get("peft.tuners.tuners_utils")
    adapters = [
        (
            name,
            tuple(m.active_adapters),
            m.disable_adapters,
            tuple(m.merged_adapters),
            tuple(m.scaling.items()),
        )
        for name, m in model.named_modules()
        if peft is not None and isinstance(m, peft.BaseTunerLayer) and hasattr(m, "scaling")
    ]
    device = next(model.parameters()).device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return (
        tuple((name, t.data_ptr(), t.dtype, t.shape, t.device) for name, t in tensors),
        tuple(adapters),
        autocast,
        torch.get_float32_matmul_precision(),
    )


class DecodeGraphs:
    """Graphs by shape, in one memory pool; all write their logits to a shared buffer.

    cuda: torch.cuda, which has the graphs; None: no graphs, every step runs directly.
    captures, replays: their numbers so far. seconds: what the graphs that are there have taken to be made.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._side: Any = None  # the stream of warm-ups: each new one would keep memory of its own
        self._signature: tuple | None = None
        self.captures = self.replays = 0
        self._failed = False
        self.clear()

    def check(self, model: torch.nn.Module) -> bool:
        """Drop everything if the model differs from the captured one; returns whether it was kept."""
        current = signature(model)
        same = current == self._signature
        if not same:
            self.clear()
        self._signature = current
        return same

    def clear(self) -> None:
        """Forget all graphs; their memory goes back to torch's allocator."""
        self._bytes, self.seconds = 0, 0.0
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = None
        self._logits: torch.Tensor | None = None

    def run(self, shape: Hashable, step: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The result of step(), float (rows, V), captured when `shape` is new; valid until the next run.

        step(out) may write its result there, which saves a copy.
        If the layers cannot be captured it warns once and runs them one by one: slower, with the same result.
        """
        if self._failed or self._cuda is None:
            return step()
        if shape not in self._graphs:
            begin = time.perf_counter()
            output = self._warm(step)  # what fails here fails without graphs, too
            try:
                self._graphs[shape] = self._capture(step, output), output
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if isinstance(error.__context__, torch.OutOfMemoryError):  # hidden by the capture's own end
                    raise error.__context__ from None
                self.clear()
                self._failed = True
                warnings.warn(f"decoding without CUDA graphs, which failed: {error}", stacklevel=2)
                return step()
            self.seconds += time.perf_counter() - begin
        graph, logits = self._graphs[shape]
        graph.replay()
        self.replays += 1
        return logits

    def nbytes(self) -> int:
        """Bytes that only the graphs can use: their pool, as torch's allocator counts it, and the logits."""
        logits = self._logits
        return self._bytes + (0 if logits is None else logits.numel() * logits.element_size())

    def _warm(self, step: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Off the main stream, the first time twice: libraries allocate workspaces. Where the graph is to write."""
        cuda = self._cuda
        self._side = stream = self._side or cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            for _ in range(1 if self._graphs else 2):
                logits = step()
        cuda.current_stream().wait_stream(stream)
        rows, vocabulary = logits.shape
        if self._logits is None or self._logits.size(0) < rows:
            self._logits = torch.empty(rows, vocabulary, dtype=logits.dtype, device=logits.device)
        return self._logits[:rows]

    def _capture(self, step: Callable[..., torch.Tensor], output: torch.Tensor) -> torch.cuda.CUDAGraph:
        cuda = self._cuda
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            before = cuda.memory_reserved()  # in here the cache has been emptied: only the pool grows
            logits = step(output)
            if logits is not output:
                output.copy_(logits)
            del logits
        self.captures += 1
        self._bytes += max(0, cuda.memory_reserved() - before)
        return graph
