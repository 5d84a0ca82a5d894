"""Few successes: positives weighed against negatives, and groups without a signal drawn anew."""

from dataclasses import replace

import pytest
import torch
from loop_runs import letters, make, record, same, task, weights

from grpo_kit.loop.batch import Batch
from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.score import first_groups, give_advantages, with_signal
from grpo_kit.record.files import read_metrics
from grpo_kit.tasks import from_rows

ROWS = [{"question": f"Say {i}.", "answer": str(i)} for i in range(9)]


def paid_by(reward):
    return from_rows("few", ROWS[:8], ROWS[8:], reward=reward, max_completion_tokens=6)


def some_can(completions, answer, **columns):
    """Three prompts can be solved: by the first of their completions."""
    return [float(a in ("1", "4", "6") and i % 4 == 0) for i, a in enumerate(answer)]


def none_can(completions, **columns):
    return [0.0] * len(completions)


class Keep(Hook):
    def __init__(self):
        self.batches = []

    def after_step(self, trainer, row, batch):
        self.batches.append(batch)


@pytest.mark.parametrize(
    "options", [{"dynamic_sampling": 2}, {"positive_weight": 1.0, "negative_weight": 1.0}]
)
def test_where_every_group_has_a_signal_nothing_changes(options, tmp_path):
    own = replace(task(), rewards=[letters], reward_weights=[1.0])
    plain, ours = make(tmp_path / "a", task=own), make(tmp_path / "b", task=own, **options)
    plain.train(), ours.train()
    assert same(weights(plain), weights(ours))
    extra = read_metrics(ours.folder).get("rollout/extra_completions")
    assert extra is None if "dynamic_sampling" not in options else extra.tolist() == [0] * 4


def test_weights_multiply_advantages_by_their_sign(tmp_path):
    keep = Keep()
    trainer = make(
        tmp_path / "run", hooks=[keep], steps=1, positive_weight=3.0, negative_weight=0.5
    )
    trainer.train()
    plain = replace(keep.batches[0], advantages=[])
    give_advantages(plain, trainer.config.__class__())
    wanted = [a * (3.0 if a > 0 else 0.5) for a in plain.advantages]
    assert keep.batches[0].advantages == pytest.approx(wanted) and any(a > 0 for a in wanted)


def test_groups_without_a_signal_are_replaced_and_the_cost_is_counted(tmp_path):
    keep = Keep()
    options = {"dynamic_sampling": 8, "prompts_per_step": 2, "group_size": 4}
    trainer = make(
        tmp_path / "run", task=paid_by(some_can), hooks=[keep], seams="fast", **options
    )
    trainer.train()
    table = read_metrics(trainer.folder)
    extra = table["rollout/extra_completions"]
    assert (extra % 8 == 0).all() and extra.sum() > 0 and extra.max() <= 64
    assert table["rollout/logprob_gap"].max() < 1e-4, "rows still belong to their prompts"
    for batch in keep.batches:
        assert len(batch) == 8 and len({*batch.groups}) == 2
        assert {row["answer"] for row in batch.rows} <= {"1", "4", "6"} and len(
            with_signal(batch)
        ) == 8
        assert (
            sum(a > 0 for a in batch.advantages) == 2
            and sum(a < 0 for a in batch.advantages) == 6
        )
    replaced = extra > 0
    assert (table["reward"][replaced] < 0.25).all(), (
        "of the prompts as they came, not of those that were chosen"
    )
    again = make(tmp_path / "again", task=paid_by(some_can), seams="fast", **options)
    again.train()
    assert same(weights(trainer), weights(again)) and record(trainer.folder) == record(
        again.folder
    )


def test_where_nothing_is_ever_solved_the_rounds_end_and_the_weights_stay(tmp_path):
    trainer = make(tmp_path / "run", task=paid_by(none_can), dynamic_sampling=2, steps=2)
    before = {name: p.detach().clone() for name, p in trainer.trained.items()}
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.trained.items())
    assert read_metrics(trainer.folder)["rollout/extra_completions"].tolist() == [16, 16]
    assert len(record(trainer.folder)[1]) == 16


def test_equal_rewards_that_round_are_no_signal(tmp_path):
    """0.1 + 0.2 + 0.3 in either order is the same reward."""
    # sum() makes up for rounding since Python 3.12
    one, other = 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1

    def rounds(completions, **columns):
        return [one if i % 2 else other for i, _ in enumerate(completions)]

    assert one != other
    trainer = make(tmp_path / "run", task=paid_by(rounds), dynamic_sampling=1, steps=1)
    trainer.train()
    assert read_metrics(trainer.folder)["rollout/extra_completions"].tolist() == [8]
    assert read_metrics(trainer.folder)["frac_reward_zero_std"].tolist() == [1.0]


def test_the_first_groups_with_a_signal_are_kept_whole_and_in_order():
    def batch(groups, rewards):
        size = len(groups)
        ids = [[group, i] for i, group in enumerate(groups)]
        return Batch(
            [{}] * size, groups, ids, ids, [""] * size, [False] * size, rewards=rewards
        )

    one, two = (
        batch([0, 0, 1, 1], [0.0, 0.0, 0.0, 1.0]),
        batch([2, 2, 3, 3], [1.0, 0.0, 1.0, 1.0]),
    )
    kept = first_groups([one, two], 2)
    assert kept.groups == [1, 1, 2, 2] and kept.rewards == [0.0, 1.0, 1.0, 0.0]
    assert kept.prompt_ids == [[1, 2], [1, 3], [2, 0], [2, 1]]
    assert first_groups([one, two], 3).groups == [1, 1, 2, 2, 0, 0], (
        "filled up with the first of the others"
    )
