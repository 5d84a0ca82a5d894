"""Code rewards: what is a block, what do hidden tests accept, and what a hostile program cannot gain."""

import json
import math
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kit.more.code import _code_runner as code_runner
from grpo_kit.more.code import sandbox
from grpo_kit.more.code._code_harness import as_json, encode
from grpo_kit.more.code._code_runner import CodeRunner, Job, _answer, _read_lines, programs_of
from grpo_kit.more.code._code_tests import Answer, CallTest, StdinTest, passes, read_tests
from grpo_kit.more.code._code_values import decode, read_json, same
from grpo_kit.more.code.code_answer import extract_code, own_code
from grpo_kit.more.code.code_rewards import CodeFormat, CodeRuns, CodeTests
from grpo_kit.more.code.sandbox import SandboxUnavailableError, isolation, run_python_batch
from grpo_kit.rewards import WeightedSum, check_rewards
from grpo_kit.rewards.cheat_cases import Case

PREFILL = "```python\n"
# the rewards' own logic is tested there too; isolation is test_sandbox.py's matter
UNSAFE = isolation() is None


def runner(**limits):
    return CodeRunner(allow_unsafe=UNSAFE, **limits)


SHARED = runner()


def block(code):
    return f"{code.rstrip()}\n```"


def share(code, tests, entry_point="f", reward=None):
    reward = CodeTests(SHARED) if reward is None else reward
    (score,) = reward(
        [block(code)], prefill=PREFILL, tests=[json.dumps(tests)], entry_point=[entry_point]
    )
    return score


# --- the block -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "expected", "reason"),
    [
        ("```python\nx = 1\n```", "x = 1\n", "the plain case"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n", "text around is fine here"),
        ("```py\nx = 1\n```", "x = 1\n", "py is Python"),
        ("```python3  \nx = 1\n```  \n", "x = 1\n", "white space behind a fence"),
        (
            "```python\nx = '''\n    ```\n'''\n```",
            "x = '''\n    ```\n'''\n",
            "an indented fence is the program's",
        ),
        ("```python\r\nx = 1\r\n```", "x = 1\r\n", "Windows line ends"),
        ("```python\nx = 1\n", None, "never closed"),
        ("x = 1\n```", None, "never opened"),
        ("```\nx = 1\n```", "x = 1\n", "without its language, but Python and alone"),
        ("```\nx: 1\n```", None, "without its language and no program: output or anything"),
        ("```js\nx = 1\n```", None, "another language"),
        ("```python\n```", None, "empty"),
        ("```python\n \n```", None, "white space is empty"),
        ("```python\nx = 1\n```\n```python\nx = 2\n```", None, "two blocks are hedging"),
        ("```python\nx = 1\n```\n```\n1\n```", "x = 1\n", "its output behind it"),
        ("```python\n```python\nx = 1\n```", None, "opened twice"),
        ("```python\nx = 1\n``` done", None, "a closing fence stands alone in its line"),
        ("```\nx = 1\n```python\n", None, "wrong order"),
        ("x ```python\nx = 1\n```", None, "a fence begins its line"),
        ("", None, "nothing at all"),
    ],
)
def test_extract_code(response, expected, reason):
    assert extract_code(response) == expected, reason


def test_code_of_the_prefill_alone_is_not_the_models():
    assert own_code("", "```python\nx = 1\n```") is None
    assert own_code("```", "```python\nx = 1\n") is None
    assert own_code("    return 1\n```", "```python\ndef f():\n") == "def f():\n    return 1\n"


@pytest.mark.parametrize(
    ("completion", "prefill", "expected", "reason"),
    [
        ("x = 1\n```", PREFILL, 1.0, "all of it"),
        ("```python\nx = 1\n```", "", 1.0, "without a prefill"),
        ("Reasoning.\n```python\nx = 1\n```\n", "", 1.0, "reasoning first"),
        ("no Python at all\n```", PREFILL, 1.0, "what stands inside is for the others"),
        ("x = 1\n```\nHope this helps!", PREFILL, 0.75, "text behind"),
        ("x = 1", PREFILL, 0.25, "only what the prefill opened"),
        ("```", PREFILL, 0.75, "an empty block"),
        ("x = 1\n```\n```", PREFILL, 0.25, "closed twice earns nothing for closing"),
        ("x = 1\n```\n```python\nx = 2\n```", PREFILL, 0.0, "everything twice"),
        ("", "```python\nx = 1\n```", 0.75, "the prefill's own block"),
        ("x = 1", "", 0.0, "no block"),
        ("", "", 0.0, "nothing"),
    ],
)
def test_code_format(completion, prefill, expected, reason):
    assert CodeFormat()([completion], prefill=prefill) == [expected], reason


PIECES = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(["```python\n", "\n```", "```", "x = 1", "\n", "\ud800", "\0"]),
    ),
    max_size=12,
)


@given(PIECES, st.sampled_from(["", PREFILL, "```python\nx"]))
def test_format_of_any_text_lies_in_the_range_and_full_marks_mean_a_block(pieces, prefill):
    text = "".join(pieces)
    (score,) = CodeFormat()([text], prefill=prefill)
    assert 0 <= score <= 1
    if score == 1.0:
        assert extract_code(prefill + text) is not None
        assert (
            (prefill + text)
            .rstrip()
            .rpartition("\n")[2]
            .strip(" \t>")
            .startswith(("```", "~~~"))
        )
    if own_code(text, prefill) is None:
        assert score < 1


# --- values ----------------------------------------------------------------------------------------------

KEYS = st.one_of(st.integers(), st.text(max_size=5), st.booleans(), st.none())
PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(max_size=9),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.frozensets(KEYS, max_size=4),
        st.sets(KEYS, max_size=4),
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_values_come_back_through_json_with_their_types(value):
    assert as_json(encode(value)) == json.dumps(encode(value))
    back = decode(read_json(as_json(encode(value))))
    assert repr(back) == repr(value) or back == value
    assert type(back) is type(value)
    assert same(back, value)


def _without_floats(value):
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else 0
    if isinstance(value, dict):
        return {key: _without_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_floats(item) for item in value)
    return value


@given(PLAIN, PLAIN)
def test_without_floats_the_same_is_what_python_calls_equal(a, b):
    a, b = _without_floats(a), _without_floats(b)
    assert same(a, b) == (a == b)
    assert same([a, b], [b, a]) == ([a, b] == [b, a])


@pytest.mark.parametrize(
    ("given_", "expected", "equal", "reason"),
    [
        (True, 1, True, "Python's =="),
        (2, 2.0, True, "Python's =="),
        ((1, 2), [1, 2], False, "a tuple is no list"),
        ({1, 2}, [1, 2], False, "a set is no list"),
        ("1", 1, False, "text is no number"),
        (None, 0, False, "nothing is no number"),
        (0.1 + 0.2, 0.3, True, "rounding"),
        ([{"a": 0.1 + 0.2}], [{"a": 0.3}], True, "rounding, further in"),
        (0.31, 0.3, False, "not rounding"),
        (float("nan"), float("nan"), True, "a test that expects NaN can be passed"),
        (float("nan"), 1.0, False, "NaN is no number"),
        (float("inf"), float("inf"), True, "infinity"),
        (10**400, 1.0, False, "an integer beyond every float"),
        ({True: 1}, {1: 1}, True, "equal keys"),
        ({"a": 1}, {"a": 1, "b": 2}, False, "a key is missing"),
        ([1], [1, 2], False, "shorter"),
        ([1, 2], [1], False, "longer"),
    ],
)
def test_same(given_, expected, equal, reason):
    assert same(given_, expected) is equal, reason


def test_subclasses_are_the_plain_type_below_them_and_other_objects_no_value():
    from collections import Counter, OrderedDict, namedtuple

    class Odd(int):
        def __eq__(self, other):
            return True

        def __repr__(self):
            return "6"

        __hash__ = int.__hash__

    class OddComplex(complex):
        real = imag = property(lambda self: "6")

    assert encode(OddComplex(1, -2)) == {"$complex": [1.0, -2.0]}
    assert encode(Odd(5)) == 5
    assert type(encode(Odd(5))) is int
    assert decode(encode(Counter("aab"))) == {"a": 2, "b": 1}
    assert decode(encode(OrderedDict(a=1))) == {"a": 1}
    assert decode(encode(namedtuple("P", "x y")(1, 2))) == (1, 2)
    for value in (object(), range(3), (i for i in "ab"), {}.keys(), int):
        with pytest.raises(TypeError, match="no plain value"):
            encode(value)
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="deeper than 40"):
        encode(loop)


HOSTILE = {
    "nesting bomb": "[" * 200_000,
    "closed nesting bomb": '{"value": ' + "[" * 20_000 + "]" * 20_000 + "}",
    "nesting bomb of a result's length": '{"value": ' + "[" * 12_000 + "]" * 12_000 + "}",
    "nested past the limit": '{"value": ' + "[" * 60 + "]" * 60 + "}",
    "number of 10 MB": '{"value": ' + "9" * 10_000_000 + "}",
    "float of 1 MB": '{"value": 0.' + "9" * 1_000_000 + "}",
    "a key twice": '{"value": 1, "value": 2}',
    "two keys": '{"value": 1, "error": 2}',
    "no object": "6",
    "nothing": "",
    "not JSON": "__import__('os').system('true')",
    "an unknown tag": '{"value": {"$eval": ["1"]}}',
    "a tag with company": '{"value": {"$set": [1], "a": 2}}',
    "a list in a set": '{"value": {"$set": [[1]]}}',
    "a tag without its list": '{"value": {"$tuple": 3}}',
    "no hexadecimal": '{"value": {"$int": "zz"}}',
    "a number for hexadecimal": '{"value": {"$int": 3}}',
    "pairs that are none": '{"value": {"$dict": [[1]]}}',
    "a set of colliding integers": json.dumps(
        {"value": {"$set": [k * (2**61 - 1) for k in range(60_000)]}}
    ),
    "complex of three": '{"value": {"$complex": [1, 2, 3]}}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_line_is_no_value_and_no_crash(text):
    start = time.monotonic()
    answer = _answer(text)
    assert time.monotonic() - start < 2
    assert answer.kind == "other"
    assert not passes(answer, CallTest("()", 6))


@given(
    st.lists(st.text(max_size=30), max_size=5),
    st.one_of(st.integers(-3, 12), st.text("-+_0129٣ ", max_size=9), st.text(max_size=9)),
)
def test_any_output_is_read_without_raising(lines, place):
    stdout = "\n".join(f"mark {place} {line}" for line in lines)
    answers = _read_lines(stdout + "\nmark", "mark", 3)
    assert len(answers) == 4
    assert all(not passes(answer, CallTest("()", object())) for answer in answers)


def test_a_call_answered_twice_is_not_answered():
    once, twice = 'm 0 {"value": 6}\n', 'm 0 {"value": 7}\nm 0 {"value": 6}\n'
    assert _read_lines(once, "m", 1)[1].value == 6
    assert _read_lines(twice, "m", 1)[1].kind == "none"
    assert _read_lines(once, "n", 1)[1].kind == "none"
    for odd in ("00000000000", "--1", "-", "", "+0", "0_0", "٠", "1e3"):
        assert _read_lines(f'm {odd} {{"value": 6}}', "m", 1)[1].kind == "none"


# --- the tests column ------------------------------------------------------------------------------------


def test_read_tests():
    assert read_tests('[[[3], 6], [["a", [1]], {"$tuple": [1, null]}]]') == (
        CallTest("(3,)", 6),
        CallTest("('a', [1])", (1, None)),
    )
    assert read_tests([{"args": [], "expected": 0.5, "tolerance": 0.1, "as": "sorted"}]) == (
        CallTest("()", 0.5, 0.1, "sorted"),
    )
    assert read_tests('[{"stdin": "3 4\\n", "stdout": "7\\n"}]') == (StdinTest("3 4\n", "7\n"),)
    # A table fills the keys that a test lacks.
    call, text = (
        {"args": [1], "expected": None, "as": None},
        {"stdin": "3", "stdout": "7", "tolerance": None},
    )
    assert read_tests([call | dict.fromkeys(text)]) == read_tests("[[[1], null]]")
    assert read_tests([text | dict.fromkeys(call)]) == (StdinTest("3", "7"),)
    assert read_tests(None) == read_tests("") == read_tests([]) == read_tests("[]") == ()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("[[[3]]]", r"test 0 is \[\[3\]\]"),
        ('{"args": [3]}', "no list of tests"),
        ("[[3, 6]]", "args 3; use a list"),
        ("[[[3], 6], 7]", "test 1 is 7"),
        ('[{"args": [3], "expected": 6, "as": "len"}]', "as='len'"),
        ('[{"args": [3], "expected": 6, "tolerance": -1}]', "tolerance=-1"),
        ('[{"args": [3], "expected": 6, "tolerence": 1}]', "test 0 is"),
        ('[{"args": [3], "expected": 6, "tolerance": null}]', "tolerance=None"),
        (
            '[{"stdin": "", "stdout": "1", "tolerance": "1e-6"}]',
            "tolerance='1e-6'; use a number >= 0",
        ),
        ('[{"stdin": "", "stdout": "1", "tolerance": Infinity}]', "tolerance=inf"),
        ('[{"stdin": "", "stdout": "1", "as": "set"}]', "test 0 is"),
        ('[[[{"$evil": [1]}], 6]]', r"\$evil is no tag"),
        ('[{"args": [3], "expected": 6, "as": ["set"]}]', r"as=\['set'\]"),
        (
            f'[[[3], {{"$complex": [1{"0" * 400}, 0]}}]]',
            "test 0 holds a value that cannot be read",
        ),
        ('[[[3], 6], {"stdin": "", "stdout": ""}]', "one kind"),
        ('[{"stdin": 3, "stdout": ""}]', "test 0 is"),
        ("[[[3], 6", "row 1"),
    ],
)
def test_a_test_that_does_not_fit_names_reward_row_and_test(cell, message):
    with pytest.raises(ValueError, match=message) as caught:
        CodeTests(SHARED)(["", ""], tests=["[]", cell], entry_point=["f", "f"])
    assert "reward 'code_tests', row 1" in str(caught.value)


def test_bad_columns_and_limits():
    with pytest.raises(ValueError, match="'code_tests' needs the data set column 'tests'"):
        CodeTests(SHARED)(["x"])
    with pytest.raises(ValueError, match="entry_point=None with CallTest"):
        CodeTests(SHARED)(["x"], tests=["[[[3], 6]]"])
    with pytest.raises(ValueError, match="entry_point='f' with StdinTest"):
        CodeRuns(SHARED)(["x"], tests=['[{"stdin": "", "stdout": ""}]'], entry_point=["f"])
    with pytest.raises(ValueError, match="seconds=0"):
        CodeRunner(seconds=0)
    with pytest.raises(ValueError, match="seconds=inf"):
        CodeRunner(seconds=float("inf"))
    with pytest.raises(ValueError, match="memory_mb=32.*at least 64 MB"):
        CodeRunner(memory_mb=32)


# --- programs --------------------------------------------------------------------------------------------

DOUBLE = [[[3], 6], [[0], 0], [[-2], -4], [["ab"], "abab"]]


@pytest.mark.parametrize(
    ("code", "expected", "reason"),
    [
        ("def f(n):\n    return n * 2", 1.0, "right"),
        ("f = lambda n: n + n", 1.0, "a function by any way"),
        ("def f(n):\n    return 2 * abs(n) if n != 'ab' else n", 0.5, "share of tests"),
        ("def f(n):\n    return 0", 0.25, "a constant earns what it gets right"),
        ("def f(n):\n    pass", 0.0, "nothing"),
        ("def f(n):\n    if n == 0:\n        raise KeyError\n    return n * 2", 0.75, "a raise loses its own test"),
        ("class Solution:\n    def f(self, n: List[int]) -> Optional[int]:\n        return n * 2", 1.0,
         "LeetCode's class"),
        ("def f(n):\n    return n * 2\nclass Solution:\n    def f(self, n):\n        return n", 1.0,
         "the function first"),
        ("class Solution:\n    def __init__(self):\n        self.seen = 0\n    def f(self, n):\n"
         "        self.seen += 1\n        return n * 2 * self.seen", 1.0, "an object a call"),
        ("class Solution:\n    f = 6", 0.0, "a class without the method"),
        ("class Other:\n    def f(self, n):\n        return n * 2", 0.0, "another class"),
        ("def f(n):\n    return n * 2\nexit()", 1.0, "ends well"),
        ("def f(n):\n    return n * 2\nquit()", 1.0, "ends well"),
        ("import sys\ndef f(n):\n    return n * 2\ndef main():\n    print(f(1))\nsys.exit(main())", 1.0, "ends well"),
        ("import sys\ndef f(n):\n    return n * 2\nsys.exit(0)", 1.0, "ends well"),
        ("def f(n):\n    return n * 2\nexit(1)", 0.0, "ends with an error code"),
        ("def f(n):\n    return n * 2\nexit('done')", 0.0, "a text is an error code, too"),
        ("exit()\ndef f(n):\n    return n * 2", 0.0, "ends before it has the function"),
        ("def f(n):\r\n    return n * 2\r\n", 1.0, "Windows line ends"),
        ("def f(n):   \n    return n * 2\t \n  \n", 1.0, "white space at line ends"),
        ("class E(Exception):\n    def __str__(self):\n        return 6\ndef f(n):\n    if n == 0:\n        raise E\n"
         "    return n * 2", 0.75, "so does one that has no text"),
        ("import sys\ndef f(n):\n    if n == -2:\n        sys.exit(0)\n    return n * 2", 0.5, "an exit loses more"),
        ("import os\ndef f(n):\n    if n == -2:\n        os._exit(0)\n    return n * 2", 0.5, "this exit too"),
        ("def f(n):\n    while n == -2:\n        pass\n    return n * 2", 0.5, "and so does an endless call"),
        ("def f(n):\n    print(n, 'noise' * 50_000)\n    return n * 2", 1.0, "prints are not looked at"),
        ("import os\ndef f(n):\n    os.write(1, b'noise')\n    os.write(2, b'x')\n    return n * 2", 1.0, "nor these"),
        ("import os\ndef f(n):\n    os.write(1, b'x' * 2_000_000)\n    return n * 2", 1.0, "however much"),
        ("print('loaded')\ndef f(n):\n    return n * 2\nprint(f(1))", 1.0, "nor on import"),
        ("def f(n):\n    return n * 2\nif __name__ == '__main__':\n    print(f(int(input())))", 1.0, "no script here"),
        ("def f(n):\n    return n * 2\nimport sys\nsys.stdout.close()", 1.0, "closed its own stdout"),
        ("def g(n):\n    return n * 2", 0.0, "another name"),
        ("f = 6", 0.0, "no function"),
        ("def f():\n    return 6", 0.0, "other arguments"),
        ("def f(n):\n    return (n * 2,)", 0.0, "a tuple"),
        ("def f(n:\n    return n * 2", 0.0, "no Python"),
        ("def f(n):\n    return n * 2\nraise ValueError", 0.0, "raises when run"),
        ("def f(n):\n    return f(n)", 0.0, "endless recursion"),
        ("def f(n):\n    return n * 2\nf.x = '\0'", 0.0, "a NUL is no Python"),
        ("def f(n):\n    return n * 2\n# \ud800", 0.0, "a lone surrogate is no Python"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\ndef f(n):\n    return A(n).x * 2",
         1.0, "a dataclass looks its module up"),
    ],
)  # fmt: skip
def test_share_of_tests_passed(code, expected, reason):
    assert share(code, DOUBLE) == expected, reason


def test_values_of_every_kind_are_asked_and_answered():
    values = [None, True, 3, -(10**30), 2.5, "é\ud800", [1, [2]], (1,), {1, 2}, frozenset({3}), {"a": 1}, {1: (2,)},
              b"\x00", 1j, float("inf"), float("nan"), {"$set": 1}, complex(2, float("-inf"))]  # fmt: skip
    tests = [[[encode(value)], encode(value)] for value in values]
    assert share("def f(x):\n    return x", tests) == 1.0


def test_arguments_are_fresh_for_each_call():
    tests = [[[[1, 2]], [2]], [[[1, 2]], [2]], [[[1, 2]], [2]]]
    assert share("def f(items):\n    del items[0]\n    return items", tests) == 1.0


def test_tolerance_and_another_type():
    assert share("def f():\n    return 0.1 + 0.2", [[[], 0.3]]) == 1.0
    assert (
        share(
            "def f():\n    return [{'a': 0.30001}]",
            [{"args": [], "expected": [{"a": 0.3}], "tolerance": 1e-3}],
        )
        == 1.0
    )
    near = "def f():\n    return 0.3001"
    assert share(near, [[[], 0.3]]) == 0.0
    assert share(near, [{"args": [], "expected": 0.3, "tolerance": 0.01}]) == 1.0
    unordered = {"args": [], "expected": [3, 1, 2], "as": "sorted"}
    assert share("def f():\n    return (1, 2, 3)", [unordered]) == 1.0
    assert share("def f():\n    return (1, 2)", [unordered]) == 0.0
    assert share("def f():\n    return 6", [unordered]) == 0.0


ADD = [{"stdin": "3 4\n", "stdout": "7\n"}, {"stdin": "1 1\n", "stdout": "2\n"}]


@pytest.mark.parametrize(
    ("code", "expected", "reason"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 1.0, "right"),
        ("import sys\nsys.stdout.write(str(sum(map(int, sys.stdin.read().split()))))", 1.0, "no newline"),
        ("print(sum(map(int, input().split())), '  \\n\\n')", 1.0, "white space at line ends"),
        ("def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()", 1.0, "main"),
        ("def solve():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    solve()\n    exit()",
         1.0, "solve(), guarded, and exit()"),
        ("print(sum(map(int, input().split())))\nexit(0)", 1.0, "exits well"),
        ("print(sum(map(int, input().split())))\nquit()", 1.0, "exits well"),
        ("print(sum(map(int, input().split())))\nexit(1)", 0.0, "exits with an error code"),
        ("a, b = map(int, input().split())\r\nprint(a + b, end='\\r\\n')\r\n", 1.0, "Windows line ends"),
        ("print(7)", 0.5, "a constant"),
        ("print(sum(map(int, input().split())))\nimport sys\nsys.exit(0)", 1.0, "exits well"),
        ("print(sum(map(int, input().split())))\n1 / 0", 0.0, "printed, then raised"),
        ("print('Answer:', sum(map(int, input().split())))", 0.0, "printed more"),
        ("print(2)\nprint(7)", 0.0, "hedged"),
        ("print(input())", 0.0, "echo"),
        ("import os\nos._exit(0)", 0.0, "nothing"),
        ("print(sum(map(int, input().split()))", 0.0, "no Python"),
    ],
)  # fmt: skip
def test_stdin_and_stdout(code, expected, reason):
    assert share(code, ADD, entry_point=None) == expected, reason
    (without_column,) = CodeTests(SHARED)([block(code)], prefill=PREFILL, tests=[ADD])
    assert without_column == expected


@pytest.mark.parametrize(
    ("printed", "tolerance", "expected", "reason"),
    [
        ("0.3 ok\n12345678901", None, 1.0, "the text itself"),
        ("0.3  \n12345678901", None, 0.0, "a word is missing"),
        ("0.30 ok\n12345678901", None, 0.0, "without a tolerance numbers are text"),
        ("0.30 ok\n12345678901.0", 1e-6, 1.0, "numbers, however they are written"),
        ("3e-1   ok \n+12345678901\n", 0, 1.0, "and however they are spaced"),
        ("0.3000009 ok\n12345678901", 1e-6, 1.0, "within the tolerance"),
        ("0.3000011 ok\n12345678901", 1e-6, 0.0, "beyond it"),
        ("0.3 ok\n12345678902", 1e-6, 0.0, "whole numbers are exact, large ones too"),
        ("0.3 OK\n12345678901", 1e-6, 0.0, "words are compared as words"),
        ("0.3 ok 12345678901", 1e-6, 0.0, "lines stay lines"),
        ("0.3 ok\n12345678901\n1", 1e-6, 0.0, "a line too many"),
        ("0.3 ok 1\n12345678901", 1e-6, 0.0, "a word too many"),
        ("nan ok\n12345678901", 1e-6, 0.0, "no number"),
        ("1e999 ok\n12345678901", 1e-6, 0.0, "not finite"),
    ],
)
def test_what_a_program_prints_may_be_off_by_the_tests_own_tolerance(
    printed, tolerance, expected, reason
):
    test = {"stdin": "", "stdout": "0.3 ok\r\n12345678901\r\n"}
    test |= {} if tolerance is None else {"tolerance": tolerance}
    assert passes(Answer("value", printed), *read_tests([test])) == expected, reason


def test_stdin_of_a_windows_file_reaches_the_program_without_its_carriage_returns():
    tests = [
        {"stdin": "yes\r\nno\r\n", "stdout": "True\r\n"},
        {"stdin": "no\r\n", "stdout": "False"},
    ]
    assert share("print(input() == 'yes')", tests, entry_point=None) == 1.0


@pytest.mark.parametrize("entry_point", ["f", "Solution.f", "Solution().f"])
def test_a_method_of_leetcodes_class_is_found_by_each_of_its_names(entry_point):
    right = "class Solution:\n    def f(self, n):\n        return n * 2\nif __name__ == '__main__':\n    print(1 / 0)"
    assert share(right, DOUBLE, entry_point) == 1.0
    assert share(right.replace("2", "3"), DOUBLE, entry_point) == 0.25
    assert (
        share("class Solution:\n    def g(self, n):\n        return n * 2", DOUBLE, entry_point)
        == 0.0
    )
    assert (
        share(
            "class Solution:\n    @staticmethod\n    def f(n):\n        return n * 2",
            DOUBLE,
            entry_point,
        )
        == 1.0
    )
    assert share("def f(n):\n    return n * 2", DOUBLE, entry_point) == (entry_point == "f")


@pytest.mark.parametrize("entry_point", ["f g", "f(", "a.b.c", "1f", ".f", "Solution(1).f"])
def test_an_entry_point_that_can_be_none_is_named(entry_point):
    with pytest.raises(ValueError, match="row 0: entry_point=.*use 'f', 'Solution.*f'"):
        CodeTests(SHARED)(["x"], tests=[DOUBLE], entry_point=[entry_point])


@pytest.mark.parametrize(
    ("code", "tests", "entry_point", "expected", "reason"),
    [
        ("x = 1", None, None, 1.0, "runs"),
        ("x = 1\nexit()", None, None, 1.0, "ends well"),
        ("def f(n): return n\nexit()", DOUBLE, "f", 1.0, "ends well"),
        ("def f(n): return n\nexit(2)", DOUBLE, "f", 0.5, "ends with an error code"),
        ("x = y", None, None, 0.5, "Python, but raises"),
        ("x =", None, None, 0.0, "no Python"),
        ("A sentence of prose.", None, None, 0.0, "prose"),
        ("while True: pass", None, None, 0.5, "never ends"),
        ("import sys\nsys.exit(3)", None, None, 0.5, "ends with an error code"),
        ("def f(n): return n", None, "f", 1.0, "has the function"),
        ("def g(n): return n", None, "f", 0.5, "has it not"),
        ("f = 6", None, "f", 0.5, "has no function"),
        ("def f(n): return 'wrong'", DOUBLE, "f", 1.0, "what comes back does not matter"),
        ("def f(n): return object()", DOUBLE, "f", 1.0, "what comes back does not matter"),
        ("def f(n): return n / 1", DOUBLE, "f", 0.5, "raises for text"),
        (
            "import os\ndef f(n): os._exit(0)",
            DOUBLE,
            "f",
            0.5,
            "a call that exits does not return",
        ),
        ("print(input())", ADD, None, 1.0, "ends well"),
        ("print(int(input()))", ADD, None, 0.5, "raises"),
    ],
)
def test_code_runs(code, tests, entry_point, expected, reason):
    fast = CodeRuns(runner(seconds=1.0))
    assert fast([block(code)], prefill=PREFILL, tests=[tests], entry_point=[entry_point]) == [
        expected
    ], reason
    assert fast(["x = 1"], tests=[tests], entry_point=[entry_point]) == [0.0]  # no block


# --- hostile programs ------------------------------------------------------------------------------------

SECRET = [[[3], "orange-417"], [[4], "violet-902"], [[5], "silver-633"]]
ATTACKS = {
    "always equal": "class A:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(n): return A()",
    "always equal text": "class A(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
    "def f(n): return A('x')",
    "always equal list": "class A(list):\n    def __eq__(self, other): return True\n    def __len__(self): return 1\n"
    "def f(n): return A()",
    "lying repr": "class A(str):\n    __repr__ = __str__ = lambda self: 'orange'\ndef f(n): return A()",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef f(n): return 1",
    "patched builtins": "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.eval = print\n"
    "builtins.type = lambda *a: str\ndef f(n): return 1",
    "patched stdout": "import sys\nsys.stdout = sys.stderr = None\ndef f(n): return 1",
    "prints the verdict": "def f(n):\n    print('OK', 'passed', True)\n    return 'all tests passed'",
    "exits with success": "import os\nos._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "exits at the call": "import os\ndef f(n): os._exit(0)",
    "ends well without a function": "exit()",
    "ends well as often as one likes": "def f(n): exit(0)\nexit(0)",
    "a class that has everything": "class Solution:\n    def __getattr__(self, name): return lambda *args: True",
    "an exit code that equals all": "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "def f(n): return A()\nraise SystemExit(A())",
    "replaces the harness": "import __main__, sys\n__main__.encode = lambda *a: {'$any': 1}\n"
    "__main__.call_all = print\ndef f(n): return 1",
    "searches the frames": "import sys\ndef f(n):\n    frame, seen = sys._getframe(), []\n    while frame:\n"
    "        seen += list(frame.f_locals.values()) + list(frame.f_globals.values())\n        frame = frame.f_back\n"
    "    words = [w for w in map(str, seen) if len(w) == 10 and '-' in w]\n    return words[0] if words else None",
    "searches memory": "import gc\ndef f(n):\n    held = gc.get_referents(*gc.get_objects())\n"
    "    words = [w for w in held if type(w) is str and len(w) == 10 and w[6] == '-']\n    return words[0]",
    "forges every line": "import os, sys\nhere = sys._getframe(1).f_locals\n"
    "for i in range(-1, 9):\n    for v in 'ab':\n"
    "        os.write(here['out'], ('\\n%s %d {\"value\": \"%s\"}\\n' % (here['mark'], i, v)).encode())\n"
    "def f(n): return 1",
    "forges a pass": "import os, sys\nhere = sys._getframe(1).f_locals\nfor i in range(-1, 9):\n"
    "    os.write(here['out'], ('\\n%s %d {\"passed\": true}\\n' % (here['mark'], i)).encode())\nos._exit(0)",
    "floods the results": "def f(n): return 'x' * 10_000_000",
    "nests without end": "def f(n):\n    a = []\n    for _ in range(100_000): a = [a]\n    return a",
    "a loop of itself": "def f(n):\n    a = {}\n    a[1] = a\n    return a",
    "a huge number": "def f(n): return 10 ** 100_000",
    "raises from repr": "class A(Exception):\n    def __str__(self): raise RuntimeError\ndef f(n): raise A",
    "a class for a method": "class A(dict):\n    def items(self): return 1 / 0\ndef f(n): return A(a=1)",
    "closes everything": "import os\nos.closerange(0, 100)\ndef f(n): return 1",
    "thread that forges later": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
    "def f(n): return 1",
}  # fmt: skip


@pytest.fixture(scope="module")
def attacked():
    """(score of CodeTests, of CodeRuns) for every attack, in one batch beside an honest program."""
    honest = "def f(n):\n    return {3: 'orange-417', 4: 'violet-902', 5: 'silver-633'}[n]"
    codes = [block(code) for code in [*ATTACKS.values(), honest]]
    columns = {"tests": [json.dumps(SECRET)] * len(codes), "entry_point": ["f"] * len(codes)}
    one = runner()
    tests, runs = CodeTests(one), CodeRuns(one)
    scores = zip(
        tests(codes, prefill=PREFILL, **columns),
        runs(codes, prefill=PREFILL, **columns),
        strict=True,
    )
    return dict(zip([*ATTACKS, "honest"], scores, strict=True))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_earns_nothing(name, attacked):
    assert attacked[name][0] == 0.0
    # the trainer goes on: the rest of the batch is scored
    assert attacked["honest"] == (1.0, 1.0)


@pytest.mark.skipif(UNSAFE, reason="nothing isolates programs here")
def test_the_file_of_problems_cannot_be_read():
    path = Path(code_runner.__file__).parent / "data" / "code_problems.json"
    reads = (
        f"def f(path):\n    with open({str(path)!r}) as file:\n        return len(file.read())"
    )
    (outcome,) = SHARED.run([Job(reads, "f", (f"({str(path)!r},)",))])
    assert path.is_file()
    assert outcome.answers[0].kind == "error"
    assert outcome.error.startswith(("PermissionError", "FileNotFoundError"))


def test_expected_answers_never_enter_the_child():
    tests = read_tests(SECRET)
    job = Job("def f(n): pass", "f", tuple(test.args for test in tests))
    ((program, stdin),) = programs_of(job, "mark")
    assert "(3,)" in program
    assert not any(expected in program + stdin for _, expected in SECRET)
    stdin_job = Job("print(1)", None, tuple(test.stdin for test in read_tests(ADD)))
    assert [stdin for _, stdin in programs_of(stdin_job, "mark")] == ["3 4\n", "1 1\n"]


def given_to_the_sandbox(monkeypatch):
    """The (code, stdin) of every program from here on."""
    seen = []
    monkeypatch.setattr(
        code_runner,
        "run_python_batch",
        lambda p, **limits: seen.extend(p) or run_python_batch(p, **limits),
    )
    return seen


def test_what_the_sandbox_is_given_holds_no_expected_answer(monkeypatch):
    seen = given_to_the_sandbox(monkeypatch)
    assert share("def f(n):\n    return 1", SECRET, reward=CodeTests(runner())) == 0.0
    assert len(seen) == 1
    assert not any(expected in text for text in seen[0] for _, expected in SECRET)


# --- together --------------------------------------------------------------------------------------------


def rewards_of(shared):
    return [CodeFormat(), CodeRuns(shared), CodeTests(shared)]


def test_partial_credit_comes_in_order():
    total = WeightedSum(list(zip(rewards_of(SHARED), [0.125, 0.125, 0.75], strict=True)))
    assert total.columns == ("tests",)
    completions = [
        "no block",
        "def f(n:\n```",
        "def f(n):\n    return x\n```",
        "def f(n):\n    return None\n```",
        "def f(n):\n    return 0\n```",
        "def f(n):\n    return n * 2\n```",
    ]
    n = len(completions)
    scores = total(
        completions, prefill=PREFILL, tests=[json.dumps(DOUBLE)] * n, entry_point=["f"] * n
    )
    assert scores == [0.03125, 0.125, 0.1875, 0.25, 0.4375, 1.0]


def test_rewards_that_share_a_runner_run_a_program_once(monkeypatch):
    seen = given_to_the_sandbox(monkeypatch)
    shared = runner()
    codes = [block("def f(n):\n    return n * 2"), block("def f(n):\n    return n")]
    batch = [codes[0], codes[1], codes[0], codes[0]]
    columns = {"tests": [json.dumps(DOUBLE)] * 4, "entry_point": ["f"] * 4}
    assert CodeRuns(shared)(batch, prefill=PREFILL, **columns) == [1.0] * 4
    assert CodeTests(shared)(batch, prefill=PREFILL, **columns) == [1.0, 0.25, 1.0, 1.0]
    assert len(seen) == 2


def test_none_only_where_there_are_no_tests():
    codes = [block("def f(n):\n    return n * 2")] * 4 + ["no block"]
    columns = {"tests": [None, "", "[]", json.dumps(DOUBLE), None], "entry_point": ["f"] * 5}
    assert CodeTests(SHARED)(codes, prefill=PREFILL, **columns) == [None, None, None, 1.0, None]
    assert CodeRuns(SHARED)(codes, prefill=PREFILL, **columns) == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_the_order_of_the_batch_does_not_matter():
    codes = [
        block(code)
        for code in (
            "def f(n): return n * 2",
            "def f(n): return 0",
            "x =",
            "def f(n): return n",
        )
    ]
    codes += ["", "x", [{"role": "assistant", "content": block("def f(n): return n * 2")}]]
    order = list(range(len(codes)))
    random.Random(0).shuffle(order)
    columns = {"tests": [json.dumps(DOUBLE)] * len(codes), "entry_point": ["f"] * len(codes)}
    for make in (CodeFormat, lambda: CodeRuns(runner()), lambda: CodeTests(runner())):
        plain = make()(codes, prefill=PREFILL, **columns)
        mixed = make()([codes[i] for i in order], prefill=PREFILL, **columns)
        assert mixed == [plain[i] for i in order]
        assert len(set(plain)) > 1


@given(st.lists(PIECES.map("".join), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_any_text_is_scored_in_the_range(texts):
    texts = [text + "\n```" for text in texts]
    columns = {"tests": [json.dumps(DOUBLE)] * len(texts), "entry_point": ["f"] * len(texts)}
    for reward in (CodeRuns(SHARED), CodeTests(SHARED)):
        assert all(0 <= score <= 1 for score in reward(texts, prefill=PREFILL, **columns))


def test_a_sandbox_that_is_not_there_is_no_score(monkeypatch):
    monkeypatch.setattr(sandbox, "_working", lambda: (None, ["no isolation here"]))
    for reward in (CodeRuns(CodeRunner()), CodeTests(CodeRunner())):
        with pytest.raises(SandboxUnavailableError):
            reward(
                [block("def f(n): pass")], prefill=PREFILL, tests=[DOUBLE], entry_point=["f"]
            )
        # nothing to run
        assert reward(["no block"], tests=[DOUBLE], entry_point=["f"]) == [0.0]


# --- cheating --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", [PREFILL, ""])
@pytest.mark.parametrize(
    ("code", "tests", "entry_point"),
    [
        ("def f(n):\n    return n * 2", DOUBLE, "f"),
        ("class Solution:\n    def f(self, n):\n        return n * 2", DOUBLE, "Solution().f"),
        ("a, b = map(int, input().split())\nprint(a + b)", ADD, None),
    ],
    ids=["calls", "method", "stdin"],
)
def test_no_cheat_pays(code, tests, entry_point, prefill):
    columns = {"tests": json.dumps(tests), "entry_point": entry_point}
    opening = "" if prefill else PREFILL
    honest = Case(
        "honest", opening + block(code), honest=True, prefill=prefill, columns=columns
    )
    rewards = rewards_of(SHARED)
    cheats = [cheat for reward in rewards for cheat in reward.cheats(honest)]
    assert len({cheat.name for cheat in cheats}) == len(cheats) > 20
    table = check_rewards(rewards, [honest, *cheats], weights=[0.125, 0.125, 0.75])
    assert table["total"].iloc[0] == 1.0
    assert (table["total"].iloc[1:] < 1.0).all()


def test_a_test_set_that_a_constant_passes_is_found():
    columns = {"tests": json.dumps([[[1], True], [[2], True]]), "entry_point": "f"}
    honest = Case(
        "honest",
        block("def f(n):\n    return n > 0"),
        honest=True,
        prefill=PREFILL,
        columns=columns,
    )
    reward = CodeTests(SHARED)
    with pytest.raises(ValueError, match="'the most frequent expected value' .* ties with"):
        check_rewards(reward, [honest, *reward.cheats(honest)])


def test_a_stdin_program_may_print_as_much_as_a_result_may_hold():
    tests = [{"stdin": "", "stdout": "x" * 30_000}]
    made = CodeTests()(
        [f"```python\nprint('x' * {n})\n```" for n in (30_000, 40_000)], tests=[tests] * 2
    )
    assert made == [1.0, 0.0]
    runner = CodeRunner()
    runner.run([Job("print('x' * 40_000)", None, ("",))])
    (outcome,) = runner._kept.values()
    assert [answer.value for answer in outcome.answers] == [None]  # not kept in memory
    with pytest.raises(ValueError, match="test 0 has a stdout of 40000 characters"):
        read_tests([{"stdin": "", "stdout": "x" * 40_000}])
