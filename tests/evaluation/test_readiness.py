"""Readiness: shares by hand and by enumeration, verdicts, lengths, words; the tiny model end to end."""

import argparse
import itertools
import json
import re
import shlex
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import grpo_kit as kit
from benchmarks.readiness import command_of
from grpo_kit.engine.complete import Completion, complete
from grpo_kit.evaluation import generate_and_score
from grpo_kit.evaluation.intervals import bootstrap_mean, wilson_interval
from grpo_kit.evaluation.lengths import (
    COMMON,
    WORDS,
    Lengths,
    cost_of_maximum,
    count_words,
    decode_steps,
    length_probe,
    word_table,
)
from grpo_kit.evaluation.readiness import VERDICTS, Readiness, readiness, signal_share
from grpo_kit.more.lab.figures import plot_pass_at_k
from grpo_kit.more.memory.plan import plan_memory
from grpo_kit.rewards import ExactAnswer, SoftFormat, audit, last_number, on_response
from grpo_kit.tasks import from_rows, largest
from grpo_kit.tasks._measure import labels_of
from grpo_kit.trainer.presets import preset

# ---- groups with a signal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(3, 2), (1, 4), (5, 0), (2, 2, 1), (1, 1, 1, 1)])
def test_mixed_share_is_the_share_of_subsets_that_are_not_alike(counts):
    values = [value for value, count in enumerate(counts) for _ in range(count)]
    for size in range(2, len(values) + 1):
        groups = list(itertools.combinations(values, size))
        expected = Fraction(sum(len(set(group)) > 1 for group in groups), len(groups))
        assert signal_share(counts, size) == pytest.approx(float(expected), abs=1e-15)


def test_mixed_share_is_unbiased():
    p, n, size = 0.2, 6, 3
    expected = 0.0
    for outcome in itertools.product([0, 1], repeat=n):  # every way six samples can come out
        c = sum(outcome)
        expected += p**c * (1 - p) ** (n - c) * signal_share([c, n - c], size)
    assert expected == pytest.approx(1 - p**size - (1 - p) ** size, abs=1e-12)


@pytest.mark.parametrize(("counts", "size"), [([2, 2], 1), ([2, 2], 5), ([], 2), ([-1, 4], 2)])
def test_mixed_share_refuses(counts, size):
    with pytest.raises(ValueError, match=f"group_size={size} must lie in 2.."):
        signal_share(counts, size)


# ---- table and verdict ------------------------------------------------------------------------------------------


def made(
    right,
    *,
    samples=4,
    formatted=None,
    lenient=None,
    group_size=2,
    rewards=None,
    constant=0.25,
    **more,
):
    """A Readiness of these counts by prompt."""
    return Readiness(
        task="largest",
        samples=samples,
        group_size=group_size,
        questions=[f"q{i}" for i in range(len(right))],
        right=list(right),
        lenient=list(lenient or right),
        formatted=list(formatted or [samples] * len(right)),
        rewards=rewards or [{0.25: samples - c, 1.0: c} for c in right],
        lengths=Lengths({4: 3, 6: 1}, 0, 8),
        words={"wait": 2, "any": 2},
        constant=None if constant is None else ("always number 1", constant),
        settings={"max_completion_tokens": 8},
        **more,
    )


def test_numbers_by_hand():
    r = made(
        [0, 1, 4], formatted=[4, 3, 4], rewards=[{0.0: 2, 0.25: 2}, {0.25: 3, 1.0: 1}, {1.0: 4}]
    )
    assert {k: e.value for k, e in r.pass_at.items()} == pytest.approx(
        {1: 5 / 12, 2: 0.5, 4: 2 / 3}
    )
    assert r.pass_at[2] == bootstrap_mean([0, 0.5, 1])
    assert r.format_rate.value == pytest.approx(11 / 12)
    # pairs of four: none mixed, 3 of 6, none; by reward 4 of 6, 3 of 6, none
    assert r.signal_right().value == pytest.approx(1 / 6)
    assert r.signal_reward().value == pytest.approx((4 / 6 + 3 / 6) / 3)
    assert r.signal_right(4).value == pytest.approx(1 / 3)
    table = r.table()
    assert (
        table.loc["pass@4", "value"] == pytest.approx(2 / 3) and table.loc["pass@1", "n"] == 3
    )
    assert table.loc["groups of 2 with right and wrong", "value"] == pytest.approx(1 / 6)
    assert table.loc["always number 1", "value"] == 0.25 and table.index.name == "largest"
    assert table.loc["always number 1", ["low", "high"]].isna().all(), (
        "a strategy has no interval"
    )
    for shown in (repr(table), table._repr_html_()):
        assert "0.250" in shown and "NaN" not in shown


@pytest.mark.parametrize(
    ("changes", "verdict", "words", "why"),
    [
        ({"right": [2, 2, 1]}, "ready", "42% of samples are right, 100% of prompts", "right and wrong mix"),
        (
            {"right": [0, 0, 0], "formatted": [1, 2, 2], "lenient": [2, 2, 2]},
            "format first",
            "42% of samples have a readable answer, below 50% (read leniently, 50% are right)",
            "nothing is known about ability where nothing can be read",
        ),
        ({"right": [2, 2, 2], "formatted": [2, 2, 2]}, "ready", "50% of samples", "half is enough"),
        ({"right": [0] * 11 + [1]}, "never succeeds", "8% of prompts", "1 of 12 is below a tenth"),
        ({"right": [0] * 9 + [1], "constant": 0.0}, "rarely succeeds", "5% of groups of 2", "a tenth is enough"),
        ({"right": [4] * 9 + [3]}, "too easy", "98% of samples are right, above 90%", "no room"),
        ({"right": [4, 4, 4, 0]}, "rarely succeeds", "0% of groups", "each prompt always or never"),
        (
            {"right": [1, 0, 0], "constant": 0.67},
            "shortcut pays",
            "pass@1 is 8%, and 'always number 1' is right for 67% of these prompts without reading the question, "
            "so not ready",
            "one constant answer is far ahead",
        ),
        ({"right": [2, 2, 1], "constant": 0.83}, "shortcut pays", "right for 83% of these prompts", "half as good"),
        ({"right": [2, 0, 0], "constant": 0.49}, "shortcut pays", "right for 49% of these prompts", "seldom right"),
        ({"right": [2, 2, 1], "constant": 0.43}, "shortcut pays", "so not ready", "a little better than 42 %"),
        ({"right": [2, 2, 1], "constant": 0.41}, "ready", "42% of samples", "a little worse"),
        ({"right": [4] * 9 + [3], "constant": 1.0}, "too easy", "98% of samples", "and nothing to learn"),
        ({"right": [2, 2, 1], "constant": None}, "ready", "42% of samples", "a task without strategies"),
    ],
)  # fmt: skip
def test_verdicts(changes, verdict, words, why):
    r = made(**changes)
    assert r.verdict == verdict, why
    assert words in r.reason and VERDICTS[verdict] in r.reason
    assert ("SFT" in r.reason) == (verdict == "never succeeds"), (
        "where nothing succeeds and no rewards differ"
    )
    assert verdict in r._repr_html_() and "pass@4" in r._repr_html_()


CREDIT = {"right": [2, 2, 1], "credit": [{0.0: 4}] * 3}
REWARD = {
    "right": None,
    "lenient": None,
    "measure": "reward",
    "rewards": [{0.1: 2, 0.3: 2}] * 3,
}


def with_reward(**changes):
    """Where the reward is the measure, with groups that differ."""
    return replace(made([2, 2, 1]), constant=None, **REWARD | changes)


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (made(**CREDIT), "never succeeds", "answer pays any of them. So: score a right answer, task.s"),
        (made(**CREDIT | {"credit": [{-1.0: 2, 0.0: 2}] * 3}), "never succeeds", "pays any of them"),
        (made(**CREDIT | {"credit": [{0.0: 2, 0.5: 2}] * 3}), "ready", "42% of samples are right"),
        (made(**CREDIT | {"credit": [{1.0: 4}] * 3, "floor": 1.0}), "never succeeds", "pays any of them"),
        (made([2, 2, 1], rewards=[{0.5: 4}] * 3), "rarely succeeds", "in 0% of groups rewards would differ, below 20%"),
        (with_reward(credit=[{0.0: 4}] * 3), "never succeeds", "earns anything for its answer, and in 67%"),
        (with_reward(credit=[{0.0: 3, 0.1: 1}] * 3), "ready", "the mean reward is 0.20"),
        (with_reward(credit=[{-3.0: 3, -1.0: 1}] * 3, floor=-3.0), "ready", "the mean reward is 0.20"),
        (with_reward(credit=None), "ready", "the mean reward is 0.20"),
        (with_reward(credit=None, rewards=[{-3.0: 2, -1.0: 2}] * 3), "ready", "the mean reward is -2.00"),
        (with_reward(credit=None, rewards=[{0.0: 4}] * 3), "never succeeds", "no sample earns anything, and in 0%"),
        (
            with_reward(credit=[{0.0: 3, 0.1: 1}] * 3, constant_reward=("always 'x'", 0.21)), "shortcut pays",
            "the mean reward is 0.20, and answering 'x' every time earns 0.21, so not ready",
        ),
        (with_reward(credit=[{0.0: 3, 0.1: 1}] * 3, constant_reward=("always 'x'", 0.19)), "ready", "reward is 0.20"),
        (with_reward(credit=None, constant_reward=("always '!'", 0.9)), "ready", "Answering '!' every time earns 0.90"),
    ],
)  # fmt: skip
def test_where_the_reward_for_the_answer_is_never_paid_or_a_constant_earns_more_it_does_not_say_go(
    found, verdict, words
):
    assert found.verdict == verdict and found.sentence.startswith("GO") == (verdict == "ready")
    assert words in found.reason


def test_a_share_just_beside_its_threshold_does_not_read_as_the_threshold():
    r = made([2] * 250, formatted=[1] + [2] * 249)
    assert (
        r.format_rate.value == 499 / 1000
        and "49.9% of samples have a readable answer, below 50%" in r.reason
    )
    assert "100% of samples" in made([4] * 4).reason and "0% of groups" in made([0, 4]).reason


def test_soft_rewards_are_told_where_success_is_rare():
    soft = made([0, 0, 0], rewards=[{0.1: 2, 0.3: 2}] * 3)
    assert soft.verdict == "never succeeds" and "SFT" not in soft.reason
    assert (
        "by format or other parts do rewards differ, in 67% of groups. So: training would learn"
        in soft.reason
    )
    none = made([0, 0, 0]).reason
    assert "differ" not in none and "do SFT first" in none


def test_save_and_load(tmp_path):
    r = made([0, 1, 4])
    r.save(tmp_path / "r.json")
    loaded = Readiness.load(tmp_path / "r.json")
    assert loaded == r and loaded.table().equals(r.table())
    assert Readiness.from_dict(asdict(r)) == r
    assert (
        repr(r) == "Readiness('largest', 3 prompts x 4 samples: rarely succeeds)\n" + r.reason
    )


RESULTS = sorted(
    (Path(__file__).parents[2] / "benchmarks" / "results").glob("readiness_*.json")
)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_saved_results_can_be_read_and_say_where_they_come_from(path):
    text = path.read_text(encoding="utf-8")
    saved = json.loads(text)
    assert all(
        saved[name] for name in ("command", "hardware", "weights", "date", "versions", "tasks")
    )
    assert not re.search(r"/(tmp|home|root|work)\b", text), "no path of one machine"
    for one in saved["tasks"].values():
        r = Readiness.from_dict(one["readiness"])
        assert (
            r.lengths.n == r.n * r.samples == sum(sum(counts.values()) for counts in r.rewards)
        )
        assert r.verdict in VERDICTS and all(
            c <= e for c, e in zip(r.right, r.lenient, strict=True)
        )


# ---- lengths ----------------------------------------------------------------------------------------------------

PROBE = Lengths({3: 5, 5: 4, 20: 10}, cut_off=1, limit=32)


def test_lengths_by_hand():
    assert PROBE.n == 20
    assert [PROBE.quantile(q) for q in (0.25, 0.26, 0.45, 0.46, 0.95, 0.96)] == [
        3,
        5,
        5,
        20,
        20,
        None,
    ]
    assert [round(PROBE.share_cut_off(m).value * 20) for m in (2, 3, 4, 5, 19, 20, 32)] == [
        20,
        15,
        15,
        11,
        11,
        1,
        1,
    ]
    assert PROBE.share_cut_off(20).low == wilson_interval(1, 20)[0]
    table = PROBE.table()["tokens"]
    assert table["50% end within"] == "20" and table["99% end within"] == "more than 32"
    assert table["not ended at 32"] == "5.0%"
    with pytest.raises(ValueError, match=r"maximum=33 must lie in 1..32"):
        PROBE.share_cut_off(33)
    with pytest.raises(ValueError, match="q=0 must"):
        PROBE.quantile(0)


def test_lengths_of_completions_count_the_end():
    some = [
        Completion("a", 3, False),
        Completion("b", 8, True),
        Completion("c", 8, False),
        Completion("d", 3, False),
    ]
    assert Lengths.of(some, 8) == Lengths({3: 2, 8: 1}, 1, 8)


@pytest.mark.parametrize("maximum", [1, 3, 4, 12])
def test_decode_steps_by_enumeration(maximum):
    lengths = Lengths({1: 2, 3: 1}, cut_off=1, limit=4)
    outcomes = [1, 1, 3, 10**9]  # the fourth runs away
    batches = list(itertools.product(outcomes, repeat=3))
    expected = np.mean([max(min(length, maximum) for length in batch) for batch in batches])
    assert decode_steps(lengths, maximum, 3) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["cpu", "t4", "gpu24"])
def test_keys_and_values_are_those_of_the_memory_plan(name):
    """A t4 computes in float32, so they take twice the bytes of a card with bfloat16."""
    cfg = kit.preset(name)
    plan = kit.plan_memory(cfg, completion_tokens=32, prompt_tokens=100).parts["rollout"][
        "keys and values"
    ]
    costs = cost_of_maximum(PROBE, [32], cfg, prompt_tokens=100)
    assert costs.loc[32, "keys and values"] == pytest.approx(plan / 2**30)


def test_cost_of_a_maximum():
    cpu = preset("cpu")
    costs = cost_of_maximum(PROBE, [5, 32, 512], cpu, prompt_tokens=100, seconds_a_step=0.5)
    rows = cpu.completions_per_step
    assert costs["cut off"].tolist()[:2] == [0.55, 0.05] and np.isnan(costs["cut off"][512])
    assert costs["batches with a runaway"].tolist() == pytest.approx(
        [1 - 0.45**rows] + [1 - 0.95**rows] * 2
    )
    assert costs.loc[512, "written"] == pytest.approx(
        rows * (5 * 3 + 4 * 5 + 10 * 20 + 512) / 20
    )
    assert costs.loc[512, "seconds"] == pytest.approx(decode_steps(PROBE, 512, rows) / 2)
    assert costs["padded"].tolist() == pytest.approx((costs["steps"] * rows).tolist())
    plan = plan_memory(replace(cpu, max_completion_tokens=512), prompt_tokens=100)
    assert costs.loc[512, "keys and values"] == plan.parts["rollout"]["keys and values"] / 2**30
    # keys and values of SmolLM2's 30 layers and 3 heads of 64, 16 bit
    per_token = 2 * 30 * 3 * 64 * 2
    grown = costs.loc[512, "keys and values"] - costs.loc[32, "keys and values"]
    assert grown * 2**30 == pytest.approx(rows * 480 * per_token)


# ---- words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "why"),
    [
        ("Wait, wait. Wait. That's an aha moment", {"wait", "aha"}, "a text counts once"),
        ("the waiter awaits", set(), "whole words only"),
        ("Let me re-check and recheck", {"recheck"}, "both spellings are one word"),
        ("a Re-evaluation", {"reevaluate"}, "noun and verb"),
        ("double check it", {"double-check"}, "with a blank too"),
        ("However, alternatively", {"however", "alternatively"}, "everyday words are counted"),
        ("Ahab retries", set(), "no prefixes"),
    ],
)
def test_words_of_reflection(text, words, why):
    counts = count_words([text, "nothing"])
    assert {word for word, n in counts.items() if n and word != "any"} == words, why
    assert counts["any"] == bool(words - set(COMMON)) and max(counts.values()) <= 1


def test_word_table():
    counts = count_words(["wait", "Wait, however", "however", "however", "5"])
    table = word_table(counts, 5)
    assert table.index.tolist() == ["however", "wait", "any"]
    assert (
        table["per 1000"].tolist() == [600, 400, 400]
        and "2505.15612" in table.loc["however", "source"]
    )
    assert all(source for _, source in WORDS.values())


def test_the_benchmarks_command_can_be_pasted():
    options = argparse.Namespace(prompts=24, samples=64, batch_size=32, seed=1)
    words = shlex.split(
        command_of("smollm2-135m-instruct", ["largest, zero-shot", "arithmetic"], options)
    )
    start = words.index("--task") + 1
    assert words[start : start + 3] == ["largest, zero-shot", "arithmetic", "--prompts"]
    assert words[-6:] == ["--samples", "64", "--batch-size", "32", "--seed", "1"]


# ---- end to end -------------------------------------------------------------------------------------------------


def test_the_tiny_model_end_to_end(tiny, tmp_path):
    model, tokenizer = tiny
    task = largest(n_train=4, n_held_out=5)
    r = readiness(
        model, tokenizer, task, samples=6, group_size=3, max_completion_tokens=5, seed=3
    )
    prompts = task.render(tokenizer, task.held_out)
    samples = complete(
        model, tokenizer, prompts, samples=6, temperature=1.0, max_completion_tokens=5, seed=3
    )
    assert r.lengths == Lengths.of(samples, 5) and r.lengths.n == 30
    assert r.formatted == [
        sum(task.answer_of(c.text) is not None for c in samples[i : i + 6])
        for i in range(0, 30, 6)
    ]
    assert r.verdict == "format first" and r.constant == task.best_constant()
    r.save(tmp_path / "r.json")
    assert Readiness.load(tmp_path / "r.json") == r
    assert "text" not in json.loads((tmp_path / "r.json").read_text())
    assert r.audit == audit(task, n=8).summary and r.reason.endswith(
        f" Audit of the reward: {r.audit}"
    )
    older = {key: value for key, value in asdict(r).items() if key != "audit"}
    assert (
        Readiness.from_dict(older).audit is None
        and "Audit" not in Readiness.from_dict(older).reason
    )
    probe = length_probe(model, tokenizer, task, max_completion_tokens=7, samples=2)
    assert probe.n == 10 and probe.limit == 7


def test_a_length_probe_takes_the_tasks_length(tiny):
    task = replace(largest(n_train=4, n_held_out=3), max_completion_tokens=3)
    probe = length_probe(*tiny, task, samples=2)
    prompts = task.render(tiny[1], task.held_out)
    drawn = complete(*tiny, prompts, samples=2, temperature=1.0, max_completion_tokens=3)
    assert probe.limit == 3 and probe.n == 6
    assert probe.cut_off == sum(
        len(one.ids) == 3 and one.ids[-1] != tiny[1].eos_token_id for one in drawn
    )
    assert probe.cut_off > 0, "a random model seldom ends within 3 tokens"


def test_a_reward_that_guesses_is_told_before_training(tiny):
    @on_response
    def last_one(responses, answer):
        return [
            float(last_number(r) == gold) for r, gold in zip(responses, answer, strict=True)
        ]

    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(10, 40)]
    found = readiness(*tiny, from_rows("sums", rows, reward=last_one), samples=2, group_size=2)
    assert re.search(
        r"last_one refuses [\d.]+ % of 48 right spellings and pays [1-9][\d.]+ % of 48",
        found.reason,
    )
    blank = from_rows(
        "blank", [{"question": row["question"]} for row in rows], reward=SoftFormat()
    )
    assert readiness(*tiny, blank, samples=2, group_size=2).audit is None


def test_judging_and_rewards_belong_to_their_rows(tiny, monkeypatch):
    task = largest(n_train=4, n_held_out=3)
    rows = task.held_out
    wrong = min(rows[1]["numbers"])
    said = [
        *[f"{rows[0]['answer']}</answer>"] * 2,
        "words",
        f"{rows[1]['answer']}</answer>",
        f"{wrong}</answer>",
        rows[1]["answer"],  # right, but its tag is never closed
        *[f"{rows[0]['answer']}0</answer>"] * 3,
    ]
    module = generate_and_score
    monkeypatch.setattr(
        module, "complete", lambda *_, **__: [Completion(text, 4, False) for text in said]
    )
    r = readiness(*tiny, task, samples=3, group_size=2, seconds=None)
    assert (r.right, r.lenient, r.formatted) == ([2, 1, 0], [2, 2, 0], [2, 2, 3])
    columns = {name: [row[name] for row in rows for _ in range(3)] for name in rows[0]}
    parts = [reward(said, prefill=task.prefill, **columns) for reward in task.rewards]
    total = [
        sum(w * part for w, part in zip(task.reward_weights, row, strict=True))
        for row in zip(*parts, strict=True)
    ]
    for i, counts in enumerate(r.rewards):
        expected = [round(x, 6) for x in total[3 * i : 3 * i + 3]]
        assert counts == {value: expected.count(value) for value in expected}
    assert r.signal_reward().value == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_labels_that_no_sample_has_are_named(tiny, monkeypatch, tmp_path):
    """Of three labels one is written, one is right in another spelling, and one is in no answer."""
    golds = ["billing", "delivery", "refund", "refund"]
    rows = [{"question": f"Message {i}?", "answer": gold} for i, gold in enumerate(golds)]
    others = [row | {"question": f"{row['question']} Again."} for row in rows]

    def loose(completions, answer, **columns):
        pairs = zip(completions, answer, strict=True)
        return [float(gold in text.lower()) for text, gold in pairs]

    said = [*["billing</answer>", "Delivery</answer>"] * 3, "no refund</answer>", "</answer>"]
    monkeypatch.setattr(
        generate_and_score,
        "complete",
        lambda *_, **__: [Completion(text, 4, False) for text in said],
    )

    def asked(task_rows, held_out, reward):
        task = from_rows("sorted", task_rows, held_out, reward=reward, prefill="<answer>")
        return readiness(*tiny, task, samples=2, group_size=2, seconds=None)

    r = asked(others, rows, ExactAnswer())
    assert r.never_written == {"refund": 2, "delivery": 1}
    assert (
        "Never written in 8 samples: 'refund' (2 of 4 rows have it), 'delivery' (1 of 4 rows have it). GRPO cannot "
        "learn a label from rewards alone that is never written: show it in an example of the prompt, or train on a "
        "few supervised examples first (notebook 07)." in r.reason
    )
    r.save(tmp_path / "r.json")
    assert Readiness.load(tmp_path / "r.json") == r
    assert asked(others, rows, loose).never_written == {}, "another spelling was right"
    sums = [row | {"answer": str(i)} for i, row in enumerate(rows)]
    other_sums = [row | {"question": f"{row['question']} Again."} for row in sums]
    assert asked(other_sums, sums, ExactAnswer()).never_written, "4 numbers may be stars"
    names = [row | {"answer": f"name {i}"} for i, row in enumerate(rows)]
    other_names = [row | {"question": f"{row['question']} Again."} for row in names]
    assert asked(other_names[:2], names, ExactAnswer()).never_written == {}


def test_many_labels_are_cut_and_the_format_comes_first():
    labels = {f"label {i}": 9 - i for i in range(7)}
    r = made([2, 2, 1], never_written=labels)
    assert "'label 4' (5 of 3 rows have it), 2 more. GRPO" in r.reason
    assert (
        "Never written" not in made([0, 0, 0], formatted=[1, 1, 1], never_written=labels).reason
    )
    assert "Never written" not in made([2, 2, 1]).reason


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rows": []}, "rows is empty"),
        ({"samples": 4, "group_size": 5}, r"group_size=5 must lie in 2..samples=4"),
        ({"group_size": 1}, "group_size=1 must"),
        ({"temperature": 0}, "temperature=0 must be a number above 0"),
        ({"seconds": 0}, "seconds=0 must be a number above 0, such as 300; None asks all rows"),
        ({"seconds": float("nan")}, "seconds=nan must be a number above 0"),
        ({"seconds": "60"}, "seconds='60' must be a number above 0"),
        ({"seconds": True}, "seconds=True must be a number above 0"),
    ],
)
def test_refusals(tiny, how, message):
    with pytest.raises(ValueError, match=message):
        readiness(*tiny, largest(n_train=4, n_held_out=2), **how)


def test_the_curves_are_those_of_the_evaluations():
    before, after = made([0, 1, 4]), made([2, 3, 4])
    figure = plot_pass_at_k({"before": before, "after": after}, title="largest")
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["before"].get_xdata().tolist() == [1, 2, 4]
    assert lines["after"].get_ydata() == pytest.approx(
        [e.value for e in after.pass_at.values()]
    )
    band = axes.collections[1].get_paths()[0].vertices
    for k, estimate in after.pass_at.items():
        edges = band[band[:, 0] == k, 1]
        assert (edges.min(), edges.max()) == (estimate.low, estimate.high)
    assert axes.get_xscale() == "log"
    assert lines["always number 1"].get_ydata()[0] == 0.25 and axes.get_title() == "largest"
    assert figure._repr_png_()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="curves is empty"):
        plot_pass_at_k({})


def test_rows_without_an_answer_have_no_labels():
    """A task of one's own need not have that column: readiness raised KeyError there."""
    assert labels_of([{"question": "Is it spam?"}] * 4) == {}
