"""Digests by which run folders know their task: values written down before, and what makes two tasks two."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_kit.evaluation._sample_cache import _settings
from grpo_kit.loop.grpo import Loop
from grpo_kit.models import load_policy
from grpo_kit.more.episodes import grid
from grpo_kit.more.lab import _arm as lab
from grpo_kit.more.lab._job import Job
from grpo_kit.rewards import ExactAnswer, WeightedSum
from grpo_kit.tasks import largest
from grpo_kit.tasks._same_task import content_digest, reward_digest, task_digest


def small():
    return largest(n_train=4, n_held_out=2)


def test_digests_that_older_run_folders_hold():
    """Made by the three functions that this one replaces: those runs go on, and those samples are found again."""
    games = grid(n_train=4, n_held_out=2)
    assert task_digest(small()) == "e4da8921dc279c52"
    assert task_digest(games) == "f342b19cdc9de40b"
    odd = replace(small(), train=[{**row, "x": {1, 2}} for row in small().train])
    assert task_digest(odd) == "8cf4d9546dc0b6b2"
    assert lab.digest(small().train) == content_digest(small().train) == "7b8344c6eea46ee4"
    assert lab.digest(games.train) == "3849ee1971459e06"
    assert (
        lab.digest([{"a": (1, 2.5), "b": None, "é": Path("x")}, {1, 2}]) == "b4065e4679fea2f4"
    )
    assert lab.prompt_fingerprint(lab.arm_of("smoke", {"task": small()})) == "9df85df5bacfd188"
    assert content_digest([["a b", "ü"], [[1, 2], [3]]]) == "c857d673bb709407"


def test_the_cache_of_samples_keeps_the_digest_of_its_prompts():
    model, tokenizer = load_policy("tiny-random", quiet=True)
    kept = _settings(model, tokenizer, ("a b", "ü"), ((1, 2), (3,)))
    assert kept["prompts"] == "2, digest c857d673bb709407"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"system": "Other."},
        {"prefill": "<think>"},
        {"max_completion_tokens": 13},
        {"reward_weights": [0.5, 0.5]},
        {"examples": ()},
    ],
    ids=str,
)
def test_another_prompt_reward_or_length_is_another_task(change):
    assert task_digest(replace(small(), **change)) != task_digest(small())


def test_other_rows_are_another_task():
    task = small()
    for split in ("train", "held_out"):
        fewer = replace(task, **{split: getattr(task, split)[1:]})
        assert task_digest(fewer) != task_digest(task)
    assert task_digest(replace(task, train=task.train[::-1])) != task_digest(task)
    assert task_digest(
        replace(task, train=[dict(reversed(row.items())) for row in task.train])
    ) == task_digest(task)


def test_a_run_folder_takes_its_task_and_no_other(tmp_path):
    job = Job.asked(
        "largest", {"preset": "smoke", "task_options": {"n_train": 4, "n_held_out": 2}}
    )
    model, tokenizer = load_policy("tiny-random", quiet=True)
    trainer = Loop(model, job.task, job.config, tokenizer=tokenizer, folder=tmp_path)
    trainer.open()
    text = (tmp_path / "run.json").read_text()
    assert f'"digest": "{task_digest(job.task)}"' in text
    assert Job.of_run(tmp_path).task.train == small().train
    (tmp_path / "run.json").write_text(text.replace('"n_train": 4', '"n_train": 5'))
    with pytest.raises(ValueError, match="is not the one that .* was begun with"):
        Job.of_run(tmp_path)


def longest(most=1):
    def short(completions, at=0, **columns):
        return [float(len(text) <= most) for text in completions]

    return short


def other(completions, at=0, **columns):
    return [float(len(text) < 2) for text in completions]


def test_a_reward_is_known_by_its_source_and_its_parameters():
    made = {
        "as made": lambda: longest(),
        "closed over": lambda: longest(2),
        "other source": lambda: other,
        "partial": lambda: functools.partial(other, at=1),
        "object": lambda: ExactAnswer(),
        "object's parameter": lambda: ExactAnswer(tag="final"),
        "sum": lambda: WeightedSum({ExactAnswer(): 0.5, other: 0.5}),
        "a part of the sum": lambda: WeightedSum({ExactAnswer(tag="final"): 0.5, other: 0.5}),
        "built in": lambda: len,
    }
    digests = {name: reward_digest(make()) for name, make in made.items()}
    assert len({*digests.values()}) == len(made)
    assert digests == {name: reward_digest(make()) for name, make in made.items()}
