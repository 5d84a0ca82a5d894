"""Fenced blocks of a response, outside its thoughts. The only reader of fences, for programs and for calls."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from grpo_kit._support.literal_calls import parse_quietly, parse_without_warnings
from grpo_kit.rewards.response import is_blank

# White space, quote signs and list signs, perhaps an <answer> tag; then three ticks or tildes, and the language.
_OPENS = re.compile(
    r"(?P<lead>(?:[ \t>]|[-*+][ \t]|[0-9]{1,9}[.)][ \t])*)(?:<\w{1,20}>[ \t]*)?(?P<fence>`{3,}|~{3,})(?P<info>.*)"
)
_CLOSES = re.compile(r"(?P<lead>[ \t>]*)(?P<fence>`{3,}|~{3,})(?P<glued>.*)")
_GLUED = re.compile(
    r"<[^<>]{1,40}>|\[/?[A-Z_]{2,20}\]"
)  # tokens and tags: <|im_end|>, </s>, </answer>, [/INST]
_END_TOKENS = re.compile(
    r"(?:(?:<[|｜][^<>]{1,40}[|｜]>|</s>|<(?:eos|eot|pad|end_of_turn|end_of_text)>)\s*)+\Z"
)
_LANGUAGE = re.compile(
    r"[{\s.]*([A-Za-z_+#-]*)"
)  # {python}, .python, python3, python:file.py, python title=x
_THOUGHT = "think|thinking|thoughts?|reasoning|reflection|scratchpad"
_THINKS = re.compile(rf"^[ \t]*(?:<(?:{_THOUGHT})>|\[THINK\])", re.IGNORECASE | re.MULTILINE)
_THOUGHT_ENDS = re.compile(rf"</(?:{_THOUGHT})>|\[/THINK\]", re.IGNORECASE)
# The prompt may have opened the thoughts. A closing tag inside a program's string has a quote behind it, none of these.
_OPEN_BEFORE = re.compile(rf"(?:{_THOUGHT_ENDS.pattern})(?=\s|```|~~~|<|\Z)", re.IGNORECASE)
_FURTHER_IN = 3  # columns that a closing fence may be indented beyond its opening one, as in CommonMark
_MOST = 1_000  # blocks of a response: one with more answers nothing, and reading them would take a minute
_TRIED = 8  # closing fences to try, as the first ones may be in a string of the program


@dataclass(frozen=True)
class Block:
    """A fenced block: its language ("" for none) and its text without quote signs and common indentation.

    opened, start, end, after: places in the response: the start of the opening fence's line, both ends of the text, and
    the end of the closing fence. closed: False without a closing fence; the block then ends where the next fence opens.
    """

    language: str
    code: str
    opened: int
    start: int
    end: int
    after: int
    closed: bool

    @property
    def is_python(self) -> bool:
        """Whether the fence names Python."""
        return self.language in ("python", "py", "ipython")


def read_blocks(response: str) -> list[Block]:
    """All fenced blocks outside thoughts, in order; none where there are more than 1,000.

    A fence is a line of three or more ` or ~, indented, quoted or in a list. A block ends at a line of as many of the
    same sign, which only tokens and tags may follow (<|im_end|>, </answer>), and never inside a string of its program.

    >>> [(block.language, block.code) for block in read_blocks("1. ~~~Python\\n   x = 1\\n   ~~~\\n```\\n1\\n```")]
    [('python', 'x = 1\\n'), ('', '1\\n')]
    """
    blocks: list[Block] = []
    at = 0
    ends = _OPEN_BEFORE.search(response)
    if ends and not _THINKS.search(response, 0, ends.start()):
        at = ends.end()
    while at < len(response):
        end = _line_end(response, at)
        line = response[at:end].rstrip()
        if thinks := _THINKS.match(line):
            ends = _THOUGHT_ENDS.search(response, at + thinks.end())
            at = ends.end() if ends else len(response)
        elif opening := _opening(line):
            if len(blocks) == _MOST:
                return []
            blocks.append(_block(response, at, end, opening))
            at = blocks[-1].after
        else:
            at = end
    return blocks


def without_end_tokens(text: str) -> str:
    """The text without the tokens that end a turn.

    >>> without_end_tokens("f(1)<|im_end|></s>")
    'f(1)'
    """
    return _END_TOKENS.sub("", text)


def _line_end(text: str, at: int) -> int:
    return text.find("\n", at) + 1 or len(text)


def _opening(line: str) -> re.Match[str] | None:
    found = _OPENS.match(line)
    return found if found and not (found["fence"][0] == "`" and "`" in found["info"]) else None


def _block(response: str, opened: int, start: int, opening: re.Match[str]) -> Block:
    language = _LANGUAGE.match(opening["info"])[1].lower()
    quotes, lead = opening["lead"].count(">"), opening["lead"].rpartition(">")[2]
    spaced = bool(quotes) and lead.startswith(" ")  # that space belongs to the quote sign
    indent = len(lead) - spaced

    def made(end: int, after: int, closed: bool = True) -> Block:
        return Block(language, _code(response[start:end], quotes, spaced), opened, start, end, after, closed)

    first = None  # the first closing fence, used unless it is in a string of the program
    at, tried, in_text = start, 0, False
    while at < len(response) and tried < _TRIED:
        end = _line_end(response, at)
        line = response[at:end].rstrip()
        if after := _closed_by(line, opening, quotes, indent):
            block = made(at, at + after)
            done = parse_quietly(block.code) is not None if first else not _in_text(block.code)
            if done:
                return block
            first, tried = first or block, tried + 1
        elif not in_text and (inner := _opening(line)) and len(inner["lead"]) <= indent + _FURTHER_IN:
            if _LANGUAGE.match(inner["info"])[1]:  # the next block begins before this one is closed
                block = made(at, at, closed=False)
                in_text = _in_text(block.code)
                if not in_text:
                    return first or block
        at = end
    return first or made(len(response), len(response), closed=False)


def _closed_by(line: str, opening: re.Match[str], quotes: int, indent: int) -> int:
    """Where in the line the closing fence ends; 0 if it closes nothing."""
    found = _CLOSES.match(line)
    if not found or not found["fence"].startswith(opening["fence"]) or (">" in found["lead"] and not quotes):
        return 0
    near = len(found["lead"].rpartition(">")[2]) <= indent + _FURTHER_IN
    return found.end("fence") if near and is_blank(_GLUED.sub("", found["glued"])) else 0


def _code(text: str, quotes: int, spaced: bool) -> str:
    if quotes:
        signs = rf"^(?:[ \t]*>){{1,{quotes}}}{' ?' if spaced else ''}"
        text = re.sub(signs, "", text, flags=re.MULTILINE)
    return textwrap.dedent(text) if text.lstrip("\r\n")[:1] in (" ", "\t") else text


def _in_text(code: str) -> bool:
    """Whether the code ends inside a triple-quoted string."""
    if '"""' not in code and "'''" not in code:
        return False
    try:
        parse_without_warnings(code)
    except SyntaxError as error:
        return "unterminated triple-quoted" in str(error.msg)
    except (ValueError, RecursionError, MemoryError):
        pass
    return False
