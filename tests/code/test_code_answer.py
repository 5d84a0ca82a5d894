"""Which program a response answers with, in the habits of instruct models; what is hedging and what is not."""

import time

import pytest

from grpo_kit.more.code.code_answer import extract_code, own_code, read_blocks
from grpo_kit.more.code.code_rewards import CodeFormat

F = "def f(n):\n    return n * 2\n"
OTHER = "def f(n):\n    return n * 3\n"
PLAIN = f"```python\n{F}```"


def fenced(code, language="python"):
    return f"```{language}\n{code}```\n"


def indented(text, by):
    return "".join(f"{by}{line}" for line in text.splitlines(keepends=True))


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (fenced(F, "Python"), "a capital"),
        (fenced(F, "PYTHON"), "capitals"),
        (fenced(F, " python"), "a space"),
        (fenced(F, "\tpy "), "a tab"),
        (fenced(F, "py3"), "a version"),
        (fenced(F, "python3.11"), "a version with a dot"),
        (fenced(F, "{python}"), "R Markdown"),
        (fenced(F, "{.python .numberLines}"), "pandoc"),
        (fenced(F, 'python title="a.py"'), "a title"),
        (fenced(F, "python:a.py"), "a file"),
        (f"~~~python\n{F}~~~", "tildes"),
        (f"~~~~py\n{F}~~~~~", "more tildes, the closing fence longer"),
        (f"````python\n{F}````", "four ticks"),
        (f"````markdown\n{PLAIN}\n````", "inside a block of Markdown"),
        (f"1. First:\n\n{indented(PLAIN, '   ')}\n2. Done.", "in a list item"),
        (f"1. {indented(PLAIN, '   ').lstrip()}", "behind the list's number"),
        (f"- Code:\n\n{indented(PLAIN, chr(9))}", "by a tab"),
        (indented(fenced("\n" + F), "  "), "by two columns, a blank line first"),
        (f"  ```python\n{F}  ```", "the fence alone"),
        (fenced(indented(F, "    ")), "the code alone"),
        (indented(PLAIN, "> "), "quoted"),
        (indented(PLAIN, ">"), "quoted without a space"),
        (indented(PLAIN, "> > "), "quoted twice"),
        (indented(indented(PLAIN, "  "), "> "), "quoted and indented"),
        (PLAIN.replace("\n", "\r\n"), "Windows line ends"),
        (indented(PLAIN, "> ").replace("\n", "\r\n"), "quoted, with Windows line ends"),
        (fenced(F, ""), "no language, nothing beside"),
        (fenced("pip install x\n", "bash") + fenced(F, ""), "no language, a command beside"),
        (fenced(F, "") + fenced("6\n", ""), "no language, its output behind"),
        (PLAIN + "\n" + fenced("6\n", ""), "an output without a language"),
        (PLAIN + "\n" + fenced("n = 6\n", ""), "an output that could be Python"),
        (PLAIN + "\n" + fenced("Counter({6: 1})\n", ""), "one that could be a call"),
        (PLAIN + "\n" + fenced("Sum: six\n", ""), "one that could be an annotation"),
        (PLAIN + "\n" + fenced("6\n", "output"), "an output block"),
        (PLAIN + "\n" + fenced("6\n", "text"), "a text block"),
        (fenced('{"n": 3}\n', "json") + PLAIN, "JSON before"),
        (fenced("$ pip install x\n", "bash") + PLAIN + "\n" + fenced("python a.py\n", "sh"), "commands around"),
        (fenced("int f(int n);\n", "c") + PLAIN, "another language"),
        (f"<think>\n{fenced(OTHER)}</think>\n{PLAIN}", "another program in thoughts"),
        (f"<think>\n```python\ncut off\n</think>\n{PLAIN}", "a fence that thoughts leave open"),
        (f"<think>Short.</think>{PLAIN}", "thoughts glued to it"),
        (f"{fenced(OTHER)}No.\n</think>\n\n{PLAIN}", "thoughts that the prompt opened"),
        (f"<THINKING>\n{fenced(OTHER)}</THINKING>\n{PLAIN}", "another tag of thoughts"),
        (f"[THINK]\n{fenced(OTHER)}[/THINK]{PLAIN}", "Mistral's"),
        (PLAIN + "<|im_end|>", "an end token"),
        (PLAIN + "<|eot_id|><|eot_id|>", "two"),
        (PLAIN + "</s>", "another"),
        (PLAIN + "<end_of_turn>\n", "Gemma's"),
        (PLAIN + "<｜end▁of▁sentence｜>", "DeepSeek's"),
        (f"<answer>{PLAIN}</answer>", "answer tags"),
        (f"<answer>\n{PLAIN}\n</answer>", "answer tags on lines of their own"),
        (f"{PLAIN}\n{PLAIN}", "the same program twice"),
        (f"{fenced('def  f( n ):  # twice' + chr(10) + '  return n*2' + chr(10))}{PLAIN}", "up to white space"),
        (f"{PLAIN}\n{fenced(F, '')}", "again without a language"),
        (fenced("n * 2\n") + PLAIN, "a value first"),
        (fenced("return n * 2\n") + PLAIN, "a line of it first"),
        (PLAIN + "\n" + fenced("    return n * 2\n"), "a line of it again"),
        (fenced("def f(n):\n") + PLAIN, "its head, which is no program"),
        (PLAIN + "\n" + fenced("print(f(3))\n"), "an example"),
        (PLAIN + "\n" + fenced("print(f(3))  # 6\n", ""), "without a language"),
        (fenced("assert f(3) == 6\n") + PLAIN, "the question's assertion"),
        (PLAIN + "\n" + fenced("from solution import f\n\nfor n in range(3):\n    print(f(n))\n"), "a longer example"),
        (PLAIN + "\n" + fenced("def test_f():\n    assert f(3) == 6\n"), "a test"),
        (PLAIN + "\n" + fenced("import unittest\n\nclass TestF(unittest.TestCase):\n    def test(self):\n"
                               "        self.assertEqual(f(3), 6)\n"), "a class of tests"),
        (PLAIN + "\n" + fenced(">>> f(3)\n6\n"), "a session"),
        (PLAIN + "\n" + fenced(">>> f(3)\n6\n", "pycon"), "a session that says so"),
        (PLAIN + "\n" + fenced("first add them, then look\n"), "prose in a fence"),
        (f"{PLAIN}\n```", "a fence too many"),
    ],
)  # fmt: skip
def test_the_program_is_found(response, reason):
    assert (extract_code(response) or "").replace("\r\n", "\n").strip("\n") == F.strip("\n"), (
        reason
    )


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (f"{PLAIN}\n{fenced(OTHER)}", "two programs"),
        (f"{fenced(OTHER)}\nBetter:\n{PLAIN}", "also where one is called better"),
        (f"{PLAIN}\n{fenced(OTHER, '')}", "also where one says no language"),
        (fenced(F, "") + fenced(OTHER, ""), "or both"),
        (f"{PLAIN}\n~~~Py\n{OTHER}~~~", "in two habits"),
        (f"{fenced(F + 'x = f(1)' + chr(10))}{fenced(F)}", "a shorter one behind: which is it?"),
        (f"{PLAIN}\n{fenced('f = lambda n: f(n) * 3' + chr(10))}", "it uses f, to make another one"),
        (f"{fenced('def g(n):' + chr(10) + '    return n' + chr(10))}{PLAIN}", "two functions in two blocks"),
        (fenced("print(int(input()) * 2)\n") + fenced("print(int(input()) * 3)\n"), "two scripts"),
        (f"{PLAIN}\n{fenced('pass' + chr(10))}", "a second one, however small"),
        ("".join(fenced(F.replace("2", str(k))) for k in range(60)), "sixty"),
        (f"{PLAIN}\n```python\n{OTHER}", "a second one, cut off"),
        (f"```python\n{F}\n{PLAIN}", "the first never closed"),
        (f"<think>\n{PLAIN}\n</think>\nIt doubles.", "in thoughts alone"),
        (f"<think>\n{PLAIN}", "in thoughts that never end"),
        (f"{PLAIN}\n</think>", "in thoughts that the prompt opened"),
        (fenced(F, "js"), "another language"),
        (fenced(F, "text"), "text"),
        (fenced("6\n", ""), "an output alone"),
        (fenced("It doubles n.\n", ""), "words alone"),
        (fenced("\u200b\n"), "a zero-width program"),
        (f"~~~python\n{F}```", "closed by another sign"),
        (f"````python\n{F}```", "closed by a shorter fence"),
        (f"```python\n{F}``` done", "a closing fence with words"),
        (fenced("It doubles n ```\n") + "```", "no Python, and a fence too many: who knows what is code"),
        (f"The code: {PLAIN}", "a fence begins its line"),
    ],
)  # fmt: skip
def test_there_is_no_one_program(response, reason):
    assert extract_code(response) is None, reason


STRING = "PROMPT = '''\n```json\n{}\n```\n'''\n\ndef f(n):\n    return n * 2\n"
DOC = 'def f(n):\n    """Twice n.\n\n    ```python\n    f(3)\n    ```\n    """\n    return n * 2\n'
THINKS = 'def f(text):\n    return text.split("</think>")[-1]\n'


@pytest.mark.parametrize("code", [STRING, DOC, THINKS], ids=["string", "docstring", "tag"])
def test_fences_and_tags_in_a_text_of_the_program_are_its_own(code):
    assert extract_code(fenced(code)) == code
    assert extract_code(fenced(code, "")) == code
    assert (
        extract_code(
            f"<think>\n{fenced(OTHER)}</think>\n{fenced(code)}Done.\n{fenced('6', 'text')}"
        )
        == code
    )
    assert extract_code(fenced("x = '''\n")) == "x = '''\n"  # never closed: the fence ends it


def test_part_of_the_program_must_be_the_models():
    assert own_code("```", f"```python\n{F}") is None
    assert own_code("\u200b\n```", f"```python\n{F}") is None
    assert own_code("    return n * 2\n```", "```python\ndef f(n):\n") == F
    assert own_code(f"Again:\n{PLAIN}", f"{PLAIN}\n") == F
    assert own_code(f"No.\n</think>\n{PLAIN}", f"<think>\n{fenced(OTHER)}") == F


@pytest.mark.parametrize(
    ("completion", "expected", "reason"),
    [
        (fenced(F, "Python"), 1.0, "any habit of naming Python"),
        (f"~~~python\n{F}~~~", 1.0, "and of fences"),
        (f"<think>\n{fenced(OTHER)}</think>\n{PLAIN}", 1.0, "thoughts are no answer"),
        (fenced("{}\n", "json") + PLAIN, 1.0, "a block of another language before it is text"),
        (PLAIN + "<|im_end|>", 1.0, "the token that ends the turn is not seen"),
        (PLAIN + "\u200b\n", 1.0, "nor is a zero-width space"),
        (fenced(F, ""), 0.75, "the fence does not say Python"),
        (f"{PLAIN}\n{fenced('6' + chr(10), 'output')}", 0.75, "an output is text behind it"),
        (f"{PLAIN}</answer>", 0.75, "so is a tag"),
        (f"{PLAIN}\n{PLAIN}", 0.25, "the program is found, but there are two blocks"),
        (f"{PLAIN}\n{fenced('print(f(3))' + chr(10))}", 0.25, "as with an example"),
        (f"{PLAIN}\n{fenced(OTHER)}", 0.0, "hedging"),
        (f"{PLAIN}\n```", 0.25, "a fence without its pair: one block is opened, that is all"),
        (f"<think>\n{PLAIN}", 0.0, "thoughts alone"),
    ],
)
def test_the_format_follows_from_the_same_reading(completion, expected, reason):
    assert CodeFormat()([completion]) == [expected], reason


def test_places_are_those_of_the_response():
    response = f"So:\n> ```python\n{indented(F, '> ')}> ```<|im_end|>\n"
    (block,) = read_blocks(response)
    assert response[block.opened :].startswith("> ```python")
    assert response[block.start : block.end] == indented(F, "> ")
    assert response[block.after :] == "<|im_end|>\n"


MANY = 100_000
HOSTILE = {
    "opened without end": "```python\n" * (MANY // 10),
    "strings without end": "```python\n'''\n" * (MANY // 14),
    "strings closed by fences": "```python\n'''\n```\n" * (MANY // 18),
    "blocks": "```python\nx = 1\n```\n" * (MANY // 20),
    "another program each": "".join(f"```python\nx = {k}\n```\n" for k in range(MANY // 20)),
    "plain blocks": "```\nx()\n```\n" * (MANY // 12),
    "white space behind a fence": "```" + " " * MANY + "x",
    "quotes": "> " * (MANY // 2) + "```\n",
    "lists": "- " * (MANY // 2) + "```\n",
    "thoughts": "<think>" * (MANY // 7) + "</think>" * (MANY // 8),
    "tokens": "```python\nx\n```" + "<|a|>" * (MANY // 5) + "x",
    "signs": "```python\n" + "-" * MANY + "1\n```\n```\n1\n```",
    "sums": "```python\n1" + "+1" * (MANY // 2) + "\n```\n```\n1\n```",
    "brackets": "```python\n" + "(" * MANY + "\n```\n```\n1\n```",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_read_in_little_time(text):
    started = time.perf_counter()
    CodeFormat()([text])
    assert time.perf_counter() - started < 5
