"""Bad inputs at every public door: a third of the campaign's cases here, all of them in its result."""

import json

import pytest

from benchmarks.bad_inputs.campaign import FINE, Case, campaign, cases, tried
from benchmarks.result import RESULTS

DOORS = {
    "Config", "preset", "load_policy", "GRPOTrainer", "tasks.from_rows", "tasks", "prompts", "rewards", "schedules",
    "evaluate", "readiness", "export", "chat", "plan_memory", "from_trl", "others", "command line",
}  # fmt: skip


def test_every_door_is_tried_and_no_case_stands_there_twice():
    found = cases()
    assert {one.door for one in found} == DOORS and len(found) > 700
    assert len({one.code for one in found}) == len(found)
    refused = [one for one in found if one.words]
    assert len(refused) > 650 and all(
        len(word) > 1 or word.isdigit() for one in refused for word in one.words
    )


@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_third_of_the_cases_of_each_door(door):
    chosen = [one for one in cases() if one.door == door][::3]
    wrong = [one for one in campaign(chosen) if one["outcome"] not in FINE]
    assert not wrong


@pytest.mark.parametrize("code, words, outcome", [
    ("int('x')", ("invalid literal", "'X'"), "refused"),
    ("int('x')", ("invalid literal", "name=3"), "unclear"),
    ("int('x')", (), "unclear"),
    ("int(None)", ("None",), "raw"),
    ("__import__('sys').exit(2)", ("2",), "raw"),
    ("int('3')", ("'3'",), "silent"),
    ("1 == 2", (), "silent"),
    ("1 == 1", (), "right"),
    ("(print('hm'), 'hm' in out.getvalue())[1]", (), "right"),
])  # fmt: skip
def test_what_became_of_a_case_is_told_apart(code, words, outcome):
    assert tried(Case("x", code, words), {})[0] == outcome


def test_the_result_is_of_these_cases():
    result = json.loads((RESULTS / "bad_inputs.json").read_text(encoding="utf-8"))
    assert (
        result["n"] == len(cases())
        and result["wrong"] == []
        and {*result["outcomes"]} == {*FINE}
    )
    assert {*result["by_door"]} == DOORS
