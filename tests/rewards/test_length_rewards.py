"""Length and repetition: tables with a reason on each row, and TRL's own punishments plus one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

from grpo_kit.rewards.cheat_cases import crafted_cases
from grpo_kit.rewards.form import Repetition, RightSize

# --- RightSize -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "expected", "reason"),
    [
        (0, 0.0, "nothing written"),
        (1, 0.05, "too short: 1 of 20"),
        (10, 0.5, "half of the shortest"),
        (20, 1.0, "the shortest that will do"),
        (50, 1.0, "between"),
        (80, 1.0, "the expected length, inclusive"),
        (81, 0.95, "a twentieth of the way to the limit"),
        (90, 0.5, "half way"),
        (99, 0.05, "just below the limit"),
        (100, 0.0, "the limit: where the trainer cuts off"),
        (101, 0.0, "past it"),
        (100_000, 0.0, "it never climbs again"),
    ],
)
def test_right_size(length, expected, reason):
    characters = RightSize(80, 100, unit="characters", shortest=20)
    tokens = RightSize(80, 100, unit="tokens", shortest=20)
    assert characters(["x" * length]) == [pytest.approx(expected)], reason
    if length:
        assert tokens(["any text"], completion_ids=[[7] * length]) == [
            pytest.approx(expected)
        ], reason


def test_it_falls_without_ever_climbing_again():
    scores = RightSize(80, 100, unit="characters")(["x" * n for n in range(1, 400)])
    assert scores[:80] == [1.0] * 80
    assert all(a > b for a, b in zip(scores[79:100], scores[80:100], strict=False))
    assert set(scores[99:]) == {0.0}


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("", 0.0, "an empty completion is no good size, though shortest is 0"),
        (" \n\t", 0.0, "nor is white space"),
        ("答" * 80, 1.0, "characters mean the same in a script without spaces"),
        ("\ud800" * 90, 0.5, "a lone surrogate is a character"),
    ],
)
def test_right_size_in_characters(text, expected, reason):
    assert RightSize(80, 100, unit="characters")([text]) == [expected], reason


def test_a_completion_of_special_tokens_alone_is_blank():
    assert RightSize(80, 100, unit="tokens")([""], completion_ids=[[2] * 50]) == [0.0]


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=20),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_right_size_is_one_plus_trls_soft_overlong_punishment(lengths, expected, slack):
    ids = [[1] * length for length in lengths]
    theirs = get_soft_overlong_punishment(
        max_completion_len=expected + slack, soft_punish_cache=slack
    )(ids)
    ours = RightSize(expected, expected + slack, unit="tokens")(
        ["text"] * len(ids), completion_ids=ids
    )
    assert ours == pytest.approx([1 + punishment for punishment in theirs], abs=1e-12)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (dict(expected=100, limit=100, unit="tokens"), "limit=100"),
        (dict(expected=100, limit=90, unit="tokens"), "limit=90"),
        (dict(expected=100, limit=120, unit="tokens", shortest=101), "shortest=101"),
        (dict(expected=0, limit=10, unit="tokens"), "expected=0"),
        (dict(expected=10, limit=20, unit="words"), "unit='words'"),
    ],
)
def test_right_size_refuses(numbers, message):
    with pytest.raises(ValueError, match=message):
        RightSize(**numbers)


def test_tokens_come_from_the_trainer_and_there_is_no_default_unit():
    with pytest.raises(ValueError, match="needs completion_ids"):
        RightSize(80, 100, unit="tokens")(["text"])
    with pytest.raises(ValueError, match="completion_ids' has 1 rows for 2 completions"):
        RightSize(80, 100, unit="tokens")(["a", "b"], completion_ids=[[1]])
    with pytest.raises(TypeError, match="unit"):
        RightSize(80, 100)
    assert RightSize(80, 100, unit="characters")(["x" * 90], completion_ids=[[1]]) == [0.5]


# --- Repetition ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("one two three four", 1.0, "nothing repeated"),
        ("so so so so so", 1 / 3, "3 trigrams, all the same"),
        ("a b c a b c", 3 / 4, "4 trigrams: abc bca cab abc"),
        ("a b c, a b c", 4 / 5, "a comma is a piece: 5 trigrams, abc twice"),
        ("A b c a B C", 3 / 4, "case hides no repetition"),
        ("two words", 1.0, "shorter than n: nothing can be repeated"),
        ("", 0.0, "blank: else writing nothing would be best"),
        (" \n ", 0.0, "white space is blank"),
        ("!" * 12, 1 / 10, "punctuation marks are read mark by mark"),
        ("ok" + "!" * 11, 2 / 10, "also behind a word"),
        ("x" * 102, 1 / 100, "a text without spaces is read letter by letter"),
        ("abc" * 34, 3 / 100, "so a pattern in it shows"),
        ("答案是答案是", 3 / 4, "Chinese, word by character"),
        (
            "Donaudampfschiffahrtsgesellschaft",
            30 / 31,
            "33 letters are text without spaces: sch comes twice",
        ),
        ("Geschwindigkeitsbegrenzung", 1.0, "26 letters are a word"),
    ],
)
def test_repetition(text, expected, reason):
    assert Repetition(3)([text]) == [pytest.approx(expected)], reason


@given(
    st.lists(st.sampled_from("a b c d e".split()), min_size=1, max_size=30), st.integers(1, 5)
)
def test_repetition_is_one_plus_trls_penalty(letters, n):
    theirs = get_repetition_penalty_reward(ngram_size=n)([[ord(letter) for letter in letters]])[
        0
    ]
    assert Repetition(n)([" ".join(letters)]) == [pytest.approx(1 + theirs, abs=1e-12)]


@pytest.mark.parametrize("n", [0, 21, 2.5])
def test_repetition_refuses(n):
    with pytest.raises(ValueError, match=f"n={n}"):
        Repetition(n)


# --- cheats ----------------------------------------------------------------------------------------------


def test_filler_of_the_right_length_earns_it_here_and_without_end_it_does_not():
    reward = RightSize(80, 100, unit="characters")
    honest = crafted_cases("82", "47")[0]
    right, endless = reward.cheats(honest)
    assert reward([honest.completion, right.completion, endless.completion]) == [1.0, 1.0, 0.0]
    assert {right.tie, endless.tie} == {"format"}
    assert RightSize(80, 100, unit="tokens").cheats(honest) == []


def test_repeating_a_phrase_or_the_answer_does_not_pay():
    honest = crafted_cases("82", "47", think="think")[0]
    cheats = Repetition().cheats(honest)
    assert Repetition()([honest.completion])[0] > 0.9
    assert max(Repetition()([case.completion for case in cheats])) < 0.25
