"""Reads sequences of calls out of text, by ast and without running them, and measures how far two are apart.

Longer than 300 lines because the notations of answers and the forms of golds are read by the same functions.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, time
from decimal import Decimal
from typing import Any, NamedTuple

from grpo_kit._support.literal_calls import call_from_node, literal_value, parse_quietly
from grpo_kit.more.code._code_values import keys_once
from grpo_kit.more.code.code_answer import read_blocks, without_end_tokens
from grpo_kit.rewards.response import gold_text, is_blank, python_value

_MAX_TEXT = 4000  # characters; no answer needs more, and comparing takes calls x gold calls steps
_MARK = "[TOOL_CALLS]"  # Mistral's
_WRAPPED = re.compile(
    r"<(?P<tag>tool_?calls?|function_?calls?|tools?)>(?P<inside>.*?)</(?P=tag)>"  # Qwen, Hermes
    r"|<function=(?P<name>[^<>\s]+)>(?P<arguments>.*?)</function>",  # Llama, and Qwen's coders inside tool_call
    re.DOTALL | re.IGNORECASE,
)
_NAMED = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?P<arguments>\{.*)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_BETWEEN = re.compile(r"[\s;]*")
_BESIDE_A_CALL = {"id", "type", "index"}  # keys of a call in JSON without meaning for it
_ARGUMENTS = {"arguments", "parameters"}
_NONE = ("constant", None)


class Call(NamedTuple):
    """One call: its operation, and its arguments as comparable values; keywords sorted by name."""

    name: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()

    def without_none(self) -> Call:
        """The call without keywords, and keys of dicts, whose value is None."""
        keywords = ((key, _without_none(value)) for key, value in self.keywords if value != _NONE)
        return Call(self.name, tuple(map(_without_none, self.arguments)), tuple(keywords))


def parse_calls(text: str) -> list[Call] | None:
    """The calls of a text, in the notations of people and models; None if the text holds anything else.

    - Python, one a line or with ; between, or a list: `math.sqrt(2); lamp("hall", on=True)`, `[f(a=1), g(b=2)]`;
    - JSON or Python's dicts, one, a list or several in a row: `{"name": "f", "arguments": {"a": 1}}`, or "parameters";
    - in tags (Qwen, Hermes, Llama): `<tool_call>...</tool_call>`, `<function=f>{"a": 1}</function>`;
    - behind a mark (Llama, Mistral): `<|python_tag|>...`, `[TOOL_CALLS][{...}]`, `[TOOL_CALLS]f{"a": 1}`;
    - any of these in one code fence, alone. Comments of Python and tokens that end a turn are skipped.

    Arguments are numbers, texts, True, False, None, plain names (Python's alone), and lists, tuples and dicts of these:
    2 and 2.0 are equal; 1 and True differ, and so do "x" and x; dicts and keywords have no order. Nothing is run: no
    calls in calls, operators, stars or assignments. At most 4,000 characters.

    >>> parse_calls("add(2, 3)\\nlamp('hall', on=True)")[1]
    Call(name='lamp', arguments=(('text', 'hall'),), keywords=(('on', ('constant', True)),))
    >>> parse_calls('{"name": "add", "arguments": {"b": 3, "a": 2.0}}') == parse_calls("[add(a=2, b=3)]")
    True
    """
    if len(text) > _MAX_TEXT:
        return None
    try:
        return _read(_bare(text))
    except (ValueError, TypeError, RecursionError, MemoryError):  # TypeError: a dict with a list as its key
        return None


def gold_calls(gold: Any) -> list[Call] | None:
    """The calls of a gold: text (see parse_calls), a dict as in JSON, or a list of these; None if it holds none.

    Arguments may be a dict or JSON text, as in xLAM and ToolACE. BFCL's {"f": {"a": [1]}} is read if it allows one
    value for each argument. A table fills the missing keys of a dict with None. Beside the arguments these keys are
    left out. Among them they stay, since the row may have had a None (see Call.without_none).

    >>> gold_calls({"name": "f", "arguments": '{"a": 1}'}) == gold_calls([{"f": {"a": [1]}}]) == parse_calls("f(a=1)")
    True
    """
    calls: list[Call] = []
    gold = python_value(gold)
    for item in [gold] if isinstance(gold, str | Mapping) else gold if isinstance(gold, Iterable) else []:
        try:
            data = item if isinstance(item, str) else _from_table(item)
            read = parse_calls(data) if isinstance(data, str) else _bfcl(data) or _json_calls(data)
        except (ValueError, RecursionError):
            read = None
        if read is None:
            return None
        calls += read
    return calls or None


def call_text(call: Call) -> str:
    """The call as Python text that parse_calls reads as the same call.

    >>> call_text(parse_calls("f( 2,b = {'k':[x]} )")[0])
    "f(2, b={'k': [x]})"
    """
    given = [
        *map(_value_text, call.arguments),
        *(f"{key}={_value_text(value)}" for key, value in call.keywords),
    ]
    return f"{call.name}({', '.join(given)})"


def call_distance(calls: Sequence[Call], wanted: Sequence[Call]) -> float:
    """Edit distance between two sequences of calls, over the longer one's length: in [0, 1], 0 if they are equal.

    A call that is missing, extra or of another name costs 1. A call of the right name costs half the share of its
    arguments that differ, matched by place or keyword. Symmetric. Two empty sequences have distance 0.

    >>> call_distance(parse_calls("add(2, 3)"), parse_calls("add(2, 4); neg(1)"))  # (0.25 + 1) / 2
    0.625
    """
    row = [float(place) for place in range(len(wanted) + 1)]
    for done, call in enumerate(calls, 1):
        above, row = row, [float(done)]
        for place, gold in enumerate(wanted):
            row.append(min(above[place] + _difference(call, gold), above[place + 1] + 1, row[place] + 1))
    return row[-1] / max(len(calls), len(wanted), 1)


def _from_table(item: Any) -> Any:
    """A call of a gold, without the keys beside its arguments that a table filled with None."""
    item = _json_value(item)
    if isinstance(item, list):
        return [_from_table(call) for call in item]
    if not isinstance(item, dict):
        return item
    there = {key: value for key, value in item.items() if value is not None}
    if isinstance(there.get("function"), dict):  # OpenAI's
        there["function"] = _from_table(there["function"])
    if "name" in there and item.keys() & _ARGUMENTS and not there.keys() & _ARGUMENTS:
        there["arguments"] = {}
    return there


def _json_value(value: Any) -> Any:
    """A table's value as JSON would have it: a number for a decimal, a text for a date."""
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, Decimal):
        return float(value)
    return gold_text(value) if isinstance(value, date | time) else value


def _difference(a: Call, b: Call) -> float:
    if a == b:
        return 0.0
    if a.name != b.name:
        return 1.0
    given, gold = (dict([*enumerate(call.arguments), *call.keywords]) for call in (a, b))
    places = given.keys() | gold.keys()
    missing = object()
    return sum(given.get(place, missing) != gold.get(place, missing) for place in places) / len(places) / 2


def _bare(text: str) -> str:
    """The text without tokens that end a turn, and without its fence if it is a single block."""
    text = without_end_tokens(text).strip(" \t\r\n\ufeff\u200b")
    blocks = read_blocks(text)
    if len(blocks) == 1 and blocks[0].closed and is_blank(text[: blocks[0].opened] + text[blocks[0].after :]):
        return blocks[0].code.strip()
    return text


def _read(text: str) -> list[Call]:
    if text.startswith(_MARK):
        pieces = [piece.strip() for piece in text.removesuffix("[/TOOL_CALLS]").split(_MARK)[1:]]
        found = [(piece, _NAMED.fullmatch(piece)) for piece in pieces]
        return [call for piece, named in found for call in ([_named(named)] if named else _read(piece))]
    text = text.removeprefix("<|python_tag|>").strip()
    wrapped = list(_WRAPPED.finditer(text))
    if wrapped and is_blank(_WRAPPED.sub("", text)):
        inner = [[_named(one)] if one["name"] else _read(one["inside"].strip()) for one in wrapped]
        return [call for calls in inner for call in calls]
    if re.match(r"\{|\[\s*\{", text):
        with suppress(ValueError):  # not JSON: Python's {'name': 'f', ...}, or nothing
            return _json_text(text)
    tree = parse_quietly("\n".join(line.strip() for line in text.split("\n")))
    if tree is None:
        raise ValueError("no Python")
    calls: list[Call] = []
    for statement in tree.body:
        node = statement.value if isinstance(statement, ast.Expr) else None
        for one in node.elts if isinstance(node, ast.List) else [node]:
            calls += _from_dict(one) if isinstance(one, ast.Dict) else [_call(one)]
    return calls


def _from_dict(node: ast.Dict) -> list[Call]:
    _value(node)  # raises for a key given twice
    return _json_calls(literal_value(node))


def _json_text(text: str) -> list[Call]:
    """Consecutive JSON values, separated by white space or ;."""
    calls, at = [], 0
    while at < len(text):
        value, at = _JSON.raw_decode(text, at)
        calls += _json_calls(value)
        at = _BETWEEN.match(text, at).end()
    return calls


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_JSON = json.JSONDecoder(object_pairs_hook=keys_once, parse_constant=_refuse)


def _json_calls(data: Any) -> list[Call]:
    if isinstance(data, list | tuple):
        return [call for item in data for call in _json_calls(item)]
    if not isinstance(data, Mapping):
        raise ValueError("no call")
    said = {key: value for key, value in data.items() if key not in _BESIDE_A_CALL}
    if set(said) == {"function"}:  # OpenAI's
        return _json_calls(said["function"])
    name, arguments = said.get("name"), [said[key] for key in _ARGUMENTS if key in said]
    if not isinstance(name, str) or not name.strip() or not len(arguments) == 1 == len(said) - 1:
        raise ValueError("a call is its name and its arguments, nothing else")
    return [_made(name, arguments[0])]


def _made(name: str, given: Any) -> Call:
    given = {} if given is None or given == "" else given
    given = _JSON.decode(given) if isinstance(given, str) else given
    if isinstance(given, list | tuple):
        return Call(name, tuple(map(_plain, given)))
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError("arguments that are no object")
    return Call(name, (), tuple(sorted((key, _plain(value)) for key, value in given.items())))


def _named(found: re.Match[str]) -> Call:
    """A call whose name comes before its arguments: JSON, or <parameter=...> tags."""
    inside = found["arguments"]
    parameters = _PARAMETER.findall(inside)
    if not parameters or not is_blank(_PARAMETER.sub("", inside)):
        return _made(found["name"], inside.strip())
    return _made(found["name"], keys_once([(key, _json_or_text(value)) for key, value in parameters]))


def _json_or_text(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except ValueError:
        return text


def _bfcl(data: Any) -> list[Call]:
    """The call of {"f": {"a": [1]}}; none if the object is of another kind, or allows a choice."""
    if not isinstance(data, Mapping) or len(data) != 1:
        return []
    ((name, given),) = data.items()
    if isinstance(given, Mapping):
        given = {key: values for key, values in given.items() if values is not None}
    one_each = isinstance(given, Mapping) and all(isinstance(v, list) and len(v) == 1 for v in given.values())
    if not one_each or any(isinstance(value, Mapping) for (value,) in given.values()):
        return []
    return [_made(name, {key: value for key, (value,) in given.items()})]


def _plain(value: Any) -> tuple[str, Any]:
    match value:
        case bool() | None:
            return "constant", value
        case int() | float() if value == value:
            return "number", value
        case str():
            return "text", value
        case list() | tuple():
            return "list", tuple(map(_plain, value))
        case Mapping():
            return _dict([(_plain(key), _plain(item)) for key, item in value.items()])
    raise ValueError("no plain value")


def _dict(pairs: list[tuple[Any, Any]]) -> tuple[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is given twice")
    return "dict", frozenset(pairs)


def _without_none(value: tuple[str, Any]) -> tuple[str, Any]:
    kind, inside = value
    if kind == "list":
        return kind, tuple(map(_without_none, inside))
    if kind == "dict":
        return kind, frozenset((key, _without_none(item)) for key, item in inside if item != _NONE)
    return value


def _call(node: ast.expr | None) -> Call:
    call = call_from_node(node, _value)
    return Call(call.name, call.arguments, tuple(sorted(call.keywords.items())))


def _value(node: ast.expr) -> tuple[str, Any]:
    match node:
        case ast.Constant():
            return _plain(node.value)
        case ast.UnaryOp(op=sign, operand=ast.Constant(value=number)) if type(number) in (int, float):
            if isinstance(sign, ast.UAdd):
                return "number", number
            if isinstance(sign, ast.USub):
                return "number", -number
        case ast.Name():
            return "name", node.id
        case ast.List() | ast.Tuple():
            return "list", tuple(map(_value, node.elts))
        case ast.Dict() if None not in node.keys:
            return _dict(list(zip(map(_value, node.keys), map(_value, node.values), strict=True)))
    raise ValueError("no plain value")


def _value_text(value: tuple[str, Any]) -> str:
    kind, inside = value
    if kind == "list":
        return f"[{', '.join(map(_value_text, inside))}]"
    if kind == "dict":
        return f"{{{', '.join(sorted(f'{_value_text(key)}: {_value_text(item)}' for key, item in inside))}}}"
    return inside if kind == "name" else repr(inside)
