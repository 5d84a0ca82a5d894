"""Corrects habits of the libraries that load models, once as the kit loads."""

from __future__ import annotations

import functools
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import torch
from transformers.utils import logging


def _bar(factory: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("desc") in ("Loading weights", "Writing model shards"):
        factory = logging.EmptyTqdm
    return (_bar_before or (lambda make, a, k: make(*a, **k)))(factory, args, kwargs)


# A saved notebook would keep a widget for each reading or writing of weights. Downloads and transformers < 5.5 do.
_bar_before = logging.set_tqdm_hook(_bar) if hasattr(logging, "set_tqdm_hook") else None


def load_peft() -> ModuleType:
    """peft, imported in a third of the time: the functions of its bitsandbytes are compiled at their first call.

    torch.compile loads a second's worth of torch._inductor at its first mention, and bitsandbytes mentions it at
    import. It compiles only its 8-bit and 4-bit kernels on a CPU, which the kit does not use.
    """
    compile_now = torch.compile

    def compile_later(function: Any = None, **options: Any) -> Any:
        if not isinstance(function, FunctionType):  # a model, or a decorator with options
            return compile_now(function, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = compile_later
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:  # the user of it raises the error
        pass
    finally:
        torch.compile = compile_now
    return import_module("peft")
