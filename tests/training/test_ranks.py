"""Two processes are one process with twice the accumulation: weights, metrics and completions, on the same rows."""

from pathlib import Path

import pytest
import torch
from ranks_run import SETTINGS, in_order, launch, relative, replayed, state_of, trainer_of

from grpo_kit.record.files import read_completions, read_metrics

METRICS = [
    "loss", "grad_norm", "learning_rate", "temperature", "reward", "reward_std", "frac_reward_zero_std", "entropy",
    "kl", "clip_ratio", "completion_length", "completion_cut_off", "num_tokens", "reward/letters", "update/skipped",
    "rollout/logprob_gap", "clip_ratio/low_min", "clip_ratio/high_max", "policy_loss",
]  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for name in SETTINGS:
        (folder / name).mkdir()
    out = launch(Path(__file__).with_name("ranks_equal.py"), folder)[1]
    assert "done 0" in out and "done 1" in out
    return folder


@pytest.fixture
def ordered(monkeypatch):
    import trl.trainer.grpo_trainer as trl_grpo

    monkeypatch.setattr(trl_grpo, "shuffle_sequence_dict", trl_grpo.shuffle_sequence_dict)
    in_order()


@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_are_one(two, name, ordered, tmp_path):
    made = [torch.load(two / name / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    one = trainer_of(name, tmp_path / "one", processes=1)
    before = state_of(one)
    replayed(one, [calls for calls, _ in made])
    one.train()
    after = state_of(one)
    assert relative(made[0][1], made[1][1]) == 0, "both processes have the same weights, bit for bit"
    assert relative(made[0][1], after) < 1e-5
    assert relative(changes(made[0][1], before), changes(after, before)) < 1e-3, (
        "and they moved as far, the same way"
    )
    there, here = read_metrics(two / name / "two"), read_metrics(tmp_path / "one")
    for column in METRICS:
        if column in here:
            assert there[column].tolist() == pytest.approx(
                here[column].tolist(), rel=2e-4, abs=2e-6, nan_ok=True
            ), column
    there, here = read_completions(two / name / "two"), read_completions(tmp_path / "one")
    for column in ("step", "group", "prompt", "completion", "reward", "answer"):
        assert there[column].tolist() == here[column].tolist(), column
    assert all(map(list.__eq__, map(list, there["tokens"]), map(list, here["tokens"])))
    assert there["advantage"].tolist() == pytest.approx(here["advantage"].tolist(), abs=1e-5)


def changes(after, before):
    return {n: after[n] - before[n] for n in before}
