"""Intervals against published and enumerated values; evaluation and comparison on models whose answers are known."""

import copy
import itertools
import json
import math
import pickle
import random
import re
from html import unescape

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from grpo_kit._support.cuda import peak_gib
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.complete import Completion, complete
from grpo_kit.evaluation.accuracy import Evaluation, evaluate
from grpo_kit.evaluation.comparison import compare, results
from grpo_kit.evaluation.generate_and_score import Answers
from grpo_kit.evaluation.intervals import (
    Estimate,
    bootstrap_mean,
    mcnemar_p,
    pass_at_k,
    wilson_interval,
)
from grpo_kit.models import load_policy
from grpo_kit.tasks import countdown, from_rows, largest

# ---- intervals and tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe (1998), Statistics in Medicine 17:857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_published_values_and_their_mirror(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_is_the_set_of_rates_that_a_score_test_does_not_reject():
    low, high = wilson_interval(7, 40, confidence=0.9)
    for rate in (low, high):
        z = abs(7 / 40 - rate) / math.sqrt(rate * (1 - rate) / 40)
        assert z == pytest.approx(1.6448536)
    assert wilson_interval(0, 5)[0] == 0 and wilson_interval(5, 5)[1] == 1


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([i < c for i in range(n)], k))
        assert pass_at_k(n, c, k) == pytest.approx(
            sum(map(any, subsets)) / len(subsets), abs=1e-15
        )


@pytest.mark.parametrize("n", [1, 4, 9])
def test_mcnemar_is_the_share_of_coin_flips_at_least_as_uneven(n):
    flips = [sum(outcome) for outcome in itertools.product([0, 1], repeat=n)]
    for fixed in range(n + 1):
        uneven = sum(abs(heads - n / 2) >= abs(fixed - n / 2) for heads in flips) / len(flips)
        assert mcnemar_p(fixed, n - fixed) == pytest.approx(uneven, abs=1e-15)
    assert mcnemar_p(0, 0) == 1.0


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    estimates = [
        bootstrap_mean(rng.random(80) < 0.3, resamples=400, seed=i) for i in range(300)
    ]
    covered = np.mean([e.low <= 0.3 <= e.high for e in estimates])
    assert 0.89 < covered < 0.985


def test_bootstrap_width_is_that_of_the_normal_approximation_and_the_seed_decides():
    values = np.random.default_rng(1).random(400)
    e = bootstrap_mean(values)
    assert e.value == pytest.approx(values.mean()) and e.n == 400
    assert e.high - e.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.06)
    assert e == bootstrap_mean(values) and e != bootstrap_mean(values, seed=1)


def test_bootstrap_of_values_all_alike_still_has_width():
    always = bootstrap_mean([1.0] * 20)
    assert (always.low, always.high) == pytest.approx(wilson_interval(20, 20))
    none = bootstrap_mean([0] * 20, lowest=-1)
    assert none.low == -none.high == -wilson_interval(0, 20)[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wilson_interval(0, 0), "n=0 must be a whole number of at least 1"),
        (lambda: wilson_interval(6, 5), "successes=6 must lie in 0..n=5"),
        (lambda: wilson_interval(1, 5, 95), "confidence=95"),
        (lambda: pass_at_k(4, 5, 1), "n=4, c=5"),
        (lambda: pass_at_k(4, 1, 5), r"k=5 must lie in 1..n=4"),
        (lambda: mcnemar_p(-1, 2), "fixed=-1"),
        (lambda: bootstrap_mean([]), "values has 0 entries"),
        (lambda: bootstrap_mean([0.5, math.nan]), r"a number in \[0, 1\]"),
        (lambda: bootstrap_mean([0, -1]), r"a number in \[0, 1\]"),
        (lambda: bootstrap_mean([1], resamples=5), "resamples=5"),
    ],
)
def test_refusals_name_argument_and_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- strict and lenient ---------------------------------------------------------------------------------------

ROW = {
    "question": "Which number is the largest: 47, 82, 15?",
    "answer": "82",
    "numbers": [47, 82, 15],
}


def judge(task, row, text, tokens, cut_off):
    made = [Completion(text, tokens, cut_off)]
    return Answers(task, [row], ["prompt"], made, 1, {}).table().iloc[0]


@pytest.mark.parametrize(
    ("completion", "strict", "lenient", "formatted", "why"),
    [
        ("82</answer>", True, True, True, "as asked"),
        (" 82 </answer>", True, True, True, "white space does not count"),
        ("82", False, True, False, "never closed, but readable"),
        (
            "82\nbecause 15 is small",
            False,
            True,
            False,
            "the open line holds it; the last number does not",
        ),
        ("47</answer>", False, False, True, "wrong"),
        ("47</answer> no, 82", False, True, True, "lenient reads the last number"),
        ("47, 15, 82</answer>", False, True, True, "inside the tags only the answer may stand"),
        ("82, 47, 15</answer>", False, False, True, "naming all of them is no answer"),
        (
            "82</answer><answer>47</answer>",
            False,
            False,
            False,
            "answering twice: the last one counts, wrong",
        ),
        ("", False, False, False, "empty"),
        ("</answer>", False, False, False, "an empty block is no answer"),
    ],
)
def test_how_a_completion_is_judged(completion, strict, lenient, formatted, why):
    judged = judge(largest(n_train=4, n_held_out=4), ROW, completion, 5, False)
    assert (judged["strict"], judged["lenient"], judged["formatted"]) == (
        strict,
        lenient,
        formatted,
    ), why


def test_lenient_reads_an_expression_behind_an_unclosed_tag():
    task = countdown(n_train=4, n_held_out=4)
    row = {"question": "q", "answer": "(3 + 5) * 2", "numbers": [3, 5, 2], "target": 16}
    judged = judge(task, row, "2 * (5 + 3)", 5, True)
    assert (judged["strict"], judged["lenient"]) == (False, True)


def test_what_is_right_strictly_is_right_leniently():
    rows = [{"question": f"q{i}", "answer": "two\nlines"} for i in range(2)]
    task = from_rows(
        "own", rows[:1], rows[1:], reward=lambda completions, **_: [0.0] * len(completions)
    )
    judged = judge(task, rows[0], "<answer>two\nlines</answer>", 5, False)
    assert (judged["strict"], judged["lenient"]) == (True, True)


def test_nothing_in_the_prefill_counts_as_the_models_answer():
    rows = [{"question": f"q{i}", "answer": "82"} for i in range(4)]
    task = from_rows(
        "own", rows[:2], rows[2:], reward=lambda completions, **_: [0.0] * len(completions)
    )
    task = copy.copy(task)
    object.__setattr__(task, "prefill", "I say <answer>82")
    for completion in ("</answer>", "", " "):
        judged = judge(task, rows[0], completion, 1, False)
        assert not (judged["strict"] or judged["lenient"] or judged["formatted"]), completion


# ---- generation -----------------------------------------------------------------------------------------------


def _by_hand(model, tokenizer, prompt, limit):
    """Greedy, one prompt at a time, no cache, no padding."""
    ids = list(tokenizer(prompt)["input_ids"])
    start = len(ids)
    with torch.no_grad():
        while len(ids) - start < limit:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


PROMPTS = [
    "Hello",
    "A somewhat longer prompt, so that the other one is padded",
    "<|im_start|>user\nHi",
    "1 2 3 4",
]


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_batched_greedy_equals_one_by_one_without_padding_and_cache(tiny, batch_size):
    model, tokenizer = tiny
    made = complete(model, tokenizer, PROMPTS, max_completion_tokens=6, batch_size=batch_size)
    assert [c.text for c in made] == [_by_hand(model, tokenizer, p, 6) for p in PROMPTS]
    assert all(c.cut_off and c.tokens == 6 for c in made)


def test_a_checkpoints_own_decoding_settings_do_not_leak_in(tiny):
    model, tokenizer = tiny
    plain = complete(model, tokenizer, PROMPTS, max_completion_tokens=6)
    model.generation_config.repetition_penalty = 50.0
    model.generation_config.suppress_tokens = list(range(0, len(tokenizer), 2))
    assert complete(model, tokenizer, PROMPTS, max_completion_tokens=6) == plain
    assert model.generation_config.repetition_penalty == 50.0


def test_every_end_the_model_declares_ends_a_completion(tiny):
    model, tokenizer = tiny
    (whole,) = complete(model, tokenizer, ["Hello"], max_completion_tokens=6)
    ids = model.generate(
        **tokenizer("Hello", return_tensors="pt"),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
    )
    third = int(ids[0, -4])
    position = ids[0, -6:].tolist().index(third) + 1
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, third]
    (short,) = complete(model, tokenizer, ["Hello"], max_completion_tokens=6)
    assert (short.tokens, short.cut_off) == (position, False) and whole.cut_off


def test_samples_lie_beside_their_prompt_and_follow_the_seed(tiny):
    model, tokenizer = tiny
    sample = lambda **how: complete(  # noqa: E731
        model, tokenizer, PROMPTS, max_completion_tokens=4, samples=3, temperature=1.0, **how
    )
    assert len(sample()) == 12 and sample() == sample(seed=0) != sample(seed=1)
    # so sharp that a sample is the greedy completion
    model.get_output_embeddings().weight.data *= 1e4
    greedy = complete(model, tokenizer, PROMPTS, max_completion_tokens=4)
    assert sample() == [c for c in greedy for _ in range(3)]


def test_samples_come_from_the_whole_distribution(tiny):
    hot = complete(
        *tiny, ["Hello"], max_completion_tokens=1, samples=200, temperature=1e3, batch_size=200
    )
    # nearly uniform; transformers' own default would keep 50 tokens
    assert len({c.text for c in hot}) > 150


def test_prompts_are_tokenized_as_by_trl_when_a_tokenizer_adds_bos(tiny, tmp_path, monkeypatch):
    import trl
    from datasets import Dataset
    from tokenizers.processors import TemplateProcessing

    model, tokenizer = tiny
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos]
    )
    task = largest(n_train=4, n_held_out=3)
    seen, real = [], RolloutEngine.generate
    monkeypatch.setattr(
        RolloutEngine,
        "generate",
        lambda self, ids, *a, **how: seen.extend(ids) or real(self, ids, *a, **how),
    )
    evaluate(model, tokenizer, task, max_completion_tokens=1)
    args = trl.GRPOConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    trainer = trl.GRPOTrainer(
        model,
        lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "x"}]),
        processing_class=tokenizer,
    )
    prompts = list(task.dataset(tokenizer, "held_out")["prompt"])
    expected = trainer._tokenize_prompts(prompts)[0]
    # one BOS: the trap is set
    assert all(ids[0] == bos[1] and ids[1] != bos[1] for ids in expected)
    assert sorted(seen) == sorted(expected)


def _state(model, tokenizer):
    return (
        [m.training for m in model.modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.is_grad_enabled(),
        tokenizer.padding_side,
        model.generation_config.to_dict(),
        [(p.requires_grad, p.grad) for p in model.parameters()],
    )


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_afterwards(tiny, monkeypatch, fails):
    model, tokenizer = tiny
    tokenizer.padding_side = "right"
    model.train()
    model.model.layers[0].eval()  # mixed on purpose
    before, settings = _state(model, tokenizer), model.generation_config
    if fails:
        stop = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
        model.model.layers[1].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, tokenizer, largest(n_train=4, n_held_out=4), samples=2, k=(1, 2))
    else:
        inside = []
        model.model.layers[0].register_forward_hook(
            lambda *_: inside.append((model.training, torch.is_grad_enabled()))
        )
        evaluate(model, tokenizer, largest(n_train=4, n_held_out=4), samples=2, k=(1, 2))
        assert set(inside) == {(False, False)}
    assert _state(model, tokenizer) == before and model.generation_config is settings


def test_lora_models_are_evaluated_with_their_adapters():
    model, tokenizer = load_policy("tiny-random", tuning="lora", quiet=True)
    before = complete(model, tokenizer, PROMPTS, max_completion_tokens=4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=5.0)
    after = complete(model, tokenizer, PROMPTS, max_completion_tokens=4)
    assert before != after
    assert [c.text for c in after] == [_by_hand(model, tokenizer, p, 4) for p in PROMPTS]


# ---- end to end, with a model that says what a script has it say -------------------------------------------------


class Scripted(LlamaForCausalLM):
    """Writes script[prompt ids], token by token: each next one with a logit `sharp` above all others."""

    script: dict[tuple[int, ...], list[int]]
    sharp = 60.0

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        # all of it: no cache to look into
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, **_):
        if attention_mask is None:  # transformers drops a mask without padding
            attention_mask = torch.ones_like(input_ids)
        logits = torch.zeros(*input_ids.shape[:1], 1, self.config.vocab_size)
        for row, mask, scores in zip(input_ids, attention_mask, logits, strict=True):
            ids = row[mask.bool()].tolist()
            prompt = next((p for p in self.script if tuple(ids[: len(p)]) == p), None)
            if prompt is None:  # words of the proof that padding is hidden
                continue
            place = len(ids) - len(prompt)
            # rows that have ended are asked on while others write
            if place < len(self.script[prompt]):
                scores[0, self.script[prompt][place]] = self.sharp
        return CausalLMOutputWithPast(logits=logits)


MEASURES = ["strict", "lenient", "formatted"]


@pytest.fixture(scope="module")
def taught():
    """(base, scripted model, tokenizer, task): rows 0-3 right, 4-5 wrong, 6 right but its tag never closed."""
    base, tokenizer = load_policy("tiny-random", quiet=True)
    task = largest(n_train=4, n_held_out=7)
    wrong = [str(min(row["numbers"])) for row in task.held_out]
    says = [
        row["answer"] if i in (0, 1, 2, 3, 6) else wrong[i]
        for i, row in enumerate(task.held_out)
    ]
    texts = [f"{number}</answer>{tokenizer.eos_token}" for number in says]
    texts[6] = says[6] + tokenizer.eos_token
    config = copy.deepcopy(base.config)
    config.model_type = (
        # unknown to the rollout engine, which would look past the script, into the layers
        "scripted"
    )
    model = Scripted(config)
    prompts = task.dataset(tokenizer, "held_out")["prompt"]
    model.script = {
        tuple(tokenizer(prompt)["input_ids"]): tokenizer(text)["input_ids"]
        for prompt, text in zip(prompts, texts, strict=True)
    }
    return base, model, tokenizer, task


def test_evaluation_finds_exactly_what_the_model_was_taught(taught):
    _, model, tokenizer, task = taught
    e = evaluate(model, tokenizer, task)
    assert e.rows["strict"].tolist() == [True] * 4 + [False] * 3
    assert e.rows["lenient"].tolist() == [True] * 4 + [False] * 2 + [True]
    assert e.rows["formatted"].tolist() == [True] * 6 + [False]
    assert not e.rows["cut_off"].any() and e.n == 7
    assert e.strict == Estimate(4 / 7, *wilson_interval(4, 7), 7)
    assert (e.lenient.value, e.formatted.value) == (5 / 7, 6 / 7)
    assert e.constant == task.best_constant() and e.constant[0] in e.table().index
    assert e.table().loc["strict", "value"] == 4 / 7 and "strict" in e._repr_html_()


def test_pass_at_k_of_a_model_between_right_and_wrong(taught):
    _, model, tokenizer, task = taught
    warm = copy.copy(model)
    warm.sharp = 20.0  # at temperature 1.5 each token then comes with a chance of 0.93
    e = evaluate(warm, tokenizer, task, samples=6, k=(1, 3, 8), temperature=1.5, seed=3)
    assert set(e.pass_at) == {1, 3} and e.rows["n_right"].between(0, 6).all()
    assert 0 < e.rows["n_right"].sum() < 42
    for k, estimate in e.pass_at.items():
        each = [
            np.mean([any(s) for s in itertools.combinations([i < c for i in range(6)], k)])
            for c in e.rows["n_right"]
        ]
        assert (
            estimate.value == pytest.approx(np.mean(each))
            and estimate.low <= estimate.value <= estimate.high
        )
    # n_right belongs to its row: sampled again, row by row, and judged by hand
    prompts = list(task.dataset(tokenizer, "held_out")["prompt"])
    again = complete(
        warm, tokenizer, prompts, max_completion_tokens=12, samples=6, temperature=1.5, seed=3
    )
    right = [
        c.text.strip() == f"{task.held_out[i // 6]['answer']}</answer>"
        for i, c in enumerate(again)
    ]
    assert e.rows["n_right"].tolist() == [sum(right[i : i + 6]) for i in range(0, 42, 6)]


def test_save_and_load(taught, tmp_path):
    _, model, tokenizer, task = taught
    e = evaluate(model, tokenizer, task, samples=2, k=(1, 2))
    e.save(tmp_path / "e.json")
    loaded = Evaluation.load(tmp_path / "e.json")
    assert loaded.table().equals(e.table()) and loaded.rows.equals(e.rows)
    assert (loaded.settings, loaded.constant, loaded.pass_at) == (
        e.settings,
        e.constant,
        e.pass_at,
    )
    assert compare(e, loaded).p["strict"] == 1.0


def test_comparison_of_base_and_taught(taught):
    base, model, tokenizer, task = taught
    c = compare(evaluate(base, tokenizer, task), evaluate(model, tokenizer, task))
    assert (c.fixed, c.broken) == (4, 0) and c.p["strict"] == mcnemar_p(4, 0) == 0.125
    assert c.difference["strict"].value == pytest.approx(4 / 7) and c.p[
        "formatted"
    ] == mcnemar_p(6, 0)
    assert c.difference["strict"] == bootstrap_mean([1, 1, 1, 1, 0, 0, 0], lowest=-1)
    table = c.table()
    assert table.loc["strict", ["base", "tuned", "p"]].tolist() == [0, 4 / 7, 0.125]
    assert table.loc[task.best_constant()[0], "tuned"] == task.best_constant()[1]
    assert task.best_constant()[0] in str(c) and "4 fixed, 0 broken" in str(c)
    figure = c.plot()
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx([0, 0, 0, 4 / 7, 5 / 7, 6 / 7])
    assert any(line.get_ydata()[0] == task.best_constant()[1] for line in figure.axes[0].lines)
    assert figure._repr_png_()[:4] == b"\x89PNG"


def evaluation(right: list[bool], *, constant=("always 7", 0.273)) -> Evaluation:
    """Of an evaluation what its tables show: 256 rows, rewards of 1 and 0.25."""
    n = len(right)
    rate = Estimate(sum(right) / n, *wilson_interval(sum(right), n), n)
    columns = {
        "question": [f"Which <{i}>?" for i in range(n)],
        "answer": "7",
        "completion": "tock " * 100,
    }
    rows = pd.DataFrame(
        columns
        | {name: right for name in MEASURES}
        | {"reward": [1.0 if r else 0.25 for r in right]}
    )
    settings = {"max_completion_tokens": 16}
    return Evaluation("toy", rate, rate, rate, constant, {}, rows, settings)


def test_accuracy_by_label_and_the_runs_of_a_folder(tmp_path):
    questions = [f"q{i}" for i in range(6)]

    def evaluated(right):
        rows = pd.DataFrame(
            {"question": questions, "strict": right, "reward": [float(one) for one in right]}
        )
        share = Estimate(sum(right) / 6, 0.0, 1.0, 6)
        return Evaluation("t", share, share, share, None, {}, rows.assign(lenient=right, formatted=right),
                          {"max_completion_tokens": 8})  # fmt: skip

    comparison = compare(
        evaluated([True, False] * 3), evaluated([True, True, True, True, False, False])
    )
    table = comparison.by([1, 1, 1, 2, 2, 2], "place")
    assert table.index.tolist() == [1, 2] and table["n"].tolist() == [3, 3]
    assert table["base"].tolist() == pytest.approx([2 / 3, 1 / 3]) and table[
        "tuned"
    ].tolist() == pytest.approx([1, 1 / 3])
    assert table.loc[2, "tuned_high"] == pytest.approx(wilson_interval(1, 3)[1])
    assert "33.3 % [6.1, 79.2]" in repr(table) and "Right, by place." in table._repr_html_()
    assert "33.3\u00a0% [6.1,\u00a079.2]" in table._repr_html_(), (
        "a narrow page breaks it in front of the interval"
    )
    with pytest.raises(ValueError, match="labels: 5 for 6 rows"):
        comparison.by([1] * 5)

    assert results(tmp_path).empty
    saved = {
        "preset": "cpu",
        "seed": 0,
        "n": 6,
        "steps": 2,
        "train_seconds": 90.0,
        "peak_gib": 1.25,
    }
    saved |= {
        "before": {"accuracy": 0.5, "low": 0.25, "high": 0.75},
        "after": {"reward": 0.5, "low": 0.25, "high": 0.75},
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "results.json").write_text(json.dumps(saved))
    for name, others in {
        "b": {"before": saved["before"], "after": saved["before"]},
        "c": {},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(others))
    table = results(tmp_path)
    assert set(table.index) == {"a", "b"} and table.loc["b", "after"] == "50.0 % [25.0, 75.0]"
    row = table.loc["a"]
    assert row["before"] == "50.0 % [25.0, 75.0]" and row["after"] == "0.500 [0.250, 0.750]"
    assert row["minutes"] == 1.5 and row["peak GiB"] == 1.2 and row["model"] is None


def test_the_peak_is_that_of_the_process():
    held = torch.ones(2**26)  # 0.25 GiB
    assert 0.25 < peak_gib() < 200 and held.sum() > 0


def test_tables_hold_numbers_and_show_percent_behind_a_sentence():
    """By hand: 51 of 256 are right before, 226 after, of them 51 + 175 - 0."""
    before, after = (
        evaluation([i < 51 for i in range(256)]),
        evaluation([i < 226 for i in range(256)]),
    )
    c = compare(before, after)
    reward = bootstrap_mean([1.0] * 51 + [0.25] * 205)
    low, high = 100 * c.difference["strict"].low, 100 * c.difference["strict"].high
    said = (
        f"19.9 % -> 88.3 %, n = 256, +68.4 points [{low:.1f}, {high:.1f}], p < 0.001; "
        "the best constant strategy has 27.3 %."
    )
    assert c.sentence == said
    table = c.table()
    assert (
        table.loc["strict", "tuned"] == 226 / 256
        and table.loc["strict", "tuned_low"] == after.strict.low
    )
    assert type(table["base"].round(2)) is pd.Series and type(table[["base"]]) is pd.DataFrame
    for words in (table._repr_html_(), repr(table), c._repr_html_()):
        words = unescape(words).replace("\u00a0", " ")
        assert said in words and words.index(said) < words.index("strict")
        assert "19.9 % [15.5, 25.2]" in words and "88.3 % [83.8, 91.7]" in words
        assert (
            f"+68.4 points [{low:.1f}, {high:.1f}]" in words
            and f"0.399 [{reward.low:.3f}, {reward.high:.3f}]" in words
        )
        assert "0.199" not in words and "strict_low" not in words
    assert str(c).startswith(said) and str(c).endswith("\n175 fixed, 0 broken.")
    for words in (before.table()._repr_html_(), repr(before.table()), before._repr_html_()):
        words = words.replace("\u00a0", " ")
        assert "19.9 % right, n = 256; the best constant strategy has 27.3 %." in words
        assert "19.9 % [15.5, 25.2]" in words and "0.1992" not in words
    assert before.table().loc["strict", "low"] == before.strict.low
    bare = evaluation([True, False], constant=None)
    assert compare(bare, bare).sentence.endswith("p = 1.000.") and "constant" not in repr(
        bare.table()
    )
    assert pickle.loads(pickle.dumps(table)).loc["strict", "n"] == 256 and repr(
        copy.deepcopy(table)
    )


def test_print_shows_an_evaluation_in_two_lines():
    shown = str(evaluation([i < 51 for i in range(256)]))
    reward = bootstrap_mean([1.0] * 51 + [0.25] * 205)
    assert shown == (
        "toy: 19.9 % right, n = 256; the best constant strategy has 27.3 %.\n"
        "strict 19.9 % [15.5, 25.2], lenient 19.9 % [15.5, 25.2], formatted 19.9 % [15.5, 25.2], "
        f"reward {reward.words(rate=False)}, always 7 27.3 %"
    )
    assert "always" not in str(evaluation([True], constant=None))


def test_examples_are_shown_whole_and_folded():
    c = compare(evaluation([False] * 4), evaluation([True] * 4))
    page, text = c.examples(2)._repr_html_(), repr(c.examples(2))
    assert (
        page.count("<details") == 4 and page.count("tock") == 400 and "Which &lt;1&gt;?" in page
    )
    assert text.startswith(
        "4 fixed, 0 broken; the first 2 of each.\n\nfixed, row 0: Which <0>?\nanswer: 7\nbase: tock"
    )
    assert text.count("tock") == 400 and "row 2" not in page + text


def test_partial_credit_on_held_out_rows_is_shown(taught, tmp_path):
    """Right 4, 2 wrong in a whole format, 1 with its tag open: what the parts and the total come to by hand."""
    base, model, tokenizer, task = taught
    before, after = evaluate(base, tokenizer, task), evaluate(model, tokenizer, task)
    parts = {
        "reward/exact_answer": [1, 1, 1, 1, 0, 0, 0],
        "reward/soft_format": [1] * 6 + [0.25],
    }
    parts["reward"] = [0.75 * a + 0.25 * b for a, b in zip(*parts.values(), strict=True)]
    assert set(after.rewards) == set(parts)
    for name, scores in parts.items():
        assert after.rewards[name] == bootstrap_mean(scores)
        assert after.table().loc[name, "value"] == pytest.approx(np.mean(scores))
    c = compare(before, after)
    change = np.array(parts["reward"]) - before.rows["reward"]
    assert (
        c.difference["reward"] == bootstrap_mean(change.tolist(), lowest=-1)
        and c.p["reward"] is None
    )
    row = c.table().loc["reward/soft_format"]
    assert row["tuned"] == pytest.approx(6.25 / 7) and math.isnan(row["p"]) and row["n"] == 7
    assert re.search(r"reward/soft_format +0\.\d+ .* 0\.893 \[0\.\d+, 1\.000\] .* 7\n", str(c))

    # a row that could not be judged
    after.rows.loc[0, ["reward", "reward/exact_answer"]] = math.nan
    assert compare(before, after).difference["reward"].n == 6 and after.rewards["reward"].n == 6
    old = Evaluation(
        **{**vars(before), "rows": before.rows[["question", "answer", "completion", *MEASURES]]}
    )
    # saved by an older version
    assert old.rewards == {} and set(compare(old, old).difference) == set(MEASURES)


def test_examples_are_the_first_fixed_and_the_first_broken(taught):
    base, model, tokenizer, task = taught
    before, after = evaluate(base, tokenizer, task), evaluate(model, tokenizer, task)
    fixed = compare(before, after).examples(3)
    assert fixed.index.tolist() == [("fixed", 0), ("fixed", 1), ("fixed", 2)]
    assert fixed["tuned"].tolist() == [f"{row['answer']}</answer>" for row in task.held_out[:3]]
    broken = compare(after, before).examples(2)
    assert broken.index.tolist() == [("broken", 0), ("broken", 1)]
    assert len(compare(before, before).examples()) == len(compare(after, after).examples()) == 0


def test_comparing_what_cannot_be_compared(taught):
    base, _, tokenizer, task = taught
    e = evaluate(base, tokenizer, task, max_completion_tokens=2)
    fewer = evaluate(base, tokenizer, task, rows=task.held_out[:3], max_completion_tokens=2)
    turned = evaluate(base, tokenizer, task, rows=task.held_out[::-1], max_completion_tokens=2)
    for other in (fewer, turned):
        with pytest.raises(ValueError, match="evaluate both on the same rows"):
            compare(e, other)
    with pytest.raises(ValueError, match="max_completion_tokens is 2 in base and 3 in tuned"):
        compare(e, evaluate(base, tokenizer, task, max_completion_tokens=3))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rows": []}, "rows is empty"),
        ({"samples": -1}, "samples=-1"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        (
            {"max_completion_tokens": 0},
            "max_completion_tokens=0 must be a whole number of at least 1",
        ),
        ({"samples": 2, "k": (4, 8)}, r"k=\(4, 8\) has no number in 1..samples=2"),
        ({"samples": 2, "k": (0, 1)}, r"k=\(0, 1\)"),
        ({"samples": 2, "temperature": 0}, "temperature=0 must be a number above 0"),
        (
            {"max_completion_tokens": 2000},
            "max_completion_tokens=2000 that is .* exceeds the model's context of 1024",
        ),
    ],
)
def test_evaluate_refusals(taught, how, message):
    base, _, tokenizer, task = taught
    with pytest.raises(ValueError, match=message):
        evaluate(base, tokenizer, task, **how)


def test_complete_refusals(tiny):
    with pytest.raises(ValueError, match="temperature=0 makes samples=2 alike"):
        complete(*tiny, ["x"], max_completion_tokens=2, samples=2)
    with pytest.raises(ValueError, match="temperature=-1"):
        complete(*tiny, ["x"], max_completion_tokens=2, temperature=-1)
    assert complete(*tiny, [], max_completion_tokens=2) == []
