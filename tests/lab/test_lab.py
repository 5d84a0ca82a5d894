"""The laboratory: equal but for the arm, resumable, honest about seeds."""

import functools
import importlib
import io
import json
import math
import re
import shutil
import signal
import sys
from dataclasses import replace

import forked
import lab_runs
import numpy as np
import pandas as pd
import pytest
from filelock import FileLock
from lab_runs import ARMS, SEEDS, base, task
from scipy import stats

import grpo_kit as kit
from benchmarks import interval_coverage
from grpo_kit._support.display import BASE, COLOURS, ProgressLine, progress_line
from grpo_kit.evaluation.intervals import bootstrap_mean
from grpo_kit.more import lab
from grpo_kit.more.lab._arm import _of_curve, arm_of, fingerprint, prompt_fingerprint
from grpo_kit.more.lab._run import RESULT, SETTINGS, set_aside, write_json
from grpo_kit.more.lab.statistics import difference_over_seeds, holm, over_seeds, paired_scalars
from grpo_kit.record.files import RunFolderError
from grpo_kit.schedules import linear

# the module; lab.compare_arms is the function
COMPARE_ARMS = importlib.import_module("grpo_kit.more.lab.compare_arms")
TIMES = [
    "seconds",
    "train_seconds",
    "evaluate_seconds",
    "prepare_seconds",
    "date",
    "step_seconds",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "whole"
    return folder, lab_runs.compare(folder)


def untimed(table):
    return table.drop(columns=[c for c in TIMES if c in table]).reset_index(drop=True)


def copied(folder, target, *runs):
    """Finished runs, such as "control/seed-0", as another laboratory."""
    for run in runs:
        shutil.copytree(folder / run, target / run)
    return target


def made(rewards, *, right=None, seeds=(0, 1), **columns):
    """A Lab out of rewards by arm; right: arm -> a share of 20 rows for each seed."""
    arms, rng = list(rewards), np.random.default_rng(0)
    shares = right or {arm: [0.5] * len(seeds) for arm in arms}
    keys = [(arm, seed, shares[arm][i]) for arm in arms for i, seed in enumerate(seeds)]
    steps = range(1, 1 + max(map(len, rewards.values())))
    curves = [
        pd.DataFrame(
            {"step": steps, "reward": np.array(rewards[arm], float), "arm": arm, "seed": seed}
        )
        for arm, seed, _ in keys
    ]
    numbers = dict.fromkeys(("steps", "completions", "tokens", "seconds", "reward_mean"), 1.0)
    runs = [
        {
            "arm": arm,
            "seed": seed,
            "accuracy": share,
            "before": 0.1,
            "n": 20,
            "best_constant": None,
            **numbers,
        }
        for arm, seed, share in keys
    ]
    answers = {
        (arm, seed): rng.permutation(
            [1] * round(20 * share) + [0] * round(20 * (1 - share))
        ).tolist()
        for arm, seed, share in keys
    }
    return lab.Lab(
        arms, pd.DataFrame(runs).assign(**columns), answers, pd.concat(curves), arms[0]
    )


# ---- statistics


def test_one_seed_has_the_rows_interval_alone():
    found = over_seeds([[1, 0, 1, 1, 0, 1, 0, 0]])
    alone = bootstrap_mean([1, 0, 1, 1, 0, 1, 0, 0])
    assert (found.value, found.low, found.high) == pytest.approx((0.5, alone.low, alone.high))


def test_rows_alike_inside_a_seed_leave_students_t():
    found = over_seeds([[0.2] * 50, [0.4] * 50, [0.6] * 50])
    # t quantile with 2 degrees of freedom, from a printed table
    half = 4.302653 * 0.2 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((max(0, 0.4 - half), 0.4 + half))


def test_what_is_left_is_counted_once():
    """Two seeds, three rows, by hand: seed means 0.5 and 0.7; row means 0.2, 0.6, 1.0; left: 0, +-0.1, +-0.1."""
    values = [[0.1, 0.4, 1.0], [0.3, 0.8, 1.0]]
    seed_error = 0.1  # sd of 0.5 and 0.7 is 0.1414, over the root of 2
    # Rows: variance of their means 0.16; what is left has squares 0, 0.02, 0.02 in (2 - 1)(3 - 1) parts: 0.02.
    row_error = math.sqrt((0.16 - 0.02 / 2) / 3)
    half = math.hypot(12.7062 * seed_error, 1.959964 * row_error)
    d, _ = difference_over_seeds([[0.0] * 3] * 2, values)
    assert d.value == pytest.approx(0.6) and d.low == pytest.approx(0.6 - half, abs=1e-4)


@pytest.mark.parametrize(
    "seeds_vary, rows_vary", [(0.0, 0.0), (0.0, 1.0), (0.3, 1.0), (1.0, 0.0)]
)
def test_interval_covers_what_it_says(seeds_vary, rows_vary):
    """Seeds and rows both random, one of them or neither: as often as it says, and hardly oftener."""
    variation = {"seeds_vary": seeds_vary, "rows_vary": rows_vary, "gap": 0.8}
    true = interval_coverage.truth(**variation)
    found = interval_coverage.coverage(
        np.random.default_rng(0), 1000, 3, 64, true=true, **variation
    )
    assert 0.93 <= found["covered"] <= 0.975


def test_paired_difference_is_tighter_than_two_intervals():
    """The same rows are hard for both arms, and there is no difference: found in about one of twenty."""
    rng, found = np.random.default_rng(1), []
    for _ in range(60):
        hard = rng.random(200) < 0.5
        one, two = (
            [(hard & (rng.random(200) < 0.98)).astype(float) for _ in range(3)]
            for _ in range(2)
        )
        d, p = difference_over_seeds(one, two)
        assert d.high - d.low < over_seeds(one).high - over_seeds(one).low
        found.append(p < 0.05)
    assert sum(found) <= 9


def test_scalars_are_students_paired_t():
    one, two = [0.3, 0.5, 0.4, 0.35], [0.5, 0.55, 0.6, 0.41]
    mean, low, high, p = paired_scalars(one, two)
    theirs = stats.ttest_rel(two, one)
    bounds = theirs.confidence_interval()
    assert (low, high, p) == pytest.approx((bounds.low, bounds.high, theirs.pvalue))
    assert mean == pytest.approx(0.1275)


@pytest.mark.parametrize(
    "ps, expected, why",
    [
        ([0.01], [0.01], "one test needs no correction"),
        (
            [0.01, 0.04, None, 0.03],
            [0.03, 0.06, None, 0.06],
            "steps down, never falls, skips None",
        ),
        ([0.5, 0.6], [1.0, 1.0], "never above 1"),
        ([0.04, math.nan, 0.01], [0.04, None, 0.02], "NaN is no test"),
    ],
)
def test_holm(ps, expected, why):
    assert holm(ps) == pytest.approx(expected), why


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("shift", [0.0, 0.04, 0.1, 0.3, -0.2])
def test_p_and_interval_say_the_same(seeds, shift):
    """Below 0.05 exactly where 0 is outside the 95 % interval."""
    rng = np.random.default_rng(seeds)
    for _ in range(5):
        one = (rng.random((seeds, 80)) < 0.5).astype(float)
        two = (rng.random((seeds, 80)) < 0.5 + shift).astype(float)
        d, p = difference_over_seeds(one, two)
        assert (p < 0.05) == (d.low > 0 or d.high < 0) and 0 < p <= 1
        assert difference_over_seeds(two, one)[1] == pytest.approx(p, rel=1e-6)


def test_p_without_noise_of_rows_is_students():
    one, two = (
        np.full((3, 4000), 0.5),
        np.full((3, 4000), 0.5) + np.array([[0.1], [0.2], [0.3]]),
    )
    p = difference_over_seeds(one, two)[1]
    assert p == pytest.approx(stats.ttest_1samp([0.1, 0.2, 0.3], 0).pvalue, rel=0.01)


def test_rows_that_all_change_alike_are_no_proof():
    """Four rows, wrong before and right after, in both seeds: nothing varies, yet four rows are four rows."""
    d, p = difference_over_seeds([[0] * 4] * 2, [[1] * 4] * 2)
    assert d.low < 1 and 1e-5 < p < 0.05
    assert difference_over_seeds([[1, 0]] * 2, [[1, 0]] * 2)[1] == 1


@pytest.mark.parametrize(
    "call", [lambda: over_seeds([]), lambda: difference_over_seeds([[1.0]], [[1.0, 0.0]])]
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(ValueError, match="shape"):
        call()


# ---- settings


def arm(**changes):
    given = {**base(), **changes}
    return arm_of(given.pop("config"), given)


def test_an_arm_is_the_config_changed_and_what_it_does_besides():
    made = arm_of(
        "smoke",
        {"group_size": 2, "temperature": linear(1.2, 0.6), "loss": "grpo", "on_flag": "stop"},
    )
    config = made.config
    assert (made.on_flag, config.group_size, config.loss, config.steps) == (
        "stop",
        2,
        "grpo",
        2,
    )
    assert config.temperature == linear(1.2, 0.6) and config.max_completion_tokens == 8
    lora = {"tuning": "lora"}
    assert (
        arm_of("smoke", lora).config.optimizer is None
        and arm_of("smoke", lora).config.learning_rate == 1e-2
    )
    assert arm_of("smoke", lora | {"optimizer": "adamw-8bit"}).config.optimizer == "adamw-8bit"
    mine = kit.preset("smoke", steps=5)
    assert arm_of(mine, {"group_size": 2}).config.steps == 5 and mine.group_size == 4, (
        "a copy is changed"
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"grup_size": 2}, "grup_size.*did you mean 'group_size'"),
        ({"seed": 3}, "seed"),
        ({"num_iterations": 2}, "num_iterations=2.*here it is iterations"),
        ({"sample": 3}, "sample=3.*the fast sample"),
        ({"on_flag": "sotp"}, "on_flag='sotp'"),
        ({"prepare": 3}, "prepare=3"),
        ({"task": 3}, "task=3"),
        ({"eval_temperatures": 0.7}, "eval_temperatures=0.7"),
        ({"eval_temperatures": [0.7, 0]}, "eval_temperatures"),
        ({"tuning": "loar"}, "tuning='loar'"),
        ({"loss": "gpro"}, "loss='gpro'"),
        ({"temperature": linear(1, -1)}, r"temperature\(1.0\)=-1"),
    ],
)
def test_unknown_settings_are_refused_before_anything_runs(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        lab.compare_arms({"a": {}, "b": changes}, [0], "smoke", folder=tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "names, seeds",
    [("", [0]), ("a", []), ("a", [1, 1]), ("a", [0.5]), ("a", [-1]), ("a", [True])]
    + [([name], [0]) for name in ("a/b", "..", ".locks", "")],
)
def test_no_arms_no_seeds_or_bad_names_are_refused(names, seeds, tmp_path):
    arms = {name: {} for name in names}
    with pytest.raises(ValueError):
        lab.compare_arms(arms, seeds, "smoke", folder=tmp_path / "x")


def test_settings_are_named_alike_in_every_process():
    text = json.dumps(fingerprint(arm(prepare=lab_runs.compare, temperature=linear(1, 0.5))))
    assert " at 0x" not in text and "linear(start=1, end=0.5)" in text and '"letters"' in text


def weighted(weight):
    def reward(completions, **columns):
        return [weight * len(text) for text in completions]

    return reward


class Bare:
    """A reward without a repr of its own: what it prints holds its address."""

    __name__ = "bare"

    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]

    def pay(self, *given):
        pass


class Other(Bare):
    pass


def other_rows(split, **change):
    rows = list(getattr(task(), split))
    return {"task": replace(task(), **{split: [*rows[:-1], {**rows[-1], **change}]})}


def rewarded(reward):
    return {"task": replace(task(), rewards=[reward])}


@pytest.mark.parametrize(
    "one, two, why",
    [
        (
            {},
            other_rows("train", answer="7"),
            "another last row, the first and the number alike",
        ),
        ({}, other_rows("held_out", answer="7"), "the same in held-out rows"),
        (
            {},
            {"task": replace(task(), is_correct=lambda text, row: True)},
            "judged in another way",
        ),
        (
            {"temperature": linear(1, 0.5)},
            {"temperature": linear(1, 0.4)},
            "a repr that says it",
        ),
        (rewarded(weighted(0.1)), rewarded(lab_runs.letters), "another function"),
        (rewarded(Bare()), rewarded(Other()), "objects of another class"),
        (
            {"prepare": functools.partial(print, 1)},
            {"prepare": functools.partial(print, 2)},
            "a partial with another argument",
        ),
        (
            {"prepare": functools.partial(weighted, 1)},
            {"prepare": functools.partial(weighted, 2)},
            "the same, of a function whose own repr is an address",
        ),
        ({"prepare": Bare().pay}, {"prepare": Other().pay}, "a method of another object"),
        ({}, {"beta": 0.1}, "a number"),
        (
            {},
            {"config": "cpu", "model": "tiny-random"},
            "another preset, whatever else it stands for",
        ),
        ({}, {"eval_temperatures": [1.0]}, "another measure"),
        ({}, {"on_flag": "stop"}, "it may end early"),
        ({}, {"sample": functools.partial(lab_runs.Colder, by=1)}, "another sample"),
        (
            {"sample": functools.partial(lab_runs.Colder, by=1)},
            {"sample": functools.partial(lab_runs.Colder, by=2)},
            "the same with another number",
        ),
    ],
)
def test_other_settings_have_another_fingerprint(one, two, why):
    prints = [fingerprint(arm(**changes)) for changes in (one, two)]
    assert prints[0] != prints[1], why
    assert json.loads(json.dumps(prints)) == prints


@pytest.mark.parametrize(
    "one, two, why",
    [
        ({}, {"beta": 0, "tuning": "full"}, "what is the default anyway"),
        (
            rewarded(weighted(0.1)),
            rewarded(weighted(0.2)),
            "a function is known by its name alone",
        ),
        (
            {"temperature": lambda p: 1 - p / 2},
            {"temperature": lambda p: 1 - p / 4},
            "lambdas have one name",
        ),
        (rewarded(Bare()), rewarded(Bare()), "an object without a repr is known by its class"),
        (
            {"eval_temperatures": (1,)},
            {"eval_temperatures": [1.0]},
            "kinds of numbers and lists",
        ),
    ],
)
def test_the_same_settings_have_the_same_fingerprint(one, two, why):
    assert fingerprint(arm(**one)) == fingerprint(arm(**two)), why


def test_before_is_shared_by_arms_with_the_same_prompts_only():
    key = lambda **changes: prompt_fingerprint(arm(**changes))  # noqa: E731
    paid = replace(task(), rewards=[weighted(0.5)])
    for same in (
        {"task": paid},
        {"beta": 0.1},
        {"tuning": "lora"},
        {"steps": 9},
        other_rows("train", answer="7"),
    ):
        assert key(**same) == key(), same
    for other in (
        other_rows("held_out", question="Other?"),
        {"task": replace(task(), prefill="It is")},
        {"dtype": "bfloat16"},
        {"max_completion_tokens": 5},
        {"held_out": 4},
    ):
        assert key(**other) != key(), other


def test_only_a_whole_checkpoint_under_the_same_settings_is_gone_on_with(done, tmp_path):
    run = copied(done[0], tmp_path, "control/seed-0") / "control" / "seed-0"
    (run / "checkpoint-9").mkdir()  # half of one
    assert set_aside(run, arm()) is None
    stopping = arm(on_flag="stop")
    assert set_aside(run, arm(learning_rate=0.1)).name == "seed-0.unfinished-1"
    again = functools.partial(
        shutil.copytree, tmp_path / "control" / "seed-0.unfinished-1", run
    )
    again()
    (run / SETTINGS).unlink()
    assert set_aside(run, arm()).name == "seed-0.unfinished-2", (
        "nobody knows with which settings"
    )
    again()
    with (run / "checkpoint-2" / "optimizer.pt").open("ab") as file:
        file.write(b"x")
    assert set_aside(run, arm()).name == "seed-0.unfinished-3", "a damaged checkpoint is none"
    again()
    write_json(run / SETTINGS, fingerprint(stopping))
    assert len(kit.watch.read_flags(run))
    assert set_aside(run, stopping).name == "seed-0.unfinished-4", (
        "it would not stop there again"
    )
    again()
    write_json(run / SETTINGS, fingerprint(stopping))
    (run / "flags.jsonl").unlink()
    assert set_aside(run, stopping) is None


# ---- runs


def test_an_arm_is_the_trainer_run_by_hand(done, tmp_path):
    """The same settings without the laboratory: same steps, same greedy answers."""
    folder, result = done
    cfg = kit.preset(
        "smoke", model=base()["model"], steps=3, learning_rate=1e-2, temperature=0.5, seed=1
    )
    model, tokenizer = kit.load_policy(cfg.model, dtype=cfg.dtype, quiet=True)
    trainer = kit.GRPOTrainer(
        model,
        task(),
        kit.preset(cfg, max_completion_tokens=6),
        tokenizer=tokenizer,
        folder=tmp_path / "run",
        live=None,
    )
    trainer.train()
    mine, theirs = (
        kit.read_metrics(tmp_path / "run"),
        kit.read_metrics(folder / "cold" / "seed-1"),
    )
    for column in ("reward", "loss", "grad_norm", "entropy", "temperature"):
        assert mine[column].tolist() == theirs[column].tolist(), column
    assert mine["reward_std"].max() > 0 and mine["grad_norm"].max() > 0
    judged = kit.evaluate(model, tokenizer, task())
    assert judged.rows["strict"].astype(int).tolist() == result.right["cold", 1]


def test_an_arm_may_sample_in_another_way(done, tmp_path):
    """Its sample is made of the fast one, and what it samples is trained on."""
    arms = {"colder": {"sample": functools.partial(lab_runs.Colder, by=1)}}
    colder = lab.compare_arms(arms, [0], **base(), folder=tmp_path, quiet=True).curves
    control = done[1].curves.query("arm == 'control' and seed == 0")
    assert colder["temperature"].tolist() == control["temperature"].tolist() == [1, 1, 1]
    assert colder["entropy"].iloc[0] < control["entropy"].iloc[0]
    assert colder["rollout/logprob_gap"].min() > 0.05 > control["rollout/logprob_gap"].max()


def test_what_to_try_is_said_once_and_each_runs_red_flags_are(tmp_path, capsys):
    # a random model never ends its completions
    settings = {**base(), "steps": 6, "save_steps": 100}
    lab.compare_arms(
        {"a": {}, "ends": {"on_flag": "stop"}}, [0, 1], **settings, folder=tmp_path, quiet=True
    )
    said = capsys.readouterr().out
    flags = {seed: kit.watch.read_flags(tmp_path / "a" / f"seed-{seed}") for seed in SEEDS}
    assert [flag.name for flag in flags[0]] == [flag.name for flag in flags[1]] and len(
        flags[0]
    )
    for first, again in zip(flags[0], flags[1], strict=True):
        assert f"1/4 a, seed 0: Red flag: {first}" in said
        assert (
            f"3/4 a, seed 1: Red flag: {again.name} since step {again.step}: {again.saw} (what to"
            in said
        )
        assert f"3/4 a, seed 1: Red flag: {again}" not in said
    steps = {
        path.parent.parent.name: len(kit.read_metrics(path.parent))
        for path in tmp_path.glob(f"*/seed-0/{RESULT}")
    }
    assert steps["a"] == 6 and steps["ends"] < 6, "an arm's own on_flag is obeyed"


def test_tables_have_every_run_and_one_row_an_arm(done):
    _, result = done
    assert result.runs[["arm", "seed"]].values.tolist() == [[a, s] for a in ARMS for s in SEEDS]
    assert result.seeds() == SEEDS and len(result.curves) == 3 * len(ARMS) * len(SEEDS)
    table = result.summary()
    assert table.index.tolist() == list(ARMS) and pd.isna(table.loc["control", "difference"])
    each = [
        np.mean(result.right["cold", s]) - np.mean(result.right["control", s]) for s in SEEDS
    ]
    assert table.loc["cold", "difference"] == pytest.approx(np.mean(each))
    assert table["completions"].tolist() == [3 * 2 * 4] * 3, "steps, prompts, groups"
    assert (
        table["low"].le(table["accuracy"]).all() and table["high"].ge(table["accuracy"]).all()
    )


def test_difference_of_any_column(done):
    _, result = done
    runs = result.runs.set_index(["arm", "seed"])["reward_mean"]
    expected = np.mean([runs["cold", s] - runs["control", s] for s in SEEDS])
    assert result.difference("cold", outcome="reward_mean")["mean"] == pytest.approx(expected)
    for bad in (
        dict(arm="nobody"),
        dict(arm="cold", outcome="nothing"),
        dict(arm="cold", outcome="model"),
    ):
        with pytest.raises(ValueError, match="use one of"):
            result.difference(**bad)
    with pytest.raises(ValueError, match="nobody"):
        result.accuracy("nobody")


def test_seeds_without_a_value_do_not_count():
    """No wrong answer has no length: such a seed is left out, and said to be."""
    curve = [0.1, 0.2, 0.3]
    result = made(
        {"a": curve, "b": curve}, seeds=(0, 1, 2), x=[1.0, 2.0, None, 4.0, None, 6.0], y=np.nan
    )
    assert (
        result.difference("b", outcome="x")["seeds"] == 1
        and result.difference("b", outcome="x")["mean"] == 3
    )
    with pytest.raises(ValueError, match="not measured"):
        result.difference("b", outcome="y")


def test_unlike_numbers_of_held_out_rows_are_paired_by_seed():
    result = made({"a": [0.1], "b": [0.1]}, right={"a": [0.5, 0.5], "b": [0.6, 0.8]})
    result.right.update(
        {("b", seed): rows[:10] for (arm, seed), rows in result.right.items() if arm == "b"}
    )
    found = result.difference("b")
    # two seeds, t = 12.7
    assert found["mean"] == pytest.approx(0.2) and found["high"] - found["low"] > 1


def test_roughness_is_not_the_rise():
    """A straight line of any slope has none; a zigzag's is its height."""
    of = lambda rewards: _of_curve(  # noqa: E731
        pd.DataFrame(
            {
                "reward": rewards,
                "grad_norm": 1.0,
                "entropy": [8.0, 4.0] * 4,
                "frac_reward_zero_std": 0.0,
            }
        )
    )
    assert of(np.linspace(0, 1, 8))["reward_roughness"] == pytest.approx(0)
    assert of([0.2, 0.6] * 4)["reward_roughness"] == pytest.approx(0.4)
    # Reused rollouts.
    assert of([0.2, None, 0.4, None, 0.6, None, 0.8, None])[
        "reward_roughness"
    ] == pytest.approx(0)
    half = of([0.2, None] * 4)
    # Of 8 steps the last 2, of 4 rollouts the last.
    assert half["entropy_last"] == 6.0 and half["reward_last"] == 0.2


def test_figure_shows_every_arm(done):
    figure = done[1].figure()
    assert len(figure.axes) == 4
    assert [t.get_text() for t in figure.axes[1].get_yticklabels()] == list(ARMS)
    of_arm = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert of_arm == {"control": BASE, "cold": COLOURS[0], "again": COLOURS[1]}
    assert figure._repr_png_()[:4] == b"\x89PNG"


def test_figure_of_many_arms_with_gaps():
    """Rewards below 0 are in sight, a step without a reward is a gap, an arm without a common seed has no interval."""
    curves = {f"arm {i}": [-0.5, None, 0.9] for i in range(12)} | {"none": [None] * 3}
    result = made(curves)
    result.runs["seed"] += 5 * (result.runs["arm"] == "none")
    result.right.update(
        {("none", seed + 5): result.right.pop(("none", seed)) for seed in (0, 1)}
    )
    figure = result.figure()
    rewards, _, change, _ = figure.axes
    assert rewards.get_ylim()[0] < -0.5 and rewards.get_ylim()[1] > 0.9
    dots = [line for line in change.lines if line.get_marker() == "o"]
    assert len(dots) == 12 and np.isnan(dots[-1].get_xdata()[0])
    assert figure._repr_png_()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "seeds, title", [((0,), "reward in training"), ((0, 1), "reward in training (band: seeds)")]
)
def test_figure_names_a_band_where_there_is_one(seeds, title):
    rewards = made({"control": [0.1, 0.2], "other": [0.3, 0.4]}, seeds=seeds).figure().axes[0]
    assert (rewards.get_title("left"), len(rewards.collections)) == (
        title,
        2 * (len(seeds) - 1),
    )


def test_nothing_done_is_done_again(done):
    folder, result = done
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*/*/*.json*")}
    again = lab_runs.compare(folder)
    assert (
        len(before) > 6
        and {p: p.stat().st_mtime_ns for p in folder.glob("*/*/*.json*")} == before
    )
    pd.testing.assert_frame_equal(again.runs, result.runs)


def test_other_settings_under_the_same_name_are_refused(done):
    folder, _ = done
    with pytest.raises(
        RunFolderError, match="control.*learning_rate.*another name.*known by name"
    ):
        lab.compare_arms(
            {"control": {}}, [0], **{**base(), "learning_rate": 1e-3}, folder=folder
        )


def test_other_settings_are_refused_before_anything_runs(done, tmp_path, capsys):
    """Also where another seed of the arm was asked for, and an arm later in the list; by the result alone, too."""
    folder = copied(done[0], tmp_path, "cold/seed-0")
    for arms, seeds in [
        ({"new": {}, "cold": {"temperature": 0.7}}, [0]),
        ({"cold": {"temperature": 0.7}}, [5]),
    ]:
        with pytest.raises(RunFolderError, match="cold.*temperature"):
            lab.compare_arms(arms, seeds, **base(), folder=folder)
    (folder / "cold" / "seed-0" / SETTINGS).unlink()
    with pytest.raises(RunFolderError, match="cold.*temperature"):
        lab.compare_arms(arms, seeds, **base(), folder=folder)
    assert [p.name for p in folder.iterdir()] == ["cold"] and not capsys.readouterr().out
    lab.compare_arms({"cold": ARMS["cold"]}, [0], **base(), folder=folder)
    assert (
        "1 of 1 runs were done before" in (said := capsys.readouterr().out)
        and "known by name" in said
    )


def test_the_first_arm_is_compared_with_or_nothing_is(done, tmp_path):
    """While no run of it is done, the next arm does not take its place; nor do a person's copies count as seeds."""
    folder = copied(done[0], tmp_path, "cold/seed-0", "again/seed-0")
    (folder / "cold" / "seed-0").rename(folder / "cold" / "seed-0 (copy)")
    copied(done[0], tmp_path, "cold/seed-0")
    result = lab.load(folder, list(ARMS))
    assert (
        result.arms == ["cold", "again"]
        and result.against == "control"
        and result.seeds("cold") == [0]
    )
    assert result.summary()["difference"].isna().all() and result.figure().axes[2].get_title(
        "left"
    ).endswith("control")
    with pytest.raises(ValueError, match="control.*no finished run"):
        result.difference("cold")
    assert result.difference("again", "cold")["seeds"] == 1


def test_what_another_process_does_is_left_to_it(tmp_path, capsys):
    (tmp_path / ".locks").mkdir()
    with FileLock(tmp_path / ".locks" / "cold--0.lock"):
        result = lab.compare_arms(
            {"control": {}, "cold": ARMS["cold"]}, [0], **base(), folder=tmp_path
        )
    assert result.arms == ["control"] and "another process" in capsys.readouterr().out


MOMENTS = [
    ("evaluated", 1, "the untrained model, not yet saved"),
    ("json", 1, "settings.json: nothing of the run yet"),
    ("row", 1, "no checkpoint yet: set aside"),
    ("saving", 1, "half a checkpoint: set aside"),
    ("row", 5, "step 3 was done, but the checkpoint is of step 2: step 3 is done again"),
    (
        "evaluated",
        1,
        "continued from step 2, the tuned model evaluated, the result not written",
    ),
    ("json", 2, "from the last step's checkpoint to the result"),
]


def test_killed_at_any_moment_and_restarted_gives_the_same_table(done, tmp_path):
    arms, folder = ["control", "again"], tmp_path / "lab"
    moments = [str(x) for where, count, _ in MOMENTS for x in (where, count)]
    died = forked.run(lab_runs.__file__, folder, *moments)
    ends = [line for line in died.stdout.splitlines() if line.endswith(" -9")]
    assert len(ends) == len(MOMENTS), died.stdout + died.stderr[-2000:]
    assert (folder / "control" / "seed-0" / RESULT).exists() and not (folder / "again").exists()
    result = lab_runs.compare(folder, arms, [0])
    runs, curves = (
        t[t["arm"].isin(arms) & (t["seed"] == 0)] for t in (done[1].runs, done[1].curves)
    )
    pd.testing.assert_frame_equal(untimed(result.runs), untimed(runs))
    both = [untimed(table).dropna(axis=1, how="all") for table in (result.curves, curves)]
    pd.testing.assert_frame_equal(*both, check_like=True)
    assert result.right == {
        key: right for key, right in done[1].right.items() if key in result.right
    }
    left = sorted(p.name for p in (folder / "control").iterdir())
    # kept; and no more than these
    assert left == ["seed-0", "seed-0.unfinished-1", "seed-0.unfinished-2"]
    assert len(kit.read_metrics(folder / "control" / "seed-0.unfinished-1")) == 1
    steps = kit.read_metrics(folder / "control" / "seed-0")["step_seconds"]
    assert result.runs["train_seconds"][0] >= steps[:2].sum() - 0.1  # of both sessions


def test_adapters_come_back_from_the_last_checkpoint(tmp_path):
    arms = {"lora": {"tuning": "lora", "eval_temperatures": [1.0]}}
    first = lab.compare_arms(arms, [0], **base(), folder=tmp_path, quiet=True)
    (tmp_path / "lora" / "seed-0" / RESULT).unlink()  # as if killed just before it
    again = lab.compare_arms(arms, [0], **base(), folder=tmp_path, quiet=True)
    pd.testing.assert_frame_equal(untimed(again.runs), untimed(first.runs))
    assert again.right == first.right and not list((tmp_path / "lora").glob("*.unfinished*"))


def test_stop_button_saves_and_the_next_call_goes_on(done, tmp_path):
    pressed = []

    def stop_once(completions, **columns):
        pressed.append(1)
        if len(pressed) == 3:  # in the second step; the evaluation before it asks once
            signal.raise_signal(signal.SIGINT)
        return lab_runs.letters(completions)

    stopping = replace(task(), rewards=[stop_once])
    arms, settings = {"control": {}}, {**base(), "task": stopping, "save_steps": 0}
    with pytest.raises(KeyboardInterrupt):
        lab.compare_arms(arms, [0], **settings, folder=tmp_path)
    assert any((tmp_path / "control" / "seed-0").glob("checkpoint-*"))
    result = lab.compare_arms(arms, [0], **settings, folder=tmp_path)
    assert not any((tmp_path / "control" / "seed-0").glob("checkpoint-*")), (
        "it is done, and none is due by steps"
    )
    assert result.right["control", 0] == done[1].right["control", 0]
    assert (
        result.curves["reward"].tolist()
        == done[1].curves.query("arm == 'control' and seed == 0")["reward"].tolist()
    )


def test_it_says_which_run_and_step_it_is_at_and_for_how_long(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(
        COMPARE_ARMS, "progress_line", functools.partial(progress_line, after=0)
    )
    monkeypatch.setattr(ProgressLine, "OFTEN", 0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    lab.compare_arms({"a": {}, "b": {}}, [0], **base(), folder=tmp_path / "x")
    lines = [line.strip() for line in screen.getvalue().split("\r") if line.strip()]
    told = [line for line in lines if line.startswith("laboratory x: run")]
    for run, arm in ((1, "a"), (2, "b")):
        own = [
            line
            for line in told
            if line.startswith(f"laboratory x: run {run} of 2 ({arm}, seed 0)")
        ]
        assert [n for n in (1, 2, 3) if any(f"step {n} of 3" in line for line in own)] == [
            1,
            2,
            3,
        ]
        assert any(line.endswith("(letters, completions: 0 of 8)") for line in own), (
            "evaluating, inside its line"
        )
    assert re.search(r"step 2 of 3, \d+ s left", told[-1] + " ".join(told))
    assert not [line for line in lines if line.startswith("letters")]


def test_without_a_finished_run_there_is_nothing_to_load(tmp_path):
    with pytest.raises(RunFolderError, match="no finished run"):
        lab.load(tmp_path)
