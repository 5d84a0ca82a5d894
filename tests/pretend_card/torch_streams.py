"""Streams, events and CUDA graphs of torch.cuda on the pretend card, in Python.

Pretends: what torch.cuda's own classes of these names do for one card; an event that the clock has passed is no wait.
Does not: streams that run side by side (a stream that reads what another writes must wait), priorities, processes.
"""

import contextlib
import gc
from typing import Any


def _check(torch: Any, lib: Any, failed: int) -> None:
    if failed:
        raise torch.AcceleratorError(lib.card_error().decode())


def streams(torch: Any, lib: Any, get: Any) -> dict[str, Any]:
    def wait(what: str) -> None:
        _check(torch, lib, lib.card_wait(what.encode()))

    class Stream:
        def __init__(self, device=None, priority=0, stream_id=None, **rest):
            self.stream_id = lib.card_new_stream() if stream_id is None else stream_id
            self.cuda_stream, self.priority = self.stream_id, priority
            self.device, self.device_index, self.device_type = torch.device("cuda", 0), 0, 1

        def wait_stream(self, other):
            lib.card_join(self.stream_id, other.stream_id)

        def wait_event(self, event):
            event.wait(self)

        def record_event(self, event=None):
            event = event or Event()
            event.record(self)
            return event

        def query(self):
            return True

        def synchronize(self):
            wait("stream.synchronize")

        def __eq__(self, other):
            return isinstance(other, Stream) and other.stream_id == self.stream_id

        def __hash__(self):
            return hash(self.stream_id)

        def __enter__(self):
            self._before = lib.card_set_stream(self.stream_id)
            return self

        def __exit__(self, *error):
            lib.card_set_stream(self._before)

    class Event:
        def __init__(
            self, enable_timing=False, blocking=False, interprocess=False, external=False
        ):
            self.at = self.stream = None

        def record(self, stream=None):
            self.stream, self.at = stream or current_stream(), get("device_clock")

        # for all that its stream was given so far, a little more than CUDA's
        def wait(self, stream=None):
            if self.stream is not None:
                (stream or current_stream()).wait_stream(self.stream)

        def query(self):
            return self.at is None or get("host_clock") >= self.at

        def synchronize(self):
            if get("capturing"):
                wait("event.synchronize in a capture")
            if self.at is None:
                return
            if get("host_clock") >= self.at:  # the card is past it: nothing to wait for
                lib.card_arrive(self.stream.stream_id)
            else:
                wait("event.synchronize")

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

    class StreamContext:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            if self.stream is not None:
                self.before = lib.card_set_stream(self.stream.stream_id)

        def __exit__(self, *error):
            if self.stream is not None:
                lib.card_set_stream(self.before)

    def current_stream(device=None):
        return Stream(stream_id=int(get("stream")))

    return {
        "Stream": Stream, "Event": Event, "StreamContext": StreamContext, "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(stream_id=0),
        "set_stream": lambda stream: lib.card_set_stream(stream.stream_id),
        "synchronize": lambda device=None: wait("cuda.synchronize"),
        "is_current_stream_capturing": lambda: bool(get("capturing")),
    }  # fmt: skip


def graphs(torch: Any, lib: Any, names: dict[str, Any]) -> dict[str, Any]:
    pools = [0]

    def graph_pool_handle():
        pools[0] += 1
        return (0, pools[0])

    class CUDAGraph:
        def __init__(self, keep_graph=False):
            self.id, self._pool = lib.card_graph_new(), None

        def capture_begin(self, pool=None, capture_error_mode="global"):
            self._pool = pool or graph_pool_handle()
            _check(torch, lib, lib.card_capture_begin(self.id, self._pool[1]))

        def capture_end(self):
            _check(torch, lib, lib.card_capture_end())

        def replay(self):
            _check(torch, lib, lib.card_replay(self.id))

        def reset(self):
            if self.id:
                lib.card_graph_free(self.id)
                self.id = 0

        def pool(self):
            return self._pool

        def launches(self):
            """Kernels of a replay; only the pretend card's graphs tell it."""
            return lib.card_graph_launches(self.id)

        def __del__(self):
            with contextlib.suppress(Exception):  # at the interpreter's end
                self.reset()

    class Graph:  # torch.cuda.graph
        default = None

        def __init__(self, cuda_graph, pool=None, stream=None, capture_error_mode="global"):
            if Graph.default is None:
                Graph.default = names["Stream"]()
            self.graph, self.pool, self.mode = cuda_graph, pool, capture_error_mode
            self.inside = names["StreamContext"](stream or Graph.default)

        def __enter__(self):
            names["synchronize"]()
            gc.collect()
            names["empty_cache"]()
            self.inside.__enter__()
            pool = {"pool": self.pool} if self.pool else {}
            self.graph.capture_begin(**pool, capture_error_mode=self.mode)

        def __exit__(self, *error):
            try:
                self.graph.capture_end()
            finally:
                self.inside.__exit__(*error)

    return {"CUDAGraph": CUDAGraph, "graph": Graph, "graph_pool_handle": graph_pool_handle}
