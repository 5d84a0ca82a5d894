"""BLEU and ROUGE: tables with a reason on each row, sacrebleu's and rouge-score's own numbers, and what cheats earn."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.more.tasks.bleu_rouge import Bleu, Rouge, common_subsequence, normalize
from grpo_kit.rewards.cheat_cases import Case, RewardCheckError, crafted_cases
from grpo_kit.rewards.check import check_rewards
from grpo_kit.rewards.form import words

RECORDED = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "rouge_score.json").read_text()
)["rows"]
GOLD = "the powerhouse of the cell"


def score(reward, answer, gold):
    return reward([f"<answer>{answer}</answer>"], answer=[gold])[0]


@pytest.mark.parametrize(
    ("answer", "gold", "expected", "reason"),
    [
        (GOLD, GOLD, 1.0, "the gold"),
        (
            "The Powerhouse of the Cell.",
            GOLD,
            1.0,
            "case and the full stop at the end do not count",
        ),
        ("\n the  powerhouse of\nthe cell ", GOLD, 1.0, "nor does white space"),
        ("water", "water", 1.0, "one word: effective order 1, not the 0 of plain BLEU"),
        ("oxygen", "water", 0.0, "one wrong word: no smoothing from nothing"),
        ("CO2", "CO₂", 1.0, "a subscript is a way to write the digit"),
        ("", GOLD, 0.0, "an empty answer"),
        ("...", GOLD, 0.0, "nothing but full stops"),
        (
            "sodium",
            "sodium chloride",
            math.exp(1 - 2),
            "too short: all precisions 1, brevity penalty e^(1 - 2/1)",
        ),
        (
            "chloride sodium",
            "sodium chloride",
            math.sqrt(1 * 1 / 2),
            "the words in the wrong order: no pair of them, smoothed to 1/2",
        ),
        (
            "a b c d",
            "a b x d",
            (3 / 4 * 1 / 3 * (1 / 4) * (1 / 4)) ** 0.25,
            "3 of 4, 1 of 3, then 1/(2*2), 1/(4*1)",
        ),
        (
            "water water",
            "water",
            math.sqrt(1 / 2 * 1 / 2),
            "said twice, counted once: 1/2, and the pair smoothed to 1/2",
        ),
        (
            "cell, wall",
            "cell wall",
            (2 / 3 * 1 / 4 * 1 / 4) ** (1 / 3),
            "inside, a comma is a word of 13a",
        ),
        ("membrane", ["wall", "membrane"], 1.0, "one of two references"),
        ("wall", ["", None, "wall"], 1.0, "empty references are none"),
        ("x" * 300, "water", 0.0, "over 50 times as long as the gold: not read"),
        (
            "water " + "x" * 300,
            "water",
            0.0,
            "nor where it begins with the gold, though it has but one word more",
        ),
        ("water", "", None, "no gold"),
        ("water", None, None, "no gold"),
        ("water", [], None, "no references"),
        ("water", [" ", "."], None, "nor here"),
        (None, "water", 0.0, "never None for a bad completion"),
    ],
)
def test_bleu(answer, gold, expected, reason):
    got = (
        score(Bleu(), answer, gold)
        if answer is not None
        else Bleu()(["</answer>"], answer=[gold])[0]
    )
    assert got == pytest.approx(expected, abs=1e-12), reason


@pytest.mark.parametrize(
    ("answer", "gold", "r1", "r2", "rl", "reason"),
    [
        (GOLD, GOLD, 1, 1, 1, "the gold"),
        (
            "The powerhouse, of the (cell)!",
            GOLD,
            1,
            1,
            1,
            "punctuation does not count, anywhere",
        ),
        (
            "the cell wall",
            "cell membrane",
            2 / 5,
            0,
            2 / 5,
            "1 of 3 and of 2 words: F = 2*1/(3+2)",
        ),
        (
            "cell the of powerhouse the",
            GOLD,
            1,
            0,
            3 / 5,
            "backwards: rouge1 cannot tell; the longest run is 'the of the'",
        ),
        ("sodium", "sodium chloride", 2 / 3, 0, 2 / 3, "half of it: recall 1/2, precision 1"),
        (
            "water " * 5,
            "water",
            2 / 6,
            None,
            2 / 6,
            "five times: precision 1/5; no pair in the gold to judge by",
        ),
        ("ÅNGSTRÖM", "ångström", 1, None, 1, "letters of any script, in any case"),
        ("水分子", "水分子", 1, 1, 1, "Chinese, word by character"),
        ("水", "水分子", 2 / 4, 0, 2 / 4, "of which one is a part of the answer"),
        ("membrane", ["wall", "cell membrane"], 2 / 3, 0, 2 / 3, "the best reference counts"),
        ("", GOLD, 0, 0, 0, "empty"),
        ("?!", GOLD, 0, 0, 0, "no word"),
        ("x" * 300, "water", 0, None, 0, "over 50 times as long"),
        ("water", "?!", None, None, None, "a gold without a word"),
        ("water", None, None, None, None, "no gold"),
        ("water", ["", None], None, None, None, "no references"),
    ],
)
def test_rouge(answer, gold, r1, r2, rl, reason):
    got = [score(Rouge(variant), answer, gold) for variant in ("rouge1", "rouge2", "rougeL")]
    assert got == pytest.approx([r1, r2, rl], abs=1e-12), reason


@pytest.mark.parametrize("reward", [Bleu(), Rouge()], ids=repr)
@pytest.mark.parametrize(
    ("completion", "prefill", "expected", "reason"),
    [
        ("water</answer>", "<answer>", 1.0, "the prefill opened the tag"),
        ("water", "<answer>", 0.0, "never closed"),
        ("", "<answer>water</answer>", 0.0, "the prefill's answer is not the model's"),
        ("<answer>water</answer><answer>salt</answer>", "", 0.0, "two answers"),
        ("water", "", 0.0, "no tags"),
    ],
)
def test_the_answer_is_the_models_own(reward, completion, prefill, expected, reason):
    assert reward([completion], prefill=[prefill], answer=["water"]) == [expected], reason


@pytest.mark.parametrize("family", [Bleu, Rouge])
def test_without_a_tag_the_whole_completion_counts_and_the_prefill_does_not(family):
    assert family(tag=None)(
        ["water", " "], prefill=["salt", "water"], answer=["water"] * 2
    ) == [
        1.0,
        0.0,
    ]


def test_options_change_what_they_say():
    assert score(Bleu(lowercase=False), "nacl", "NaCl") == 0.0
    assert score(Bleu(max_order=1), "chloride sodium", "sodium chloride") == 1.0
    assert (
        0 == score(Bleu(), "水分", "水分子") < score(Bleu(tokenize="zh"), "水分", "水分子") < 1
    )
    assert Bleu(column="gold")(["<answer>x</answer>"], gold=["x"]) == [1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bleu(max_order=0), "max_order=0"),
        (lambda: Bleu(tokenize="spm"), "tokenize='spm'"),
        (lambda: Bleu(tag=""), "tag=''"),
        (lambda: Rouge("rougeLsum"), "variant='rougeLsum'"),
        (lambda: Rouge(column=""), "column=''"),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- the libraries' own numbers --------------------------------------------------------------------------

VOCABULARY = st.sampled_from(
    [
        "the",
        "cell",
        "wall",
        "H2O",
        "NaCl,",
        "2,4-dinitro",
        "(aq)",
        "acid-base",
        "3.5",
        "-40",
        "&amp;",
    ]
)
SENTENCE = st.lists(VOCABULARY, min_size=1, max_size=12).map(" ".join)


@given(answer=SENTENCE, golds=st.lists(SENTENCE, min_size=1, max_size=3), cased=st.booleans())
def test_bleu_is_sacrebleus(answer, golds, cased):
    theirs = sacrebleu.sentence_bleu(answer, golds, lowercase=not cased).score / 100
    assert score(Bleu(lowercase=not cased), answer, golds) == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize(("place", "variant"), list(enumerate(["rouge1", "rouge2", "rougeL"])))
def test_rouge_is_rouge_scores(place, variant):
    reward = Rouge(variant, tag=None)
    compared = 0
    for answer, golds, *theirs in RECORDED:
        ours = reward([answer], answer=[golds])[0]
        if ours is None:  # one word has no pair: rouge-score says 0 even to the right answer
            assert variant == "rouge2" and all(len(words(gold)) < 2 for gold in golds)
            continue
        assert ours == pytest.approx(theirs[place], abs=1e-12), answer
        compared += 1
    assert compared >= 70


@given(answer=SENTENCE, golds=st.lists(SENTENCE, min_size=1, max_size=3))
def test_rouge_is_rouge_scores_live(answer, golds):
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    for variant in ("rouge1", "rougeL"):
        theirs = scorer.RougeScorer([variant]).score_multi(golds, answer)[variant].fmeasure
        assert score(Rouge(variant), answer, golds) == pytest.approx(theirs, abs=1e-12)


@given(
    st.lists(st.sampled_from("abc"), max_size=9), st.lists(st.sampled_from("abc"), max_size=9)
)
def test_common_subsequence_by_the_textbook_table(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
            )
    assert common_subsequence(a, b) == table[-1][-1]


def test_many_different_answers_do_not_fill_the_memory():
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    reward = Bleu(max_order=1)
    for i in range(2500):
        score(reward, f"answer {i}", "answer")
    assert Tokenizer13a.__call__.cache_info().currsize <= 2100


@given(st.text(max_size=80))
def test_normalizing_again_changes_nothing(text):
    assert normalize(normalize(text)) == normalize(text)


# --- cheats ----------------------------------------------------------------------------------------------

PAIRS = [
    ("sodium chloride", "potassium iodide"),
    ("water", "salt"),
    (GOLD, "a part of the plant"),
]


@pytest.mark.parametrize(
    "reward", [Bleu(), Rouge(), Rouge("rouge1"), Bleu(max_order=2)], ids=repr
)
@pytest.mark.parametrize(("right", "wrong"), PAIRS)
def test_cheats_earn_less_than_the_answer(reward, right, wrong):
    cases = crafted_cases(right, wrong, prefill="<answer>")
    cheats = reward.cheats(cases[0])
    assert {"gold five times", "gold among keywords", "keywords"} <= {
        case.name for case in cheats
    }
    assert all(
        case.completion.endswith("</answer>") and case.prefill == "<answer>" for case in cheats
    )
    table = check_rewards(reward, cases + cheats).set_index("case")[
        "bleu" if isinstance(reward, Bleu) else reward.__name__
    ]
    assert table["honest"] == 1.0
    assert table[[case.name for case in cheats]].max() < 0.75
    assert table[["keywords", "gold among keywords"]].max() < 0.4


def test_a_reward_that_counts_recall_alone_is_caught():
    def recall(completions, prefill=None, answer=None, **columns):
        return [
            float(all(word in text for word in gold.split()))
            for text, gold in zip(completions, answer, strict=True)
        ]

    recall.columns = ("answer",)
    cases = crafted_cases("sodium chloride", "water", prefill="<answer>")
    with pytest.raises(RewardCheckError, match="gold among keywords"):
        check_rewards(recall, cases[:1] + Bleu().cheats(cases[0]))


@pytest.mark.parametrize("reward", [Bleu(), Rouge(), Rouge("rouge1")], ids=repr)
@pytest.mark.parametrize(
    "golds", [["an isotope", "Isotope"], ["acid and base", "base and acid."]]
)
def test_what_is_another_reference_is_no_cheat(reward, golds):
    cases = crafted_cases(golds[0], "water", prefill="<answer>", columns={"answer": golds})
    check_rewards(reward, cases + reward.cheats(cases[0]))


def test_what_rouge1_cannot_see_is_left_to_the_others():
    honest = crafted_cases("sodium chloride", "water")[0]
    backwards = [case for case in Bleu().cheats(honest) if case.name == "gold backwards"]
    assert Rouge("rouge1")([backwards[0].completion], answer=["sodium chloride"]) == [1.0]
    assert "gold backwards" not in {case.name for case in Rouge("rouge1").cheats(honest)}
    assert "gold backwards" in {case.name for case in Rouge().cheats(honest)}


def test_cheats_need_a_gold_and_an_answer_of_the_models_own():
    whole = Bleu(tag=None).cheats(
        Case("honest", "water", honest=True, columns={"answer": ["water", "ice"]})
    )
    assert {"all references": "water ice"}.items() <= {
        case.name: case.completion for case in whole
    }.items()
    assert Bleu().cheats(Case("honest", "<answer>water</answer>", honest=True)) == []
    inside = Case(
        "honest", "ter</answer>", honest=True, prefill="<answer>wa", columns={"answer": "water"}
    )
    assert Bleu().cheats(inside) == []


@pytest.mark.parametrize(
    "answer",
    ["Paris", "in Paris, France", "paris paris", "Rome or Berlin", "city of light Paris"],
)
@pytest.mark.parametrize("gold", ["Paris", "Paris, city of light", "Berlin"])
def test_rouge1_is_squads_token_f1_where_no_article_stands(answer, gold):
    """By the formula of SQuAD's evaluate-v1.1.py: precision and recall of shared tokens."""
    said, wanted = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, gold))
    shared = sum((said & wanted).values())
    f1 = 2 * shared / (sum(said.values()) + sum(wanted.values()))
    assert score(Rouge("rouge1"), answer, gold) == pytest.approx(f1)


@pytest.mark.parametrize(
    "answer, gold, f1",
    [
        ("red blood cells carry oxygen", "oxygen carried by red cells", 2 * 3 / (5 + 5)),
        ("oxygen oxygen oxygen", "oxygen", 2 * 1 / (3 + 1)),
        ("Cells, red!", "red cells", 1.0),
        ("nitrogen", "red cells", 0.0),
    ],
)
def test_rouge1_is_the_token_f1_of_squad(answer, gold, f1):
    """Against SQuAD's own counting: words as multisets, precision and recall, no articles in these."""
    counted = [
        Counter("".join(c for c in text.lower() if c.isalnum() or c == " ").split())
        for text in (answer, gold)
    ]
    shared = (counted[0] & counted[1]).total()
    precision, recall = (shared / words.total() for words in counted)
    squad = 2 * precision * recall / (precision + recall) if shared else 0.0
    (got,) = Rouge("rouge1")([f"<answer>{answer}</answer>"], answer=[gold])
    assert got == pytest.approx(squad) == pytest.approx(f1)
