"""What a reader does not see is no answer, no thought and no program."""

import sys
import unicodedata

import pytest

from grpo_kit.rewards import CodeFormat, ExactAnswer, SoftFormat, extract_answer, extract_code
from grpo_kit.rewards.response import is_blank, own_answer

BLANK = {
    "nothing": "",
    "spaces": " \t\r\n\x0b\x0c",
    "no-break, thin and ideographic spaces": "\xa0\u2009\u202f\u3000\u1680\u2028\x85",
    "zero-width space": "\u200b",
    "joiners": "\u200c\u200d\u2060",
    "byte order mark": "\ufeff",
    "soft hyphen": "\xad",
    "combining grapheme joiner": "\u034f",
    "direction": "\u200e\u200f\u202a\u202e\u2066\u2069\u061c",
    "Hangul fillers": "\u115f\u1160\u3164\uffa0",
    "Braille without dots": "\u2800",
    "Mongolian and Khmer": "\u180e\u180b\u180f\u17b4\u17b5",
    "variation selectors": "\ufe0f\U000e0100",
    "tags": "\U000e0041\U000e007f",
    "control characters": "\x00\x08\x7f",
    "HTML's spaces": "&nbsp;&ensp;&#160;&#x200b;&ZeroWidthSpace;&shy;",
    "line breaks": "<br><br/><BR />",
    "all together": " \u200b&nbsp;<br>\n\ufeff",
}
SEEN = {"a question mark": "?", "dots": "...", "a sign": "+", "a tag": "<b>", "an ampersand": "&amp;", "a dash": "—",
        "an emoji": "\U0001f600"}  # fmt: skip
WORDS = {"a letter": "a", "a digit": "7", "Chinese": "水", "Hangul": "한", "Arabic digits": "٣", "Braille": "\u2801a",
         "a word among blanks": "\u200bso\u200b"}  # fmt: skip


@pytest.mark.parametrize("text", BLANK.values(), ids=BLANK)
def test_blank_text_is_no_answer_no_thought_and_no_program(text):
    assert is_blank(text) and is_blank(text, words=True)
    assert extract_answer(f"<answer>{text}</answer>") is None
    assert (
        own_answer(f"{text}</answer>", "<answer>")
        is own_answer(f"{text}</answer>", "<answer>82")
        is None
    )
    assert ExactAnswer()([f"<answer>{text}</answer>"], answer=["82"]) == [0.0]
    assert SoftFormat(think=None)([f"<answer>{text}</answer>"]) == [0.75]
    assert SoftFormat()([f"<think>So.</think><answer>{text}</answer>"]) == [0.75]
    assert SoftFormat()([f"<think>{text}</think><answer>82</answer>"]) == [0.75]
    assert SoftFormat()([f"{text}</think><answer>82</answer>"], prefill="<think>So: ") == [0.75]
    assert SoftFormat()([f"<think>So.</think><answer>82</answer>{text}"]) == [1.0]
    assert extract_code(f"```python\n{text}\n```") is None
    assert CodeFormat()([f"```python\n{text}\n```"]) == [0.75]


@pytest.mark.parametrize("text", SEEN.values(), ids=SEEN)
def test_a_sign_may_be_an_answer_but_is_no_thought(text):
    assert not is_blank(text) and is_blank(text, words=True) == (text != "<b>")
    assert extract_answer(f"<answer>{text}</answer>") == text
    assert SoftFormat(think=None)([f"<answer>{text}</answer>"]) == [1.0]
    assert SoftFormat()([f"<think>So.</think><answer>82</answer>{text}"]) == [0.75]
    assert SoftFormat()([f"<think>{text}</think><answer>82</answer>"]) == [
        1.0 if text == "<b>" else 0.75
    ]


@pytest.mark.parametrize("text", WORDS.values(), ids=WORDS)
def test_a_letter_or_a_digit_of_any_script_is_a_thought(text):
    assert not is_blank(text, words=True)
    assert SoftFormat()([f"<think>{text}</think><answer>{text}</answer>"]) == [1.0]


def test_the_table_holds_every_character_that_unicode_calls_white_space_control_or_format():
    unseen = {"Cc", "Cf", "Zl", "Zp", "Zs"}
    # These stand before digits and words of their scripts, with a shape of their own.
    shaped = set("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2")
    for char in map(chr, range(sys.maxunicode + 1)):
        if (
            unicodedata.category(char) in unseen
            and char not in shaped
            and not "\U000110bd" <= char <= "\U0001343f"
        ):
            assert is_blank(char), hex(ord(char))
        if char.isalnum() and is_blank(char):
            assert char in "\u115f\u1160\u3164\uffa0", hex(ord(char))


def test_a_thought_that_stands_in_the_prefill_is_not_the_models():
    assert SoftFormat()(["</think><answer>82</answer>"], prefill="<think>Let me see.") == [0.75]
    assert SoftFormat()(
        ["18 left.</think><answer>82</answer>"], prefill="<think>Let me see: "
    ) == [1.0]
