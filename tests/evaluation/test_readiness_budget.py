"""Readiness within a time: the first rows are those of a look without a limit, and the verdict has its intervals."""

import importlib
import math
from dataclasses import asdict

import pytest

from grpo_kit.engine.complete import complete
from grpo_kit.evaluation import readiness as module
from grpo_kit.evaluation.readiness import Readiness, readiness
from grpo_kit.tasks import from_rows

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
        # in a fifth of pairs one
        return [float(sum(map(ord, text)) % 8 == 0) for text in completions]


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def sums(reward, n=40):
    rows = [{"question": f"{i} + {i % 7} ="} for i in range(n)]
    return from_rows("sums", [{"question": "0"}], rows, reward=reward, max_completion_tokens=4)


def counted(r):
    """What is counted row by row."""
    return {
        name: asdict(r)[name]
        for name in ("questions", "right", "lenient", "formatted", "rewards", "credit")
    }


def first(r, n):
    return {name: values and values[:n] for name, values in counted(r).items()}


@pytest.mark.parametrize(
    ("seconds", "n", "why"),
    [
        (1, 2, "the first two rows take their 4 s"),
        (
            9,
            4,
            "5 s are left after them: two rows more, and one second is too short for another",
        ),
        (50, 25, "2, then the 23 that 46 s are enough for"),
        (80, 40, "all"),
        (math.inf, 40, "no limit"),
    ],
)
def test_the_first_rows_are_those_of_a_look_without_a_limit(tiny, clock, seconds, n, why):
    task = sums(clock.reward)
    whole = readiness(*tiny, task, seconds=None, **HOW)
    assert whole.n == 40 and whole.asked_for is None
    clock.now = 0.0
    some = readiness(*tiny, task, seconds=seconds, **HOW)
    assert some.n == n, why
    assert counted(some) == first(whole, n)
    assert some.lengths.n == 2 * n and some.settings == whole.settings
    assert some.asked_for == (None if n == 40 else 40)


def test_what_turns_out_faster_is_asked_on(tiny, clock):
    """Of the first two rows a row takes 12 s, as where a card warms up, and then 2."""
    task = sums(
        lambda completions, **columns: clock.reward(completions) + clock.late(completions)
    )
    clock.late = lambda completions: setattr(clock, "now", max(clock.now, 24.0)) or []
    assert readiness(*tiny, task, seconds=100, **HOW).n > 8, "88 s were left for 7 rows"


def test_a_verdict_has_its_intervals_and_says_how_many_rows_were_asked(
    tiny, clock, tmp_path, capsys
):
    some = readiness(*tiny, sums(clock.reward), seconds=50, **HOW)
    assert some.reason.endswith(
        f" (Only 25 of 40 rows were asked; seconds=None asks all. 95 % intervals: mean reward "
        f"{some.mean_reward.words(rate=False)}, groups with unequal rewards {some.signal_reward().words()}.)"
    )
    assert capsys.readouterr().out == f"{some!r}\n", (
        "the verdict is printed once, whoever keeps the result"
    )
    some.save(tmp_path / "some.json")
    assert Readiness.load(tmp_path / "some.json") == some
    whole = readiness(*tiny, sums(clock.reward), seconds=None, quiet=True, **HOW)
    assert " (95 % intervals: " in whole.reason and "Only" not in whole.reason
    assert capsys.readouterr().out == ""


def test_stopped_by_hand_it_says_what_is_known(tiny, monkeypatch, capsys):
    asked = []

    def answer(*args, **how):
        asked.append(how)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return inner(*args, **how)

    inner = module.answer
    monkeypatch.setattr(module, "answer", answer)
    with pytest.raises(KeyboardInterrupt):
        readiness(*tiny, sums(Clock().reward), **HOW)
    out = capsys.readouterr().out
    assert (
        out.startswith("Stopped. Readiness('sums', 2 prompts x 2 samples: ")
        and "Only 2 of 40 rows" in out
    )


def test_a_row_that_cannot_be_asked_is_refused_before_the_first(tiny, clock):
    task = sums(clock.reward)
    rows = [*task.held_out[:9], task.held_out[9] | {"question": "so many words " * 9000}]
    with pytest.raises(ValueError, match=r"prompts\[9\] has \d+ tokens"):
        readiness(*tiny, task, rows=rows, **HOW)
    assert not clock.sizes


def test_parts_that_transformers_draws_do_not_share_their_draws(tiny, monkeypatch):
    monkeypatch.setattr(
        completing.RolloutEngine, "unsupported", lambda *args: "so that generate is used"
    )
    how = {"max_completion_tokens": 4, "samples": 2, "temperature": 1.0, "seed": 3}
    texts = [
        [one.text for one in complete(*tiny, ["1 + 1 ="], numbers=n, **how)]
        for n in (None, [0, 1], [2, 3])
    ]
    assert texts[0] == texts[1] != texts[2]
