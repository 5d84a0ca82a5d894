"""The pretend card in Python: `install("rtx4090")`, before anything imports torch, then torch has a card "cuda:0".

What it pretends and what not stands at the head of each file in cpp/ and of torch_cuda.py. Counters: counts(),
operators(), waits(), waits_by_line(). Its clock is a model: never quote it. Nothing in grpo_kit knows of this.
"""

import collections
import contextlib
import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from build import library


class Model(NamedTuple):
    """Name, memory and capability as torch tells them; the data sheet's bytes and FLOP a second."""

    name: str
    gib: float
    capability: tuple[int, int]
    processors: int
    bandwidth: float
    flops16: float
    flops32: float


CARDS = {
    "rtx4090": Model("NVIDIA GeForce RTX 4090", 23.99, (8, 9), 128, 1.008e12, 165e12, 82.6e12),
    "rtx3090": Model("NVIDIA GeForce RTX 3090", 23.69, (8, 6), 82, 0.936e12, 71e12, 35.6e12),
    "a10g": Model("NVIDIA A10G", 22.06, (8, 6), 80, 0.600e12, 70e12, 31.2e12),
    "l4": Model("NVIDIA L4", 22.05, (8, 9), 58, 0.300e12, 121e12, 30.3e12),
    "t4": Model("Tesla T4", 14.75, (7, 5), 40, 0.320e12, 65e12, 8.1e12),
}
COUNTS = (
    "launches",
    "replays",
    "waits",
    "to_card",
    "to_card_late",
    "to_host",
    "to_host_late",
    "allocations",
    "bytes",
)
WATCHED = (
    "grpo_kit/",
    "transformers/",
    "peft/",
    "torch/optim",
    "torch/nn/utils",
    "torch/amp",
    "bitsandbytes/",
)

lib: Any = None
_noted: collections.Counter = collections.Counter()
_keep: list = []


def install(card: str = "rtx4090", *, total: int | None = None) -> None:
    """Make a card of this process. total: bytes of memory, None: the card's own.

    Raises NotHere where there can be none, RuntimeError where torch is there already.
    """
    global lib
    if lib is not None or "torch" in sys.modules:
        raise RuntimeError("the pretend card is installed once, before torch is imported")
    # bitsandbytes' CPU kernels would be compiled, for minutes
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    lib = _load(library())
    model = CARDS[card]
    put("total", total or model.gib * 2**30)
    put("capability", 10 * model.capability[0] + model.capability[1])
    put("bandwidth", 0.85 * model.bandwidth)
    put("flops16", 0.75 * model.flops16)
    put("flops32", 0.7 * model.flops32)
    import torch

    with contextlib.suppress(ImportError):
        import bitsandbytes  # noqa: F401  while there is no card: its CPU kernels then stand for CUDA's
    _register_kernels()
    import torch_cuda

    torch_cuda.patch(torch, lib, get, put, model)


def _load(path: Path) -> Any:
    loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    texts = ("card_error", "card_operators", "card_waits", "card_snapshot")
    for name in texts:
        getattr(loaded, name).restype = ctypes.c_char_p
    for name in ("card_new_stream", "card_set_stream", "card_graph_new", "card_graph_launches"):
        getattr(loaded, name).restype = ctypes.c_int64
    for name in (
        "card_set_stream",
        "card_arrive",
        "card_graph_launches",
        "card_replay",
        "card_graph_free",
    ):
        getattr(loaded, name).argtypes = [ctypes.c_int64]
    loaded.card_join.argtypes = [ctypes.c_int64, ctypes.c_int64]
    loaded.card_capture_begin.argtypes = [ctypes.c_int64, ctypes.c_uint64]
    loaded.card_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
    loaded.card_get.argtypes, loaded.card_get.restype = [ctypes.c_char_p], ctypes.c_double
    return loaded


def _register_kernels() -> None:
    """Every operator that has a CUDA kernel in torch's own table is a kernel of the card."""
    import yaml

    root = Path(importlib.util.find_spec("torchgen").submodule_search_locations[0])
    table = yaml.safe_load((root / "packaged/ATen/native/native_functions.yaml").read_text())

    def name(function: dict) -> str:
        return function["func"].split("(")[0]

    def on_cuda(function: dict) -> bool:
        keys = [
            key.strip() for keys in function.get("dispatch") or {} for key in keys.split(",")
        ]
        return "CUDA" in keys or "ufunc_inner_loop" in function

    own = {name(f) for f in table if on_cuda(f)}
    names = [name(f) for f in table if name(f) in own or f.get("structured_delegate") in own]
    lib.card_register("\n".join(names).encode())


def put(what: str, value: float) -> None:
    """Set a number of the card: total, context, fraction, poison, copies_are_late, capability."""
    if lib.card_set(what.encode(), float(value)):
        raise ValueError(f"what={what!r} is no setting of the pretend card")


def get(what: str) -> float:
    """A number of the card; a ValueError for one that it has not."""
    value = lib.card_get(what.encode())
    if value < 0:
        raise ValueError(f"what={what!r} is nothing that the pretend card counts")
    return value


def counts() -> dict[str, int]:
    """What was counted since the last reset()."""
    return {name: int(get(name)) for name in COUNTS}


def reset() -> None:
    """Count from zero."""
    lib.card_reset_counts()
    _noted.clear()


def operators() -> dict[str, int]:
    """Launches by operator."""
    return {name: launches for name, (launches, _) in traffic().items()}


def traffic() -> dict[str, tuple[int, float]]:
    """(launches, bytes read and written) by operator; what a capture records counts as if it ran."""
    lines = (line.split("\t") for line in lib.card_operators().decode().splitlines())
    return {name: (int(launches), float(moved)) for name, launches, moved, _ in lines}


def waits() -> dict[str, int]:
    """Waits by kind."""
    lines = (line.split("\t") for line in lib.card_waits().decode().splitlines())
    return {what: int(times) for what, times in lines}


def waits_by_line() -> collections.Counter:
    """(kind, file:line of whom of WATCHED waits) -> times, from the first call on."""
    if not _keep:

        def note(what: bytes) -> None:
            try:
                frame = sys._getframe(1)
            except ValueError:  # autograd's own thread
                _noted[what.decode(), "backward"] += 1
                return
            while frame is not None and not any(
                part in frame.f_code.co_filename for part in WATCHED
            ):
                frame = frame.f_back
            file = frame.f_code.co_filename.split("site-packages/")[-1] if frame else ""
            _noted[what.decode(), f"{file}:{frame.f_lineno}" if frame else ""] += 1

        _keep.append(ctypes.CFUNCTYPE(None, ctypes.c_char_p)(note))
        lib.card_set_tracer(_keep[0])
    return _noted
