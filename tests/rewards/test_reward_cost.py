"""The cost benchmark measures every reward, on completions that differ and that the reward really judges."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_reward_contract import ROWS

from benchmarks.reward_cost import completions, entries, measure
from grpo_kit.more.code.code_rewards import CodeRuns, CodeTests

ROOT = Path(__file__).parents[2]


def test_every_reward_is_measured():
    in_the_sandbox = {CodeRuns, CodeTests}
    assert {type(row.reward) for row in ROWS} - in_the_sandbox == {
        type(entry.reward) for entry in entries()
    }


@pytest.mark.parametrize(
    "entry", entries(), ids=lambda entry: entry.name or entry.reward.__name__
)
def test_completions_differ_and_are_judged(entry):
    made = completions(entry, 6, characters=300)
    assert len({text for text, _ in made}) == 6
    scores = [
        entry.reward([text], **{k: [v] for k, v in columns.items()})[0]
        for text, columns in made
    ]
    assert all(score is not None for score in scores) and max(scores) > 0
    if entry.tag and entry.reward.columns:
        right, wrong = scores[::2], scores[1::2]
        assert sum(right) >= sum(wrong)


def test_cost_rises_with_length_where_the_whole_completion_is_read():
    entry = next(entry for entry in entries() if entry.reward.__name__ == "repetition")
    times = measure(entry, 9)
    assert times["long"]["median"] > times["usual"]["median"] > 0


def test_the_command_prints_and_saves(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.reward_cost",
        "--n",
        "3",
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "above 2 ms:" in done.stdout, done.stderr
    result = json.loads((tmp_path / "reward_cost.json").read_text())
    assert set(result["outside the sandbox"]) == {
        entry.name or entry.reward.__name__ for entry in entries()
    }
    assert {"hardware", "date", "versions", "load average before", "n"} <= set(result)
