"""A stand-in for torch.cuda's graphs on a CPU, for tests: what is captured is every operator with the memory it reads.

As on a card a replay reads and writes the addresses of the capture, whatever has become of the Python objects. Memory
from outside is held by no graph: where it was given back since, a card would read what others wrote there, and
this raises ReadsFreedMemory. Reading a value on the host inside a capture is an error, as there.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HOST_READS = {"_local_scalar_dense", "nonzero", "equal"}


class ReadsFreedMemory(AssertionError):
    pass


class Outside:
    """A tensor whose memory the graph does not hold."""

    def __init__(self, tensor, name):
        storage = tensor.untyped_storage()
        self.weak, self.bytes, self.name = StorageWeakRef(storage), storage.nbytes(), name
        self.place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self.dtype = tensor.dtype

    def tensor(self):
        if self.weak.expired():
            raise ReadsFreedMemory(
                f"{self.name} reads {self.dtype} {self.place[1]}, which was given back"
            )
        storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


class Record(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        graph, kwargs = self.graph, kwargs or {}

        def noted(tensor):
            return tensor if cell(tensor) in graph.made else Outside(tensor, name)

        given = tree_map_only(torch.Tensor, noted, (args, kwargs))
        read = {cell(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs)
        outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [cell(t) not in read for t in outs]
        graph.made.update(
            {cell(t): t.untyped_storage() for t, new in zip(outs, fresh, strict=True) if new}
        )
        graph.steps.append(
            (func, given, [t if new else None for t, new in zip(outs, fresh, strict=True)])
        )
        return out


def cell(tensor):
    return tensor.untyped_storage()._cdata


class Graph:
    def __init__(self):
        self.steps, self.made = [], {}

    def replay(self):
        with torch.autocast("cpu", enabled=False):  # what it did is in the graph
            for func, given, outs in self.steps:
                args, kwargs = tree_map_only(Outside, Outside.tensor, given)
                found = [
                    t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)
                ]
                for kept, now in zip(outs, found, strict=True):
                    if kept is not None:
                        kept.copy_(now)

    def poison(self):
        """Nothing of an earlier replay may be read: all of the graph's own floating-point memory becomes NaN."""
        for _, _, outs in self.steps:
            for kept in outs:
                if kept is not None and kept.is_floating_point():
                    kept.fill_(float("nan"))


class FakeCuda:
    """The names of torch.cuda that grpo_kit.engine.card._graphs uses. captured: every graph there has been."""

    def __init__(self):
        self.captured = []
        self.pools = 0

    def Stream(self):  # noqa: N802
        return self

    def current_stream(self):
        return self

    def wait_stream(self, other):
        pass

    def stream(self, stream):
        return nullcontext()

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    def CUDAGraph(self):  # noqa: N802
        return Graph()

    def memory_reserved(self):
        return sum(s.nbytes() for graph in self.captured for s in graph.made.values())

    @contextmanager
    def graph(self, graph, pool, capture_error_mode):
        assert pool == self.pools and capture_error_mode == "thread_local"
        with Record(graph):
            yield
        graph.poison()
        self.captured.append(graph)
