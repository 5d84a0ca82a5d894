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
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from grpo_kit.rewards.parts import Reward, with_parts


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
    if hasattr(task, "view"):  # of episodes, which the loop that writes digests does not load
        prompt |= {"view": asdict(task.view), "turns": task.max_turns, "success": task.success}
    else:
        prompt |= {"system": task.system, "prefill": task.prefill, "examples": task.examples}
        names = [getattr(reward, "__name__", type(reward).__name__) for reward in task.rewards]
        prompt |= {"rewards": names, "weights": task.reward_weights}
    return content_digest([prompt, task.train, task.held_out], lambda value: type(value).__name__)


def reward_digest(reward: Reward) -> str:
    """8 hexadecimal digits of the source and the settings of a reward and its parts. What it calls does not count.

    Settings: defaults of arguments, what a function closes over, attributes of an object and of its class, private ones
    too. What a reward remembers from call to call (a dict or list of its own) counts by its kind alone.
    """
    found: list[Any] = []
    for part in with_parts([reward]):
        while isinstance(part, functools.partial):
            found.append([part.args, part.keywords])
            part = part.func
        body = part if inspect.isroutine(part) else type(part).__call__
        with suppress(OSError, TypeError):  # typed at a prompt, or compiled
            found.append(inspect.getsource(body))
        found += [getattr(body, name, None) for name in ("__defaults__", "__kwdefaults__")]
        found += [cell.cell_contents for cell in getattr(body, "__closure__", None) or ()]
        found += sorted(_attributes(part).items())
    return sha256(json.dumps(found, skipkeys=True, default=_words).encode()).hexdigest()[:8]


def _attributes(value: Any) -> dict[str, Any]:
    """Of an object: its class's own, those in slots, then its own."""
    classes = [] if inspect.isroutine(value) else type(value).__mro__[-2::-1]
    shared = {name: each for one in classes for name, each in vars(one).items() if not name.startswith("__")}
    slots = {name for name, each in shared.items() if inspect.ismemberdescriptor(each)}
    plain = {name: each for name, each in shared.items() if not (callable(each) or hasattr(each, "__get__"))}
    own = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )
    remembered = {
        n: type(each).__name__ for n, each in own.items() if n[0] == "_" and isinstance(each, dict | list)
    }
    return plain | own | remembered


def _words(value: Any) -> Any:
    """A value that JSON cannot hold: its text, unless that is an address; then its kind and its attributes."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if " at 0x" not in (text := repr(value)):
        return text
    if inspect.isroutine(value):
        return reward_digest(value)
    return [type(value).__name__, sorted(_attributes(value).items())]
