"""Policies that read no reply: which sequences are tried, that they know the goal, and what they score, by hand."""

from dataclasses import replace

import pytest

from examples.lookup import lookup
from grpo_kit.more.episodes import EpisodeTask, grid


class Lock:
    """Opens after row["code"], letter by letter; anything else shuts it for good. Never over by itself otherwise."""

    def reset(self, row):
        self.code, self.invalid = list(row["code"]), False
        return "It is shut."

    def step(self, text):
        if self.code is None or text != self.code.pop(0):
            self.code = None
            return "It stays shut.", 0.0, False
        return "Click.", float(not self.code), not self.code


def task(codes, actions, **options):
    rows = [{"question": f"Open number {i}.", "code": code} for i, code in enumerate(codes)]
    more = [{"question": "Open another.", "code": "a"}]
    options = {"max_turns": 4, **options}
    return EpisodeTask("lock", more, rows, Lock, actions=actions, **options)


@pytest.mark.parametrize(
    "actions, max_turns, most, why",
    [
        (4, 4, 4, "256"),
        (4, 6, 6, "4,096"),
        (4, 7, 6, "16,384 are too many"),
        (64, 4, 2, "4,096"),
        (65, 4, 1, "4,225 are too many"),
        (25, 4, 2, "lookup's"),
        (5000, 4, 1, "one action always is tried"),
        (1, 3, 3, "there is one sequence"),
    ],
)
def test_how_long_the_sequences_are(actions, max_turns, most, why):
    assert (
        task(["a"], tuple(map(str, range(actions))), max_turns=max_turns)._longest_plan()
        == most
    ), why


def test_sequences_go_on_from_the_start_until_the_episode_ends():
    others = tuple(f"other {i}" for i in range(62))
    found = task(["abab", "abab", "aaaa", "abba"], ("a", "b", *others)).blind()
    assert found["always a, b"] == 0.5  # two of four locks
    one_more = task(["abab", "abab", "aaaa", "abba"], ("a", "b", *others, "last")).blind()
    assert one_more["always a"] == 0.25  # 65 actions: one at a time


def test_the_best_sequence_and_chance_by_hand():
    found = task(["ab", "ab", "ba"], ("a", "b"), max_turns=2).blind()
    assert list(found) == ["always a, b", "random"] and found["always a, b"] == pytest.approx(
        2 / 3
    )
    many = task(["ab"] * 400, ("a", "b"), max_turns=2).blind()
    # two letters, each right half the time
    assert many["random"] == pytest.approx(1 / 4, abs=0.03)
    assert task(["a"], ()).blind() == {}


def test_a_shorter_sequence_is_named_where_it_is_as_good():
    assert task(["aa", "ab"], ("b", "a"), max_turns=2).blind()["always a"] == 0.5


def test_fields_of_the_row_are_filled_in():
    codes = ["ab", "ba", "bb"]
    assert task(codes, ("a", "b", "{code[0]}", "{code[1]}")).best_constant() == (
        "always {code[0]}, {code[1]}",
        1.0,
    )
    assert task(codes, ("a", "b")).best_constant()[1] == pytest.approx(1 / 3)
    assert task(["a", "b", "b"], ("{code}",)).blind() == {"always {code}": 1.0, "random": 1.0}
    assert task([["{a}"]], ("{{a}}",)).best_constant()[1] == 1.0  # a doubled brace is one brace


@pytest.mark.parametrize(
    "action, named",
    [
        ("say {word}", "'word'"),
        ("say {}", "positional"),
        ("say {", "Single '{'"),
        ("say {code.x}", "attribute 'x'"),
    ],
)
def test_a_field_that_the_row_lacks_is_named_with_those_it_has(action, named):
    with pytest.raises(
        ValueError, match="(?s)has a field .*that a row lacks, which has question, code"
    ) as error:
        task(["a"], ("a", action)).blind()
    assert repr(action) in str(error.value)
    with pytest.raises(ValueError, match=named):
        task(["a"], ("a", action)).blind()


def test_what_is_known_is_not_played_again():
    """Of a row that was among others only the 8 plays by chance, which draw from one stream over all rows."""
    made = []

    def make():
        made.append(Lock())
        return made[-1]

    asked = replace(task(["ab", "ba", "ab"], ("a", "b")), environment=make)
    first = asked.blind()
    count = len(made)
    first["random"] = 7.0  # the caller's own
    again = asked.blind()
    assert len(made) == count and again["random"] != 7.0
    fewer = asked.blind(asked.held_out[1:2])
    assert fewer.keys() != again.keys() and len(made) == count + 8
    alone = replace(asked, held_out=asked.held_out[1:2])
    assert fewer == alone.blind()
    asked.held_out[0]["code"] = "ba"
    assert "always b, a" in asked.blind()


def test_grid_and_lookup_score_what_they_did():
    """Measured on 2026-11-23 with the sequences of one action, and of all turns, that were tried then."""
    assert grid().best_constant() == ("always right, right, down, left", 0.234375)
    assert lookup().best_constant() == ("always say apples", 0.15625)
    assert "ask {person}" in lookup().actions
