"""tools: rows are what they say, shortcuts earn what is stated, cheats do not pay."""

import re
from dataclasses import replace

import pytest

from examples import tools as tools_module
from examples.tools import OPERATIONS, tools
from grpo_kit.more.episodes._tool_call_syntax import parse_calls
from grpo_kit.more.episodes.tool_calls import CallValidity, call_reward
from grpo_kit.rewards import SoftFormat, check_rewards
from grpo_kit.tasks.task import strategy_rewards

SMALL = {"n_train": 40, "n_held_out": 30}

_SAID = [  # how a person reads each request, written apart from the generator
    (r"turn (?P<b>on|off) the lamp in the (?P<a>\w+)", 'lamp("{a}", "{b}")'),
    (r"switch the (?P<a>\w+) lamp (?P<b>on|off)", 'lamp("{a}", "{b}")'),
    (r"(?P<b>lock|unlock) the (?P<a>\w+) door", 'door("{a}", "{b}")'),
    (r"see to it that the (?P<a>\w+) door is (?P<b>lock|unlock)ed", 'door("{a}", "{b}")'),
    (r"heat the oven to (?P<a>\d+) degrees", "oven({a})"),
    (r"set the oven to (?P<a>\d+)", "oven({a})"),
    (r"heat the (?P<a>\w+) to (?P<b>\d+) degrees", 'heating("{a}", {b})'),
    (r"set the heating in the (?P<a>\w+) to (?P<b>\d+)", 'heating("{a}", {b})'),
    (r"lower the blinds in the (?P<a>\w+) to (?P<b>\d+) percent", 'blinds("{a}", {b})'),
    (r"put the (?P<a>\w+) blinds at (?P<b>\d+) %", 'blinds("{a}", {b})'),
    (r"start a timer of (?P<a>\d+) minutes", "timer({a})"),
    (r"remind me in (?P<a>\d+) minutes", "timer({a})"),
]


def _understood(question):
    text = question[0].lower() + question[1:].removesuffix(".")
    text, _, first = text.partition(", but first ")
    calls = []
    for words in [
        *([first] if first else []),
        *re.split(r", then | and then |, after that ", text),
    ]:
        pattern, call = next((p, c) for p, c in _SAID if re.fullmatch(p, words))
        calls.append(call.format(**re.fullmatch(pattern, words).groupdict()))
    return calls


def test_the_calls_are_what_the_question_asks_for():
    task = tools()
    for row in task.train + task.held_out:
        assert row["calls"] == _understood(row["question"]) == row["answer"].split("; ")
        assert parse_calls("\n".join(row["calls"])) == parse_calls(row["answer"])
    assert {len(row["calls"]) for row in task.train} == {1, 2, 3}
    turned = sum("but first" in row["question"] for row in task.train) / len(task.train)
    assert 0.1 < turned < 0.25
    assert {call.partition("(")[0] for row in task.train for call in row["calls"]} == set(
        OPERATIONS
    )


def test_tools_rows_are_distinct_disjoint_and_seeded():
    task, again, other = tools(seed=3, **SMALL), tools(seed=3, **SMALL), tools(seed=4, **SMALL)
    questions = [row["question"] for row in task.train + task.held_out]
    assert len(set(questions)) == 70
    assert task.examples[0][0] not in questions
    assert (again.train, again.held_out) == (task.train, task.held_out)
    assert other.train != task.train
    assert {len(row["calls"]) for row in tools(calls=(5, 5), **SMALL).train} == {5}


def test_the_gold_earns_full_accuracy_in_any_spelling_and_the_example_is_right():
    task = tools(**SMALL)
    question, response = task.examples[0]
    assert _understood(question) == response.removeprefix("<answer>").removesuffix(
        "</answer>"
    ).split("; ")
    for row in task.held_out:
        spelled = row["answer"].replace('"', "'").replace("; ", "\n")
        assert task.is_correct(spelled, row)
        assert task.is_correct(f"[{', '.join(row['calls'])}]", row)
        assert not task.is_correct("no idea", row)
        assert not task.is_correct(row["answer"] + "; timer(1)", row)
        batch = {name: [value] for name, value in row.items()}
        scores = [
            reward([f"{spelled}</answer>"], prefill=["<answer>"], **batch)[0]
            for reward in task.rewards
        ]
        assert scores == [pytest.approx(1 - 0.125 * len(row["calls"]) / 50), 1.0]
        assert CallValidity(OPERATIONS)([f"<answer>{spelled}</answer>"]) == [1.0]
    assert all(name in task.system for name in OPERATIONS)


def test_tools_strategies_earn_what_the_docstring_says():
    task = tools()
    accuracies, rewards = task.constant_accuracies(), strategy_rewards(task)
    stated = re.findall(
        r"^\| (always .+?) +\| ([\d.]+) % \| ([\d.]+) +\|$", tools_module.__doc__, re.MULTILINE
    )
    assert [name for name, *_ in stated] == list(rewards)
    for name, accuracy, mean in stated:
        assert (f"{100 * accuracies[name]:.1f}", f"{rewards[name]:.3f}") == (accuracy, mean)
    usual = replace(
        task, rewards=[call_reward(OPERATIONS, weights=(0.4, 0.5, 0.1)), SoftFormat(think=None)]
    )
    assert f"earns {max(strategy_rewards(usual).values()):.2f} of" in tools_module.__doc__
    with pytest.raises(ValueError, match="rows is empty"):
        strategy_rewards(task, [])


def test_no_cheat_pays_in_tools():
    table = check_rewards((task := tools(n_train=8, n_held_out=40)).rewards, task, rows=40)
    assert {
        "all calls twice",
        "unknown operation",
        "calls as a list of texts",
        "nothing, commented",
    } <= set(table["case"])


@pytest.mark.parametrize("calls", [(0, 2), (3, 2), (1, 6)])
def test_calls_that_cannot_be_met_are_named(calls):
    with pytest.raises(ValueError, match=re.escape(f"calls={calls!r}")):
        tools(calls=calls)
