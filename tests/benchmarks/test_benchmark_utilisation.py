"""The model of benchmarks/utilisation.py against intervals drawn by hand."""

import json

import pandas as pd
import pytest

from benchmarks.utilisation import (
    PUBLISHED,
    as_in_run,
    interval_seconds,
    lengths_of,
    measure,
    nearest_to_published,
    utilisation,
)


@pytest.mark.parametrize(
    ("rollouts", "updates", "sync", "seconds", "why"),
    [
        ([4], [6], 0, 10, "one step: sampler and trainer wait for each other"),
        ([4], [6], 2, 12, "and both for the weights"),
        (
            [4, 4, 4],
            [6, 6, 6],
            1,
            4 + 18 + 1,
            "slow trainer: it waits for the first rollouts alone",
        ),
        (
            [6, 6, 6],
            [4, 4, 4],
            1,
            18 + 4 + 1,
            "slow sampler: the last update comes after its last rollouts",
        ),
        ([5, 5], [5, 5], 0, 15, "as fast: one rollout and one update stand alone"),
        ([1, 9], [4, 2], 0, 12, "uneven: there at 1 and 10; updates end at 5 and 12"),
        ([2, 2, 8], [5, 1, 1], 0, 13, "there at 2, 4, 12; updates end at 7, 8, 13"),
    ],
)
def test_an_interval_by_hand(rollouts, updates, sync, seconds, why):
    assert interval_seconds(rollouts, updates, sync) == seconds, why


def test_with_equal_steps_it_is_the_formula():
    for r, u, s, k in [(3, 7, 0.5, 5), (7, 3, 0.5, 10), (4, 4, 0, 20), (1, 9, 2, 1)]:
        assert interval_seconds([r] * k, [u] * k, s) == pytest.approx(
            r + u + (k - 1) * max(r, u) + s
        )


def test_shares_by_hand():
    # two whole intervals of 4 + 6 + 6; a step left out
    shares = utilisation([4.0] * 5, [6.0] * 5, 2, 0.0, (8, 2))
    assert shares == pytest.approx(
        {"trainer": 24 / 32, "sampler": 16 / 32, "all": (8 * 0.75 + 2 * 0.5) / 10}
    )
    # strictly on-policy: one of two works
    assert utilisation([4.0], [6.0], 1, 0.0, (1, 1))["all"] == 0.5
    with pytest.raises(ValueError, match="sync_every=20"):
        utilisation([1.0] * 5, [1.0] * 5, 20, 0.0, (1, 1))


def test_longer_intervals_never_lower_it_and_the_limit_is_the_slower_side():
    shares = [
        utilisation([4.0] * 400, [6.0] * 400, k, 1.0, (1, 1)) for k in (1, 2, 5, 10, 20, 400)
    ]
    trainer = [s["trainer"] for s in shares]
    assert trainer == sorted(trainer) and trainer[-1] > 0.99
    assert shares[-1]["sampler"] == pytest.approx(4 / 6, abs=0.01)


def test_steps_as_in_a_run_keep_the_means_and_follow_the_lengths():
    metrics = pd.DataFrame(
        {"completion_length": [10.0, 30.0], "completions/max_length": [20.0, 60.0]}
    )
    phases = {
        "prefill": 1.0,
        "decode": 4.0,
        "reward": 0.0,
        "forward-backward": 5.0,
        "other": 1.0,
    }
    rollouts, updates = as_in_run(phases, metrics)
    assert rollouts == [1 + 4 * 0.5, 1 + 4 * 1.5] and updates == [6 * 0.5, 6 * 1.5]
    metrics.loc[2] = [float("nan")] * 2
    with pytest.raises(ValueError, match="steps without rollouts"):
        as_in_run(phases, metrics)


def test_the_table_reads_what_the_step_benchmark_wrote():
    seconds = {
        "prefill": 1.0,
        "decode": 3.0,
        "reward": 0.0,
        "forward-backward": 5.0,
        "optimizer": 1.0,
    }
    step = {
        "arms": {
            "kit": {"phases": {phase: {"median": value} for phase, value in seconds.items()}}
        }
    }
    result = measure(step, "kit", [], sync=0.0)
    assert (result["rollout seconds"], result["update seconds"]) == (4.0, 6.0)
    assert [row["sync_every"] for row in result["rows"]] == [1, 5, 10, 20]
    assert result["rows"][1]["trainer"] == round(30 / 34, 4)


def by_formula(k, ratio, sync):
    """Share of 8 + 2 cards that work, rollout and sync in updates."""
    return k * (8 + 2 * ratio) / 10 / (ratio + 1 + (k - 1) * max(ratio, 1) + sync)


def test_the_nearest_ratios_are_found_and_their_miss_is_told():
    best = nearest_to_published()
    k = {n: best[f"share at {n}"] for n in (1, 5, 10, 20)}
    assert PUBLISHED == {1: 0.62, 5: 0.72, 10: 0.81, 20: 0.85}
    assert max(abs(k[n] - p) for n, p in PUBLISHED.items()) == pytest.approx(
        best["largest miss"], abs=1e-3
    )
    ratio, sync = best["rollout / update"], best["sync / update"]
    assert by_formula(5, ratio, sync) == pytest.approx(best["share at 5"], abs=1e-3)
    squares = lambda r, s: sum((by_formula(n, r, s) - p) ** 2 for n, p in PUBLISHED.items())  # noqa: E731
    others = [squares(r, s) for r in (0.1, 0.16, 0.3, 1, 3) for s in (0, 0.1, 0.3, 1)]
    assert squares(ratio, sync) < min(others)


def test_lengths_of_a_loops_run_are_those_of_its_completions(tmp_path):
    rows = [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "completion_length": 2.0}]
    written = [{"step": 1, "tokens": ["a"]}, {"step": 1, "tokens": ["a", "b", "c"]}]
    for name, lines in (("metrics.jsonl", rows), ("completions.jsonl", written)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = lengths_of(tmp_path)
    assert found["completions/max_length"].tolist() == [3] and found[
        "completion_length"
    ].tolist() == [2.0]
