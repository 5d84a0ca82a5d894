"""Other people's environments as ours, and ours as theirs."""

import json
from pathlib import Path

import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template

from examples.tool_env import (
    ToolCall,
    describe_tool,
    for_trl,
    from_tools,
    from_trl,
    read_calls,
    sums,
)
from grpo_kit.more.episodes import EpisodeTask, grid
from grpo_kit.more.episodes.environment import VectorEnv
from grpo_kit.more.episodes.grid_world import Grid

ROW = {"question": "What is 2 + 3?", "answer": "5"}
START = {"question": "go", "size": 3, "start": [2, 0], "door": [0, 0]}


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: one
        b: other
    """
    return a + b


def judge(row, text):
    return float(row["answer"] in text)


@pytest.mark.parametrize(
    "text, name, arguments, why",
    [
        (
            '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
            "add",
            {"a": 2},
            "Qwen's tags",
        ),
        (
            '{"name": "add", "arguments": "{\\"a\\": 2}"}',
            "add",
            {"a": 2},
            "arguments as text, as servers send them",
        ),
        (
            'Let me see. {"name": "add", "parameters": {"a": 2}} ok',
            "add",
            {"a": 2},
            "Llama's word for arguments",
        ),
        (
            '{"name": "f", "arguments": {"x": {"y": 1}}}',
            "f",
            {"x": {"y": 1}},
            "braces in braces",
        ),
        ("add(2, b=3)", "add", {"0": 2, "b": 3}, "Python's call syntax"),
        ("I call add([1, 2]) now", "add", {"0": [1, 2]}, "a list"),
    ],
)
def test_calls_are_read_in_every_form(text, name, arguments, why):
    assert read_calls(text) == [ToolCall(name, arguments)], why


@pytest.mark.parametrize(
    "text", ["", "the sum is 5", "{not json}", "f(x", "f(__import__('os'))", '{"a": 1}']
)
def test_what_is_no_call_is_none_and_nothing_is_run(text):
    assert not any(read_calls(text))


def test_tools_are_called_until_a_text_calls_none():
    world = VectorEnv(from_tools([add], judge))
    (seen,) = world.reset([ROW])
    assert "add(a: int, b: int = 1) -> int: Add two numbers." in seen
    found = world.step({0: "add(2, 3)"}, 1)[0]
    assert (found.observation, found.reward, found.done, found.invalid) == (
        "5",
        0.0,
        False,
        False,
    )
    found = world.step({0: "It is 5."}, 2)[0]
    assert (found.reward, found.done) == (1.0, True)


@pytest.mark.parametrize(
    "text, said",
    [
        ("sub(2, 3)", "There is no tool sub; there are add."),
        ("add()", "add: missing a required argument: 'a'"),
        ("add(2, c=3)", "add: got an unexpected keyword argument 'c'"),
    ],
)
def test_calls_that_fit_no_tool_are_invalid(text, said):
    world = VectorEnv(from_tools([add], judge))
    world.reset([ROW])
    found = world.step({0: text}, 1)[0]
    assert found.observation == said and found.invalid and not found.done


def test_a_tool_that_raises_is_for_the_model_to_read():
    world = VectorEnv(from_tools([add], judge))
    world.reset([ROW])
    found = world.step({0: 'add("x", 3)'}, 1)[0]
    assert found.observation.startswith("TypeError") and not found.invalid


class Counter:
    """As trl's environment_factory takes them."""

    def reset(self, start=0, **row):
        self.value = start
        return f"The counter stands at {start}."

    def up(self, by: int) -> int:
        """Raise the counter.

        Args:
            by: how far
        """
        self.value += by
        return self.value

    def get_reward(self):
        return float(self.value == 3)


def test_trls_environments_are_played_and_earn_what_they_say():
    world = VectorEnv(from_trl(Counter))
    (seen,) = world.reset([{"question": "Make it 3.", "start": 1}])
    assert (
        seen.startswith("The counter stands at 1.")
        and "up(by: int) -> int" in seen
        and "get_reward" not in seen
    )
    assert world.step({0: "up(2)"}, 1)[0].observation == "3"
    assert world.step({0: "done"}, 2)[0][1:3] == (1.0, True)


def test_trls_environments_without_a_judgement_are_refused():
    with pytest.raises(ValueError, match="Silent has no get_reward; give judge"):
        from_trl(type("Silent", (), {"reset": lambda self, **row: None}))()
    with pytest.raises(ValueError, match="has no reset"):
        from_trl(type("Bare", (), {}))()


def test_ours_are_classes_that_trl_plays():
    made = for_trl(Grid)()
    assert made.reset(**START) == "The door is above you."
    assert made.act("up") == "The door is above you." and made.get_reward() == 0.0
    assert made.act("up") == "You are through the door." and made.get_reward() == 1.0
    assert made.act("up") == "It is over."
    made.reset(**START)
    assert made.get_reward() == 0.0


def test_a_tool_is_described_in_one_line():
    assert describe_tool(add) == "add(a: int, b: int = 1) -> int: Add two numbers."
    assert describe_tool(lambda x: x) == "<lambda>(x)"


def test_an_episode_that_runs_out_of_turns_is_paid_as_trl_pays():
    task = grid(n_train=8, n_held_out=8)
    both = EpisodeTask(
        "same",
        task.train,
        task.held_out,
        from_trl(for_trl(Grid)),
        max_turns=task.max_turns,
        success=1.0,
    )

    def act(row, rng):
        move = task.optimum(row, rng)
        return lambda seen: f"act({move(seen)!r})"

    assert task.score(task.optimum) == both.score(act) == 1.0


@pytest.mark.parametrize("inside", ["[1]", "3", '"x"', "[]", "null", '{"name": 3}'])
def test_what_is_no_call_is_read_as_none_and_is_invalid(inside):
    text = f"<tool_call>{inside}</tool_call>"
    assert read_calls(text) == [None]
    world = VectorEnv(from_tools([add], lambda row, text: 1.0))
    world.reset([{"question": "q"}])
    found = world.step({0: text}, 1)[0]
    assert (
        found.invalid and not found.done and found.observation == "That call could not be read."
    )


def test_a_list_of_one_call_and_async_tools():
    (call,) = read_calls('<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>')
    assert call.name == "add"

    async def later(a: int) -> int:
        return a

    with pytest.raises(ValueError, match="tool later is async"):
        from_tools([later], lambda row, text: 1.0)


def test_sums_are_right_by_the_tool_and_by_no_guess():
    task = sums()

    def caller(row, rng):
        a, b = (word.rstrip("?") for word in row["question"].split()[2::2])
        return lambda seen: f"add({a}, {b})" if "Tools:" in seen else f"It is {seen}."

    def hedger(row, rng):
        return lambda seen: f"{row['answer']} or 7"

    assert task.score(caller) == task.score(caller, task.train) == 1.0
    assert task.score(hedger) == 0.0
    assert not {row["question"] for row in task.train} & {
        row["question"] for row in task.held_out
    }


# ---- several calls in one turn ----------------------------------------------------------------------------------

QWEN = {
    "the repository's": Path(__file__).parents[1] / "fixtures/qwen2.5_chat_template.jinja",
    "trl's": Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja",
}


def tagged(*calls):
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


TWO = tagged(("add", {"a": 2, "b": 3}), ("add", {"a": 10, "b": 20}))


@pytest.mark.parametrize(
    "text, sums, why",
    [
        (TWO, ["5", "30"], "Qwen's tags, one behind the other"),
        (f"Both at once.\n{TWO}", ["5", "30"], "words before them"),
        (
            '<tool_call>[{"name": "add", "arguments": {"a": 2, "b": 3}}, '
            '{"name": "add", "arguments": {"a": 10, "b": 20}}]</tool_call>',
            ["5", "30"],
            "a list in one tag",
        ),
        (
            '[{"name": "add", "parameters": {"a": 2, "b": 3}}, {"name": "add", "parameters": {"a": 1}}]',
            ["5", "2"],
            "a bare list",
        ),
        (
            '{"name": "add", "arguments": {"a": 2, "b": 3}}; {"name": "add", "arguments": {"a": 1}}',
            ["5", "2"],
            "objects in a row",
        ),
        ("add(2, 3)\nadd(10, b=20)", ["5", "30"], "Python's call syntax"),
        (f"{TWO}\n<tool_call>", ["5", "30", None], "cut off where a third begins"),
        (
            '{"thought": 1} {"name": "add", "arguments": {"a": 1}}',
            ["2"],
            "JSON between words that is no call is words",
        ),
    ],
)
def test_all_calls_of_a_turn_run_in_their_order(text, sums, why):
    world = VectorEnv(from_tools([add], judge))
    world.reset([ROW])
    found = world.step({0: text}, 1)[0]
    results = [each or "That call could not be read." for each in sums]
    expected = [f"<tool_response>\n{each}\n</tool_response>" for each in results]
    if len(results) == 1:
        expected = results
    assert found.observation == "\n".join(expected), why
    assert not found.done and found.invalid is (None in sums)


def test_calls_see_what_the_calls_before_them_did():
    world = VectorEnv(from_trl(Counter))
    world.reset([{"question": "Make it 3.", "start": 0}])
    found = world.step({0: "up(1) up(2)"}, 1)[0]
    assert found.observation == (
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    )
    assert world.step({0: "done"}, 2)[0][1:3] == (1.0, True)


def test_one_call_that_fails_is_answered_in_its_place_and_the_others_run():
    world = VectorEnv(from_tools([add], judge))
    world.reset([ROW])
    text = tagged(
        ("sub", {"a": 1}), ("add", {"c": 1}), ("add", {"a": "x", "b": 1}), ("add", {"a": 2})
    )
    found = world.step({0: text}, 1)[0]
    results = found.observation.split("</tool_response>\n<tool_response>")
    for said, each in zip(("no tool sub", "add: ", "TypeError", "\n3\n"), results, strict=True):
        assert said in each
    assert found.invalid and not found.done
    found = world.step({0: TWO}, 2)[0]
    assert not found.invalid, "the next turn begins anew"


@pytest.mark.parametrize("template", QWEN.values(), ids=QWEN)
def test_calls_and_results_are_those_of_qwens_template(template):
    """What the template makes of tool_calls is read; what it makes of tool messages is what the model reads here."""
    asked = [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}},
        {"type": "function", "function": {"name": "add", "arguments": {"a": 10, "b": 20}}},
    ]
    messages = [
        {"role": "user", "content": "Add them."},
        {"role": "assistant", "content": "", "tool_calls": asked},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "30"},
    ]
    (rendered,), _ = render_jinja_template([messages], chat_template=template.read_text())
    *_, written, read = rendered.split("<|im_start|>")
    written = written.removeprefix("assistant\n").removesuffix("<|im_end|>\n")
    read = read.removeprefix("user\n").removesuffix("<|im_end|>\n")
    world = VectorEnv(from_tools([add], judge))
    world.reset([ROW])
    assert world.step({0: written}, 1)[0].observation == read
