"""The kit's tasks by name, as a Config names them: each in the file of its name, loaded when it is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_kit.tasks.task import Task

NAMES = ("largest", "countdown", "gsm8k", "code", "interval_scheduling", "science")
_GIVEN_ROWS = ("code", "science")  # as many rows as there are, split by the task itself


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument that the task of this name does not take."""
    parameters = inspect.signature(_function(name)).parameters
    unknown = sorted(set(options) - set(parameters))
    if unknown:
        raise ValueError(
            f"task_options has {', '.join(unknown)}, which task {name!r} does not take; it takes "
            f"{', '.join(parameters)}. "
            f"preset(..., task={name!r}) begins with its own"
        )


def make(name: str | None, options: Mapping[str, Any], held_out: int) -> Task:
    """The task with `held_out` held-out rows, unless the options say otherwise, or all rows that were not trained on.

    Raises ValueError for no name, and for arguments that the task does not take.
    """
    if name is None:
        raise ValueError(
            f"task=None: name one of {', '.join(NAMES)}, or give the trainer a task of your own"
        )
    check_options(name, options)
    if name not in _GIVEN_ROWS:
        options = {"n_held_out": held_out, **options}
    return _function(name)(**options)


def _function(name: str) -> Callable[..., Task]:
    # its list of names says in which file
    return getattr(import_module("grpo_kit.tasks"), name)
