"""Fenced blocks of a response, outside its thoughts, and which of them is the program that answers.

The only reader of fences, for programs and for calls.

The answer is the one block whose fence names Python or, if none does, the one block without a language that is Python.
Blocks in thoughts and of other languages (json, bash, output, text) do not count. Beside the answer these blocks may
stand: text that is no program (a doctest session, an expected value, prose); the same program again; an earlier step
whose lines all stand in a later program; lines of the program shown again; an example or a test that uses what the
program defines. Any other second program is hedging, and the response has no answer.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
_MOST_PROGRAMS = 16  # in one response; a response with more has no answer
_TESTS = re.compile(r"(?i)_*(?:test|check|main|demo|example|usage)")
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ACTS = (*_DEFINES, ast.Import, ast.ImportFrom, ast.For, ast.While, ast.With)


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


class _Program(NamedTuple):
    block: Block
    key: str  # equal for equal programs, whatever their spacing and comments
    lines: list[str]
    acts: bool  # defines, imports, loops, reads or prints: more than the output `x = 5` or `Counter({1: 2})`
    defines: set[str]
    binds: set[str]
    uses: set[str]


def extract_code(response: str) -> str | None:
    """The text of the one Python block that answers, without its fences; None if there is none, or several.

    The fence may read ```python, ```Python, ~~~py or {python}, or bare ``` where no other block is Python; it may be
    longer, indented or quoted. Text and other blocks around it are fine. Two different programs (hedging), a block that
    is never closed, an empty one, and one in <think> tags give None. The whole rule: the docstring of code_answer.

    >>> extract_code("So:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    >>> extract_code("```python\\nx = 1\\n```\\n```python\\nx = 2\\n```") is None
    True
    """
    return own_code(response, "")


def own_code(completion: str, prefill: str) -> str | None:
    """extract_code(prefill + completion), but None where the model wrote none of the code.

    >>> own_code("x = 1\\n```", "```python\\n"), own_code("```", "```python\\nx = 1\\n")
    ('x = 1\\n', None)
    """
    response = prefill + completion
    block = answer_block(read_blocks(response))
    if block is None or is_blank(response[max(block.start, len(prefill)) : block.end]):
        return None
    return block.code


def answer_block(blocks: Sequence[Block]) -> Block | None:
    """The block of the one program that answers, by the rule at the head of this file; None if none, or several.

    >>> answer_block(read_blocks("```json\\n{}\\n```\\n```\\nx = 1\\n```")).code
    'x = 1\\n'
    """
    named = [block for block in blocks if block.is_python]
    plain = [block for block in blocks if block.closed and not block.language]
    if not all(block.closed for block in named):
        return None
    paired = all(block.closed for block in blocks)
    if len(named) == 1 and not plain and paired:
        return named[0]  # not necessarily Python: callers check that
    unnamed = [program for block in plain if (program := _program(block))]
    programs = [program for block in named if (program := _program(block))] if named else unnamed
    if not programs:
        return named[0] if len(named) == 1 and paired else None
    distinct = {program.key: program for program in programs}
    beside = {p.key: p for p in unnamed if p.acts and p.key not in distinct} if named else {}
    several = [*beside.values(), *distinct.values()]
    if len(several) > _MOST_PROGRAMS:
        return None
    left = [
        one for one in several if not any(_goes_with(one, other) for other in several if other is not one)
    ]
    return left[0].block if len(left) == 1 and left[0].key in distinct else None


def _program(block: Block) -> _Program | None:
    """None where the text is not Python, or does nothing: bare values and names, like printed output."""
    tree = parse_quietly(block.code)
    if tree is None or all(map(_does_nothing, tree.body)):
        return None
    try:
        key = ast.dump(tree)
    except RecursionError:  # nested deeper than any answer
        return None
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defines = {node.name for node in tree.body if isinstance(node, _DEFINES)}
    called = {getattr(node.func, "id", "") for node in nodes if isinstance(node, ast.Call)}
    return _Program(
        block,
        key,
        [line.strip() for line in block.code.splitlines() if line.strip()],
        bool(called & {"print", "input"}) or any(isinstance(node, _ACTS) for node in nodes),
        defines,
        defines | {name.id for name in names if isinstance(name.ctx, ast.Store)},
        {name.id for name in names if isinstance(name.ctx, ast.Load)},
    )


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    return isinstance(statement, ast.AnnAssign) and statement.value is None  # "Sum: ten" is words


def _goes_with(one: _Program, other: _Program) -> bool:
    """Whether `one` is no second answer beside `other` but a part of it, or an example or a test of it."""
    if len(one.lines) < len(other.lines) and (one.block.start < other.block.start or not one.defines):
        rest = iter(other.lines)
        if all(line in rest for line in one.lines):
            return True
    only_tests = all(map(_TESTS.match, one.defines)) and not one.binds & other.defines
    return only_tests and bool(one.uses & other.defines)
