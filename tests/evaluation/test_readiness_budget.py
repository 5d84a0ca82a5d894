"""Readiness within a budget: the first rows are those of a look without one, and it says how sure it is."""

import importlib
import math
import re
from dataclasses import asdict, replace

import pytest

from grpo_kit.evaluation import portions
from grpo_kit.evaluation.intervals import Estimate
from grpo_kit.evaluation.readiness import Readiness, readiness
from grpo_kit.evaluation.verdict import possible_verdicts
from grpo_kit.rollout.complete import complete
from grpo_kit.tasks import from_rows, largest

completing = importlib.import_module(complete.__module__)
HOW = {"samples": 2, "group_size": 2, "max_completion_tokens": 4, "seed": 5}


class Clock:
    """Seconds that pass only where a reward is asked: one a completion, so two a row."""

    def __init__(self):
        self.now = 0.0
        self.sizes = []

    def monotonic(self):
        return self.now

    def reward(self, completions, **columns):
        self.now += len(completions)
        self.sizes.append(len(completions))
        return [float(sum(map(ord, text)) % 8 == 0) for text in completions]  # in a fifth of pairs one


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(portions, "time", made)
    return made


def sums(reward, n=40):
    rows = [{"question": f"{i} + {i % 7} ="} for i in range(n)]
    return from_rows("sums", [{"question": "0"}], rows, reward=reward, max_completion_tokens=4)


def counted(r):
    """What is counted row by row."""
    return {
        name: asdict(r)[name] for name in ("questions", "right", "lenient", "formatted", "rewards", "credit")
    }


def first(r, n):
    return {name: values and values[:n] for name, values in counted(r).items()}


@pytest.mark.parametrize(
    ("seconds", "n", "why"),
    [
        (1, 2, "the first two rows take their 4 s"),
        (9, 4, "5 s are left after them: two rows more, and one second is too short for another"),
        (16, 8, "2, then up to 8"),
        (50, 25, "2, 8, 16, then the 9 that 18 s are enough for"),
        (math.inf, 40, "nothing is sure: all rows"),
    ],
)
def test_the_first_rows_are_those_of_a_look_without_a_budget(tiny, clock, seconds, n, why):
    task = sums(clock.reward)
    whole = readiness(*tiny, task, seconds=None, **HOW)
    assert whole.n == 40 and sum(clock.sizes) >= 80
    clock.now = 0.0
    some = readiness(*tiny, task, seconds=seconds, **HOW)
    assert not some.sure or n == 40, "else it would have ended for that"
    assert some.n == n, why
    assert counted(some) == first(whole, n)
    assert some.lengths.n == 2 * n and some.settings == whole.settings
    assert (some.asked_for, some.needs) == ((None, None) if n == 40 else (40, 80.0)), "2 s a row"


def test_no_completion_is_judged_twice(tiny, clock):
    some = readiness(*tiny, sums(clock.reward), seconds=50, **HOW)
    assert clock.sizes[:4] == [4, 12, 16, 18], "2, 6, 8 and 9 rows of 2 samples"
    assert set(clock.sizes[4:]) == {some.n}, "then constants, given to every row once"


def test_a_sure_verdict_ends_it(tiny, capsys):
    task = largest(n_train=4, n_held_out=40)
    some = readiness(*tiny, task, **HOW)
    # No answer can be read: of 8 rows Wilson's upper end is 32 %, but fewer than 16 are never sure; of 16 it is 19 %.
    assert some.n == 16 and some.verdict == "format first" and some.sure and some.needs is None
    told = " (Sure after 16 of 40 rows: no other verdict holds within the 95 % intervals.)"
    assert told in some.reason
    assert capsys.readouterr().out == f"{some!r}\n", "the verdict is printed once, whoever keeps the result"
    whole = readiness(*tiny, task, seconds=None, quiet=True, **HOW)
    assert whole.n == 40 and counted(some) == first(whole, 16) and "ure after" not in whole.reason
    assert capsys.readouterr().out == ""


def test_a_budget_that_ends_says_how_sure_it_is_and_what_would_help(tiny, clock, tmp_path):
    some = readiness(*tiny, sums(clock.reward), seconds=50, quiet=True, **HOW)
    one = some.signal_reward()
    assert one.low < 0.2 < one.value and some.verdict == "ready", "a fifth of groups decides, here from below"
    assert some.possible == ["rarely succeeds", "ready"]
    assert some.reason.endswith(
        f" (Not sure after 25 of 40 rows: groups with unequal rewards {one.value:.2f}, 95 % interval {one.low:.2f} to "
        f"{one.high:.2f}, so it may be 'rarely succeeds' too; seconds=80 would look at about all.)"
    )
    some.save(tmp_path / "some.json")
    assert Readiness.load(tmp_path / "some.json") == some
    half = [{0.0: 1, 1.0: 1}] * 4
    few = replace(
        some, questions=some.questions[:4], formatted=some.formatted and [2] * 4, rewards=half, credit=half
    )
    assert few.possible == ["ready"] and not few.sure
    assert "and fewer than 16 rows are too few to be sure; seconds=80" in few.reason


def test_stopped_by_hand_it_says_what_is_known(tiny, capsys):
    asked = []

    def reward(completions, **columns):
        asked.append(completions)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [0.5] * len(completions)

    with pytest.raises(KeyboardInterrupt):
        readiness(*tiny, sums(reward), **HOW)
    out = capsys.readouterr().out
    assert out.startswith("Stopped. Readiness('sums', 2 prompts x 2 samples: rarely succeeds)")
    assert re.search(r"Not sure after 2 of 40 rows: .* too\.\)", out)


def test_a_row_that_cannot_be_asked_is_refused_before_the_first(tiny, clock):
    task = sums(clock.reward)
    rows = [*task.held_out[:9], task.held_out[9] | {"question": "so many words " * 9000}]
    with pytest.raises(ValueError, match=r"prompts\[9\] has \d+ tokens"):
        readiness(*tiny, task, rows=rows, **HOW)
    assert not clock.sizes


def test_portions_that_transformers_draws_do_not_share_their_draws(tiny, monkeypatch):
    monkeypatch.setattr(completing.RolloutEngine, "unsupported", lambda *args: "so that generate is used")
    how = {"max_completion_tokens": 4, "samples": 2, "temperature": 1.0, "seed": 3}
    texts = [
        [one.text for one in complete(*tiny, ["1 + 1 ="], numbers=n, **how)] for n in (None, [0, 1], [2, 3])
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("changes", "nothing", "verdicts", "why"),
    [
        ({}, False, ["ready"], "every interval lies on one side"),
        ({"mixed": (0.4, 0.19, 0.6)}, False, ["rarely succeeds", "ready"], "the lower end is below a fifth"),
        ({"ever": (0.3, 0.09, 0.6)}, False, ["never succeeds", "ready"], "the lower end is below a tenth"),
        ({"once": (0.8, 0.7, 0.91)}, False, ["too easy", "ready"], "the upper end is above nine tenths"),
        ({"formatted": (0.6, 0.49, 0.7)}, False, ["format first", "ready"], "the lower end is below a half"),
        ({"constant": (0.4, 0.2, 0.7)}, False, ["shortcut pays", "ready"], "0.7 is more than twice 0.3"),
        ({"constant": (0.4, 0.2, 0.55)}, False, ["ready"], "0.55 is less than twice 0.3"),
        (
            {"credit": (0.5, 0.3, 0.7), "mixed": (0.1, 0.0, 0.15)},
            False,
            ["ready"],
            "partial credit is enough",
        ),
    ],
)
def test_possible_verdicts_by_hand(changes, nothing, verdicts, why):
    sure = {
        "unequal": (0.5, 0.3, 0.7), "formatted": (0.9, 0.8, 1.0), "once": (0.4, 0.3, 0.5), "mixed": (0.5, 0.3, 0.7),
        "ever": (0.8, 0.6, 0.9), "credit": (0.1, 0.0, 0.15),
    }  # fmt: skip
    measured = {name: Estimate(*ends, n=20) for name, ends in (sure | changes).items()}
    assert possible_verdicts(measured, 1.0, nothing) == verdicts, why


def test_where_nothing_was_paid_something_still_may_be():
    measured = {"unequal": Estimate(0.0, 0.0, 0.1, 40), "mean": Estimate(0.0, 0.0, 0.1, 40)}
    assert possible_verdicts(measured, 1.0, True) == ["never succeeds", "rarely succeeds"]
    assert possible_verdicts(measured, 1.0, False) == ["rarely succeeds"]
