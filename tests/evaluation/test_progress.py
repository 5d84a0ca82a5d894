"""Whoever waits for completions is told how far they are, at once and with the time left."""

import functools
import io
import re
import sys

import pytest

from grpo_kit._support.display import ProgressLine, progress_line
from grpo_kit.evaluation import generate_and_score
from grpo_kit.evaluation import readiness as readiness_module
from grpo_kit.evaluation.accuracy import evaluate
from grpo_kit.evaluation.generate_and_score import Decoding, answer
from grpo_kit.evaluation.lengths import length_probe
from grpo_kit.evaluation.readiness import readiness
from grpo_kit.tasks import from_rows


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def told(self):
        return [line.strip() for line in self.getvalue().split("\r") if line.strip()]


def watched(monkeypatch):
    """A terminal on which lines come without the second that they wait for in life. (Not a fixture: pytest puts its own
    stderr in place when a test begins.)"""
    for module in (generate_and_score, readiness_module):
        monkeypatch.setattr(module, "progress_line", functools.partial(progress_line, after=0))
    monkeypatch.setattr(ProgressLine, "OFTEN", 0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    return screen


def task():
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(12)]
    return from_rows(
        "sums",
        rows[:6],
        rows[6:],
        reward=lambda completions, **_: [0.5] * len(completions),
        max_completion_tokens=4,
    )


ASKED = {
    "evaluate": lambda *model: evaluate(*model, task(), batch_size=2),
    "length_probe": lambda *model: length_probe(
        *model, task(), max_completion_tokens=4, samples=1, batch_size=2
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_each_batch_is_told(tiny, monkeypatch, name):
    screen = watched(monkeypatch)
    ASKED[name](*tiny)
    done = re.findall(r"^sums, completions: (\d+) of (\d+)", "\n".join(screen.told()), re.M)
    assert [(int(n), int(of)) for n, of in done] == [(0, 6), (2, 6), (4, 6), (6, 6)]
    assert screen.getvalue().endswith("\r")


def test_readiness_tells_questions(tiny, monkeypatch):
    screen = watched(monkeypatch)
    how = {"samples": 2, "group_size": 2, "batch_size": 4, "seconds": 1000}
    readiness(*tiny, task(), rows=task().held_out, **how)
    told = "\n".join(screen.told())
    done = re.findall(r"^sums, readiness, questions: (\d) of 6", told, re.M)
    assert done == sorted(done) and {"0", "2", "4", "6"} <= set(done)


def test_judging_is_told_too(tiny, monkeypatch):
    screen = watched(monkeypatch)
    evaluate(*tiny, task())
    assert "sums, answers judged: 5 of 6" in " ".join(screen.told())
    assert "sums, rewards of 6 completions" in screen.told()


def test_samples_are_told_inside_a_chunk_and_what_is_there_counts(tiny, monkeypatch, tmp_path):
    screen = watched(monkeypatch)

    def told():
        first = len(screen.getvalue())
        answer(
            *tiny,
            task(),
            task().train,
            Decoding(2, 0.9, batch_size=2),
            chunk=3,
            folder=tmp_path,
        )
        return [
            int(n) for n in re.findall(r"completions: (\d+) of 12", screen.getvalue()[first:])
        ]

    assert sorted(set(told())) == [0, 2, 4, 6, 8, 10, 12]
    (tmp_path / "samples" / "part-00001.json").unlink()
    assert sorted(set(told())) == [0, 6, 8, 10, 12]
