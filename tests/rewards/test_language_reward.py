"""Language: which letters count, which are neutral, and that switching the script cannot be hidden."""

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_kit.rewards.cheat_cases import crafted_cases
from grpo_kit.rewards.form import SCRIPTS, Language, script_of

LATIN, HAN, CYRILLIC = Language("latin"), Language("han"), Language("cyrillic")


@pytest.mark.parametrize(
    ("reward", "text", "expected", "reason"),
    [
        (LATIN, "The answer is four.", 1.0, "all letters Latin"),
        (
            LATIN,
            "La réponse est œuf, naïve Straße",
            1.0,
            "with accents too; French is not told from English",
        ),
        (LATIN, "re\u0301ponse", 1.0, "an accent written apart is no letter"),
        (LATIN, "答案是四", 0.0, "all Chinese"),
        (LATIN, "four 四", 4 / 5, "share of letters"),
        (LATIN, "ответ four", 4 / 9, "Cyrillic"),
        (LATIN, "82", 1.0, "no letters: in no wrong language"),
        (LATIN, "18 - 5 = 13 ✓ 🙂", 1.0, "digits, signs and emoji are no letters"),
        (LATIN, "", 0.0, "blank: nothing was written in any language"),
        (LATIN, " \n", 0.0, "white space is blank"),
        (LATIN, "β-carotene, ΔH = 5 kJ, 3 μm", 1.0, "Greek letters are symbols"),
        (Language("greek"), "η απάντηση", 1.0, "where Greek is expected they count"),
        (Language("greek"), "answer β", 1 / 7, "for and against"),
        (
            LATIN,
            "ｆｕｌｌ 𝐛𝐨𝐥𝐝",
            1.0,
            "fullwidth and mathematical letters are what they stand for",
        ),
        (HAN, "答案是四。", 1.0, "Chinese"),
        (HAN, "<think>答案</think>\n<answer>四</answer>", 1.0, "tags are neutral"),
        (HAN, r"答案 \frac{1}{2} \(x + y\) $a^2$ \[ab\] $$c$$", 1.0, "formulas are neutral"),
        (HAN, "答案 `print` ```python\nprint(1)\n```", 1.0, "code is neutral"),
        (HAN, "答案 ok", 2 / 4, "Latin outside of it is not"),
        (HAN, "<b>答</b> if a<b and c", 1 / 9, "a comparison is no tag"),
        (
            LATIN,
            "ok ```\n答案是四\n```",
            2 / 6,
            "Chinese in code is a comment or an evasion: it counts",
        ),
        (LATIN, "ok $答案是四$", 2 / 6, "so does Chinese in a formula"),
        (Language("kana", "han"), "これは漢字とカタカナです", 1.0, "Japanese has two scripts"),
        (Language("kana"), "これは漢字", 3 / 5, "one of which is not the other"),
        (Language("hangul"), "답은 사입니다", 1.0, "Korean"),
        (Language("arabic"), "الجواب هو أربعة", 1.0, "Arabic"),
        (Language("devanagari"), "उत्तर चार है", 1.0, "vowel signs are marks, not letters"),
        (LATIN, "ᏣᎳᎩ", 0.0, "a script that has no name here is another script"),
        (LATIN, "Ας δούμε το πρόβλημα", 0.0, "text in Greek is no symbol"),
        (LATIN, "αβγ, Δx and sin θ", 1.0, "a few letters are symbols"),
        (
            CYRILLIC,
            "Дом № 5 ™ Ⅳ Ⓜ",
            1.0,
            "signs are no letters, whatever letters they are made of",
        ),
        (LATIN, "a\ud800\x00", 1.0, "a surrogate and a NUL are no letters"),
    ],
)
def test_language(reward, text, expected, reason):
    assert reward([text]) == [pytest.approx(expected)], reason


def test_the_prefill_is_not_the_models_and_does_not_count():
    assert LATIN(["答案"], prefill=["Let me think."]) == [0.0]


def test_every_named_script_has_letters_in_unicode():
    found = {script_of(chr(code)) for code in range(0x3000)} | {script_of(c) for c in "水가ア"}
    assert set(SCRIPTS) <= found


@pytest.mark.parametrize("scripts", [(), ("english",), ("latin", "en")])
def test_unknown_scripts_are_refused_with_the_known_ones(scripts):
    with pytest.raises(ValueError, match="scripts=.*name one or more of arabic, .*, tibetan"):
        Language(*scripts)


@given(st.text(max_size=60))
@example("ℼ")  # a mathematical letter too, and outside of their block
def test_the_share_by_the_long_way_round(text):
    """Letter by letter with unicodedata, on text without the neutral places."""
    text = "".join(c for c in text if c not in "<>`$\\")
    names = [unicodedata.name(unicodedata.normalize("NFKC", c)[0], "?") for c in text
             if unicodedata.category(c) in ("Lu", "Ll", "Lt", "Lo")
             and unicodedata.category(unicodedata.normalize("NFKC", c)[0])[0] == "L"]  # fmt: skip
    letters = [name for name in names if not name.startswith("GREEK")]
    share = sum(name.startswith("LATIN") for name in letters) / len(letters) if letters else 1.0
    assert LATIN([text]) == [pytest.approx(share if text.strip() else 0.0)]


@pytest.mark.parametrize(
    "reward", [LATIN, HAN, CYRILLIC, Language("han", "cyrillic")], ids=repr
)
def test_switching_the_script_costs_even_with_the_right_answer(reward):
    honest = crafted_cases("82", "47")[0]
    replaced, before = reward.cheats(honest)
    assert reward([honest.completion]) == [1.0]
    assert max(reward([replaced.completion, before.completion])) == 0.0
    assert before.completion.endswith(honest.completion)
    assert (replaced.tie, before.tie) == ("format", "always")
