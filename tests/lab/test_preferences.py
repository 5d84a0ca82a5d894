"""Sets from scored samples: selection by enumeration, files under a real kill, tokens as TRL's trainers see them."""

import copy
import itertools
import json
import math
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import few_words
import forked
import pandas as pd
import pytest
import torch
from filelock import FileLock
from tokenizers.processors import TemplateProcessing
from torch import nn

from grpo_kit.engine.complete import complete
from grpo_kit.evaluation import _sample_cache as sample_cache
from grpo_kit.evaluation._sample_cache import _digest_of_every_bit, trained_as_sampled
from grpo_kit.more.lab import preferences
from grpo_kit.more.lab.preferences import Samples
from grpo_kit.record.files import RunFolderError
from grpo_kit.rewards import ExactAnswer, RightSize, SoftFormat
from grpo_kit.rewards.scoring import RewardError
from grpo_kit.tasks import from_rows, largest

# ---- selection, by hand -----------------------------------------------------------------------------------------


def made(*rows, samples=4, repeated=0):
    """Samples of rows (prompt, completion, score, flags); flags: "c" cut off, "x" not exact, "r" right."""
    table = [
        {
            "prompt": prompt,
            "completion": text,
            "ids": [5] * len(text),
            "cut_off": "c" in flags,
            "prompt_tokens": len(prompt),
            "exact": "x" not in flags,
            "score": math.nan if score is None else score,
            "right": "r" in flags,
        }
        for prompt, text, score, flags in rows
    ]
    return Samples("sums", pd.DataFrame(table), repeated, {"samples": samples})


def pairs_of(samples, **how):
    return [(r["prompt"], r["chosen"], r["rejected"]) for r in samples.pairs(**how)]


PAIRS = [
    ([("b", 0.2, ""), ("a", 0.9, ""), ("c", 0.1, "")], ("a", "c"), "best against worst, wherever they stand"),
    ([("a", 0.9, ""), ("b", 0.9, ""), ("c", 0.1, ""), ("d", 0.1, "")], ("a", "c"), "ties: the first sampled"),
    ([("a", 0.35, ""), ("b", 0.25, "")], None, "a gap of the margin itself is too small"),
    ([("a", 0.8, ""), ("b", 0.7, "")], None, "0.8 - 0.7 is above 0.1 in floating point only"),
    ([("a", 0.351, ""), ("b", 0.25, "")], ("a", "b"), "just above the margin"),
    ([("a", 0.5, ""), ("a", 0.5, "")], None, "one text twice is one candidate"),
    ([("a", 0.5, ""), ("b", 0.5, "")], None, "nothing to prefer"),
    ([("a", 0.5, ""), ("b", None, "")], None, "cannot judge is not 0"),
    ([("a", 0.5, ""), ("b", None, ""), ("c", 0.3, "")], ("a", "c"), "nor does it stop the others"),
    ([("a", 0.9, "c"), ("b", 0.6, ""), ("c", 0.1, "")], ("b", "c"), "cut off: never chosen"),
    ([("a", 0.9, ""), ("b", 0.6, ""), ("c", 0.1, "c")], ("a", "b"), "cut off: never rejected"),
    ([("a", 0.9, "x"), ("b", 0.6, ""), ("c", 0.1, "x"), ("d", 0.2, "")], ("b", "d"), "trained as other tokens"),
    ([("a", 0.9, "x"), ("a", 0.9, ""), ("b", 0.1, "")], ("a", "b"), "spelled as trained the second time"),
    ([("a", 0.9, "")], None, "one alone"),
    ([("a", 0.9, "c"), ("b", 0.1, "c")], None, "none has ended"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "expected", "why"), PAIRS, ids=[why for *_, why in PAIRS])
def test_pair_of_one_prompt(rows, expected, why):
    other = [("q", "yes", 1.0, ""), ("q", "no", 0.0, "")]  # so that the set is never empty
    found = pairs_of(made(*[("p", *row) for row in rows], *other), margin=0.1)
    assert found == [("p", *pair) for pair in [expected] if pair] + [("q", "yes", "no")], why


def test_what_was_cut_off_is_in_no_set():
    samples = made(
        *[("p", "a", 0.5, ""), ("p", "b", 0.3, ""), ("p", "c", 0.0, "c"), ("p", "d", 1.0, "c")],
        *[("q", "a", 0.0, "c"), ("q", "b", 1.0, "c")],
        *[("r", "a", 0.0, "c"), ("r", "a", 0.9, ""), ("r", "b", 0.5, "")],  # a has ended too
    )
    assert pairs_of(samples) == [("p", "a", "b"), ("r", "a", "b")]
    labels = {(r["prompt"], r["completion"]): r["label"] for r in samples.unpaired()}
    assert labels == {("p", "a"): True, ("p", "b"): False, ("r", "a"): True, ("r", "b"): True}
    assert {r["completion"] for r in samples.accepted(threshold=0)} == {"a", "b"}


def test_pairs_keep_scores_and_order():
    samples = made(
        ("z", "a", 0.2, ""),
        ("z", "b", 0.9, ""),
        ("y", "c", 0.5, ""),
        ("y", "d", 0.25, ""),
        samples=2,
    )
    assert samples.pairs().to_list() == [
        {
            "prompt": "z",
            "chosen": "b",
            "rejected": "a",
            "score_chosen": 0.9,
            "score_rejected": 0.2,
        },
        {
            "prompt": "y",
            "chosen": "c",
            "rejected": "d",
            "score_chosen": 0.5,
            "score_rejected": 0.25,
        },
    ]
    assert pairs_of(samples, margin=0.3) == [("z", "b", "a")]


@pytest.mark.parametrize("margin", [0, 0.1, 0.5])
def test_pairs_are_those_of_an_enumeration(margin):
    rng = random.Random(0)
    rows, expected = [], []
    for prompt in map("p{}".format, range(80)):
        score = {text: rng.choice([None, 0.0, 0.25, 0.5, 1.0]) for text in "abcde"}
        own = [(text, rng.choice(["", "", "x", "c"])) for text in rng.choices("abcde", k=5)]
        rows += [(prompt, text, score[text], flag) for text, flag in own]
        usable = [text for text, flag in own if flag == "" and score[text] is not None]
        every = [(c, r) for c in usable for r in usable if score[c] - score[r] > margin]
        if every:  # the widest gap; of equals the earliest chosen, then the earliest rejected
            widest = max(score[c] - score[r] for c, r in every)
            expected.append(
                (prompt, *min(
                    (pair for pair in every if score[pair[0]] - score[pair[1]] == widest),
                    key=lambda pair, usable=usable: [usable.index(text) for text in pair],
                ))
            )  # fmt: skip
    assert pairs_of(made(*rows), margin=margin) == expected and len(expected) > 10


SEVERAL = made(
    *[("p", "a", 0.5, ""), ("p", "b", 0.25, ""), ("p", "a", 0.5, ""), ("p", "c", 1.0, "r")],
    *[("q", "a", 0.49, ""), ("q", "b", None, ""), ("q", "c", 0.9, "x"), ("q", "d", 1.0, "c")],
    *[("r", "a", 0.0, ""), ("r", "bcd", 0.5, "r"), ("r", "e", 0.0, "")],
)


def test_labels_and_their_order():
    found = [(r["prompt"], r["completion"], r["label"]) for r in SEVERAL.unpaired()]
    assert found == [
        ("p", "a", True), ("r", "a", False),  # at a sixth
        ("p", "b", False), ("q", "a", False), ("r", "bcd", True),  # in the middle
        ("p", "c", True), ("r", "e", False),
    ]  # fmt: skip


def test_targets():
    def texts(data):
        assert data.column_names == ["prompt", "completion", "score"]
        return [(r["prompt"], r["completion"]) for r in data]

    assert texts(SEVERAL.best_of_n()) == [("p", "c"), ("q", "a"), ("r", "bcd")]
    assert texts(SEVERAL.best_of_n(threshold=0.5)) == [("p", "c"), ("r", "bcd")]
    assert texts(SEVERAL.accepted()) == [("p", "a"), ("p", "c"), ("r", "bcd")]
    assert texts(SEVERAL.accepted(threshold=1)) == [("p", "c")]
    tied = made(("p", "b", 0.5, ""), ("p", "a", 0.5, ""), ("p", "c", 0.4, ""))
    assert texts(tied.best_of_n()) == [("p", "b")]


def test_summary_by_hand():
    table = replace(SEVERAL, repeated=1).summary()
    expected = {
        "prompts": (3, None),
        "rows left out, their prompt came before": (1, 4),
        "prompts never right": (1, 3),
        "prompts that give a pair": (2, 3),
        "completions": (11, None),
        "equal to an earlier one of its prompt": (1, 11),
        "cut off at the length limit": (1, 11),
        "ended, but trained as other tokens": (1, 11),
        "without a score": (1, 11),
        "mean gap of the pairs": ((0.75 + 0.5) / 2, None),
        "longest prompt + completion, tokens": (4, None),
    }
    for name, (value, of) in expected.items():
        row = table.loc[name]
        assert row["value"] == pytest.approx(value), name
        assert (
            pd.isna(row["of"]) if of is None else (row["of"], row["share"]) == (of, value / of)
        ), name
    assert list(table.index) == list(expected) and table.index.name == "sums"
    assert SEVERAL.summary(margin=0.6).loc["prompts that give a pair", "value"] == 1
    assert "prompts never right" in SEVERAL._repr_html_()
    assert repr(SEVERAL) == "Samples('sums', 3 prompts x 4 samples)"
    none = made(("p", "a", 0.0, "")).summary()
    assert math.isnan(none.loc["mean gap of the pairs", "value"])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.pairs(margin=-0.1), r"margin=-0.1 must be a number of at least 0"),
        (lambda s: s.pairs(margin=math.nan), "margin=nan must be"),
        (
            lambda s: s.pairs(margin=1.0),
            "margin=1.0: no prompt has two usable completions so far apart",
        ),
        (
            lambda s: replace(s, settings={"samples": 1}).pairs(),
            "samples=1 a prompt leaves nothing to compare",
        ),
        (lambda s: s.unpaired(threshold=math.nan), "threshold=nan must be a number"),
        (lambda s: s.best_of_n(threshold="0.5"), "threshold='0.5' must be a number"),
        (lambda s: s.best_of_n(threshold=1.1), "threshold=1.1: no usable completion is left"),
        (lambda s: s.accepted(threshold=math.inf), "threshold=inf must be a number"),
        (
            lambda s: s.accepted(threshold=2),
            "11 completions, cut off at the length limit: 1; ended, but trained as other tokens: 1; without a score: 1",
        ),
        (
            lambda s: made(("p", "a", 1.0, "c")).unpaired(),
            "threshold=0.5: no usable completion",
        ),
    ],
)
def test_sets_refuse(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(SEVERAL)


# ---- sampling and scoring ---------------------------------------------------------------------------------------

WORDS = {"<|im_end|>": 4, "1": 1, "2": 1, "9": 1, "a": 0.5, "b": 0.5, "Ġ": 0.5}
# A special token, another end, a byte that is no text; "ab" is one token for the tokenizer.
ODD = {"<|im_end|>": 2, "a": 1, "b": 1, "<|im_start|>": 0.5, "<|endoftext|>": 0.5, "Ã": 0.2}


def speller(words):
    """A tiny model that writes these tokens with these frequencies, whatever it reads."""
    model, tokenizer = few_words.policy()
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size)
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, -1e4)
    with torch.no_grad():
        for word, weight in words.items():
            head.bias[tokenizer.convert_tokens_to_ids(word)] = math.log(weight)
    model.config.tie_word_embeddings = False
    model.lm_head = head
    return model.eval(), tokenizer


def nines(completions, **columns):
    """Share of nines; cannot judge a text with a b."""
    return [
        None if "b" in text else text.count("9") / max(1, len(text)) for text in completions
    ]


def nines_task(**changes):
    usual = {
        "rewards": [nines, SoftFormat(think=None)],
        "reward_weights": [0.75, 0.25],
        "max_completion_tokens": 4,
    }
    return replace(largest(n_train=14, n_held_out=2), **(usual | changes))


def scored_samples(*args, chunk=preferences.CHUNK, **how):
    """kit.scored_samples in smaller chunks, so that 14 prompts make several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preferences, "CHUNK", chunk)
        return preferences.scored_samples(*args, **how)


@pytest.fixture(scope="module")
def spelling():
    return speller(WORDS)


@pytest.fixture
def drawn(monkeypatch):
    """The prompts of every call that sampled."""
    calls = []

    def counting(model, tokenizer, prompts, **how):
        calls.append(list(prompts))
        return complete(model, tokenizer, prompts, **how)

    monkeypatch.setattr(sample_cache, "complete", counting)
    return calls


def test_rows_belong_together(spelling, tmp_path):
    task = nines_task(
        read_answer=lambda completion, prefill: completion,
        is_correct=lambda text, row: len(text) == len(row["numbers"]) - 3,  # of three to five
    )
    samples = scored_samples(*spelling, task, samples=3, chunk=5, folder=tmp_path)
    table, tokenizer = samples.table, spelling[1]
    assert table["prompt"].tolist() == [
        p for p in task.render(tokenizer, task.train) for _ in range(3)
    ]
    for i, row in enumerate(table.to_dict("records")):
        ids = row["ids"]
        assert row["cut_off"] == (ids[-1] != 2) and len(ids) <= 4 and 2 not in ids[:-1]
        assert row["completion"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert row["prompt_tokens"] == len(tokenizer(row["prompt"]).input_ids)
        assert row["right"] == task.is_right(task.train[i // 3], row["completion"])
    assert (
        len(set(table["completion"])) > 8
        and table["cut_off"].nunique() == table["right"].nunique() == 2
    )
    assert samples.task == "largest" and samples.repeated == 0
    # written so that others can read it
    kept = pd.concat(
        map(pd.read_json, sorted((tmp_path / "samples").glob("part-*"))), ignore_index=True
    )
    assert kept[["prompt", "completion"]].equals(table[["prompt", "completion"]])
    assert json.loads((tmp_path / "samples.json").read_text())["temperature"] == 0.9


def test_the_tables_defaults_are_the_train_rows_and_the_tasks_length(spelling, tmp_path):
    task = nines_task(max_completion_tokens=2)
    assert (
        scored_samples(*spelling, task, folder=tmp_path / "a").table["ids"].map(len).max() == 2
    )
    some = scored_samples(
        *spelling,
        task,
        rows=task.held_out,
        samples=16,
        max_completion_tokens=3,
        folder=tmp_path / "b",
    )
    assert some.table["prompt"].nunique() == 2 and some.table["ids"].map(len).max() == 3


def test_chunks_do_not_share_random_numbers(spelling, tmp_path):
    table = scored_samples(*spelling, nines_task(), samples=8, chunk=1, folder=tmp_path).table
    texts = table.groupby("prompt", sort=False)["completion"].apply(tuple)
    # this model writes the same of every prompt, given the same numbers
    assert texts.nunique() == len(texts)
    again = scored_samples(
        *spelling, nines_task(), samples=8, chunk=1, seed=1, folder=tmp_path / "1"
    ).table
    assert set(again.groupby("prompt")["completion"].apply(tuple)).isdisjoint(texts)


def test_temperature(spelling, tmp_path):
    task, how = nines_task(), {"samples": 8, "max_completion_tokens": 1}
    cold = scored_samples(
        *spelling, task, temperature=0.05, folder=tmp_path / "cold", **how
    ).table
    assert set(cold["completion"]) == {""}  # the likeliest token is the end
    hot = scored_samples(*spelling, task, folder=tmp_path / "hot", **how).table
    assert len(set(hot["completion"])) > 4


def test_a_prompt_counts_once(spelling, tmp_path):
    task = nines_task()
    one, two, three = task.train[:3]
    other = one | {"answer": "0", "numbers": [0]}  # same question; its first row counts
    seen = []

    def look(completions, *, answer, **columns):
        seen.extend(answer)
        return [0.0] * len(completions)

    task = replace(task, rewards=[look], reward_weights=[1.0])
    samples = scored_samples(
        *spelling, task, rows=[one, two, other, two, three], samples=2, folder=tmp_path
    )
    assert seen == [row["answer"] for row in (one, two, three) for _ in range(2)]
    assert samples.repeated == 2 and samples.table["prompt"].nunique() == 3
    assert samples.table["prompt"].unique().tolist() == task.render(
        spelling[1], [one, two, three]
    )
    assert samples.summary().loc["rows left out, their prompt came before", "of"] == 5


def test_scores_are_the_trainers(spelling, tmp_path):
    from grpo_kit.loop.batch import Batch
    from grpo_kit.loop.score import score

    model, tokenizer = spelling
    size = RightSize(2, 4, unit="tokens")
    task = nines_task(
        rewards=[ExactAnswer(), SoftFormat(think=None), size], reward_weights=[0.5, 0.2, 0.3]
    )
    table = scored_samples(model, tokenizer, task, samples=4, folder=tmp_path / "s").table
    rows = [row for row in task.train for _ in range(4)]
    batch = Batch(
        rows, [place // 4 for place in range(len(rows))], [[]] * len(rows), table["ids"].tolist(),
        table["completion"].tolist(), [False] * len(rows),
    )  # fmt: skip
    score(batch, task, task.reward_weights, tokenizer)
    assert [*batch.parts] == ["exact_answer", "soft_format", "right_size"]
    for name, scores in batch.parts.items():
        assert scores == pytest.approx(table[f"reward/{name}"].tolist())
    assert batch.rewards == pytest.approx(table["score"].tolist(), abs=1e-6)
    assert table["score"].nunique() > 2


def test_what_cannot_be_judged_has_no_score_and_is_in_no_set(spelling, tmp_path):
    samples = scored_samples(*spelling, nines_task(), folder=tmp_path)
    table = samples.table
    with_b = table["completion"].str.contains("b")
    assert (
        with_b.any()
        and (table["score"].isna() == with_b).all()
        and (table["reward/nines"].isna() == with_b).all()
    )
    assert table["reward/soft_format"].notna().all()
    sets = [
        samples.pairs(margin=0),
        samples.unpaired(),
        samples.best_of_n(),
        samples.accepted(threshold=0),
    ]
    texts = [
        row[c]
        for data in sets
        for row in data
        for c in ("chosen", "rejected", "completion")
        if c in row
    ]
    assert len(texts) > 40 and not any("b" in text for text in texts)
    assert samples.summary().loc["without a score", "value"] == with_b.sum()


def test_rewards_get_every_column_of_their_row(spelling, tmp_path):
    seen = {}

    def look(completions, *, prompts, prefill, answer, numbers, completion_ids, **columns):
        seen.update(locals())
        return [0.5] * len(completions)

    task = nines_task(rewards=[look], reward_weights=[1.0])
    table = scored_samples(*spelling, task, samples=2, folder=tmp_path).table
    assert (
        seen["prompts"] == table["prompt"].tolist()
        and seen["completions"] == table["completion"].tolist()
    )
    assert (
        seen["completion_ids"] == table["ids"].tolist() and seen["prefill"] == ["<answer>"] * 28
    )
    assert seen["answer"] == [row["answer"] for row in task.train for _ in range(2)]
    assert seen["numbers"] == [row["numbers"] for row in task.train for _ in range(2)]
    assert table["score"].tolist() == [0.5] * 28


def test_a_changed_reward_scores_anew_and_samples_nothing(spelling, tmp_path, drawn):
    before = scored_samples(*spelling, nines_task(), chunk=4, folder=tmp_path)
    assert [len(prompts) for prompts in drawn] == [4, 4, 4, 2]

    def ones(completions, **columns):
        return [text.count("1") / max(1, len(text)) for text in completions]

    def broken(completions, **columns):
        raise KeyError("gold")

    after = scored_samples(
        *spelling, nines_task(rewards=[ones], reward_weights=[1.0]), chunk=4, folder=tmp_path
    )
    with pytest.raises(RewardError, match="reward 'broken' raised KeyError"):
        scored_samples(
            *spelling,
            nines_task(rewards=[broken], reward_weights=[1.0]),
            chunk=4,
            folder=tmp_path,
        )
    assert len(drawn) == 4
    shared = ["prompt", "completion", "ids", "cut_off", "exact", "right"]
    pd.testing.assert_frame_equal(after.table[shared], before.table[shared])
    assert after.table["score"].tolist() == pytest.approx(
        ones(after.table["completion"]), abs=1e-6
    )
    assert "reward/nines" not in after.table


def test_arguments_are_refused_before_anything_is_written(spelling, tmp_path):
    task = nines_task()
    long = [{**task.train[0], "question": "Which? " * 900}]
    asked = [
        ({"rows": []}, "rows is empty"),
        ({"temperature": 0}, "temperature=0 must be a number above 0"),
        ({"samples": 0}, "samples=0 must be a whole number of at least 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens=0 must"),
        (
            {"rows": task.train + long},
            r"prompts\[14\] has \d+ tokens; with max_completion_tokens=4 that is \d+, which exceeds",
        ),
        (
            {"rows": [{"question": "a?", "answer": "b"}], "task": from_rows_needing("gold")},
            "'needs' asks for the",
        ),
    ]
    for how, message in asked:
        with pytest.raises(ValueError, match=message):
            scored_samples(*spelling, how.pop("task", task), folder=tmp_path / "s", **how)
        assert not (tmp_path / "s").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file; name a folder"):
        scored_samples(*spelling, task, folder=tmp_path / "file")


def from_rows_needing(column):
    def needs(completions, gold, **columns):
        return [0.0] * len(completions)

    rows = [{"question": f"{i}?", "answer": str(i), column: ""} for i in range(8)]
    return from_rows("own", rows, reward=needs)


# ---- files ------------------------------------------------------------------------------------------------------


def test_other_settings_are_refused_by_name_and_nothing_is_overwritten(
    spelling, tmp_path, drawn
):
    model, tokenizer = spelling
    task, folder = nines_task(), tmp_path / "s"
    scored_samples(model, tokenizer, task, chunk=7, folder=folder)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(drawn) == 2
    changed = [
        ({"samples": 3}, "samples: 4 there, 3 now"),
        ({"temperature": 1.0}, "temperature: 0.9 there, 1.0 now"),
        ({"max_completion_tokens": 3}, "max_completion_tokens: 4 there, 3 now"),
        ({"chunk": 8}, "chunk: 7 there, 8 now"),
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"rows": task.train[:-1]}, "prompts: '14, digest .*' there, '13, digest .*' now"),
        ({"rows": task.train[::-1]}, "prompts: '14, digest .*' there, '14, digest .*' now"),
        ({"task": nines_task(system="Be brief.")}, "prompts: "),
        (
            {"model": speller(WORDS | {"a": 0.6})[0]},
            r"\(weights: '\w{16}' there, '\w{16}' now\)",
        ),
    ]
    for how, message in changed:
        asked = {"chunk": 7, "folder": folder, **how}
        with pytest.raises(RunFolderError, match=message):
            scored_samples(
                asked.pop("model", model), tokenizer, asked.pop("task", task), **asked
            )
    with pytest.raises(RunFolderError, match="ends: "):
        model.generation_config.eos_token_id = [2, 0]
        try:
            scored_samples(model, tokenizer, task, chunk=7, folder=folder)
        finally:
            model.generation_config.eos_token_id = 2
    with (
        FileLock(folder / ".lock"),
        pytest.raises(RunFolderError, match="another process is sampling into"),
    ):
        scored_samples(model, tokenizer, task, chunk=7, folder=folder)
    assert len(drawn) == 2 and files == {
        p: p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }
    (folder / "samples.json").unlink()
    with pytest.raises(RunFolderError, match="nobody knows of which settings"):
        scored_samples(model, tokenizer, task, chunk=7, folder=folder)


def test_adapters_switched_off_are_another_model(tmp_path):
    model, tokenizer = few_words.policy("lora", init_lora_weights=False)
    task = nines_task()
    scored_samples(model, tokenizer, task, samples=2, folder=tmp_path)
    with (
        model.disable_adapter(),
        pytest.raises(RunFolderError, match=r"adapters: .*default.* there, \['off'\] now"),
    ):
        scored_samples(model, tokenizer, task, samples=2, folder=tmp_path)
    scored_samples(model, tokenizer, task, samples=2, folder=tmp_path)


def test_digest_sees_every_bit_and_not_the_place(tiny, tmp_path):
    model, _ = tiny
    before = _digest_of_every_bit(model)
    model.save_pretrained(tmp_path)
    assert _digest_of_every_bit(type(model).from_pretrained(tmp_path)) == before
    for name, parameter in model.named_parameters():
        last = parameter.data.view(-1)[-1:]
        was = last.clone()
        last.copy_(torch.nextafter(last, torch.tensor(9.0)))
        assert _digest_of_every_bit(model) != before, name
        last.copy_(was)
    assert (
        _digest_of_every_bit(model) == before != _digest_of_every_bit(model.to(torch.bfloat16))
    )


def test_what_failed_before_a_chunk_was_there_does_not_bind(spelling, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sample_cache, "complete", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scored_samples(*spelling, nines_task(), temperature=2.0, folder=tmp_path)
    scored_samples(*spelling, nines_task(), temperature=1.0, folder=tmp_path)


def test_interrupted_at_every_write(spelling, tmp_path, drawn, monkeypatch):
    task, how = nines_task(), {"chunk": 2, "samples": 2}
    how["rows"] = task.train[:5]
    whole = scored_samples(*spelling, task, folder=tmp_path / "whole", **how)
    # settings, then three chunks
    for moment, at in itertools.product(["before", "after", "half"], range(4)):
        folder, count = tmp_path / f"{moment}-{at}", itertools.count()
        replace_file, write = os.replace, Path.write_bytes

        def renamed(*names, replace_file=replace_file, moment=moment, at=at, count=count):
            stop = moment != "half" and next(count) == at
            if stop and moment == "before":
                raise KeyboardInterrupt
            replace_file(*names)
            if stop:
                raise KeyboardInterrupt

        def written(path, data, write=write, moment=moment, at=at, count=count):
            stop = moment == "half" and next(count) == at
            write(path, data[: len(data) // 2] if stop else data)
            if stop:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", renamed)
            patch.setattr(Path, "write_bytes", written)
            with pytest.raises(KeyboardInterrupt):
                scored_samples(*spelling, task, folder=folder, **how)
        drawn.clear()
        resumed = scored_samples(*spelling, task, folder=folder, **how)
        there = at + 1 if moment == "after" else at  # files in place, the settings' included
        assert len(drawn) == 3 - max(0, there - 1)
        pd.testing.assert_frame_equal(resumed.table, whole.table)
        assert resumed.settings == whole.settings


KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
from test_preferences import nines_task, scored_samples, speller, WORDS
from grpo_kit.evaluation import _sample_cache as sample_cache
draw = sample_cache.complete
def slow(*args, **how):
    made = draw(*args, **how)
    time.sleep(0.2)
    return made
sample_cache.complete = slow
scored_samples(*speller(WORDS), nines_task(), chunk=1, folder={folder!r})
"""


def test_killed_and_called_again(tmp_path, drawn):
    # as the other process has it: a shared one may have got another template meanwhile
    spelling = speller(WORDS)
    folder = tmp_path / "killed"
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(folder))
    child = forked.start("-c", code)
    parts = folder / "samples"
    try:
        started = time.monotonic()
        while len(list(parts.glob("part-*"))) < 3:
            assert child.poll() is None and time.monotonic() - started < 240
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    there = {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*")}
    assert 3 <= len(there) < 14
    resumed = scored_samples(*spelling, nines_task(), chunk=1, folder=folder)
    assert len(drawn) == 14 - len(there)
    assert (
        there.items()
        <= {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*")}.items()
    )
    whole = scored_samples(*spelling, nines_task(), chunk=1, folder=tmp_path / "whole")
    pd.testing.assert_frame_equal(resumed.table, whole.table)
    assert (
        resumed.settings == whole.settings
        and resumed.pairs().to_list() == whole.pairs().to_list()
    )


# ---- the tokens that TRL's trainers train on ------------------------------------------------------------------------

NAMES = ["dpo", "kto", "sft", "orpo", "cpo"]


def trainer_of(name, data, tokenizer, folder, **changes):
    """TRL's trainer on a fresh tiny model, whose vocabulary is that of most tests here."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import trl
    from trl.experimental import cpo, orpo

    classes = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig, {}),
        "kto": (trl.KTOTrainer, trl.KTOConfig, {}),
        "sft": (trl.SFTTrainer, trl.SFTConfig, {}),
        "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, {}),
        "cpo": (cpo.CPOTrainer, cpo.CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    }
    trainer, config, own = classes[name]
    args = dict(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
    )
    args |= dict(use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, **own, **changes)  # fmt: skip
    models = [few_words.policy()[0] for _ in range(2)]
    reference = {"ref_model": models[1]} if name in ("dpo", "kto") else {}
    return trainer(
        model=models[0],
        args=config(**args),
        train_dataset=data,
        processing_class=tokenizer,
        **reference,
    )


def set_for(name, samples):
    return {"kto": samples.unpaired, "sft": samples.best_of_n}.get(name, samples.pairs)()


def trained_tokens(trainer, name):
    """(prompt, completion) -> (context ids, ids with a loss) of everything the trainer prepared."""
    found = {}
    for row in trainer.train_dataset:
        for side in (
            ("chosen", "rejected") if name in ("dpo", "orpo", "cpo") else ("completion",)
        ):
            if name in ("dpo", "kto"):
                context, target = row["prompt_ids"], row[f"{side}_ids"]
            else:
                prefix = "" if name == "sft" else f"{side}_"
                ids, labels = row[f"{prefix}input_ids"], row[f"{prefix}labels"]
                start = labels.index(next(label for label in labels if label != -100))
                assert labels[start:] == ids[start:] and set(labels[:start]) == {-100}
                context, target = ids[:start], ids[start:]
            found[row["prompt"], row[side].removesuffix(trainer.processing_class.eos_token)] = (
                context,
                target,
            )
    return found


def sampled_tokens(samples, tokenizer):
    """(prompt, completion) -> (prompt ids, sampled ids), the first that is exact."""
    rows = samples.table[samples.table["exact"] & ~samples.table["cut_off"]].to_dict("records")
    return {
        (row["prompt"], row["completion"]): (tokenizer(row["prompt"])["input_ids"], row["ids"])
        for row in reversed(rows)
    }


def check_tokens(samples, tokenizer, folder, name):
    """The trainer of this name on its set, once what it prepared is what was sampled."""
    expected, data = sampled_tokens(samples, tokenizer), set_for(name, samples)
    trainer = trainer_of(name, data, tokenizer, folder)
    found = trained_tokens(trainer, name)
    assert len(found) >= len(data) >= 4
    for key, (context, target) in found.items():
        assert (context, target) == expected[key]
        assert (
            target.count(tokenizer.eos_token_id) == 1 and target[-1] == tokenizer.eos_token_id
        )
        assert context[0] == tokenizer.bos_token_id != context[1]
    return trainer


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Samples with everything that a tokenizer does not give back."""
    model, tokenizer = speller(WORDS | ODD)
    model.generation_config.eos_token_id = [2, 0]

    def judge_all(completions, **columns):
        # what is cut off is worst
        return [1 - len(text.replace("9", "")) / 10 for text in completions]

    task = nines_task(rewards=[judge_all], reward_weights=[1.0], max_completion_tokens=3)
    return scored_samples(
        model, tokenizer, task, samples=16, folder=tmp_path_factory.mktemp("odd")
    ), tokenizer


def test_odd_completions_are_left_out(odd):
    samples, _ = odd
    table = samples.table
    reasons = {
        "another end": table["ids"].map(lambda ids: ids[-1] == 0),
        "a special token inside": table["ids"].map(lambda ids: 1 in ids),
        "merges": table["completion"].str.contains("ab"),
        "no text": table["completion"].str.contains("\ufffd"),
    }
    for name, rows in reasons.items():
        assert rows.sum() >= 2 and not table.loc[rows, "exact"].any(), name
    # digits stay apart
    plain = table["ids"].map(lambda ids: set(ids[:-1]) <= {33, 34, 41} and ids[-1] == 2)
    assert plain.sum() > 20 and table.loc[plain, "exact"].all()


@pytest.mark.parametrize("name", ["dpo", "kto", "sft"])
def test_exact_is_what_trl_tokenizes_to_what_was_sampled(odd, name, tmp_path):
    """Every ended completion, exact or not, through TRL's own preparation."""
    from datasets import Dataset

    samples, tokenizer = odd
    table = samples.table[~samples.table["cut_off"]]
    column = "chosen" if name == "dpo" else "completion"
    extra = {"dpo": {"rejected": "no"}, "kto": {"label": True}, "sft": {}}[name]
    rows = [
        {"prompt": r["prompt"], column: r["completion"], **extra}
        for r in table.to_dict("records")
    ]
    prepared = trainer_of(name, Dataset.from_list(rows), tokenizer, tmp_path).train_dataset
    assert len(prepared) == len(table)
    for row, trained in zip(table.to_dict("records"), prepared, strict=True):
        if name == "sft":
            ids = trained["input_ids"]
        else:
            ids = trained["prompt_ids"] + trained[f"{column}_ids"]
        same = ids == tokenizer(row["prompt"])["input_ids"] + row["ids"]
        assert same == row["exact"], (row["completion"], row["ids"])


@pytest.mark.parametrize("name", NAMES)
def test_sets_train_what_was_sampled_and_a_step_runs(odd, name, tmp_path):
    samples, tokenizer = odd
    trainer = check_tokens(samples, tokenizer, tmp_path, name)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    result = trainer.train()
    assert result.global_step == 1 and math.isfinite(result.training_loss)
    assert any(not torch.equal(before[n], p) for n, p in trainer.model.named_parameters())


def test_trl_writes_an_end_behind_what_was_cut_off(odd, tmp_path):
    """Why cut-off completions are left out: the day this fails they need not be."""
    from datasets import Dataset

    samples, tokenizer = odd
    rows = samples.table[samples.table["cut_off"] & samples.table["exact"]].to_dict("records")
    data = Dataset.from_list(
        [
            {"prompt": r["prompt"], "completion": r["completion"], "label": i > 0}
            for i, r in enumerate(rows)
        ]
    )
    found = trained_tokens(trainer_of("kto", data, tokenizer, tmp_path), "kto")
    false_ends = [
        found[row["prompt"], row["completion"]][1] == [*row["ids"], 2] for row in rows
    ]
    assert sum(false_ends) >= 3


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_kto_estimates_its_kl_from_other_prompts(odd, batch, tmp_path):
    samples, tokenizer = odd
    trainer = trainer_of(
        "kto", samples.unpaired(), tokenizer, tmp_path, per_device_train_batch_size=batch
    )
    rows = trainer.train_dataset.to_list()
    of = {(row["prompt"], tuple(row["completion_ids"])) for row in rows}
    start, own = len(rows) // batch * batch, 0
    for place, row in enumerate(rows[:start]):
        first = place // batch * batch
        giver = rows[place - 1 if place > first else first + batch - 1]
        assert row["KL_completion_ids"] == giver["completion_ids"]  # as TRL's source says
        own += giver["prompt"] == row["prompt"]
    assert own == 0 and len(of) == len(rows)


def test_a_tokenizer_that_writes_its_own_bos(tmp_path):
    """Llama's way: the tokenizer puts the BOS in front, the template's own is dropped."""
    model, tokenizer = speller(WORDS)
    tokenizer = copy.deepcopy(tokenizer)
    bos = "<|endoftext|>"
    tokenizer.bos_token = bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)]
    )
    tokenizer.chat_template = bos + tokenizer.chat_template
    assert tokenizer("a").input_ids == [0, 81]
    samples = scored_samples(model, tokenizer, nines_task(), samples=8, folder=tmp_path / "s")
    assert (
        not samples.table["prompt"].str.startswith(bos).any()
        and samples.table["exact"].mean() > 0.5
    )
    for name in ("dpo", "sft", "orpo"):
        check_tokens(samples, tokenizer, tmp_path, name)


def test_a_completion_that_merges_with_its_prompt(smol_tokenizer):
    word = smol_tokenizer("answer")["input_ids"]
    assert len(word) == 1
    table = pd.DataFrame(
        {
            "prompt": ["ans", "ans", "<answer>"],
            "completion": ["wer", " 4", "4"],
            "cut_off": [False, False, True],
        }
    )
    ids = [smol_tokenizer(text)["input_ids"] for text in table["completion"]]
    table["ids"] = [[*ids[0], 2], [*ids[1], 2], ids[2]]
    assert trained_as_sampled(smol_tokenizer, table) == [False, True, True]
    # an end where it was cut off, none where it ended
    table["ids"] = [[*ids[0], 2], ids[1], [*ids[2], 2]]
    assert trained_as_sampled(smol_tokenizer, table) == [False, False, False]


def test_smollm2(smol, tmp_path):
    model, tokenizer = smol
    task = largest(n_train=8, n_held_out=2)
    samples = scored_samples(model, tokenizer, task, folder=tmp_path / "s")
    table = samples.table
    assert table["exact"].mean() > 0.9 and table["right"].any() and not table["right"].all()
    assert all(row["score_chosen"] - row["score_rejected"] > 0.1 for row in samples.pairs())
    right = {(r["prompt"], r["completion"]) for r in table[table["right"]].to_dict("records")}
    assert {(r["prompt"], r["completion"]) for r in samples.accepted(threshold=1.0)} <= right
    for name in NAMES:
        check_tokens(samples, tokenizer, tmp_path, name)
