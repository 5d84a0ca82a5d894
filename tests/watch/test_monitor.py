"""Red flags: raised by induced failures within stated steps, by no healthy run; wired into a real trainer."""

import functools
import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from loop_runs import letters, same, weights
from standard_runs import make

from grpo_kit.loop.processes import Stopped
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.rewards import WeightedSum
from grpo_kit.watch._flags import OF_PARTS, OF_ROLLOUTS, OF_STEPS
from grpo_kit.watch._red_flag import Setup
from grpo_kit.watch.chart import plot_run
from grpo_kit.watch.monitor import Monitor, completion_measures, read_flags, red_flags

RUNS = Path(__file__).parents[1] / "fixtures" / "flags"
HEALTHY = sorted(p.parent for p in RUNS.glob("healthy/*/metrics.csv"))
INDUCED = sorted(p.parent for p in RUNS.glob("induced/*/metrics.csv"))


@functools.cache
def load(folder):
    return read_metrics(folder), json.loads((folder / "config.json").read_text())


def after_each_step(metrics, config=None):
    """The flags by name, from looking again after every step."""
    return [
        {flag.name: flag for flag in red_flags(metrics[:row], config=config)}
        for row in range(1, len(metrics) + 1)
    ]


@functools.cache
def flags_of(folder):
    return after_each_step(*load(folder))


def first_steps(metrics, looks):
    """{flag: the step after which it was raised}."""
    steps = {}
    for step, flags in zip(metrics["step"], looks, strict=True):
        for name in flags:
            steps.setdefault(name, int(step))
    return steps


def raised(metrics, config=None):
    return first_steps(metrics, after_each_step(metrics, config))


# ---- real runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", HEALTHY, ids=lambda path: path.name)
def test_healthy_runs_are_silent(folder):
    metrics, config = load(folder)
    assert len(metrics) >= 8
    # what is raised stays, as the third test says
    for row in {*range(5, len(metrics), 3), len(metrics)}:
        assert red_flags(metrics[:row], config=config) == []


@pytest.mark.parametrize("folder", INDUCED, ids=lambda path: path.name)
def test_induced_failures_are_caught_in_time(folder):
    expected = json.loads((folder / "induced.json").read_text())
    found = first_steps(load(folder)[0], flags_of(folder))
    assert set(expected["flags"]) <= set(found), found
    for name, within in expected["flags"].items():
        assert found[name] <= within, f"{name} after {found[name]} steps"


def test_there_are_runs_of_both_kinds():
    assert len(HEALTHY) >= 20 and len(INDUCED) >= 16


def on_another_scale(metrics, config, *, times, plus, stated):
    """The run as it would be with every reward times * r + plus: its range stated, or seen in the first step."""
    weights = config.get("reward_weights") or [1.0]
    parts = [name for name in metrics if str(name).startswith(("reward/", "eval/reward/"))]
    changed = {name: times * metrics[name].astype(float) + plus for name in parts}
    changed |= {
        name: times * metrics[name].astype(float) + plus * sum(weights)
        for name in ("reward", "eval/reward")
        if name in metrics
    }
    names = [*config["reward_parts"], *(name.removeprefix("reward/") for name in parts)]
    if stated:
        return metrics.assign(**changed), config | {
            "reward_ranges": {n: [plus, times + plus] for n in names}
        }
    first = np.arange(len(metrics)) == 0
    ends = {"low": np.where(first, plus, np.nan), "high": np.where(first, times + plus, np.nan)}
    seen = {f"scale/reward/{n}/{end}": values for n in names for end, values in ends.items()}
    return metrics.assign(**changed, **seen), config


@pytest.mark.parametrize("folder", [*HEALTHY[:6], *INDUCED], ids=lambda path: path.name)
def test_flags_do_not_depend_on_the_scale_of_a_reward(folder):
    metrics, config = load(folder)
    if "reward_parts" not in config:
        pytest.skip("a run of which no part is known")
    found = [(flag.name, flag.step) for flag in red_flags(metrics, config=config)]
    for scale in (dict(times=2, plus=-1), dict(times=8, plus=-4), dict(times=16, plus=0)):
        for stated in (True, False):
            other = on_another_scale(metrics, config, **scale, stated=stated)
            flags = red_flags(other[0], config=other[1])
            assert [(flag.name, flag.step) for flag in flags] == found, (scale, stated)


def test_a_flag_is_never_taken_back():
    for folder in [*INDUCED, *HEALTHY[:3]]:
        looks = flags_of(folder)
        for before, now in zip(looks, looks[1:], strict=False):
            assert before.items() <= now.items(), folder.name


# ---- each flag by hand ----------------------------------------------------------------------------------------


def table(steps=12, **columns):
    """A quiet run, with the columns given in place of its own."""
    quiet = {
        "reward": np.linspace(0.3, 0.5, steps),
        "entropy": np.full(steps, 0.5),
        "kl": np.full(steps, 0.02),
        "grad_norm": np.full(steps, 2.0),
        "clip_ratio": np.zeros(steps),
        "completion_length": np.full(steps, 20.0),
        "completion_cut_off": np.full(steps, 0.05),
        "groups/equal_rewards": np.full(steps, 0.3),
        "diversity/self_bleu": np.full(steps, 0.6),
        "diversity/unique": np.full(steps, 0.9),
        "diversity/distinct_2": np.full(steps, 0.7),
        "script/latin": np.ones(steps),
        "rollout/logprob_gap": np.full(steps, 1e-5),
    }
    return pd.DataFrame({"step": range(1, steps + 1), **quiet, **columns})


def turned(before, after, at, steps=12):
    """`before` up to step `at`, `after` from there on."""
    return np.where(np.arange(1, steps + 1) < at, before, after).astype(float)


CASES = {  # name: what it takes, the step the flag names, the step after which it is raised
    "KL spike": (dict(kl=turned(0.02, 0.02, 1) + np.eye(12)[7]), 8, 8),
    "gradient spike": (dict(grad_norm=turned(2, 2, 1) + 10 * np.eye(12)[7]), 8, 8),
    "entropy collapse": (dict(entropy=turned(0.5, 0.01, 4)), 4, 8),
    "mode collapse": (
        {"diversity/self_bleu": turned(0.6, 1, 3), "groups/equal_rewards": turned(0.3, 1, 3)}, 2, 6,
    ),
    "sparse reward": ({"groups/equal_rewards": turned(0.3, 1, 3)}, 2, 6),
    "cancelling parts": (dict(frac_cancelled_groups=turned(0, 1, 2)), 1, 5),
    "length explosion": (
        dict(completion_length=turned(20, 60, 5), completion_cut_off=turned(0.05, 0.5, 5)), 5, 7,
    ),
    "cut off": (dict(completion_cut_off=turned(0.05, 0.9, 5)), 4, 6),
    "language switch": ({"script/latin": turned(1, 0.3, 6), "script/han": turned(np.nan, 0.7, 6)}, 4, 6),
    "sampler gap": ({"rollout/logprob_gap": turned(1e-5, 0.2, 6)}, 4, 6),
    "stale rollouts": ({"rollout/age": turned(3, 3, 1), "clip_ratio": turned(0, 0.5, 6)}, 3, 7),
    "one answer": ({"eval/one_answer": turned(0.5, 1, 6), "eval/one_gold": turned(0.4, 0.4, 1)}, 6, 6),
    "not finite": (dict(loss=turned(0.1, np.nan, 8)), 8, 8),
    "no update": (dict(learning_rate=turned(1e-5, 0, 4)), 4, 8),
    "KL drift": (dict(kl=np.linspace(0.1, 1.2, 12)), 6, 10),
    "loss spike": (dict(loss=turned(0.1, 0.1, 1) + 2 * np.eye(12)[7]), 8, 8),
    "entropy explosion": (dict(entropy=turned(0.5, 3, 6)), 6, 10),
    "held-out fall": ({"eval/accuracy": turned(0.7, 0.1, 6)}, 6, 6),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_flag_and_no_other(name):
    columns, since, after = CASES[name]
    assert red_flags(table()) == []
    flags = red_flags(table(**columns))
    assert [(flag.name, flag.step) for flag in flags] == [(name, since)]
    assert raised(table(**columns)) == {name: after}
    assert any(letter.isdigit() for letter in flags[0].saw) and flags[0].why and flags[0].first


RATE, UP = {"learning_rate": np.full(12, 1e-5)}, np.linspace(0.4, 6, 12)
LOSS = 0.1 * np.sin(np.arange(12.0))
EVALS = np.arange(12) % 3 == 2
MEMBERS = {
    "not finite": [
        {"loss": turned(0.1, np.nan, 2)}, {"loss": LOSS, "grad_norm": turned(2, np.nan, 8), **RATE},
        {"loss": LOSS + turned(0, np.inf, 12), **RATE}, {"grad_norm": turned(2, -np.inf, 9)},
        {"loss": np.full(12, np.nan), "grad_norm": np.full(12, np.nan), **RATE},
        # as transformers logs a NaN loss
        {"loss": np.zeros(12), "grad_norm": np.full(12, np.nan), **RATE},
        {"loss": LOSS + turned(0, -np.inf, 12)},
    ],
    "no update": [
        {"grad_norm": np.zeros(12)}, {"grad_norm": turned(2, 0, 8)}, {"learning_rate": np.zeros(12)},
        {"grad_norm": np.full(12, 1e-12)}, {"learning_rate": turned(1e-5, 0, 8)},
        {"grad_norm": np.zeros(12), "groups/equal_rewards": np.arange(12) % 2.0},
    ],
    "KL drift": [
        {"kl": np.linspace(0, end, 12)} for end in (1, 1.5, 3)
    ] + [{"kl": np.full(12, 0.7)}, {"kl": 0.1 * 1.3 ** np.arange(12)}],
    "loss spike": [
        {"loss": LOSS + size * np.eye(12)[at]} for size, at in ((1, 5), (-3, 8), (50, 11), (1e6, 7))
    ] + [{"loss": 2 + LOSS + 9 * np.eye(12)[6]}],
    "entropy explosion": [
        {"entropy": UP}, {"entropy": np.full(12, 6.0)}, {"entropy": turned(0.05, 1.8, 5)},
        {"entropy": turned(1.2, 3.0, 8)}, {"entropy": np.linspace(1, 6, 12)},
    ],
    "held-out fall": [
        {"eval/accuracy": np.where(EVALS, np.linspace(0.7, 0.1, 12), np.nan)}, {"eval/reward": turned(0.8, 0.3, 9)},
        {"eval/accuracy": turned(0.2, 0.02, 9)}, {"eval/accuracy": turned(0.9, 0.6, 12)},
        {"eval/accuracy": turned(0.7, 0.1, 9), "eval/accuracy_low": turned(0.6, 0.05, 9),
         "eval/accuracy_high": turned(0.8, 0.2, 9)},
    ],
    "stale rollouts": [
        {"clip_ratio": turned(0, share, 8)} for share in (0.4, 0.6, 0.9)
    ] + [{"clip_ratio": np.full(12, 0.6), "rollout/age": np.zeros(12)}, {"clip_ratio": np.full(12, 0.35)}],
}  # fmt: skip


@pytest.mark.parametrize("name", MEMBERS)
def test_no_member_of_a_kind_stays_silent(name):
    assert len(MEMBERS[name]) >= 5
    for columns in MEMBERS[name]:
        found = {flag.name: flag for flag in red_flags(table(**columns))}
        assert name in found, columns
        assert any(letter.isdigit() for letter in found[name].saw) or "nan" in found[name].saw


LOOKS_ALIKE = {
    "a column that was not recorded": {"loss": np.full(12, np.nan), **RATE},
    "rows of evaluations": {
        name: np.where(EVALS, np.nan, 0.1) for name in ("loss", "grad_norm", "learning_rate", "reward")
    },
    "a warmup from 0": {"learning_rate": np.linspace(0, 1e-5, 12)},
    "a rate that ends at 0": {"learning_rate": np.linspace(1e-5, 0, 12)},
    "solved: all groups equal, no gradient": {
        "grad_norm": turned(2, 0, 6), "groups/equal_rewards": turned(0.3, 1, 6), "reward": turned(0.9, 1, 6),
    },
    "one step's KL": {"kl": turned(0.3, 0.3, 1) + 0.3 * np.eye(12)[6]},
    "a loss of either sign": {"loss": 0.3 * np.cos(np.arange(12.0) ** 2)},
    "an entropy that begins high": {"entropy": np.linspace(3.5, 0.3, 12)},
    "a base model's entropy": {"entropy": np.full(12, 2.4)},
    "accuracy within its intervals": {
        "eval/accuracy": turned(0.6, 0.4, 6), "eval/accuracy_low": turned(0.45, 0.25, 6),
        "eval/accuracy_high": turned(0.75, 0.55, 6),
    },
    "a sequence ratio's clipping": {"clip_ratio": np.full(12, 0.15)},
}  # fmt: skip


@pytest.mark.parametrize("what", LOOKS_ALIKE)
def test_what_looks_alike_raises_nothing(what):
    assert red_flags(table(**LOOKS_ALIKE[what])) == []


def test_fp16_skips_a_step_without_a_word_and_never_all():
    once, always = turned(2, 2, 1), np.full(12, np.inf)
    once[6] = np.inf
    half = {"config": {"autocast": "float16"}}
    for norm, in_float32, in_half in ((once, True, False), (always, True, True)):
        for config, flagged in (({}, in_float32), (half, in_half)):
            names = {
                flag.name for flag in red_flags(table(grad_norm=norm, **RATE), config=config)
            }
            assert ("not finite" in names) == flagged


def test_rollouts_by_older_weights_are_no_sampler_gap():
    """Other weights give other probabilities; only of its own weights must the sampler's agree."""
    gap = {"rollout/logprob_gap": turned(1e-5, 0.2, 6)}
    old = red_flags(table(**gap, **{"rollout/age": turned(0, 3, 6)}))
    assert [flag.name for flag in old] == ["stale rollouts"] and "nats a token away" in old[
        0
    ].saw
    assert [
        flag.name for flag in red_flags(table(**gap, **{"rollout/age": turned(0, 0, 6)}))
    ] == ["sampler gap"]


def test_samples_behind_a_hint_are_no_sampler_gap():
    """The prompt that is trained gives other probabilities than the one with the hint."""
    gap = {"rollout/logprob_gap": turned(1e-5, 0.2, 6)}
    for tokens in (7.0, -3.0):  # a hint in place of a longer system message of the template
        assert red_flags(table(**gap, **{"hint/tokens": turned(tokens, tokens, 6)})) == []


@pytest.mark.parametrize(
    "reward, solved", [(-1.0, False), (-0.1, True), (0.5, False), (2.9, True)]
)
def test_without_a_config_the_range_is_the_one_seen(reward, solved):
    """[-1, 3] once scores have been there; penalties alone end at 0."""
    ends = {"scale/reward/low": [-1.0] + [np.nan] * 11}
    if reward > 0:
        ends["scale/reward/high"] = [3.0] + [np.nan] * 11
    states = {"groups/equal_rewards": np.ones(12), "diversity/self_bleu": np.ones(12)}
    found = red_flags(table(reward=np.full(12, reward), **states, **ends))
    assert [flag.name for flag in found] == ([] if solved else ["mode collapse"])


def test_a_range_widens_from_where_it_was_seen_on():
    """Solved on the scale up to 1; a score of 5 in step 9 says that there is more to earn."""
    states = {"groups/equal_rewards": np.ones(20), "diversity/self_bleu": np.ones(20)}
    ends = {"scale/reward/high": np.where(np.arange(20) == 8, 5.0, np.nan)}
    quiet = table(20, reward=np.full(20, 0.9), **states)
    assert red_flags(quiet) == []
    flags = red_flags(quiet.assign(**ends))
    assert [(flag.name, flag.step) for flag in flags] == [("mode collapse", 5)]
    assert raised(quiet.assign(**ends)) == {"mode collapse": 9}


def test_a_part_at_the_low_end_of_its_range_was_never_paid():
    config = {"reward_parts": ["right", "brief"], "reward_weights": [0.5, 0.5]}
    parts = {"reward/right": np.full(12, -1.0), "reward/brief": np.linspace(-0.5, 0.5, 12)}
    rows = table(reward=np.linspace(-0.75, -0.25, 12), **parts)
    (flag,) = red_flags(rows, config=config)
    assert (
        flag.name == "part never paid"
        and "right gave -1 to every completion of 10 steps" in flag.saw
    )
    rows["reward/right"] = 0.0
    config["reward_ranges"] = {"right": [-1, 0]}
    assert red_flags(rows, config=config) == [], "a penalty that nobody earned"


def test_scores_outside_0_and_1_are_measured_and_those_inside_leave_no_column():
    rows = {"step": [1, 1, 2, 2], "group": 0, "completion": ["a", "b"] * 2}
    scores = {"reward": [0.5, 1.0, 0.0, 1 + 1e-8], "reward/points": [None, 3.0, -2.0, None]}
    found = completion_measures(pd.DataFrame(rows | scores)).set_index("step")
    assert [name for name in found if name.startswith("scale/")] == [
        "scale/reward/points/low",
        "scale/reward/points/high",
    ]
    assert found["scale/reward/points/low"].tolist() == [3, -2]
    assert found["scale/reward/points/high"].tolist() == [3, -2]
    noisy = pd.DataFrame(rows | {"reward": [1000, 1000.0001, -1000, 1000]})
    assert completion_measures(noisy)["groups/equal_rewards"].tolist() == [1, 0]


def test_every_finder_has_a_case():
    # Hacking and the two of parts need a config, and have tests of their own.
    assert len(CASES) + 3 == len(OF_ROLLOUTS) + len(OF_PARTS) + len(OF_STEPS)


def test_solved_is_not_collapsed():
    """Entropy gone, all groups equal, all completions the same: because they are right."""
    gone = {"entropy": turned(0.5, 0.01, 4), "diversity/self_bleu": turned(0.6, 1, 4)}
    gone |= {"groups/equal_rewards": turned(0.3, 1, 4)}
    stuck = red_flags(table(**gone, reward=turned(0.4, 0.4, 1)))
    assert {flag.name for flag in stuck} == {"entropy collapse", "mode collapse"}
    assert red_flags(table(**gone, reward=turned(0.4, 0.95, 4))) == []
    # the same reward, out of 2
    of_two = {"reward_parts": ["a", "b"], "reward_weights": [1.0, 1.0]}
    assert len(red_flags(table(**gone, reward=turned(0.4, 0.95, 4)), config=of_two)) == 2


def test_hacking_is_told_by_what_training_cannot_see():
    config = {"reward_parts": ["close", "exact", "tagged"], "reward_weights": [1.0, 0.0, 0.0]}
    up = {"reward": np.linspace(0.2, 1, 12), "reward/close": np.linspace(0.2, 1, 12)}
    full = {"reward/tagged": np.full(12, 0.97)}  # a measure at its ceiling cannot follow
    left = table(**up, **full, **{"reward/exact": np.full(12, 0.1)})
    (flag,) = red_flags(left, config=config)
    assert (
        flag.name == "hacking"
        and "exact by 0.00" in flag.saw
        and raised(left, config)["hacking"] == 9
    )
    follows = table(**up, **full, **{"reward/exact": np.linspace(0.1, 0.5, 12)})
    assert red_flags(follows, config=config) == [] and red_flags(left) == []
    # Held-out measures are believed first, and an evaluation is there at some steps only.
    seldom = np.where(np.arange(12) % 3 == 2, np.full(12, 0.1), np.nan)
    held_out = follows.assign(**{"eval/reward/exact": seldom})
    (flag,) = red_flags(held_out, config=config)
    assert "held-out exact" in flag.saw
    assert (
        red_flags(
            left.assign(**{"eval/reward/exact": seldom * np.arange(1, 13)}), config=config
        )
        == []
    )


PARTS = {"reward_parts": ["exact", "format", "watched"], "reward_weights": [0.75, 0.25, 0.0]}


def parts(exact, steps=12, **columns):
    there = {
        "reward/format": np.linspace(0.5, 1, steps),
        "reward/watched": np.linspace(0, 1, steps),
    }
    return table(steps, **{"reward/exact": exact}, **there, **columns)


def test_a_part_that_never_paid():
    """The format rises and earns a reward in every group, so nothing else shows it."""
    config = PARTS
    (flag,) = red_flags(parts(np.zeros(12)), config=config)
    assert (flag.name, flag.step, flag.saw) == (
        "part never paid",
        1,
        "exact gave 0 to every completion of 10 steps",
    )
    assert raised(parts(np.zeros(12)), config) == {"part never paid": 10}
    assert red_flags(parts(np.eye(12)[7] / 32), config=config) == [], (
        "one completion of 32 in 12 steps"
    )
    assert raised(parts(turned(0.5, 0, 2)), config) == {"part never paid": 11}, (
        "it also may stop"
    )
    untrained = {"reward/watched": np.zeros(12)}
    assert red_flags(parts(np.linspace(0, 1, 12)).assign(**untrained), config=config) == []
    inside = {
        "reward_parts": ["sum", "exact", "format"],
        "reward_weights": [1.0],
        "answer_parts": ["exact"],
    }
    assert [flag.name for flag in red_flags(parts(np.zeros(12)), config=inside)] == [
        "part never paid"
    ]


def test_a_part_that_could_never_judge():
    unjudged = parts(np.linspace(0, 1, 12)).assign(**{"reward/watched": np.nan})
    (flag,) = red_flags(unjudged, config=PARTS)
    assert (flag.name, flag.saw) == (
        "part never judged",
        "watched gave None to every completion of 10 steps",
    )
    assert red_flags(unjudged.drop(columns="reward/watched"), config=PARTS) == [], (
        "not recorded is not None"
    )
    nothing = parts(np.full(12, np.nan), reward=np.full(12, np.nan))
    assert "part never judged" in {flag.name for flag in red_flags(nothing, config=PARTS)}, (
        "no total at all"
    )
    # Of four passes over a rollout only the first has rewards; ten of those are forty steps.
    reused = parts(np.zeros(36), steps=36)
    reused.loc[
        reused["step"] % 4 != 1,
        ["reward", "reward/exact", "reward/format", "completion_length"],
    ] = np.nan
    assert red_flags(reused, config=PARTS) == []


def test_groups_without_gradient_are_no_baseline_for_a_spike():
    norms = np.array([0, 0, 2, 0, 0, 2, 0, 0, 2, 2, 0, 2], float)
    assert red_flags(table(grad_norm=norms)) == []


def test_the_length_that_would_do_is_measured():
    long = table(
        completion_cut_off=turned(0.05, 0.6, 5),
        **{"completions/max_terminated_length": [31.0] * 12},
    )
    assert "took 31 tokens" in red_flags(long)[0].saw
    assert "not known" in red_flags(table(completion_cut_off=turned(0.05, 1, 1)))[0].saw


def test_age_of_rollouts_comes_from_the_config_too():
    clipped = table(clip_ratio=np.full(12, 0.25))
    assert red_flags(clipped) == []  # of a log that does not say how old its rollouts are
    args = {"steps_per_generation": 2, "num_iterations": 3, "gradient_accumulation_steps": 1}
    assert Setup.of({"args": args}).age == 5
    assert red_flags(clipped, config={"args": args})[0].saw.startswith(
        "rollouts up to 5 steps old"
    )


def test_steps_that_reuse_a_rollout_do_not_count_twice():
    """With num_iterations=3 two of three rows have no reward: five rows without spread are two rollouts."""
    frame = table(15, **{"groups/equal_rewards": np.ones(15)})
    reused = [step % 3 != 1 for step in frame["step"]]
    sampled = [
        "reward",
        "groups/equal_rewards",
        "diversity/self_bleu",
        "completion_cut_off",
        "completion_length",
    ]
    frame.loc[reused, sampled] = np.nan
    assert raised(frame) == {"sparse reward": 13}
    assert raised(frame.assign(kl=0.02 + np.eye(15)[8])) == {"KL spike": 9, "sparse reward": 13}


def test_little_is_no_reason_for_a_flag():
    assert red_flags(pd.DataFrame({"step": []})) == []
    assert red_flags(pd.DataFrame({"step": [1], "reward": [None]})) == []
    with pytest.raises(ValueError, match="no step"):
        red_flags(pd.DataFrame({"reward": [1.0]}))


# ---- what is read in completions ------------------------------------------------------------------------------


def completions(texts, rewards=None, **columns):
    n = len(texts)
    rewards = [float(i % 2) for i in range(n)] if rewards is None else rewards
    return pd.DataFrame(
        {
            "step": 1,
            "group": [i // 4 for i in range(n)],
            "completion": texts,
            "reward": rewards,
            **columns,
        }
    )


def test_scripts_and_equal_rewards():
    row = completion_measures(
        completions(["yes it is"] * 3 + ["да это так"], [1, 1, 1, 1.0000001])
    ).iloc[0]
    assert (row["script/latin"], row["script/cyrillic"], row["groups/equal_rewards"]) == (
        0.75,
        0.25,
        1.0,
    )
    bare = completion_measures(completions(["82</answer>"] * 4)).iloc[0]
    assert bare["script/latin"] == 1.0
    mixed = completion_measures(completions(["82</answer>"] * 3 + ["вода"])).iloc[0]
    assert (mixed["script/latin"], mixed["script/cyrillic"]) == (0.75, 0.25)


def test_parts_that_cancel_but_not_those_of_weight_0():
    parts = {"reward/right": [1.0, 0, 1, 0], "reward/humble": [0.0, 1, 0, 1]}
    frame = completions(["a", "b", "c", "d"], [0.5] * 4, **parts)
    assert completion_measures(frame)["frac_cancelled_groups"].tolist() == [1.0]
    watched = completion_measures(frame, weights={"right": 0.0, "humble": 1.0})
    assert "frac_cancelled_groups" not in watched or watched[
        "frac_cancelled_groups"
    ].tolist() == [0.0]


def test_flags_read_the_measures_of_completions():
    bare = table()[["step", "reward", "entropy"]]
    same_text = pd.concat(
        [completions(["7"] * 8, [0.0] * 8).assign(step=step) for step in range(1, 13)]
    )
    measured = bare.merge(completion_measures(same_text), on="step")
    assert [flag.name for flag in red_flags(measured)] == ["mode collapse"]


# ---- in a running trainer -------------------------------------------------------------------------------------


def same_score(completions, **columns):
    return [0.1] * len(completions)


def test_a_run_records_measures_and_flags(tmp_path, capsys):
    trainer = make(tmp_path / "run", rewards=same_score, steps=7, temperature=1.5)
    trainer.train()
    metrics = read_metrics(tmp_path / "run")
    assert metrics["groups/equal_rewards"].tolist() == [1.0] * 7
    measured = completion_measures(read_completions(tmp_path / "run"))
    np.testing.assert_allclose(metrics["diversity/self_bleu"], measured["diversity/self_bleu"])
    flags = read_flags(tmp_path / "run")
    assert {"sparse reward", "cut off"} <= {flag.name for flag in flags}
    assert flags == [
        flag for flag in flags if flag in red_flags(metrics, config=config_of(tmp_path / "run"))
    ]
    said = capsys.readouterr().out
    assert all(said.count(f"Red flag: {flag}") == 1 for flag in flags), (
        "once, not at every step"
    )
    assert trainer.step == 7
    drawn = plot_run(tmp_path / "run")._repr_svg_()
    for number, flag in enumerate(flags, 1):
        assert f">{number}  {flag.name} since step {flag.step}: " in drawn


def config_of(folder):
    return json.loads((folder / "run.json").read_text())


def test_stop_ends_after_the_step_saves_and_goes_on(tmp_path, capsys):
    trainer = make(tmp_path / "run", on_flag="stop", rewards=same_score, steps=9)
    with pytest.raises(Stopped, match="after step 3 of 9 .red flag: cut off."):
        trainer.train()
    assert trainer.step == 3 and (tmp_path / "run" / "checkpoint-3" / "digests.json").is_file()
    assert "Red flag: cut off since step 1" in capsys.readouterr().out
    with pytest.raises(Stopped, match="after step 5 of 9"):
        trainer.train()  # the flag is known now; the next one stops it again
    names = [flag.name for flag in read_flags(tmp_path / "run")]
    assert len(set(names)) == len(names) >= 2


def test_stopping_and_going_on_changes_no_weight(tmp_path):
    stopped, stops = make(tmp_path / "a", on_flag="stop", steps=5), 0
    while stopped.step < 5:
        try:
            stopped.train()
        except Stopped:
            stops += 1
    straight = make(tmp_path / "b", steps=5)
    straight.train()
    assert stops and same(weights(stopped), weights(straight))


def test_a_callable_gets_each_flag_once_and_may_fail(tmp_path, capsys):
    got = []
    make(tmp_path / "a", rewards=same_score, steps=6, on_flag=got.append).train()
    assert got == read_flags(tmp_path / "a") and len(got) >= 2
    assert "Red flag" not in capsys.readouterr().out

    def fails(flag):
        raise RuntimeError("no pager")

    trainer = make(tmp_path / "b", rewards=same_score, steps=6, on_flag=fails)
    with pytest.warns(RuntimeWarning, match="no pager"):
        trainer.train()
    assert trainer.step == 6
    with pytest.raises(ValueError, match="on_flag='shout'"):
        make(tmp_path / "c", on_flag="shout")


def test_dead_parts_are_seen_in_a_running_trainer(tmp_path):
    def silent(completions, **columns):
        return [None] * len(completions)

    def never(completions, answer, **columns):
        return [0.0] * len(completions)

    make(tmp_path / "run", rewards=[letters, never, silent], steps=10).train()
    flags = {flag.name: flag.saw for flag in read_flags(tmp_path / "run")}
    assert flags["part never paid"].startswith("never gave 0")
    assert flags["part never judged"].startswith("silent gave None")
    inside = WeightedSum({letters: 0.5, silent: 0.5})  # no completion has a total
    make(tmp_path / "sum", rewards=inside, steps=10).train()
    flags = {flag.name: flag.saw for flag in read_flags(tmp_path / "sum")}
    assert flags["part never judged"].startswith("weighted_sum and silent gave None")


def test_trouble_in_the_monitor_never_stops_training(tmp_path):
    monitor = Monitor("warn")
    monitor.begin(tmp_path, {"reward_weights": [1.0], "reward_parts": ["a"]}, [])
    with pytest.warns(RuntimeWarning, match="stumbled"):
        assert monitor.measure(pd.DataFrame({"step": [1], "nothing": [2]})) == {}


def test_a_sampler_that_differs_and_old_rollouts_are_seen(tmp_path):
    trainer = make(tmp_path / "gap", steps=4)
    inner = trainer.sample

    def sharper(*given):  # as a sampler that does not know the temperature
        batch = inner(*given)
        batch.sampler_logprobs = [
            [value * 0.5 for value in row] for row in batch.sampler_logprobs
        ]
        return batch

    trainer.sample = sharper
    trainer.train()
    assert "sampler gap" in {flag.name for flag in read_flags(tmp_path / "gap")}

    make(tmp_path / "stale", steps=6, iterations=8, learning_rate=0.1, epsilon=0.05).train()
    assert "stale rollouts" in {flag.name for flag in read_flags(tmp_path / "stale")}
    make(tmp_path / "fresh", steps=8, learning_rate=0.1, epsilon=0.05).train()
    names = {flag.name for flag in read_flags(tmp_path / "fresh")}
    assert not names & {"stale rollouts", "sampler gap"}


def test_a_healthy_step_says_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        make(tmp_path / "run", rewards=letters, steps=2).train()
    assert read_flags(tmp_path / "run") == []
