"""events: the optimum is what brute force finds, invalid schedules earn nothing, shortcuts earn what is stated."""

import itertools
import random
import re
import string
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.more.tasks.interval_scheduling import (
    ScheduleShare,
    best_schedule,
    interval_scheduling,
    schedule_worth,
    strategy_shares,
)
from grpo_kit.rewards import Case, RewardCheckError, check_rewards, crafted_cases, on_response

# A 4, B 2, C 1, D 3: best A D C, worth 8
LUNCH = [[9, 11, 2], [10, 12, 1], [12, 13, 1], [11, 12, 3]]
SMALL = {"n_train": 60, "n_held_out": 60}
module = sys.modules[interval_scheduling.__module__]


def brute_force(listed):
    """(best worth, every set of places that has it), by trying all subsets and all pairs in them."""
    found = {}
    for size in range(len(listed) + 1):
        for places in itertools.combinations(range(len(listed)), size):
            hours = [hour for i in places for hour in range(listed[i][0], listed[i][1])]
            if len(hours) == len(set(hours)):  # no hour is taken twice
                found[places] = sum(
                    (listed[i][1] - listed[i][0]) * listed[i][2] for i in places
                )
    best = max(found.values())
    return best, {places for places, worth in found.items() if worth == best}


EVENT = st.builds(
    lambda start, hours, priority: (start, start + hours, priority),
    st.integers(0, 12), st.integers(1, 5), st.integers(1, 4),
)  # fmt: skip
EVENTS = st.lists(EVENT, min_size=1, max_size=8)


@given(EVENTS)
def test_the_best_schedule_is_what_brute_force_finds_ties_counted(listed):
    best, ways = brute_force(listed), best_schedule(listed)
    assert (ways.worth, ways.ways) == (best[0], len(best[1]))
    assert tuple(sorted(ways.picked)) in best[1]
    assert list(ways.picked) == sorted(ways.picked, key=lambda i: listed[i][0])


def test_no_events_have_an_empty_schedule_and_bad_ones_are_refused():
    assert best_schedule([]) == (0, (), 1)
    for bad in ([9, 9, 1], [10, 9, 1], [9, 10, 0], [9, 10], 5):
        with pytest.raises(
            ValueError, match=re.escape(f"event {bad!r} must be (start, end, priority)")
        ):
            best_schedule([bad])
        with pytest.raises(ValueError, match="schedule_share.*'events'"):
            ScheduleShare()(["x"], events=[[bad]])
    with pytest.raises(ValueError, match="27 events are more"):
        best_schedule([[9, 10, 1]] * 27)


@pytest.mark.parametrize(
    ("answer", "worth", "reason"),
    [
        ("A D C", 8, "the best: D begins where A ends, which is no overlap"),
        ("A, D, C", 8, "commas"),
        ("A,D,C", 8, "commas alone"),
        ("A\n D\tC ,", 8, "any white space, a comma too many"),
        ("A C", 5, "valid, not the best"),
        ("B", 2, "one event"),
        ("A B", None, "they overlap"),
        ("A B D C", None, "all events"),
        ("A C D", None, "D starts before C: the order of the list is not that of the day"),
        ("A A", None, "one event twice"),
        ("A D C A D C", None, "the schedule twice"),
        ("A E", None, "no event E"),
        ("a d c", None, "the letters are capitals"),
        ("ADC", None, "run together"),
        ("A D C.", None, "a full stop is no letter"),
        ("A and C", None, "a word"),
        ("A D C = 8", None, "with its worth"),
        ("A 9-11", None, "with its hours"),
        (",", None, "nothing"),
        ("", None, "nothing"),
        ("Ａ", None, "a full-width A is another letter"),
        ("A\x00C", None, "a NUL is no separator"),
    ],
)
def test_what_a_schedule_is_worth(answer, worth, reason):
    assert schedule_worth(answer, LUNCH) == worth, reason
    share = 0.0 if worth is None else worth / 8
    assert ScheduleShare()([f"{answer}</answer>"], prefill="<answer>", events=[LUNCH]) == [
        share
    ], reason


@pytest.mark.parametrize(
    ("completion", "prefill", "expected", "reason"),
    [
        ("A D C</answer>", "<answer>", 1.0, "closed by the model"),
        ("A D C", "<answer>", 0.0, "never closed"),
        ("A D C</answer><answer>B</answer>", "<answer>", 0.0, "two answers"),
        ("", "<answer>A D C</answer>", 0.0, "the prefill answered"),
        ("A D C", "", 0.0, "no tags"),
    ],
)
def test_only_the_models_own_single_answer_counts(completion, prefill, expected, reason):
    assert ScheduleShare()([completion], prefill=[prefill], events=[LUNCH]) == [expected], (
        reason
    )


def test_no_events_cannot_be_judged_and_a_missing_column_is_named():
    assert ScheduleShare()(["<answer>A</answer>"] * 2, events=[None, []]) == [None, None]
    with pytest.raises(ValueError, match="'schedule_share' needs the data set column 'events'"):
        ScheduleShare()(["a"])
    assert repr(ScheduleShare()) == "ScheduleShare()"
    assert ScheduleShare(tag="plan")(["<plan>A</plan>"], events=[LUNCH]) == [0.5]


PIECES = st.sampled_from(
    ["A", "B", "C", " ", ",", "<answer>", "</answer>", "\ud800", "\x00", "日", "Z", "\n"]
)
TEXT = st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=10).map("".join))


@given(st.lists(st.tuples(TEXT, TEXT, st.one_of(st.none(), EVENTS)), max_size=4))
def test_any_text_scores_in_range_and_the_order_of_the_batch_does_not_matter(rows):
    completions, prefills, listed = ([row[i] for row in rows] for i in range(3))
    scores = ScheduleShare()(completions, prefill=prefills, events=listed)
    assert all(score is None or 0 <= score <= 1 for score in scores)
    back = ScheduleShare()(completions[::-1], prefill=prefills[::-1], events=listed[::-1])
    assert back[::-1] == scores


@given(EVENTS, st.lists(st.sampled_from("ABCDEFGHI"), max_size=6))
def test_a_share_of_one_is_exactly_an_optimal_schedule(listed, letters):
    answer = " ".join(letters)
    score = ScheduleShare()([f"<answer>{answer}</answer>"], events=[listed])[0]
    places = ["ABCDEFGHI".index(letter) for letter in letters]
    optimal = (
        tuple(sorted(places)) in brute_force(listed)[1]
        if len(set(places)) == len(places)
        else False
    )
    in_order = (
        all(listed[a][0] < listed[b][0] for a, b in itertools.pairwise(places))
        if optimal
        else False
    )
    assert (score == 1.0) == (optimal and in_order)


def test_100_kb_are_read():
    assert ScheduleShare()(["<answer>" + "A " * 50_000 + "</answer>"], events=[LUNCH]) == [0.0]


# --- the task --------------------------------------------------------------------------------------------


def _read(question):
    """The events as a person reads them out of the question."""
    lines = re.findall(r"^([A-Z]): (\d+) to (\d+), priority (\d)$", question, re.MULTILINE)
    assert [letter for letter, *_ in lines] == list("ABCDEFGH"[: len(lines)])
    return [[int(number) for number in numbers] for _, *numbers in lines]


def test_rows_are_what_they_say():
    task = interval_scheduling()
    sizes, ways = Counter(), Counter()
    for row in task.train + task.held_out:
        listed = row["events"]
        assert _read(row["question"]) == listed == sorted(listed)
        assert all(8 <= start < end <= 18 and 1 <= times <= 3 for start, end, times in listed)
        best, optimal = brute_force(listed)
        assert (row["best"], row["ways"]) == (best, len(optimal))
        assert tuple("ABCDE".index(letter) for letter in row["answer"].split()) in optimal
        assert len(row["answer"].split()) < len(listed)
        ways[row["ways"]] += 1
        sizes[len(row["answer"].split())] += 1
    assert {len(row["events"]) for row in task.train} == {3, 4, 5}
    assert sizes[1] > 20
    assert min(sizes[2], sizes[3]) > 100  # neither one event always, nor one number of them
    assert ways[2] > 10  # ties occur


def test_rows_are_distinct_disjoint_and_seeded():
    task, again, other = (
        interval_scheduling(seed=3, **SMALL),
        interval_scheduling(seed=3, **SMALL),
        interval_scheduling(seed=4, **SMALL),
    )
    questions = [row["question"] for row in task.train + task.held_out]
    assert len(set(questions)) == 120
    assert not {question for question, _ in task.examples} & set(questions)
    assert (again.train, again.held_out) == (task.train, task.held_out)
    assert other.train != task.train
    assert (
        len(
            _read(
                interval_scheduling(count=(8, 8), n_train=2, n_held_out=1).train[0]["question"]
            )
        )
        == 8
    )


def test_every_best_schedule_is_correct_and_earns_everything():
    task = interval_scheduling(n_train=1, n_held_out=200)
    tied = next(row for row in task.held_out if row["ways"] > 1)
    for row in [tied, *task.held_out[:20]]:
        for places in brute_force(row["events"])[1]:
            text = " ".join("ABCDE"[place] for place in places)
            assert task.is_correct(text, row)
            batch = {name: [value] for name, value in row.items()}
            for reward in task.rewards:
                assert reward([f"{text}</answer>"], prefill=[task.prefill], **batch) == [1.0]
        assert not task.is_correct("no idea", row)


def test_the_examples_are_right_and_no_rows():
    for question, response in interval_scheduling(**SMALL).examples:
        _, optimal = brute_force(_read(question))
        letters = response.removeprefix("<answer>").removesuffix("</answer>").split()
        # the only best one
        assert optimal == {tuple("ABCDE".index(letter) for letter in letters)}


@pytest.mark.parametrize("count", [(2, 3), (5, 3), (3, 9)])
def test_a_count_that_cannot_be_met_is_named(count):
    with pytest.raises(ValueError, match=re.escape(f"count={count!r}")):
        interval_scheduling(count=count)


def test_strategies_earn_what_the_docstring_says():
    task = interval_scheduling()
    accuracies, shares = task.constant_accuracies(), strategy_shares(task)
    stated = re.findall(
        r"^\| (.+?) +\| +([\d.]+) % \| ([\d.]+) +\|$", module.__doc__, re.MULTILINE
    )
    assert len(stated) == 10
    for name, accuracy, share in stated:
        assert f"{100 * accuracies[name]:.1f}" == accuracy, name
        assert f"{shares[name]:.3f}" == share, name
    assert task.best_constant()[0] == stated[0][0] == next(iter(shares))
    assert 0.4 < accuracies["greedy by worth"] < 0.6


def test_strategies_by_brute_force():
    task = interval_scheduling(n_train=1, n_held_out=100)
    heaviest, pair = [], []
    for row in task.held_out:
        worths = [(end - start) * times for start, end, times in row["events"]]
        heaviest.append(max(worths) / row["best"])
        apart = row["events"][0][1] <= row["events"][2][0]
        pair.append((worths[0] + worths[2]) / row["best"] if apart else 0.0)
    shares = strategy_shares(task)
    assert shares["the heaviest event"] == pytest.approx(sum(heaviest) / 100)
    assert shares["always 'A C'"] == pytest.approx(sum(pair) / 100)
    assert task.constant_accuracies()["the heaviest event"] == heaviest.count(1.0) / 100
    assert sum(name.startswith("always") for name in shares) == 2**5 - 1
    with pytest.raises(ValueError, match="rows is empty"):
        strategy_shares(task, [])


def test_the_natural_share_of_greedy_is_what_the_docstring_says():
    """Without the balance greedy by worth is best in 93 % of random rows that hold an overlap."""
    rng, hits, n = random.Random(0), 0, 1500
    for _ in range(n):
        drawn = module._draw_events(rng, rng.randint(3, 5))
        while len(best_schedule(drawn).picked) == len(drawn):
            drawn = module._draw_events(rng, rng.randint(3, 5))
        hits += (
            module.worth_of(module._greedy(drawn, module._worth), drawn)
            == best_schedule(drawn).worth
        )
    assert hits / n == pytest.approx(0.93, abs=0.02)


# --- cheats ----------------------------------------------------------------------------------------------

OWN = {
    "all events", "every subset spelled", "letters repeated", "every event named twice", "best schedule twice",
    "heaviest overlapping pair", "an event that is not in the list", "two answers in one", "the list copied",
}  # fmt: skip


def test_no_cheat_pays():
    task = interval_scheduling(n_train=8, n_held_out=40, count=(3, 6))
    table = check_rewards(task.rewards, task, rows=40)
    assert set(table["case"]) >= OWN
    assert table["total"].iloc[0] == 1.0


def _honest(row):
    return crafted_cases(row["answer"], "Z", prefill="<answer>", columns=row)[0]


def test_a_day_of_as_many_events_as_there_are_letters_has_its_cheats_too():
    row = {
        "events": [[hour, hour + 1, 1] for hour in range(26)],
        "answer": " ".join(string.ascii_uppercase),
    }
    cheats = ScheduleShare().cheats(_honest(row))  # all 2**26 subsets would fill the memory
    assert sum(len(case.completion) for case in cheats) < 10**6
    check_rewards(ScheduleShare(), [_honest(row), *cheats])


@pytest.mark.parametrize("listed", [None, []])
def test_a_row_without_events_has_no_cheats(listed):
    honest = Case("honest", "<answer>A</answer>", honest=True, columns={"events": listed})
    assert ScheduleShare().cheats(honest) == []


def test_its_own_list_catches_a_reward_that_forgets_a_rule():
    row = {"events": LUNCH, "answer": "A D C", "best": 8}

    def lenient(keep):
        @on_response
        def forgetful(responses, events):
            scores = []
            for response, listed in zip(responses, events, strict=True):
                places = [
                    "ABCD".find(c)
                    for c in response.partition("<answer>")[2].partition("<")[0]
                    if c in "ABCD"
                ]
                scores.append(min(1.0, keep(places, listed) / 8))
            return scores

        return forgetful

    worth = module.worth_of
    holes = {
        "all events": lambda places, listed: worth(places, listed),
        "an event that is not in the list": lambda places, listed: worth(places, listed),
        "best schedule twice": lambda places, listed: worth(sorted(set(places)), listed),
        "out of order": lambda places, listed: worth(places, listed) if len(places) < 4 else 0,
    }
    cases = [_honest(row), *ScheduleShare().cheats(_honest(row))]
    check_rewards(ScheduleShare(), cases)
    for name, keep in holes.items():
        with pytest.raises(RewardCheckError, match=name):
            check_rewards(lenient(keep), cases)


@given(EVENTS)
def test_no_cheat_of_any_row_earns_as_much_as_the_best(listed):
    right = " ".join("ABCDEFGH"[place] for place in best_schedule(listed).picked)
    honest = _honest({"events": listed, "answer": right})
    check_rewards(ScheduleShare(), [honest, *ScheduleShare().cheats(honest)])
