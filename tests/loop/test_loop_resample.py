"""Groups without a signal are drawn anew: what is trained on, and what the step's row says of it."""

from dataclasses import replace

from loop_runs import letters, make, task

from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.score import with_signal
from grpo_kit.record.files import read_completions, read_metrics


def paid_in_part():
    """The task of which every second question is paid nothing, whatever is written."""
    rows = [row | {"pays": float(i % 2)} for i, row in enumerate(task().train)]

    def some(completions, pays, **columns):
        return [share * paid for share, paid in zip(letters(completions), pays, strict=True)]

    held_out = [row | {"pays": 1.0} for row in task().held_out]
    return replace(task(), train=rows, held_out=held_out, rewards=[some], reward_weights=[1.0])


class Keep(Hook):
    def begin(self, trainer):
        self.batches = []

    def after_step(self, trainer, row, batch):
        self.batches.append(batch)


def test_the_row_is_of_the_first_rollout_and_counts_what_all_cost(tmp_path):
    once, again = Keep(), Keep()
    plain = make(
        tmp_path / "plain", task=paid_in_part(), steps=1, prompts_per_step=4, hooks=[once]
    )
    plain.train()
    trainer = make(
        tmp_path / "run",
        task=paid_in_part(),
        steps=1,
        prompts_per_step=4,
        dynamic_sampling=5,
        hooks=[again],
    )
    trainer.train()
    assert 0 < len(with_signal(once.batches[0])) < 16, "the test can fail"
    assert with_signal(again.batches[0]) == [*range(16)], "four groups of four"
    (first,), (row,) = (read_metrics(t.folder).to_dict("records") for t in (plain, trainer))
    for name in (
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "completion_length",
        "reward/some",
    ):
        assert row[name] == first[name], name
    assert first["frac_reward_zero_std"] > 0
    extra = row["rollout/extra_completions"]
    assert extra in (16, 32, 48, 64, 80) and "rollout/extra_completions" not in first
    shortest = min(map(len, once.batches[0].prompt_ids)) + 1
    assert (
        row["num_tokens"] >= first["num_tokens"] + extra * shortest
        and trainer.tokens == row["num_tokens"]
    )
    trained = read_completions(trainer.folder)
    assert len(trained) == 16 and trained["reward"].mean() > row["reward"], (
        "what is trained on is on record"
    )
