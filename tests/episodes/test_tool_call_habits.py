"""Calls as people, data sets and models write them: each habit is the same calls, and no habit lets a hedge through."""

import datetime
import json
import math
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.more.episodes._tool_call_syntax import call_text, gold_calls, parse_calls
from grpo_kit.rewards import CallAccuracy, CallValidity, Case, check_rewards, crafted_cases
from grpo_kit.tasks import from_rows

CALL = {"name": "f", "arguments": {"a": 1, "b": "x"}}
TEXT = json.dumps(CALL)
G = '{"name": "g", "arguments": {}}'
ONE, TWO = parse_calls("f(a=1, b='x')"), parse_calls("f(a=1, b='x'); g()")


def tagged(inside, tag="tool_call"):
    return f"<{tag}>\n{inside}\n</{tag}>"


@pytest.mark.parametrize(
    ("text", "calls", "reason"),
    [
        ("f(b='x', a=1.0)", ONE, "keywords in another order"),
        ("[f(a=1, b='x'), g()]", TWO, "a list in Python (Llama 3.2, BFCL, ToolACE)"),
        ("[f(a=1, b='x'), g()]<|eot_id|>", TWO, "with the token that ends the turn"),
        (TEXT, ONE, "JSON"),
        ('{"arguments": {"b": "x", "a": 1.0}, "name": "f"}', ONE, "keys in another order, 1.0 for 1"),
        (f"[{TEXT}, {G}]", TWO, "a JSON list (xLAM)"),
        (json.dumps([CALL, json.loads(G)], indent=2), TWO, "over several lines"),
        (f"{TEXT}\n{G}", TWO, "one JSON a line"),
        (f"{TEXT}; {G}", TWO, "with ; between them (Llama 3)"),
        (json.dumps({"name": "f", "parameters": CALL["arguments"]}), ONE, "parameters (Llama 3)"),
        (json.dumps({"type": "function", "name": "f", "parameters": CALL["arguments"]}), ONE, "with its type"),
        (json.dumps({"name": "f", "arguments": json.dumps(CALL["arguments"])}), ONE, "arguments as JSON text"),
        (json.dumps({"id": "c1", "type": "function", "function": CALL}), ONE, "OpenAI's"),
        (repr(CALL), ONE, "a dict of Python (early Hermes)"),
        (f"[{CALL!r}, g()]", TWO, "also in a list"),
        (f"<|python_tag|>{TEXT}<|eom_id|>", ONE, "Llama 3's mark"),
        ("<|python_tag|>f(a=1, b='x')", ONE, "the mark before Python"),
        ('<function=f>{"a": 1, "b": "x"}</function>', ONE, "Llama 3.1's own functions"),
        ('<function=f>{"a": 1, "b": "x"}</function><function=g>{}</function>', TWO, "two of them"),
        (tagged(TEXT), ONE, "Qwen, Hermes"),
        (f"{tagged(TEXT)}\n{tagged(G)}<|im_end|>\n", TWO, "two of them"),
        (tagged(f"[{TEXT}, {G}]", "tool_calls"), TWO, "a list in tags"),
        (tagged(f"[{TEXT}]", "TOOLCALL"), ONE, "other tags of tools"),
        (tagged("f(a=1, b='x')"), ONE, "Python in tags"),
        (tagged("<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>"), ONE,
         "Qwen's coders: a tag a parameter"),
        (f"[TOOL_CALLS][{TEXT}, {G}]", TWO, "Mistral"),
        (f"[TOOL_CALLS] [{TEXT}]</s>", ONE, "with a space and an end"),
        ('[TOOL_CALLS]f[ARGS]{"a": 1, "b": "x"}[TOOL_CALLS]g[ARGS]{}', TWO, "Mistral's later models"),
        ('[TOOL_CALLS]f{"a": 1, "b": "x"}', ONE, "and some between"),
        (f"```json\n{TEXT}\n```", ONE, "a JSON fence"),
        ("```\n[f(a=1, b='x'),\n g()]\n```", TWO, "a fence without a language"),
        ("~~~python\nf(a=1, b='x')\ng()\n~~~", TWO, "a Python fence"),
        (f"```xml\n{tagged(TEXT)}\n```\n", ONE, "tags in a fence"),
        (TEXT.replace("\n", "\r\n") + "\r\n", ONE, "Windows line ends"),
        (f"\ufeff\u200b{TEXT}\u200b", ONE, "zero-width characters around"),
    ],
)  # fmt: skip
def test_each_habit_is_read_as_the_same_calls(text, calls, reason):
    assert parse_calls(text) == calls, reason
    answer = f"<answer>{text}</answer>"
    for gold in ("f(a=1, b='x'); g()", [CALL, json.loads(G)]):
        assert (CallAccuracy()([answer], calls=[gold]) == [1.0]) == (calls == TWO)
    assert CallValidity({"f": 2, "g": 0})([answer]) == [1.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{TEXT} or {G}", "one or the other"),
        (f"{tagged(TEXT)} or {tagged(G)}", "also in tags"),
        (f"The call is {TEXT}", "words before"),
        (f"{TEXT} does it.", "words behind"),
        (f"I call {tagged(TEXT)}", "words before tags"),
        (f"So:\n```json\n{TEXT}\n```", "words before a fence"),
        (f"```json\n{TEXT}\n```\n```json\n{G}\n```", "two fences"),
        (f"{TEXT}, {G}", "a comma between"),
        (f"<tool_call>{TEXT}", "never closed"),
        (f"{TEXT}</tool_call>", "never opened"),
        (f"<tool_call>{TEXT}</tool_calls>", "closed by another tag"),
        (TEXT[:-1], "cut off"),
        ("{'name': 'f', 'arguments': {'a': true}}", "neither JSON nor Python"),
        ("{'name': 'f', 'arguments': {'a': g()}}", "a call in a dict"),
        ("{'name': 'f', 'name': 'g', 'arguments': {}}", "a name twice, in Python"),
        ("{'name': 'f'}", "no arguments, in Python"),
        ("{'name': 'f', 'arguments': {[1]: 2}}", "a list as a key"),
        ('{"name": "f"}', "no arguments: data, not a call"),
        ('{"name": "f", "arguments": {}, "parameters": {}}', "arguments twice"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "a key twice"),
        ('{"name": "f", "name": "g", "arguments": {}}', "a name twice"),
        ('{"name": "f", "arguments": {}, "or": "g"}', "something else beside"),
        ('{"name": ["f", "g"], "arguments": {}}', "two names"),
        ('{"name": " ", "arguments": {}}', "no name"),
        ('{"name": "f", "arguments": "a=1"}', "arguments that are no JSON"),
        ('{"name": "f", "arguments": "[1"}', "cut off inside"),
        ('{"name": "f", "arguments": 0}', "arguments that are none"),
        ('{"name": "f", "arguments": {"a": NaN}}', "no JSON number"),
        ('["f", {"a": 1}]', "no call"),
        ('<function=f>{"a": 1}', "never closed"),
        ("<function=f>a=1</function>", "no JSON inside"),
        (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "a parameter twice",
        ),
        ("<function=f><parameter=a>1</parameter> or 2</function>", "words inside"),
        ("[TOOL_CALLS]f or g{}", "two names"),
        ("[TOOL_CALLS]Let me see", "words"),
        ("[" * 3000, "brackets without end"),
        (
            '{"name": "f", "arguments": ' + '{"a": ' * 600 + "1" + "}" * 601,
            "objects without end",
        ),
        (f"[{', '.join([TEXT] * 100)}]", "more than 4,000 characters"),
    ],
)
def test_what_is_no_calls(text, reason):
    assert parse_calls(text) is None, reason
    assert CallAccuracy()([f"<answer>{text}</answer>"], calls=["f(a=1, b='x')"]) == [0.0], (
        reason
    )


@pytest.mark.parametrize(
    ("gold", "calls", "reason"),
    [
        (CALL, ONE, "a dict"),
        ([CALL], ONE, "a list of dicts"),
        ((CALL, "g()"), TWO, "dicts and texts"),
        (
            {"name": "f", "arguments": json.dumps(CALL["arguments"])},
            ONE,
            "arguments as JSON text",
        ),
        ({"name": "g", "arguments": None}, parse_calls("g()"), "no arguments"),
        ({"name": "g", "arguments": ""}, parse_calls("g()"), "no arguments"),
        (
            {"name": "f", "arguments": [1, ("a", 2.0)]},
            parse_calls("f(1, ['a', 2])"),
            "arguments by place",
        ),
        ({"type": "function", "function": CALL}, ONE, "OpenAI's"),
        (TEXT, ONE, "JSON text"),
        (json.dumps([CALL, CALL]), ONE + ONE, "a JSON list as text (xLAM's column)"),
        ([TEXT, G], TWO, "a list of JSON texts"),
        ("[f(a=1, b='x'), g()]", TWO, "ToolACE's text"),
        ([{"f": {"a": [1], "b": ["x"]}}, {"g": {}}], TWO, "BFCL's, where one value is allowed"),
        (
            {"m.f": {"a": [[1, 2]]}},
            parse_calls("m.f(a=[1, 2])"),
            "BFCL's list, in its list of allowed values",
        ),
        ({"f": {"a": [1, 2]}}, None, "BFCL's, where two values are: this cannot judge"),
        ({"f": {"a": [{"k": [1]}]}}, None, "BFCL's allowed values inside a dict: nor this"),
        ({"f": {"a": 1}}, None, "a dict that says neither name nor allowed values"),
        ({"name": "f", "arguments": {"a": object()}}, None, "a value that is none"),
        ({"name": "f", "arguments": {"a": float("nan")}}, None, "a number that is none"),
        ({"name": "f", "arguments": {1: 2}}, None, "a key that is no text"),
        ({}, None, "empty"),
        ([], None, "none"),
        (["f()", "g("], None, "one of them is no call"),
        (None, None, "no gold"),
        (float("nan"), None, "a table's gap"),
    ],
)
def test_the_gold_may_be_a_dict_json_or_text(gold, calls, reason):
    assert gold_calls(gold) == calls, reason
    answer = "; ".join(map(call_text, calls)) if calls else "f(1)"
    assert CallAccuracy()([f"<answer>{answer}</answer>"], calls=[gold]) == [
        1.0 if calls else None
    ], reason


VALUE = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-99, 99), st.floats(-9, 9), st.text(max_size=4)
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
NAME = st.sampled_from(["f", "g", "math.sqrt", "get_weather"])
CALLS = st.lists(
    st.tuples(NAME, st.dictionaries(st.sampled_from("abc"), VALUE, max_size=3)),
    min_size=1,
    max_size=3,
)


def test_json_values_keep_their_kinds():
    texts = [
        "1",
        "-1",
        "0",
        '"1"',
        '""',
        "true",
        "false",
        "null",
        "[1]",
        "[]",
        "{}",
        '{"1": true}',
    ]
    read = [parse_calls(f'{{"name": "f", "arguments": {{"a": {text}}}}}') for text in texts]
    assert None not in read and all(read.count(calls) == 1 for calls in read)


def plain(value):
    """What is compared, written apart from the library: numbers by value, truth values by kind, dicts without order."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return (isinstance(value, bool), value)


def habits(calls):
    """The same calls, each as Python, as JSON and in tags."""
    objects = [{"name": name, "arguments": given} for name, given in calls]
    texts = [  # fmt: skip
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    ]
    turned = [
        json.dumps({"arguments": dict(reversed(one["arguments"].items())), "name": one["name"]})
        for one in objects
    ]
    return ["; ".join(texts), f"[{', '.join(texts)}]", json.dumps(objects), "\n".join(map(tagged, turned)),
            f"[TOOL_CALLS]{json.dumps(objects)}", f"```json\n{json.dumps(objects)}\n```"]  # fmt: skip


@given(CALLS, CALLS)
def test_two_habits_of_the_same_calls_are_equal_and_of_others_are_not(calls, others):
    read = gold_calls([{"name": name, "arguments": given} for name, given in calls])
    assert [parse_calls(text) for text in habits(calls)] == [read] * 6
    assert parse_calls("\n".join(map(call_text, read))) == read
    equal = plain(calls) == plain(others)
    assert [parse_calls(text) == read for text in habits(others)] == [equal] * 6


@pytest.mark.parametrize(
    "gold", [[CALL, json.loads(G)], json.dumps([CALL]), {"f": {"a": [1], "b": ["x"]}}]
)
def test_no_cheat_pays_whatever_the_gold_is_written_in(gold):
    right = "; ".join(map(call_text, gold_calls(gold)))
    honest = crafted_cases(right, "h(1)", prefill="<answer>", columns={"calls": gold})
    cheats = CallAccuracy().cheats(honest[0])
    assert {"arguments dropped", "a call in a call", "two sequences in tags"} <= {
        case.name for case in cheats
    }
    table = check_rewards(CallAccuracy(), [*honest, *cheats])
    assert table["total"].iloc[0] == 1.0


def f(name="f", **arguments):
    return {"name": name, "arguments": arguments}


# Golds of two rows, and the right calls of each.
DIFFERENT = {
    "other arguments": ([[f(a=1)], [f("g", b="x")]], ["f(a=1)", "g(b='x')"]),
    "several calls": ([[f(a=1), f("g", b=2)], [f("h")]], ["f(a=1); g(b=2)", "h()"]),
    "a dict alone": ([f(a=1), f("g", b="x")], ["f(a=1)", "g(b='x')"]),
    "nested dicts": ([[f(a={"x": 1})], [f(a={"y": {"z": 2}})]], ["f(a={'x': 1})", "f(a={'y': {'z': 2}})"]),
    "dicts in lists": ([[f(a=[{"x": 1}, {"y": 2}])], [f(a=[])]], ["f(a=[{'x': 1}, {'y': 2}])", "f(a=[])"]),
    "parameters": ([[f(a=1)], [{"name": "g", "parameters": {"b": 2}}]], ["f(a=1)", "g(b=2)"]),
    "OpenAI's": (
        [[{"type": "function", "function": f(a=1)}], [{"id": "1", "function": f("g", b=2)}]], ["f(a=1)", "g(b=2)"],
    ),
    "BFCL's": ([[{"f": {"a": [1]}}], [{"g": {"b": [2], "c": [3]}}]], ["f(a=1)", "g(b=2, c=3)"]),
    "no arguments": ([[f()], [f("g", b=2)]], ["f()", "g(b=2)"]),
    "a None beside padding": ([[f(a=1, b=None)], [f("g", c=2)]], ["f(a=1, b=None)", "g(c=2)"]),
    "an argument that one call has": (
        [[f(city="x", note=None)], [f(city="y", note="late")]], ["f(city='x', note=None)", "f(city='y', note='late')"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DIFFERENT)
def test_keys_that_a_table_filled_are_no_arguments(kind, tmp_path):
    """Right calls earn everything by every door, also where the rewards are given the columns of a data set."""
    golds, right = DIFFERENT[kind]
    rows = [
        {"question": f"{kind} {i}", "answer": text, "calls": gold}
        for i, (gold, text) in enumerate(zip(golds, right, strict=True))
    ]
    data, held_out = (
        Dataset.from_list(rows),
        [{"question": "?", "answer": "f()", "calls": rows[0]["calls"]}],
    )
    data.to_parquet(tmp_path / "rows.parquet")
    doors = {
        "rows": rows, "JSON": json.loads(json.dumps(rows)), "pandas": pd.DataFrame(rows), "Dataset": data,
        "Parquet": pd.read_parquet(tmp_path / "rows.parquet"), "torch": data.with_format("torch"),
        "NaN": [row | {"calls": _with_nan(row["calls"])} for row in data],
    }  # fmt: skip
    for door, table in doors.items():
        task = from_rows("calls", table, held_out, reward=CallAccuracy())
        for row, text in zip(task.train, right, strict=True):
            others = ["f(a=2)", "f(b=None, q=1)", "g(b=None, z=5)"]
            scores = task.score(
                row, [f"<answer>{answer}</answer>" for answer in (text, *others)]
            )["reward"]
            assert scores[0] == 1.0 > max(scores[1:]), door
            assert all(
                case.honest
                or "calls" not in case.columns
                or task.score(row, [case.completion])["reward"][0] < 1
                for case in CallAccuracy().cheats(
                    Case("honest", f"<answer>{text}</answer>", True, columns=row)
                )
            ), door
    assert CallAccuracy()(
        [f"<answer>{text}</answer>" for text in right], calls=data["calls"]
    ) == [1.0, 1.0]


def _with_nan(value):
    """None as pandas writes it."""
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    return (
        [_with_nan(item) for item in value]
        if isinstance(value, list)
        else math.nan
        if value is None
        else value
    )


@pytest.mark.parametrize("gold", [
    "f(a=None); g(b=1)", json.dumps([f(a=None), f("g", b=1)]), [f(a=None), f("g", b=1)], ["f(a=None)", "g(b=1)"],
    [json.dumps(f(a=None)), json.dumps(f("g", b=1))],
])  # fmt: skip
def test_a_none_that_no_table_can_have_written_is_an_argument(gold):
    """Texts say what they have, and calls whose dicts differ in keys come from no table."""
    answers = ["f(a=None); g(b=1)", "f(); g(b=1)", "f(a=None); g()", "f(a=0); g(b=1)"]
    scores = CallAccuracy()([f"<answer>{text}</answer>" for text in answers], calls=[gold] * 4)
    assert scores[0] == 1.0 and max(scores[1:]) < 1


@pytest.mark.parametrize("value, text", [
    (Decimal("0.5"), "0.5"), (datetime.date(2026, 1, 2), "'2026-01-02'"), (np.float32(0.1), "0.1"),
    (np.int64(3), "3"), (np.array([1, 2]), "[1, 2]"), (torch.tensor([0.1]), "[0.1]"), (True, "True"),
])  # fmt: skip
def test_golds_of_a_tables_types_are_the_calls_that_a_model_can_write(value, text):
    assert CallAccuracy()([f"<answer>f(a={text})</answer>"], calls=[[f(a=value)]]) == [1.0]
