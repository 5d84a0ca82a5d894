"""What report_to's trackers are told is what metrics.csv holds, and the red flags."""

import pytest
from tiny_run import data, letters, make
from transformers import TrainerCallback

from grpo_kit.models import load_policy
from grpo_kit.record.files import read_metrics


class Tracker(TrainerCallback):
    """Takes logs as the trackers of transformers do: in on_log, by step."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append({**logs, "step": state.global_step})


def half(completions, **columns):
    return [1 - score for score in letters(completions)]


def tracked(folder, **options):
    tracker = Tracker()
    trainer = make("kit", folder, rewards=[letters, half], trl={"callbacks": [tracker]}, **options)
    trainer.train()
    return trainer, [row for row in tracker.rows if "loss" in row]


def test_a_tracker_sees_what_metrics_csv_sees(tmp_path):
    trainer, rows = tracked(tmp_path, max_steps=2)
    metrics = read_metrics(tmp_path)
    own = [name for name in metrics if name.startswith(("diversity/", "script/", "groups/", "update/"))]
    assert {"diversity/unique", "groups/equal_rewards"} & set(own) and "frac_cancelled_groups" in metrics
    for name in [*own, "frac_cancelled_groups"]:
        told = [row[name] for row in rows if name in row]
        assert told == pytest.approx(metrics[name].dropna().tolist()), name
    assert [row["step"] for row in rows] == [1, 2]
    kept = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(set(row) <= set(entry) for row, entry in zip(rows, kept, strict=True))


def test_a_tracker_is_told_of_a_red_flag_at_its_step(tmp_path):
    """bfloat16 under plain SGD at a rate of 1e-12: every update is rounded away."""
    model = load_policy("tiny-random", dtype="bfloat16", quiet=True)[0]
    trainer, rows = tracked(tmp_path, model=model, optim="sgd", learning_rate=1e-12, max_steps=2)
    assert [row.get("flags/lost_updates") for row in rows] == [1.0, None]
    assert "update/share_that_moves" in rows[0]


def test_evaluations_are_told_once(tmp_path):
    tracker = Tracker()
    make(
        "kit", tmp_path, trl={"callbacks": [tracker]}, eval_dataset=data(2), eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4, max_steps=2,
    ).train()  # fmt: skip
    assert [row["step"] for row in tracker.rows if "eval_reward" in row] == [1, 2]
