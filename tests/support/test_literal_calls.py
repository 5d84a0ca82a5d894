"""The one reader of calls with literal arguments: what it reads, what it refuses, and that nothing is evaluated."""

import ast
import warnings

import pytest

from grpo_kit.more.code._literal_calls import (
    call_from_node,
    call_from_text,
    literal_value,
    parse_quietly,
    value_from_text,
)


@pytest.mark.parametrize(
    ("text", "name", "arguments", "keywords"),
    [
        ("f()", "f", (), {}),
        ("  f( 1 , ) \n", "f", (1,), {}),
        ("math.sqrt(2)", "math.sqrt", (2,), {}),
        ("f('a, b)', \"it's\")", "f", ("a, b)", "it's"), {}),
        (r"f('a\d\n')", "f", ("a\\d\n",), {}),
        ("f(-1, +2.5, -0.0)", "f", (-1, 2.5, 0.0), {}),
        (
            "f([1, [2, (3, [])]], {'a': {'b': None}})",
            "f",
            ([1, [2, (3, [])]], {"a": {"b": None}}),
            {},
        ),
        ("f(1, b=True, a='x')", "f", (1,), {"b": True, "a": "x"}),
        ("f(\n  1,\n  key=2,  # two\n)", "f", (1,), {"key": 2}),
    ],
)
def test_calls(text, name, arguments, keywords):
    call = call_from_text(text)
    assert call == (name, arguments, keywords)
    assert list(call.keywords) == list(keywords)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no expression"),
        ("f(1", "no expression"),
        ("f(1); g(2)", "no expression"),
        ("x = f(1)", "no expression"),
        ("f", "no call"),
        ("[f(1)]", "no call"),
        ("f(1)(2)", "no plain name"),
        ("f[0](2)", "no plain name"),
        ("(lambda: 1)()", "no plain name"),
        ("f(*[1, 2])", r"\* and \*\*"),
        ("f(**{'a': 1})", r"\* and \*\*"),
        ("f(a=1, b=2, a=1)", "the keyword a is given twice"),
        ("f(x)", "malformed"),
        ("f(True and x)", "malformed"),
        ("f(1 + 2)", "malformed"),
        ("f(g(1))", "malformed"),
        ("f(f'{1}')", "malformed"),
        ("f({[]: 1})", "no literal"),
        ("f('a\0')", "no expression"),
        ("f(" + "[" * 500 + "]" * 500 + ")", "no"),
        ("f(" + "1," * 5000 + ")", "10003 characters; at most 10000"),
    ],
)
def test_everything_else_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        call_from_text(text)


def test_the_longest_text_that_is_read():
    text = f"f('{'a' * 9995}')"
    assert len(text) == 10_000 and call_from_text(text).arguments == ("a" * 9995,)


def test_names_are_not_evaluated(tmp_path):
    target = tmp_path / "made"
    for text in (
        f"open({str(target)!r}, 'w')",
        f"f(open({str(target)!r}, 'w'))",
        f"f(a=open({str(target)!r}, 'w'))",
    ):
        try:
            call_from_text(text)
        except ValueError:
            pass
    assert not target.exists()


def test_values():
    assert value_from_text(" {'a': [1, -2.5, None, b'x', {3}]} ") == {
        "a": [1, -2.5, None, b"x", {3}]
    }
    assert value_from_text("'16'") == "16" and value_from_text("16") == 16
    for text in ("name", "1 +", "f(1)", "", "9" * 10_001):
        with pytest.raises(ValueError):
            value_from_text(text)


def test_a_caller_brings_its_own_values():
    """Names as values, as in calls of tools; literal_value refuses them."""

    def value(node):
        return ("name", node.id) if isinstance(node, ast.Name) else literal_value(node)

    node = ast.parse("f(on, 1, k=off)", mode="eval").body
    assert call_from_node(node, value) == ("f", (("name", "on"), 1), {"k": ("name", "off")})
    with pytest.raises(ValueError):
        call_from_node(node)


def test_no_warning_for_what_a_model_wrote():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call_from_text(r"f('\d')").arguments == ("\\d",)
        assert parse_quietly("x = '\\d'") is not None and parse_quietly("x =") is None
