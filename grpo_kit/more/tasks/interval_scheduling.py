"""interval_scheduling: pick from timed events with priorities the schedule without overlaps that is worth the most.

Weighted interval scheduling. The reward is soft: the share of the best schedule's worth, so that every better
choice pays more. Shortcuts on the 256 held-out rows (seed 0):

| answer                         | right  | mean share |
|--------------------------------|--------|------------|
| greedy by priority             | 64.5 % | 0.928      |
| greedy by worth                | 53.5 % | 0.918      |
| earliest end first             | 53.1 % | 0.834      |
| the first and the last event   | 25.0 % | 0.679      |
| always 'A C'                   | 20.7 % | 0.549      |
| the heaviest event             |  8.2 % | 0.680      |
| the longest event              |  6.2 % | 0.588      |
| always 'A'                     |  3.9 % | 0.369      |
| the last event                 |  1.6 % | 0.407      |
| all events                     |  0.0 % | 0.000      |

The rows are drawn so that greedy by worth is best in about half of them. In random rows with an overlap: 93 %.
A model that beats the first line has learnt more than a greedy rule. A model may settle for one of the others.

Base rate: SmolLM2-135M-Instruct, 24 held-out prompts x 8 samples at temperature 1 (`python -m benchmarks.base_rates
--prompts 24`, CPU, seed 0, 2026-11-21): right 2.6 % [0.5, 4.7], mean reward 0.49 [0.45, 0.54], well-formed 92 %,
rewards differ in every group.

Longer than 300 lines because the rows, exact solver, reward and shortcuts of one task are read together.
"""

from __future__ import annotations

import bisect
import itertools
import random
import re
import string
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from grpo_kit.rewards import SoftFormat
from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.cheat_cases import Case, answer_cases
from grpo_kit.rewards.response import python_value
from grpo_kit.tasks.rows import check_range, split_distinct
from grpo_kit.tasks.task import Strategy, Task, strategy_means, with_answer_tag

_LETTERS = string.ascii_uppercase
_MOST_EVENTS = 8  # in a question of this task; the reward accepts as many as there are letters
_FIRST_HOUR, _LAST_HOUR, _MOST_HOURS, _MOST_PRIORITY = 8, 18, 4, 3
# Shown in every prompt: a day whose best schedule has two events, and one whose best is a single event. With only the
# pair a small model writes overlapping pairs, all worth nothing; with only the single event it never writes a pair.
_EXAMPLES = {
    ((8, 10, 2), (9, 11, 1), (11, 13, 1)): "A C",
    ((9, 12, 1), (10, 13, 3), (12, 14, 1)): "B",
}

Event = Sequence[int]  # (start, end, priority)
Events = Sequence[Event]
Value = Callable[[Event], int]  # of an event, by which a rule picks


class Best(NamedTuple):
    """The best worth of a schedule, the places of the events in one best schedule, and how many schedules are best."""

    worth: int
    picked: tuple[int, ...]
    ways: int


def interval_scheduling(
    *,
    n_train: int = 512,
    n_held_out: int = 256,
    count: tuple[int, int] = (3, 5),
    seed: int = 0,
    prefill: str | None = None,
    answer_tag: str = "answer",
) -> Task:
    """Rows "Which events give the best schedule without overlap?\\nA: 9 to 11, priority 2\\nB: ...".

    An event is worth its hours times its priority. Events that only touch (one ends at 12, the next begins
    at 12) do not overlap. The answer is the letters of the picked events in the order of their start, such as
    "A C". count: fewest and most events in a question, within 3..8, listed by start.
    At least two events of each row overlap, so "all of them" is never right. The greedy schedule (the event of
    most worth first) is best in about half of the rows.
    Row columns: question, answer (one best schedule), events ([start, end, priority] each), best (its worth),
    ways (how many schedules are worth that; any of them is right).
    Rewards: schedule share (0.75), soft format (0.25). Strategies: each set of letters, first, last, longest,
    heaviest, greedy, ...; `strategy_shares` reports their shares.
    prefill: the assistant's opening words; None: the answer tag. Another where a chat template does not let it through.
    answer_tag: name of the tag around answers, such as a plainer one that audit_tags suggests.
    Raises ValueError if `count` is no range within 3..8.

    >>> interval_scheduling().held_out[0]["question"].startswith("Which events give the best schedule")
    True
    """
    low, high = check_range("count", count, 3, _MOST_EVENTS)
    rng = random.Random(f"events {seed}")

    def draw() -> dict:
        greedy_is_best = rng.random() < 0.5
        while True:
            events = _draw_events(rng, rng.randint(low, high))
            best = best_schedule(events)
            greedy = worth_of(_greedy(events, _worth), events)
            if len(best.picked) < len(events) and greedy_is_best == (greedy == best.worth):
                break
        return {
            "question": _question(events),
            "answer": _spelled(best.picked),
            "events": [list(event) for event in events],
            "best": best.worth,
            "ways": best.ways,
        }

    examples = [
        (_question(day), f"<answer>{answer}</answer>") for day, answer in _EXAMPLES.items()
    ]
    train, held_out = split_distinct(
        draw,
        n_train,
        n_held_out,
        what=f"events with count={count!r}",
        avoid=[question for question, _ in examples],
    )
    task = Task(
        name="interval_scheduling",
        train=train,
        held_out=held_out,
        rewards=[ScheduleShare(), SoftFormat(think=None)],
        reward_weights=[0.75, 0.25],
        strategies=_strategies(high),
        system="Answer in <answer> tags with the letters of the events, in order. "
        "Best means the most hours times priority.",
        prefill="<answer>" if prefill is None else prefill,
        examples=tuple(examples),
        max_completion_tokens=16,
    )
    return with_answer_tag(task, answer_tag)


class ScheduleShare(AnswerReward):
    """The share of the best schedule's worth that the answer's schedule has, in [0, 1].

    0.0 if the answer is no schedule: events that overlap, are not in the list, are named twice or not in the order
    of their start, any other word, no answer or two. None if the row has no events.
    Column: events, [start, end, priority] each, named A, B, ... as they are listed; also as text, arrays and tensors.
    Raises ValueError for events that end before they start, a priority below 1, more than 26 events.

    >>> row = [[9, 11, 2], [10, 12, 1], [12, 13, 1]]
    >>> ScheduleShare()(["<answer>A C</answer>", "<answer>B</answer>", "<answer>A B</answer>"], events=[row] * 3)
    [1.0, 0.4, 0.0]
    """

    def __init__(self, *, tag: str = "answer") -> None:
        super().__init__("schedule_share", "events", tag=tag)

    def cheats(self, honest: Case) -> list[Case]:
        """Answers that are no schedule, or not the best one. `honest` needs the columns of a row."""
        listed = _events_in(honest.columns["events"])
        if not listed:
            return []
        letters = _LETTERS[: len(listed)]
        best = best_schedule(listed)
        right = _spelled(best.picked)
        heaviest = _place_of_highest(listed, _worth)
        texts = {
            "letters repeated": " ".join(letter * 2 for letter in right.split()),
            "every event named twice": " ".join(
                f"{letter} {letter}" for letter in right.split()
            ),
            "best schedule twice": f"{right} {right}",
            "an event that is not in the list": f"{right} {chr(ord('A') + len(listed))}",
            "two answers in one": f"{right} or {letters[heaviest]}",
            "best schedule and its worth": f"{right} = {best.worth}",
            "hours in place of letters": " ".join(
                f"{listed[i][0]}-{listed[i][1]}" for i in best.picked
            ),
            "the list copied": _listed(listed),
            "the question's words": f"Pick {right}",
        }
        if len(listed) > 1:
            subsets = _subsets(letters[:_MOST_EVENTS])  # each letter doubles their number
            texts["every subset spelled"] = ", ".join(map(" ".join, subsets))
        pairs = itertools.combinations(range(len(listed)), 2)
        overlapping = [pair for pair in pairs if not _is_schedule(pair, listed)]
        if overlapping:
            texts["all events"] = " ".join(letters)
            texts["all events, run together"] = letters
            texts["heaviest overlapping pair"] = _spelled(
                max(overlapping, key=lambda pair: worth_of(pair, listed))
            )
        if len(best.picked) > 1:
            texts["out of order"] = " ".join(right.split()[::-1])
            texts["an event dropped"] = " ".join(right.split()[1:])
        if best.worth > _worth(listed[heaviest]):
            texts["settling for the heaviest event"] = letters[heaviest]
        return answer_cases(honest, texts, tag=self.tag)

    def score(self, answer: str | None, listed: Any) -> float | None:
        """The share, in [0, 1]; None if there are no events."""
        listed = _events_in(listed)
        if not listed:
            return None
        try:
            best = best_schedule(listed)
        except ValueError as error:
            raise ValueError(f"reward {self.__name__!r}, column 'events': {error}") from error
        worth = schedule_worth(answer or "", listed) or 0
        return worth / best.worth


def _events_in(column: Any) -> Any:
    """The events of a column, a text of them too, three numbers each."""
    value = python_value(column)
    if not isinstance(value, str):
        return value
    numbers = [int(number) for number in re.findall(r"-?[0-9]+", value)]
    return [numbers[place : place + 3] for place in range(0, len(numbers), 3)]


def best_schedule(listed: Events) -> Best:
    """The best schedule of (start, end, priority) events, exactly: by dynamic programming over their ends.

    Raises ValueError for an event that does not end after its start, a priority below 1, more than 26 events.
    Source: Kleinberg and Tardos, Algorithm Design, section 6.1 (weighted interval scheduling).

    >>> best_schedule([(9, 11, 2), (10, 12, 1), (12, 13, 1)])
    Best(worth=5, picked=(0, 2), ways=1)
    """
    if len(listed) > len(_LETTERS):
        raise ValueError(
            f"{len(listed)} events are more than there are letters; give at most {len(_LETTERS)}"
        )
    for event in listed:
        if (
            not isinstance(event, Sequence)
            or len(event) != 3
            or event[0] >= event[1]
            or event[2] < 1
        ):
            raise ValueError(
                f"event {event!r} must be (start, end, priority), start < end, priority >= 1"
            )
    by_end = sorted(range(len(listed)), key=lambda place: (listed[place][1], place))
    ends = [listed[place][1] for place in by_end]
    bests = [Best(0, (), 1)]  # bests[k]: with the first k events by end
    for k, place in enumerate(by_end):
        start = listed[place][0]
        before = bests[bisect.bisect_right(ends, start, hi=k)]
        without = bests[-1]
        worth, ways = before.worth + _worth(listed[place]), before.ways
        if worth < without.worth:
            bests.append(without)
            continue
        if worth == without.worth:
            ways += without.ways
        bests.append(Best(worth, (*before.picked, place), ways))
    return bests[-1]


def schedule_worth(answer: str, listed: Events) -> int | None:
    """The worth of the answer's schedule; None if it is no schedule. White space and commas separate the letters.

    >>> schedule_worth("A, C", [(9, 11, 2), (10, 12, 1), (12, 13, 1)])
    5
    """
    names = answer.replace(",", " ").split()
    if not names or not set(names) <= set(_LETTERS[: len(listed)]):
        return None
    places = list(map(_LETTERS.index, names))
    return worth_of(places, listed) if _is_schedule(places, listed) else None


def worth_of(places: Sequence[int], listed: Events) -> int:
    """Sum of hours times priority of the events at these places."""
    return sum(_worth(listed[place]) for place in places)


def strategy_shares(task: Task, rows: Sequence[dict] | None = None) -> dict[str, float]:
    """Mean share of the best that every strategy earns on the rows (default held_out), best first; ties by name.

    A policy that settles for a shortcut earns this share of a soft reward.

    >>> next(iter(strategy_shares(interval_scheduling())))
    'greedy by priority'
    """
    share = ScheduleShare().score

    def shares(answers: Sequence[str | None], rows: Sequence[dict]) -> list[float | None]:
        return [share(answer, row["events"]) for answer, row in zip(answers, rows, strict=True)]

    return strategy_means(task, rows, shares)


def _is_schedule(places: Sequence[int], listed: Events) -> bool:
    return all(listed[a][1] <= listed[b][0] for a, b in itertools.pairwise(places))


def _hours(event: Event) -> int:
    return event[1] - event[0]


def _worth(event: Event) -> int:
    return _hours(event) * event[2]


def _draw_events(rng: random.Random, count: int) -> list[tuple[int, int, int]]:
    events = set()
    while len(events) < count:
        hours = rng.randint(1, _MOST_HOURS)
        start = rng.randint(_FIRST_HOUR, _LAST_HOUR - hours)
        events.add((start, start + hours, rng.randint(1, _MOST_PRIORITY)))
    return sorted(events)


def _listed(listed: Events) -> str:
    events = zip(_LETTERS, listed, strict=False)
    return "\n".join(
        f"{letter}: {start} to {end}, priority {p}" for letter, (start, end, p) in events
    )


def _question(listed: Events) -> str:
    return f"Which events give the best schedule without overlap?\n{_listed(listed)}"


def _spelled(places: Sequence[int]) -> str:
    return " ".join(_LETTERS[place] for place in places)


def _place_of_highest(listed: Events, value: Value) -> int:
    return max(range(len(listed)), key=lambda place: value(listed[place]))


def _greedy(listed: Events, worth: Value) -> list[int]:
    """Events in falling order of `worth`, each taken if it overlaps none taken before."""
    picked = []
    for place in sorted(range(len(listed)), key=lambda i: -worth(listed[i])):
        if _is_schedule(sorted([*picked, place], key=lambda i: listed[i][0]), listed):
            picked.append(place)
    return sorted(picked)


def _subsets(items: Sequence[Any]) -> list[tuple]:
    """All subsets but the empty one, small ones first."""
    subsets = []
    for size in range(1, len(items) + 1):
        subsets += itertools.combinations(items, size)
    return subsets


def _strategies(most: int) -> dict[str, Strategy]:
    def greedy(value: Value) -> Strategy:
        return lambda row: _spelled(_greedy(row["events"], value))

    def highest(value: Value) -> Strategy:
        return lambda row: _spelled([_place_of_highest(row["events"], value)])

    strategies = {
        "greedy by worth": greedy(_worth),
        "greedy by priority": greedy(itemgetter(2)),
        "greedy by hours": greedy(_hours),
        "earliest end first": greedy(lambda event: -event[1]),
        "the heaviest event": highest(_worth),
        "the longest event": highest(_hours),
        "the event of highest priority": highest(itemgetter(2)),
        "the last event": lambda row: _spelled([len(row["events"]) - 1]),
        "the first and the last event": lambda row: _spelled([0, len(row["events"]) - 1]),
        "all events": lambda row: _spelled(range(len(row["events"]))),
    }
    for places in _subsets(range(most)):
        strategies[f"always {_spelled(places)!r}"] = partial(_always, places)
    return strategies


def _always(places: Sequence[int], row: dict) -> str | None:
    return _spelled(places) if places[-1] < len(row["events"]) else None
