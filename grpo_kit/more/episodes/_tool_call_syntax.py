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

from grpo_kit.more.code._code_values import keys_once
from grpo_kit.more.code._literal_calls import call_from_node, literal_value, parse_quietly
from grpo_kit.more.code.code_answer import read_blocks, without_end_tokens
from grpo_kit.rewards.response import gold_text, is_blank, python_value

# characters; no answer needs more, and comparing takes calls x gold calls steps
_MAX_TEXT = 4000
_MARK = "[TOOL_CALLS]"  # Mistral's
_WRAPPED = re.compile(
    r"<(?P<tag>tool_?calls?|function_?calls?|tools?)>(?P<inside>.*?)</(?P=tag)>"  # Qwen, Hermes
    # Llama, and Qwen's coders inside tool_call
    r"|<function=(?P<name>[^<>\s]+)>(?P<arguments>.*?)</function>",
    re.DOTALL | re.IGNORECASE,
)
_NAMED = re.compile(
    r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?P<arguments>\{.*)", re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_BETWEEN = re.compile(r"[\s;]*")
_BESIDE_A_CALL = {"id", "type", "index"}  # keys of a call in JSON without meaning for it
_ARGUMENTS = {"arguments", "parameters"}
_NONE = ("constant", None)
_Value = tuple[str, Any]  # kind and content


class Call(NamedTuple):
    """One call: its operation, and its arguments as comparable values; keywords sorted by name."""

    name: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()

    def without_none(self) -> Call:
        """The call without keywords, and keys of dicts, whose value is None."""
        keywords = (
            (key, _without_none(value)) for key, value in self.keywords if value != _NONE
        )
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
    except (ValueError, TypeError, RecursionError, MemoryError):
        # TypeError: a dict with a list as its key
        return None


def gold_calls(gold: Any) -> list[Call] | None:
    """The calls of a gold: text (see parse_calls), a dict as in JSON, or a list of these; None if it holds none.

    Arguments may be a dict or JSON text, as in xLAM and ToolACE. BFCL's {"f": {"a": [1]}} is read if it allows one
    value for each argument. A table fills the missing keys of a dict with None. Beside the arguments these keys are
    left out. Among them they stay, since the row may have had a None (see Call.without_none).

    >>> gold_calls({"name": "f", "arguments": '{"a": 1}'}) == gold_calls([{"f": {"a": [1]}}]) == parse_calls("f(a=1)")
    True
    """
    gold = python_value(gold)
    if not isinstance(gold, Iterable):
        return None
    items = [gold] if isinstance(gold, str | Mapping) else gold
    calls: list[Call] = []
    for item in items:
        try:
            calls += _calls_of_item(item)
        except (ValueError, RecursionError):
            return None
    return calls or None


def call_text(call: Call) -> str:
    """The call as Python text that parse_calls reads as the same call.

    >>> call_text(parse_calls("f( 2,b = {'k':[x]} )")[0])
    "f(2, b={'k': [x]})"
    """
    arguments = list(map(_value_text, call.arguments))
    arguments += [f"{key}={_value_text(value)}" for key, value in call.keywords]
    return f"{call.name}({', '.join(arguments)})"


def call_distance(calls: Sequence[Call], expected: Sequence[Call]) -> float:
    """Edit distance between two sequences of calls, over the longer one's length: in [0, 1], 0 if they are equal.

    A call that is missing, extra or of another name costs 1. A call of the right name costs half the share of its
    arguments that differ, matched by place or keyword. Symmetric. Two empty sequences have distance 0.

    >>> call_distance(parse_calls("add(2, 3)"), parse_calls("add(2, 4); neg(1)"))  # (0.25 + 1) / 2
    0.625
    """
    row = [float(place) for place in range(len(expected) + 1)]
    for n_read, call in enumerate(calls, 1):
        last_row, row = row, [float(n_read)]
        for place, gold in enumerate(expected):
            replaced = last_row[place] + _difference(call, gold)
            row.append(min(replaced, last_row[place + 1] + 1, row[place] + 1))
    return row[-1] / max(len(calls), len(expected), 1)


def _calls_of_item(item: Any) -> list[Call]:
    """The calls of a gold's dict or text; ValueError if it holds none."""
    if not isinstance(item, str):
        item = _from_table(item)
    if not isinstance(item, str):
        return _bfcl(item) or _json_calls(item)
    calls = parse_calls(item)
    if calls is None:
        raise ValueError("no calls")
    return calls


def _from_table(item: Any) -> Any:
    """A call of a gold, without the keys beside its arguments that a table filled with None."""
    item = _json_value(item)
    if isinstance(item, list):
        return [_from_table(call) for call in item]
    if not isinstance(item, dict):
        return item
    filled = {key: value for key, value in item.items() if value is not None}
    if isinstance(filled.get("function"), dict):  # OpenAI's
        filled["function"] = _from_table(filled["function"])
    if "name" in filled and item.keys() & _ARGUMENTS and not filled.keys() & _ARGUMENTS:
        filled["arguments"] = {}
    return filled


def _json_value(value: Any) -> Any:
    """A table's value as JSON would have it: a number for a decimal, a text for a date."""
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, date | time):
        return gold_text(value)
    return value


def _difference(a: Call, b: Call) -> float:
    if a == b:
        return 0.0
    if a.name != b.name:
        return 1.0
    arguments_a = dict([*enumerate(a.arguments), *a.keywords])
    arguments_b = dict([*enumerate(b.arguments), *b.keywords])
    places = arguments_a.keys() | arguments_b.keys()
    # No value is None: a missing argument differs from every one.
    n_different = sum(arguments_a.get(place) != arguments_b.get(place) for place in places)
    return n_different / len(places) / 2


def _bare(text: str) -> str:
    """The text without tokens that end a turn, and without its fence if it is a single block."""
    text = without_end_tokens(text).strip(" \t\r\n\ufeff\u200b")
    blocks = read_blocks(text)
    if len(blocks) != 1 or not blocks[0].closed:
        return text
    (block,) = blocks
    text_beside = text[: block.opened] + text[block.after :]
    return block.code.strip() if is_blank(text_beside) else text


def _read(text: str) -> list[Call]:
    if text.startswith(_MARK):
        return _marked_calls(text)
    text = text.removeprefix("<|python_tag|>").strip()
    wrapped = list(_WRAPPED.finditer(text))
    if wrapped and is_blank(_WRAPPED.sub("", text)):
        calls = []
        for match in wrapped:
            if match["name"]:
                calls.append(_named_call(match))
            else:
                calls += _read(match["inside"].strip())
        return calls
    if re.match(r"\{|\[\s*\{", text):
        with suppress(ValueError):  # not JSON: Python's {'name': 'f', ...}, or nothing
            return _json_text(text)
    return _python_calls(text)


def _marked_calls(text: str) -> list[Call]:
    calls = []
    for piece in text.removesuffix("[/TOOL_CALLS]").split(_MARK)[1:]:
        piece = piece.strip()
        named = _NAMED.fullmatch(piece)
        if named:
            calls.append(_named_call(named))
        else:
            calls += _read(piece)
    return calls


def _python_calls(text: str) -> list[Call]:
    tree = parse_quietly("\n".join(line.strip() for line in text.split("\n")))
    if tree is None:
        raise ValueError("no Python")
    calls: list[Call] = []
    for statement in tree.body:
        node = statement.value if isinstance(statement, ast.Expr) else None
        nodes = node.elts if isinstance(node, ast.List) else [node]
        for item in nodes:
            if isinstance(item, ast.Dict):
                _value(item)  # raises for a key given twice
                calls += _json_calls(literal_value(item))
            else:
                call = call_from_node(item, _value)
                keywords = sorted(call.keywords.items())
                calls.append(Call(call.name, call.arguments, tuple(keywords)))
    return calls


def _json_text(text: str) -> list[Call]:
    """Consecutive JSON values, separated by white space or ;."""
    calls, place = [], 0
    while place < len(text):
        value, place = _JSON.raw_decode(text, place)
        calls += _json_calls(value)
        place = _BETWEEN.match(text, place).end()
    return calls


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_JSON = json.JSONDecoder(object_pairs_hook=keys_once, parse_constant=_refuse)


def _json_calls(data: Any) -> list[Call]:
    if isinstance(data, list | tuple):
        calls = []
        for item in data:
            calls += _json_calls(item)
        return calls
    if not isinstance(data, Mapping):
        raise ValueError("no call")
    fields = {key: value for key, value in data.items() if key not in _BESIDE_A_CALL}
    if set(fields) == {"function"}:  # OpenAI's
        return _json_calls(fields["function"])
    name = fields.get("name")
    arguments = fields.keys() & _ARGUMENTS
    if not isinstance(name, str) or not name.strip() or len(arguments) != 1 or len(fields) != 2:
        raise ValueError("a call is its name and its arguments, nothing else")
    return [_call(name, fields[arguments.pop()])]


def _call(name: str, arguments: Any) -> Call:
    """The call with these arguments: an object, a list, JSON text of one, or None or "" for none."""
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        arguments = _JSON.decode(arguments)
    if isinstance(arguments, list | tuple):
        return Call(name, tuple(map(_plain, arguments)))
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise ValueError("arguments that are no object")
    keywords = sorted((key, _plain(value)) for key, value in arguments.items())
    return Call(name, (), tuple(keywords))


def _named_call(match: re.Match[str]) -> Call:
    """A call whose name comes before its arguments: JSON, or <parameter=...> tags."""
    text = match["arguments"]
    parameters = _PARAMETER.findall(text)
    if not parameters or not is_blank(_PARAMETER.sub("", text)):
        return _call(match["name"], text.strip())
    return _call(
        match["name"], keys_once([(key, _json_or_text(value)) for key, value in parameters])
    )


def _json_or_text(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except ValueError:
        return text


def _bfcl(data: Any) -> list[Call]:
    """The call of {"f": {"a": [1]}}; none if the object is of another kind, or allows a choice."""
    if not isinstance(data, Mapping) or len(data) != 1:
        return []
    ((name, arguments),) = data.items()
    if not isinstance(arguments, Mapping):
        return []
    single = {}
    for key, values in arguments.items():
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != 1 or isinstance(values[0], Mapping):
            return []
        single[key] = values[0]
    return [_call(name, single)]


def _plain(value: Any) -> _Value:
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


def _dict(pairs: list[tuple[Any, Any]]) -> _Value:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is given twice")
    return "dict", frozenset(pairs)


def _without_none(value: _Value) -> _Value:
    kind, content = value
    if kind == "list":
        return kind, tuple(map(_without_none, content))
    if kind == "dict":
        return kind, frozenset(
            (key, _without_none(item)) for key, item in content if item != _NONE
        )
    return value


def _value(node: ast.expr) -> _Value:
    match node:
        case ast.Constant() | ast.UnaryOp():
            return _plain(literal_value(node))
        case ast.Name():
            return "name", node.id
        case ast.List() | ast.Tuple():
            return "list", tuple(map(_value, node.elts))
        case ast.Dict() if None not in node.keys:
            keys, values = map(_value, node.keys), map(_value, node.values)
            return _dict(list(zip(keys, values, strict=True)))
    raise ValueError("no plain value")


def _value_text(value: _Value) -> str:
    kind, content = value
    if kind == "list":
        return f"[{', '.join(map(_value_text, content))}]"
    if kind == "dict":
        items = sorted(f"{_value_text(key)}: {_value_text(item)}" for key, item in content)
        return f"{{{', '.join(items)}}}"
    return content if kind == "name" else repr(content)
