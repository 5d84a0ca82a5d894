"""Distinct n-grams and self-BLEU: by hand, and against sacrebleu."""

import random

import pandas as pd
import pytest
from sacrebleu.metrics import BLEU

from grpo_kit.watch._diversity import distinct_n, group_diversity, pieces, self_bleu


def test_distinct_by_hand():
    assert distinct_n(["a b c", "a b d"]) == 3 / 4  # ab bc ab bd
    assert distinct_n(["a b c", "a b d"], 1) == 4 / 6
    assert distinct_n(["x y"] * 8) == 1 / 8
    assert distinct_n(["a a a a"], 2) == 1 / 3  # repetition counts too
    assert distinct_n(["a", "b"], 2) != distinct_n(["a", "b"], 2)  # NaN: no pairs


def test_signs_and_chinese_characters_are_pieces():
    assert pieces("3*4") != pieces("3+4")
    assert pieces("水是 H2O。") == ["水", "是", "h2o", "。"]


def test_self_bleu_is_sacrebleus_mean_over_the_group():
    rng = random.Random(0)
    bleu = BLEU(effective_order=True, tokenize="none", smooth_method="exp")
    for _ in range(300):
        texts = [
            " ".join(rng.choices("abcdefg", k=rng.randint(1, 9)))
            for _ in range(rng.randint(2, 6))
        ]
        others = [texts[:i] + texts[i + 1 :] for i in range(len(texts))]
        expected = [
            bleu.sentence_score(t, o).score / 100 for t, o in zip(texts, others, strict=True)
        ]
        assert self_bleu(texts) == pytest.approx(sum(expected) / len(texts), abs=1e-9), texts


def test_self_bleu_at_its_ends():
    assert self_bleu(["same words here"] * 8) == 1.0
    assert self_bleu(["", ""]) == 1.0
    assert self_bleu(["a b", "c d"]) == 0.0
    assert self_bleu(["", "a"]) == 0.0


def test_refusals_name_the_argument():
    with pytest.raises(ValueError, match="n=0"):
        distinct_n(["a"], 0)
    with pytest.raises(ValueError, match="texts="):
        self_bleu(["one"])
    with pytest.raises(ValueError, match="group"):
        group_diversity(pd.DataFrame({"step": [1], "completion": ["a"]}))


def test_groups_are_measured_apart_and_averaged():
    table = pd.DataFrame(
        {
            "step": [1] * 5 + [2, 2],
            # group 2 has one completion: nothing to differ from
            "group": [0, 0, 1, 1, 2, 0, 0],
            "completion": ["a b", "a b", "a b", "c d", "e f", "g h", None],
        }
    )
    out = group_diversity(table).set_index("step")
    # unique (1/2 + 2/2) / 2, distinct the same, BLEU (1 + 0) / 2
    assert out.loc[1].tolist() == [0.75, 0.75, 0.5]
    assert out.loc[2, "diversity/unique"] == 1.0
