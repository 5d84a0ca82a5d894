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
    prompt = {"name": task.name, "length": task.max_completion_tokens}
    if hasattr(task, "made_of"):
        prompt |= task.made_of()
    else:
        prompt["system"], prompt["prefill"] = task.system, task.prefill
        prompt["examples"], prompt["weights"] = task.examples, task.reward_weights
        prompt["rewards"] = [getattr(r, "__name__", type(r).__name__) for r in task.rewards]
    return content_digest(
        [prompt, task.train, task.held_out], lambda value: type(value).__name__
    )


def reward_digest(reward: Reward) -> str:
    """8 hexadecimal digits of the source and the settings of a reward and its parts. What it calls does not count.

    Settings: defaults of arguments, what a function closes over, attributes of an object and of its class, private ones
    too. Of a private dict only its name counts: rewards remember verdicts in such a one.
    """
    contents = []
    for part in with_parts([reward]):
        while isinstance(part, functools.partial):
            contents.append([part.args, part.keywords])
            part = part.func
        functions = [part]
        if not inspect.isroutine(part):
            functions = _members(part, inspect.isfunction).values()
        for function in functions:
            contents += _code_of(function)
            contents += [
                cell.cell_contents for cell in getattr(function, "__closure__", None) or ()
            ]
        owner = part.__self__ if inspect.ismethod(part) else part
        contents.append(_attributes(owner))
    return sha256(
        json.dumps(contents, skipkeys=True, default=_json_value).encode()
    ).hexdigest()[:8]


def _code_of(function: Any) -> list[Any]:
    """The defaults of arguments, and the source, where there is one."""
    code = [getattr(function, name, None) for name in ("__defaults__", "__kwdefaults__")]
    with suppress(OSError, TypeError):  # typed at a prompt, or compiled
        code.append(inspect.getsource(function))
    return code


def _members(value: Any, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """The members of an object's classes that fit, by name; those of the nearest class last."""
    members = {}
    for cls in reversed(type(value).__mro__[:-1]):  # without object
        members |= {name: member for name, member in vars(cls).items() if fits(member)}
    return members


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes of an object by name, those of its classes and those in slots too; of a private dict only the name."""
    shared = _members(
        value, lambda member: not (callable(member) or hasattr(member, "__get__"))
    )
    attributes = {name: member for name, member in shared.items() if not name.startswith("__")}
    for name in _members(value, inspect.ismemberdescriptor):
        if hasattr(value, name):
            attributes[name] = getattr(value, name)
    attributes |= getattr(value, "__dict__", {})
    for name, attribute in attributes.items():
        if name.startswith("_") and isinstance(attribute, dict):
            attributes[name] = None
    return dict(sorted(attributes.items()))


def _json_value(value: Any) -> Any:
    """A value that JSON cannot hold, as its text; where that is an address, as its class and attributes in texts."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, vars(value)]
    if inspect.isfunction(value):
        return _code_of(value)  # without what it closes over, which may be itself
    text = repr(value)
    if " at 0x" not in text:
        return text
    attributes = {
        name: repr(item).partition(" at 0x")[0] for name, item in _attributes(value).items()
    }
    return [type(value).__name__, attributes]
