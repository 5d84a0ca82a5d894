"""Are two tasks, or two sets of rows, the same? Compares digests of their contents, equal in every process.

Run folders, laboratories and caches of samples store these digests. A change here makes them reject stored results, so
tests/tasks/test_same_task.py holds digests from before.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from hashlib import sha256
from typing import Any

from grpo_kit.rewards._parts import Reward, with_parts


def content_digest(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """16 hexadecimal digits of a value's contents, such as a list of rows; the order of a dict's keys does not count.

    default: f(value) -> JSON value, for values that JSON cannot hold. Without it such a value raises TypeError.

    >>> content_digest([{"a": 1, "b": 2}]) == content_digest([{"b": 2, "a": 1}])
    True
    """
    return sha256(json.dumps(value, sort_keys=True, default=default).encode()).hexdigest()[:16]


def task_digest(task: Any) -> str:
    """16 hexadecimal digits of a task's rows, prompt, names of rewards, and lengths.

    Tasks that differ in any of these have different digests. The code of rewards does not count.

    >>> from grpo_kit.tasks import largest
    >>> task_digest(largest(n_train=4)) == task_digest(largest(n_train=5))
    False
    """
    prompt: dict[str, Any] = {"name": task.name, "length": task.max_completion_tokens}
    if hasattr(task, "made_of"):
        prompt |= task.made_of()
    else:
        prompt |= {"system": task.system, "prefill": task.prefill, "examples": task.examples}
        names = [getattr(reward, "__name__", type(reward).__name__) for reward in task.rewards]
        prompt |= {"rewards": names, "weights": task.reward_weights}
    return content_digest([prompt, task.train, task.held_out], lambda value: type(value).__name__)


def reward_digest(reward: Reward) -> str:
    """8 hexadecimal digits of the source and the settings of a reward and its parts. What it calls does not count.

    Settings: defaults of arguments, what a function closes over, attributes of an object and of its class, private ones
    too. Of a private dict only its name counts: rewards remember verdicts in such a one.
    """
    found: list[Any] = []
    for part in with_parts([reward]):
        while isinstance(part, functools.partial):
            found.append([part.args, part.keywords])
            part = part.func
        functions = [part] if inspect.isroutine(part) else _in_classes(part, inspect.isfunction).values()
        for function in functions:
            found += _code_of(function)
            found += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        found.append(_attributes(part.__self__ if inspect.ismethod(part) else part))
    return sha256(json.dumps(found, skipkeys=True, default=_words).encode()).hexdigest()[:8]


def _code_of(function: Any) -> list[Any]:
    """The source, where there is one, and the defaults of arguments."""
    found = [getattr(function, name, None) for name in ("__defaults__", "__kwdefaults__")]
    with suppress(OSError, TypeError):  # typed at a prompt, or compiled
        found.append(inspect.getsource(function))
    return found


def _in_classes(value: Any, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """What fits in the classes of an object, the nearest class last."""
    classes = type(value).__mro__[-2::-1]  # without object
    return {name: each for one in classes for name, each in vars(one).items() if fits(each)}


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes of an object by name, those of its classes and those in slots too."""
    slots = [name for name in _in_classes(value, inspect.ismemberdescriptor) if hasattr(value, name)]
    shared = _in_classes(value, lambda each: not (callable(each) or hasattr(each, "__get__")))
    attributes = {name: each for name, each in shared.items() if not name.startswith("__")}
    attributes |= {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
    kept = {n: None if n[0] == "_" and isinstance(each, dict) else each for n, each in attributes.items()}
    return dict(sorted(kept.items()))


def _words(value: Any) -> Any:
    """What JSON cannot hold: its text, unless that is an address; then its kind, and its attributes as texts."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, vars(value)]
    if inspect.isfunction(value):
        return _code_of(value)  # without what it closes over, which may be itself
    if " at 0x" not in (text := repr(value)):
        return text
    inside = {name: repr(each).partition(" at 0x")[0] for name, each in _attributes(value).items()}
    return [type(value).__name__, inside]
