"""Overlap rewards in scripts with signs on their letters, without spaces, with short vowels, with other marks."""

import pytest

from grpo_kit.more.tasks.bleu_rouge import normalize, unpointed
from grpo_kit.rewards import Bleu, ExactAnswer, Rouge
from grpo_kit.rewards.form import words


def rouge(answer, gold):
    return Rouge("rouge1", tag=None)([answer], answer=[gold])[0]


def bleu(answer, gold, **how):
    return Bleu(tag=None, max_order=1, **how)([answer], answer=[gold])[0]


@pytest.mark.parametrize("text, expected", [
    ("की कि", ["की", "कि"]),  # Devanagari: of, that
    ("হয় হয়ে", ["হয়", "হয়ে"]),  # Bengali
    ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),  # Tamil: two words, each with signs
    ("ที่ดี", ["ที่", "ดี"]),  # Thai: no spaces, so each letter with its signs
    ("မြန်မာ", ["မြ", "န်", "မာ"]),  # Burmese
    ("ខ្មែរ", ["ខ្", "មែ", "រ"]),  # Khmer
    ("ደህና፣ እሺ።", ["ደህና", "እሺ"]),  # Amharic
    ("tiếng Việt", ["tiếng", "việt"]),
    ("don't", ["don", "t"]),
    ("水 and 火", ["水", "and", "火"]),
])  # fmt: skip
def test_a_word_keeps_the_signs_on_its_letters(text, expected):
    assert words(normalize(text)) == [normalize(word) for word in expected]


@pytest.mark.parametrize("answer, gold", [
    ("की", "कि"), ("ที่", "ที"), ("မာ", "မိ"), ("மொழி", "மொழ"), ("كَتَبَ", "كُتِبَ"), ("סֵפֶר", "סָפַר"),
])  # fmt: skip
def test_another_sign_is_another_word(answer, gold):
    assert rouge(answer, gold) == 0.0 and rouge(gold, gold) == rouge(answer, answer) == 1.0
    assert bleu(answer, gold) < 1.0 == bleu(gold, gold)


@pytest.mark.parametrize("answer, gold", [
    ("كَتَبَ", "كتب"),  # short vowels, left out on one side
    ("كتب", "كَتَبَ"),
    ("سَلَـــام", "سلام"),  # and the stretched line
    ("סֵפֶר", "ספר"),
    ("می\u200cخواهم", "میخواهم"),  # a joiner without width
    ("क\u093c", "\u0958"),  # one letter in two encodings
    ("你好。", "你好"), ("ठीक है।", "ठीक है"), ("ٹھیک ہے۔", "ٹھیک ہے"),  # a full stop of any script
    ("“yes”", '"yes"'), ("it’s", "it's"), ("«oui»", '"oui"'),
])  # fmt: skip
def test_the_same_text_in_another_habit_is_paid_in_full(answer, gold):
    assert rouge(answer, gold) == 1.0 and bleu(answer, gold) == 1.0


def test_marks_of_other_scripts_count_as_their_ascii_kin_do():
    assert bleu("نعم؟", "نعم") == bleu("yes?", "yes")
    assert bleu("是、不", "是, 不", tokenize="zh") == 1.0
    assert bleu("yes، no", "yes, no") == 1.0


def test_short_vowels_count_where_both_sides_write_them():
    assert unpointed(["كَتَبَ", "كتب"]) == ["كتب", "كتب"]
    assert unpointed(["كَتَبَ", "كُتِبَ"]) == ["كَتَبَ", "كُتِبَ"] and unpointed(["a", "b"]) == ["a", "b"]
    assert "أ" in unpointed(["أَب", "أب"])[0]  # a hamza is no short vowel


def test_exact_answers_compare_composed_text():
    assert ExactAnswer()(["<answer>e\u0301te\u0301</answer>"], answer=["\xe9t\xe9"]) == [1.0]
    assert ExactAnswer()(["<answer>की</answer>"], answer=["कि"]) == [0.0]
