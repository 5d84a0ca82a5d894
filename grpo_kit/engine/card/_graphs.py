"""CUDA graphs of the decode step: one launch instead of a thousand kernels one by one. CUDA only.

A graph reads and writes fixed addresses. It is dropped, never patched, as soon as anything it was captured over
moved: weights, buffers, adapters, autocast. Autocast's copies of the weights do not move either, so graphs
live from rollout to rollout.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class DecodeGraphs:
    """Graphs by shape, in one memory pool; all write their logits to a shared buffer.

    cuda: torch.cuda, which has the graphs; None: no graphs, every step runs directly.
    captures, replays: their numbers so far. seconds: what the graphs that are there have taken to be made.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        # the stream of warm-ups: each new one would keep memory of its own
        self._side: Any = None
        self.captures = self.replays = 0
        self._failed = False
        self.clear()

    def clear(self) -> None:
        """Forget all graphs; their memory goes back to torch's allocator."""
        self._bytes, self.seconds = 0, 0.0
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = None
        self._logits: Tensor | None = None

    def run(self, shape: Hashable, step: Callable[..., Tensor]) -> Tensor:
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
                # The end of the capture hides the error that it met.
                if isinstance(error.__context__, torch.OutOfMemoryError):
                    raise error.__context__ from None
                self.clear()
                self._failed = True
                warnings.warn(
                    f"decoding without CUDA graphs, which failed: {error}", stacklevel=2
                )
                return step()
            self.seconds += time.perf_counter() - begin
        graph, logits = self._graphs[shape]
        graph.replay()
        self.replays += 1
        return logits

    def nbytes(self) -> int:
        """Bytes that only the graphs can use: their pool, as torch's allocator counts it, and the logits."""
        return self._bytes if self._logits is None else self._bytes + self._logits.nbytes

    def _warm(self, step: Callable[..., Tensor]) -> Tensor:
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
            self._logits = torch.empty(
                rows, vocabulary, dtype=logits.dtype, device=logits.device
            )
        return self._logits[:rows]

    def _capture(self, step: Callable[..., Tensor], output: Tensor) -> torch.cuda.CUDAGraph:
        cuda = self._cuda
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            # in here the cache has been emptied: only the pool grows
            before = cuda.memory_reserved()
            logits = step(output)
            if logits is not output:
                output.copy_(logits)
            del logits
        self.captures += 1
        self._bytes += max(0, cuda.memory_reserved() - before)
        return graph


# ---- autocast's 16-bit copies of trained weights, at fixed addresses ----------------------------------------------
# Autocast caches its own copies until its outermost context ends, at the end of every rollout. The
# copies here hold the same numbers, stay from rollout to rollout and are refreshed at the start of each: 2 bytes for
# each weight that autocast would cache (float32, trained, in a linear layer), nothing for 16-bit weights.


class AutocastCache:
    """The copies of one model's weights, made where a linear layer first needs them."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the weight and its copy

    def clear(self) -> None:
        """Release the copies."""
        self._copies.clear()  # the same dict: a continued rollout fills it again

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(copy.nbytes for _, copy in self._copies.values())

    @contextmanager
    def instead_of_autocasts(self, device: str) -> Iterator[None]:
        """Inside, linear layers under autocast read these copies of the present weights.

        The numbers equal autocast's. Other tensors that it would cache are cast each time, in a graph too.
        """
        if not torch.is_autocast_enabled(device):
            yield
            return
        for weight, copy in self._copies.values():
            copy.copy_(weight)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype, cache_enabled=False), _Linear(self._copies, dtype):
            yield


class _Linear(TorchFunctionMode):
    """Gives linear() the copies; leaves all else unchanged."""

    def __init__(self, copies: dict[int, tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
        super().__init__()
        self._copies, self._dtype = copies, dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is functional.linear:
            args = (args[0], *map(self._cast, args[1:]))
        return func(*args, **(kwargs or {}))

    def _cast(self, weight: Tensor | None) -> Tensor | None:
        if weight is None or weight.dtype != torch.float32 or weight._is_view():
            return weight
        if not weight.requires_grad or not weight.is_leaf:
            return weight
        if id(weight) not in self._copies:
            self._copies[id(weight)] = weight, weight.detach().to(self._dtype)
        return self._copies[id(weight)][1]
