"""Tools in several turns: plain functions, or a class of TRL's, as an environment; and environments as classes for TRL.

    python -m grpo_kit train examples/tool_env.py:sums --preset smoke

trains a tiny random model for two steps, to see that it runs; leave --preset out for what fits this machine. In
Python, in the repository's folder: `from examples.tool_env import from_tools, sums`, then `sums()` is a task.

An action is read in any form in which models are taught to call tools: JSON in the template's own tags, a JSON object,
or Python's call syntax, `look(x=3)`.
"""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_kit.more.episodes import Environment, EpisodeTask, View, call_from_text

_TAGGED = re.compile(r"<(tool_call|function_call|tools?)>\s*(.*?)\s*</\1>", re.DOTALL)
_BEGUN = re.compile(r"<(tool_call|function_call)>")
_SPECIAL = {"reset", "get_reward"}


class ToolCall(NamedTuple):
    """A tool's name and its arguments, keyed by name, or by position as "0", "1", ..."""

    name: str
    arguments: dict[str, Any]


def read_calls(text: str) -> list[ToolCall | None]:
    """The tool calls in a model's text, in order; None for one that is begun and cannot be read. Nothing is evaluated.

    >>> read_calls('<tool_call>{"name": "look", "arguments": {"x": 3}}</tool_call><tool_call>{"na</tool_call>')
    [ToolCall(name='look', arguments={'x': 3}), None]
    >>> read_calls("I look. look(x=3), then look(x=4)")
    [ToolCall(name='look', arguments={'x': 3}), ToolCall(name='look', arguments={'x': 4})]
    >>> read_calls("nothing to call")
    []
    """
    pieces = [match[2] for match in _TAGGED.finditer(text)]
    rest = _TAGGED.sub("", text)
    unclosed = _BEGUN.search(rest)
    if unclosed:
        pieces.append(rest[unclosed.end() :])
    if not pieces:
        return _calls_in(text)
    return [call for piece in pieces for call in _calls_in(piece) or [None]]


def from_tools(
    tools: Sequence[Callable[..., Any]], judge: Callable[[Mapping[str, Any], str], float]
) -> Callable[[], Environment]:
    """Environments from plain functions, as trl's tools=. A text without a call ends the episode.

    All calls of a turn run, in their order, and the model reads their results in it: of several each in the tags of
    Qwen2.5's template, <tool_response>. One that cannot be read or that fits no tool is answered in its place; the
    others run, and the turn counts as invalid.
    judge: (row, last text) -> reward in [0, 1].

    If the last turn ends the episode, judge receives that turn's text.
    Raises ValueError for a tool that is async.

    >>> sums()
    EpisodeTask('sums', train=64, held_out=16)
    """
    for tool in tools:
        _check_not_async(tool)
    return lambda: _Tools(None, {tool.__name__: tool for tool in tools}, judge)


def sums(n_train: int = 64, n_held_out: int = 16, *, seed: int = 0) -> EpisodeTask:
    """Two numbers to add, and a tool that adds. Right is a last text that holds the sum and no other number."""

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def judge(row: Mapping[str, Any], text: str) -> float:
        return float(re.findall(r"-?\d+", text) == [row["answer"]])

    pairs = random.Random(seed).sample(
        [(a, b) for a in range(100, 1000, 7) for b in range(a, 1000, 7)], k=n_train + n_held_out
    )
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]
    view = View(
        chat=True,
        repeat_goal=True,
        system="Call the tool, such as add(1, 2). Then say the number.",
    )
    return EpisodeTask(
        "sums",
        train=rows[n_held_out:],
        held_out=rows[:n_held_out],
        environment=from_tools([add], judge),
        view=view,
        max_turns=3,
        max_completion_tokens=16,
    )


def from_trl(
    factory: Callable[[], Any], judge: Callable[[Mapping[str, Any], str], float] | None = None
) -> Any:
    """Environments from a class for trl's environment_factory: reset(**row), tools as public methods, get_reward().

    judge: as for from_tools, for a class without get_reward.
    Raises ValueError for a class without reset, and for one with neither get_reward nor a judge.
    """

    def make() -> Environment:
        inner = factory()
        methods = dict(inspect.getmembers(inner, inspect.ismethod))
        if "reset" not in methods:
            raise ValueError(
                f"{type(inner).__name__} has no reset; trl's environments begin with it"
            )
        if judge is None and "get_reward" not in methods:
            raise ValueError(
                f"{type(inner).__name__} has no get_reward; give judge=f(row, last text) -> reward"
            )
        tools = {
            n: m for n, m in methods.items() if n not in _SPECIAL and not n.startswith("_")
        }
        for tool in tools.values():
            _check_not_async(tool)
        return _Tools(inner, tools, judge)

    return make


def for_trl(make: Callable[[], Environment]) -> type:
    """An environment as a class for trl's environment_factory; its one tool is `act`.

    >>> trl.GRPOTrainer(..., environment_factory=for_trl(Grid))  # doctest: +SKIP
    """

    class ForTRL:
        """Plays one episode; `get_reward` is the sum of its rewards."""

        def __init__(self) -> None:
            self._inner, self._total, self._done = make(), 0.0, False

        def reset(self, **row: Any) -> str:
            self._total, self._done = 0.0, False
            return self._inner.reset(row)

        def act(self, action: str) -> str:
            """
            Do one thing and see what comes of it.

            Args:
                action: What to do, in words.
            """
            if self._done:
                return "It is over."
            observation, reward, self._done = self._inner.step(action)
            self._total += reward
            return observation

        def get_reward(self) -> float:
            return self._total

    return ForTRL


class _Tools:
    """Turns that call tools, until a text calls none."""

    def __init__(self, inner: Any, tools: Mapping[str, Callable[..., Any]], judge: Any) -> None:
        self.inner, self.tools, self.judge, self.invalid = inner, dict(tools), judge, False

    def reset(self, row: Mapping[str, Any]) -> str:
        self.row, self.invalid, self.last = row, False, ""
        begun = self.inner.reset(**row) if self.inner is not None else None
        offered = "\n".join(describe_tool(tool) for tool in self.tools.values())
        return "\n".join(part for part in (begun, f"Tools:\n{offered}") if part)

    def step(self, text: str) -> tuple[str, float, bool]:
        calls, self.last = read_calls(text), text
        if not calls:
            return "", self._reward(text), True
        results = [self._result_of(call) for call in calls]
        if len(results) > 1:
            results = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
        return "\n".join(results), 0.0, False

    def _result_of(self, call: ToolCall | None) -> str:
        """What the model reads of a call; sets `invalid` where it fits no tool."""
        if call is None:
            self.invalid = True
            return "That call could not be read."
        tool = self.tools.get(call.name)
        if tool is None:
            self.invalid = True
            return f"There is no tool {call.name}; there are {', '.join(self.tools)}."
        places = sorted((name for name in call.arguments if name.isdigit()), key=int)
        named = {name: value for name, value in call.arguments.items() if not name.isdigit()}
        try:
            bound = inspect.signature(tool).bind(
                *[call.arguments[name] for name in places], **named
            )
        except TypeError as error:
            self.invalid = True
            return f"{call.name}: {error}"
        try:
            return str(tool(*bound.args, **bound.kwargs))
        except Exception as error:  # the model reads a tool's error, as in trl
            return f"{type(error).__name__}: {error}"

    def settle(self) -> float:
        return self._reward(self.last)

    def _reward(self, text: str) -> float:
        return self.judge(self.row, text) if self.judge is not None else self.inner.get_reward()


def describe_tool(tool: Callable[..., Any]) -> str:
    """A tool in one line: its call, and the first line of its docstring.

    >>> def look(x: int) -> str:
    ...     "What lies at x."
    >>> describe_tool(look)
    'look(x: int) -> str: What lies at x.'
    """
    said = (inspect.getdoc(tool) or "").strip().splitlines()
    signature = str(inspect.signature(tool, eval_str=False)).replace("'", "")
    return f"{tool.__name__}{signature}" + (f": {said[0]}" if said else "")


def _check_not_async(tool: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(tool):
        raise ValueError(
            f"tool {tool.__name__} is async; give a plain function, such as one that calls asyncio.run(...)"
        )


def _calls_in(text: str) -> list[ToolCall | None]:
    """The calls of a text without tags: JSON, else JSON between words, else Python's call syntax."""
    calls = _json_calls(text)
    if not any(calls):
        calls = [call for each in _braced(text) for call in _json_calls(each) if call]
    if calls:
        return calls
    return _python_calls(text)


def _json_calls(text: str) -> list[ToolCall | None]:
    """The call of a JSON object, or those of a list of them; None for an entry that is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    return [_json_call(each) for each in (found if isinstance(found, list) else [found])]


def _json_call(found: Any) -> ToolCall | None:
    if not isinstance(found, dict):
        return None
    name, given = found.get("name"), found.get("arguments", found.get("parameters", {}))
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    if isinstance(name, str) and isinstance(given, dict):
        return ToolCall(name, given)
    return None


def _braced(text: str) -> list[str]:
    """Balanced {...} in the text, the outermost."""
    found, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if letter == "{":
            start, depth = (place if depth == 0 else start), depth + 1
        elif letter == "}" and depth:
            depth -= 1
            if depth == 0:
                found.append(text[start : place + 1])
    return found


def _python_calls(text: str) -> list[ToolCall]:
    """Every name(...) of plain values; the inside of a name(...) that is no call is not searched."""
    calls, start = [], 0
    while match := re.compile(r"(?<![\w.])[A-Za-z]\w*\(").search(text, start):
        start = _closing(text, match.end() - 1)
        try:
            call = call_from_text(text[match.start() : start])
        except ValueError:
            continue
        by_place = {str(i): value for i, value in enumerate(call.arguments)}
        calls.append(ToolCall(call.name, by_place | call.keywords))
    return calls


def _closing(text: str, opening: int) -> int:
    """The position behind the bracket that closes the one at `opening`; the text's end if none does."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    return len(text)
