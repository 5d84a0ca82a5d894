"""Structure rewards: what is a sequence of calls, how far two are apart (by brute force), what each reward pays."""

import functools
import itertools
import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.more.episodes._tool_call_syntax import Call, call_distance, parse_calls
from grpo_kit.more.episodes.tool_calls import (
    CallAccuracy,
    CallEfficiency,
    CallShape,
    CallValidity,
    call_reward,
)
from grpo_kit.rewards import (
    Case,
    ExactAnswer,
    RewardCheckError,
    WeightedSum,
    check_rewards,
    crafted_cases,
)

OPERATIONS = {"add": 2, "mul": 2, "neg": 1, "say": None}
GOLD = ["add(2, 3)", "mul(x, 4)"]


def _score(reward, answer, **columns):
    return reward(
        [f"{answer}</answer>"],
        prefill="<answer>",
        **{name: [value] for name, value in columns.items()},
    )[0]


# --- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names", "reason"),
    [
        ("add(2, 3)", ["add"], "one call"),
        ("add(2, 3)\nmul(x, 4)", ["add", "mul"], "one a line"),
        ("add(2, 3); mul(x, 4);", ["add", "mul"], "semicolons, the last may stay"),
        (
            "  add(2,\n   3)\n\n\tmul(x, 4)\r\n",
            ["add", "mul"],
            "white space, also inside a call",
        ),
        ("add(2, 3)  # sum", ["add"], "a comment is no call"),
        ("say('a; b\\n')", ["say"], "a semicolon in a text, an escape"),
        ("say([1, (2, -3.5)], mode='x')", ["say"], "lists and keywords"),
        ("# nothing", [], "nothing but a comment"),
        ("", [], "nothing"),
        ("add(2, 3", None, "never closed"),
        ("add(2, 3) mul(x, 4)", None, "nothing between the calls"),
        ("add(2, 3), mul(x, 4)", None, "a tuple of calls is no sequence"),
        ("[add(2, 3), mul(x, 4)]", ["add", "mul"], "a list of calls is one"),
        ("[add(2, 3)]\n[mul(x, 4)]", ["add", "mul"], "also a list a line"),
        ("[]", [], "a list of none"),
        ("[add(2, 3), 4]", None, "a list of something else"),
        ("[[add(2, 3)]]", None, "a list in a list"),
        ("[add(x, 3) for x in y]", None, "a list that is worked out"),
        ("[add(2, 3)] or [mul(x, 4)]", None, "one list or another"),
        ("add(2, mul(3, 4))", None, "a call in a call"),
        ("x = add(2, 3)", None, "an assignment"),
        ("add(2, 3) + 1", None, "an operator"),
        ("add(2 + 3, 1)", None, "also inside"),
        ("math.sqrt(2)", ["math.sqrt"], "a dotted name"),
        ("a.b.c_d(2)", ["a.b.c_d"], "with several dots"),
        ("'x'.upper()", None, "a method of a value"),
        ("make().add(2, 3)", None, "or of what a call gives"),
        ("xs[0].add(2, 3)", None, "or of an item"),
        ("say({'a': [1, {'b': None}]})", ["say"], "a dict"),
        ("say({**x})", None, "two stars in a dict"),
        ("say({'a': 1, 'a': 2})", None, "a key twice"),
        ("say({1, 2})", None, "a set"),
        ("say({'a': add(2, 3)})", None, "a call in a dict"),
        ("add(2, 3)()", None, "the result called"),
        ("(lambda: 1)()", None, "a function made on the spot"),
        ("add(*xs)", None, "a star"),
        ("add(**xs)", None, "two stars"),
        ("add(a=1, a=2)", None, "a keyword twice"),
        ("add(-x, 1)", None, "a sign before a name"),
        ("add(-True, 1)", None, "or before a truth value"),
        ("add(f'{x}', 1)", None, "an f-string computes"),
        ("add(b'x', 1)", None, "bytes"),
        ("add(1j, 1)", None, "a complex number"),
        ("add(..., 1)", None, "an ellipsis"),
        ("add", None, "a name alone"),
        ("82", None, "a number"),
        ("import os", None, "a statement"),
        ("Turn on the lamp.", None, "words"),
        ("first add(2, 3)", None, "words before"),
        ("add(2, 3)\x00", None, "a NUL"),
        ("add('\ud800', 3)", None, "half a surrogate pair"),
        ("(" * 1000, None, "brackets without end"),
        ("say(" + "[" * 300 + "]" * 300 + ")", None, "lists without end"),
        ("say(" + "-" * 3000 + "1)", None, "signs without end"),
        ("say(" + "9" * 3990 + ")", ["say"], "a long number"),
        ("a()\n" * 1001, None, "more than 4,000 characters"),
    ],
)
def test_what_is_a_sequence_of_calls(text, names, reason):
    calls = parse_calls(text)
    assert (calls if calls is None else [call.name for call in calls]) == names, reason


def test_arguments_are_compared_by_value():
    same = [
        ("f(2)", "f(2.0)"),
        ("f('a')", 'f("a")'),
        ("f(a=1, b=2)", "f(b=2,a=1)"),
        ("f([1])", "f((1,))"),
        ("f({'a': 1, 'b': [2]})", "f({'b': (2.0,), 'a': 1.0})"),
        ("f(x={'a': {'c': 1, 'b': 2}})", "f(x={'a': {'b': 2, 'c': 1}})"),
        ("f(+1)", "f(1)"),
    ]
    other = [("f('a')", "f(a)"), ("f(1)", "f(True)"), ("f(0)", "f(False)"), ("f(1)", "f('1')"), ("f(1)", "f(-1)"),
             ("f(1)", "f(a=1)"), ("f()", "g()"), ("f(1, 2)", "f(2, 1)"), ("f(None)", "f()"),
             ("f({'a': 1})", "f({'a': True})"), ("f({'a': 1})", "f({'a': 1, 'b': None})"),
             ("f({'a': x})", "f({'a': 'x'})"),
             ("f({1: 2})", "f({'1': 2})"), ("f({})", "f([])"), ("a.f()", "f()"), ("a.f()", "b.f()")]  # fmt: skip
    assert all(parse_calls(a) == parse_calls(b) for a, b in same)
    assert not any(parse_calls(a) == parse_calls(b) for a, b in other)


def test_reading_neither_runs_nor_warns(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_calls(r"say('\d')") == [Call("say", (("text", r"\d"),))]
        assert parse_calls("say(1or 2)") is None
        assert parse_calls("'a'(1)") is None
        assert parse_calls("print(1)") == [Call("print", (("number", 1),))]
    assert capsys.readouterr().out == ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert parse_calls("say(0xfor 2)") is parse_calls("say(1jif 2 else 3)") is None
    assert warned == []


# --- distance --------------------------------------------------------------------------------------------

VALUE = st.sampled_from(["1", "2", "x", "'x'", "True"])
CALL_TEXT = st.builds(
    lambda name, given, named: (
        f"{name}({', '.join([*given, *(f'{k}={v}' for k, v in named.items())])})"
    ),
    st.sampled_from(["add", "mul", "neg"]),
    st.lists(VALUE, max_size=3),
    st.dictionaries(st.sampled_from("ab"), VALUE, max_size=2),
)
SEQUENCE = st.lists(CALL_TEXT, max_size=4)


def _difference(a, b):
    """Half the share of arguments that differ, counted slot by slot."""
    if a.name != b.name:
        return 1
    longest = max(len(a.arguments), len(b.arguments))
    wrong = sum(x != y for x, y in itertools.zip_longest(a.arguments, b.arguments))
    names = {key for key, _ in a.keywords + b.keywords}
    wrong += sum(dict(a.keywords).get(key) != dict(b.keywords).get(key) for key in names)
    return wrong / (longest + len(names)) / 2 if longest + len(names) else 0


def _by_recursion(a, b):
    """The cheapest of all ways to edit a into b: leave out, add, or put in place of, from the front."""

    @functools.cache
    def cost(i, j):
        ways = []
        if i < len(a):
            ways.append(1 + cost(i + 1, j))
        if j < len(b):
            ways.append(1 + cost(i, j + 1))
        if i < len(a) and j < len(b):
            ways.append(_difference(a[i], b[j]) + cost(i + 1, j + 1))
        return min(ways, default=0)

    return cost(0, 0) / max(len(a), len(b), 1)


def _all_alignments(a, b):
    """The same over every order-keeping pairing of some calls of a with some of b; the rest costs 1 each."""
    best = len(a) + len(b)
    for size in range(1, min(len(a), len(b)) + 1):
        for left in itertools.combinations(a, size):
            for right in itertools.combinations(b, size):
                cost = sum(map(_difference, left, right)) + len(a) + len(b) - 2 * size
                best = min(best, cost)
    return best / max(len(a), len(b), 1)


@given(SEQUENCE, SEQUENCE)
def test_the_distance_is_that_of_all_alignments(first, second):
    a, b = (parse_calls("; ".join(texts)) for texts in (first, second))
    distance = call_distance(a, b)
    assert (
        distance == pytest.approx(_by_recursion(a, b)) == pytest.approx(_all_alignments(a, b))
    )
    assert 0 <= distance <= 1
    assert call_distance(b, a) == pytest.approx(distance)
    assert (distance == 0) == (a == b)


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_with_names_alone_it_is_levenshteins_distance(first, second):
    def levenshtein(a, b):
        if not a or not b:
            return len(a or b)
        return min(
            levenshtein(a[1:], b) + 1,
            levenshtein(a, b[1:]) + 1,
            levenshtein(a[1:], b[1:]) + (a[0] != b[0]),
        )

    a, b = ([Call(name, ()) for name in text] for text in (first[:5], second[:5]))
    assert call_distance(a, b) * max(len(a), len(b)) == pytest.approx(
        levenshtein(first[:5], second[:5])
    )


@pytest.mark.parametrize(
    ("answer", "distance", "reason"),
    [
        ("add(2, 3); mul(x, 4)", 0, "the gold"),
        (
            "add(2, 3); mul(x, 5)",
            0.125,
            "one of two arguments of one of two calls: 1/2 x 1/2 / 2",
        ),
        ("add(3, 2); mul(x, 4)", 0.25, "both arguments: 1/2 / 2"),
        ("add(2); mul(x, 4)", 0.125, "one is missing"),
        ("add(2, 3, 4); mul(x, 4)", 1 / 12, "one of three too many: 1/3 x 1/2 / 2"),
        (
            "add(a=2, b=3); mul(x, 4)",
            0.25,
            "keywords are other arguments: no operation says their order",
        ),
        ("neg(2, 3); mul(x, 4)", 0.5, "another name: 1 / 2"),
        ("add(2, 3)", 0.5, "one left out"),
        ("mul(x, 4)", 0.5, "the other left out"),
        ("add(2, 3); neg(1); mul(x, 4)", 1 / 3, "one too many, of three"),
        (
            "mul(x, 4); add(2, 3)",
            1,
            "order turned round: two renamed, or one left out and one added",
        ),
        ("neg(1); neg(2)", 1, "nothing in common"),
    ],
)
def test_distances_worked_out_by_hand(answer, distance, reason):
    assert call_distance(parse_calls(answer), parse_calls("\n".join(GOLD))) == pytest.approx(
        distance
    ), reason
    assert _score(CallAccuracy(), answer, calls=GOLD) == pytest.approx(
        math.exp(-2 * distance)
    ), reason
    assert _score(CallAccuracy(alpha=0.5), answer, calls=GOLD) == pytest.approx(
        math.exp(-distance / 2)
    ), reason


# --- rewards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "validity", "shape", "efficiency", "reason"),
    [
        ("add(2, 3); mul(x, 4)", 1.0, 1.0, 0.96, "the gold"),
        ("mul(1, 1); add(1, 1)", 1.0, 1.0, 0.96, "shape sees neither order nor arguments"),
        (
            "add(2, 3)",
            1.0,
            2 / 3,
            0.98,
            "one of two: 2 x 1 / 3; fewer calls are more efficient",
        ),
        ("add(1, 1); neg(2)", 1.0, 0.5, 0.96, "one shared: 2 x 1 / 4"),
        ("neg(1); neg(2)", 1.0, 0.0, 0.96, "none shared"),
        ("; ".join(["add(1, 1)"] * 20), 1.0, 2 / 22, 0.6, "repeated"),
        ("\n".join(["neg(1)"] * 60), 1.0, 0.0, 0.0, "beyond n_max efficiency stays 0"),
        ("add(2, 3, 4); mul(x, 4)", 0.0, 1.0, 0.96, "too many arguments"),
        ("add(2); mul(x, 4)", 0.0, 1.0, 0.96, "too few"),
        ("add(a=2, b=3); mul(x, 4)", 1.0, 1.0, 0.96, "keywords count as arguments"),
        ("say(); say(1, 2, 3)", 1.0, 0.0, 0.96, "any number where None says so"),
        ("add(2, 3); rm(4)", 0.0, 0.5, 0.96, "one operation that nobody knows"),
        ("# nothing", 0.0, 0.0, 0.0, "no call is not efficient"),
        ("add(2, 3", 0.0, 0.0, 0.0, "cut off"),
        ("add and mul", 0.0, 0.0, 0.0, "words"),
    ],
)
def test_validity_shape_and_efficiency(answer, validity, shape, efficiency, reason):
    assert _score(CallValidity(OPERATIONS), answer) == validity, reason
    assert _score(CallShape(), answer, calls=GOLD) == pytest.approx(shape), reason
    assert _score(CallEfficiency(), answer) == pytest.approx(efficiency), reason


REWARDS = [
    CallValidity(OPERATIONS),
    CallAccuracy(),
    CallShape(),
    CallEfficiency(),
    call_reward(OPERATIONS),
]


@pytest.mark.parametrize("reward", REWARDS, ids=repr)
@pytest.mark.parametrize(
    ("completion", "prefill", "reason"),
    [
        ("add(2, 3); mul(x, 4)", "<answer>", "never closed"),
        ("add(2, 3); mul(x, 4)", "", "no tags"),
        ("add(2, 3)</answer><answer>mul(x, 4)</answer>", "<answer>", "two answers"),
        ("", "<answer>add(2, 3); mul(x, 4)</answer>", "the prefill answered"),
        ("```add(2, 3)```</answer>", "<answer>", "a code fence in a line is no call"),
        ("a()\n" * 25_000 + "</answer>", "<answer>", "100 kB"),
        ("", "", "nothing"),
    ],
)
def test_no_single_answer_of_calls_earns_nothing(reward, completion, prefill, reason):
    assert reward([completion], prefill=[prefill], calls=[GOLD]) == [0.0], reason


@pytest.mark.parametrize(
    "reward", [CallAccuracy(), CallShape(), call_reward(OPERATIONS)], ids=repr
)
@pytest.mark.parametrize(
    "gold", [None, "", [], ["# nothing"], "turn on", ["add(2, 3)", "add("]]
)
def test_without_a_gold_it_cannot_be_judged(reward, gold):
    assert _score(reward, "add(2, 3)", calls=gold) is None
    assert reward(["no calls"], calls=[gold]) == [None]


def test_the_gold_is_a_list_or_one_text_and_its_column_has_a_name():
    for gold in (GOLD, "; ".join(GOLD), "\n".join(GOLD), tuple(GOLD)):
        assert _score(CallAccuracy(), "add(2, 3); mul(x, 4)", calls=gold) == 1.0
    assert _score(CallShape(column="gold"), "add(2, 3)", gold="add(0, 0)") == 1.0
    assert CallAccuracy(tag="run")(["<run>neg(1)</run>"], calls=["neg(1)"]) == [1.0]
    for reward in (CallAccuracy(), CallShape()):
        assert reward.columns == ("calls",)
        with pytest.raises(
            ValueError, match=f"{reward.__name__!r} needs the data set column 'calls'"
        ):
            reward(["a"])
    assert CallValidity(OPERATIONS).columns == CallEfficiency().columns == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CallValidity({}), "operations={} is empty"),
        (lambda: CallValidity({"not a name": 1}), "'not a name'"),
        (lambda: CallValidity({"a.": 1}), "'a.'"),
        (lambda: CallValidity({"class": 1}), "'class'"),
        (lambda: CallValidity({"add": -1}), "'add': -1"),
        (lambda: CallValidity({"add": 1.5}), "'add': 1.5"),
        (lambda: CallValidity({"add": "2"}), "'add': '2'"),
        (lambda: CallAccuracy(alpha=0), "alpha=0"),
        (lambda: CallAccuracy(alpha=math.nan), "alpha=nan"),
        (lambda: CallAccuracy(alpha=math.inf), "alpha=inf"),
        (lambda: CallEfficiency(n_max=0), "n_max=0"),
        (lambda: CallShape(tag=""), "tag=''"),
        (lambda: CallShape(column=""), "column=''"),
        (lambda: call_reward(OPERATIONS, weights=(0.4, 0.5, 0.2)), "sum to 1"),
        (lambda: call_reward(OPERATIONS, weights=(0.5, 0.5)), r"weights=\(0.5, 0.5\)"),
    ],
)
def test_options_that_do_not_fit_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_worked_sum_and_what_settling_for_it_earns():
    advised, exact = call_reward(OPERATIONS, weights=(0.4, 0.5, 0.1)), call_reward(OPERATIONS)
    assert _score(advised, "add(2, 3); mul(x, 4)", calls=GOLD) == pytest.approx(
        0.4 + 0.5 + 0.1 * 0.96, abs=1e-6
    )
    assert _score(exact, "add(2, 3); mul(x, 4)", calls=GOLD) == 0.375 + 0.5 + 0.125 * 0.96
    floor = math.exp(-2)  # one valid call, right in nothing
    assert _score(advised, "neg(1)", calls=GOLD) == pytest.approx(
        0.4 + 0.5 * floor + 0.1 * 0.98, abs=1e-6
    )
    assert round(_score(advised, "neg(1)", calls=GOLD), 3) == 0.566
    assert round(_score(exact, "neg(1)", calls=GOLD), 3) == 0.565
    assert _score(advised, "rm(1)", calls=GOLD) == pytest.approx(
        0.5 * floor + 0.1 * 0.98, abs=1e-6
    )
    assert advised.names == ["call_validity", "call_accuracy", "call_efficiency"]


PIECES = st.sampled_from(
    [
        "add(",
        "2, 3)",
        ")",
        "; ",
        "\n",
        "neg(1)",
        "<answer>",
        "</answer>",
        "'",
        "\\",
        "\x00",
        "\ud800",
        "日",
        "#",
        "1or 2",
    ]
)
TEXT = st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=10).map("".join))
GOLDS = st.one_of(st.none(), TEXT, SEQUENCE)


@pytest.mark.parametrize("reward", REWARDS, ids=repr)
@given(st.lists(st.tuples(TEXT, TEXT, GOLDS), max_size=4))
def test_any_text_scores_in_range_and_the_order_of_the_batch_does_not_matter(reward, rows):
    completions, prefills, golds = ([row[i] for row in rows] for i in range(3))
    scores = reward(completions, prefill=prefills, calls=golds)
    assert all(score is None or 0 <= score <= 1 for score in scores)
    assert reward(completions[::-1], prefill=prefills[::-1], calls=golds[::-1]) == scores[::-1]


@given(SEQUENCE, SEQUENCE.filter(bool))
def test_full_accuracy_is_the_gold_and_nothing_else(given_calls, gold):
    score = _score(CallAccuracy(), "\n".join(given_calls), calls=gold)
    assert (score == 1.0) == (
        parse_calls("\n".join(given_calls)) == parse_calls("\n".join(gold))
    )


# --- cheats ----------------------------------------------------------------------------------------------


def _honest():
    return crafted_cases("; ".join(GOLD), "neg(1)", prefill="<answer>", columns={"calls": GOLD})


def _all_cases():
    honest = _honest()[0]
    parts = [CallValidity(OPERATIONS), CallAccuracy(), CallEfficiency()]
    return [*_honest(), *(case for part in parts for case in part.cheats(honest))]


@pytest.mark.parametrize("weights", [(0.4, 0.5, 0.1), (0.375, 0.5, 0.125)])
def test_no_cheat_pays_in_the_sum(weights):
    table = check_rewards(call_reward(OPERATIONS, weights=weights), _all_cases())
    assert {
        "all calls twice",
        "a call dropped",
        "unknown operation",
        "nothing, commented",
    } <= set(table["case"])
    check_rewards(CallAccuracy(), [*_honest(), *CallAccuracy().cheats(_honest()[0])])
    check_rewards(CallValidity(OPERATIONS), _all_cases())


@pytest.mark.parametrize(
    "reward",
    [CallValidity(OPERATIONS), CallValidity({"say": None}), CallEfficiency()],
    ids=repr,
)
def test_what_a_reward_without_a_gold_lists_earns_nothing_in_it(reward):
    cases = reward.cheats(_honest()[0])
    assert len(cases) >= 2
    assert [
        case.name
        for case in cases
        if reward([case.completion], prefill=[case.prefill]) != [0.0]
    ] == []


@pytest.mark.parametrize("gold", [None, "", []])
def test_a_row_without_a_gold_has_no_sequences_near_it(gold):
    honest = Case("honest", "<answer>neg(1)</answer>", honest=True, columns={"calls": gold})
    assert CallAccuracy().cheats(honest) == []
    with pytest.raises(RewardCheckError, match="cannot judge the honest"):
        check_rewards(CallAccuracy(), [honest, *CallAccuracy().cheats(honest)])


def test_its_own_list_catches_rewards_that_are_a_part_only():
    with pytest.raises(RewardCheckError, match="call_shape: 'order turned round' .* ties"):
        check_rewards(CallShape(), _all_cases())
    with pytest.raises(RewardCheckError, match="call_efficiency: 'a call dropped' .* outranks"):
        check_rewards(CallEfficiency(), _all_cases())
    lax = WeightedSum({CallShape(): 0.125, CallEfficiency(n_max=2): 0.875})
    with pytest.raises(RewardCheckError, match="'a call dropped' .* outranks"):
        check_rewards(lax, _all_cases())
    strict = ExactAnswer(column="text")
    cases = [
        case.__class__(**{**vars(case), "columns": {**case.columns, "text": "; ".join(GOLD)}})
        for case in _all_cases()
    ]
    check_rewards(strict, cases)  # none of the cheats is the gold in other words
