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
    """8 hexadecimal digits of the source and the parameters of a reward and its parts. What it calls does not count."""
    found: list[Any] = []
    for part in with_parts([reward]):
        while isinstance(part, functools.partial):
            found.append([part.args, part.keywords])
            part = part.func
        body = part if inspect.isroutine(part) else type(part).__call__
        with suppress(OSError, TypeError):  # typed at a prompt, or compiled
            found.append(inspect.getsource(body))
        found += [cell.cell_contents for cell in getattr(body, "__closure__", None) or ()]
        found += [pair for pair in getattr(part, "__dict__", {}).items() if not pair[0].startswith("_")]

    def words(value: Any) -> Any:
        return sorted(map(str, value)) if isinstance(value, set | frozenset) else type(value).__name__

    return sha256(json.dumps(found, skipkeys=True, default=words).encode()).hexdigest()[:8]
