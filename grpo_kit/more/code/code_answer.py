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

from grpo_kit.more.code._literal_calls import parse_quietly, parse_without_warnings
from grpo_kit.rewards.response import is_blank

# White space, quote signs and list signs, perhaps an <answer> tag; then three ticks or tildes, and the language.
_OPENS = re.compile(
    r"(?P<lead>(?:[ \t>]|[-*+][ \t]|[0-9]{1,9}[.)][ \t])*)(?:<\w{1,20}>[ \t]*)?(?P<fence>`{3,}|~{3,})(?P<info>.*)"
)
_CLOSES = re.compile(r"(?P<lead>[ \t>]*)(?P<fence>`{3,}|~{3,})(?P<glued>.*)")
# Tokens and tags behind a fence: <|im_end|>, </s>, </answer>, [/INST].
_GLUED = re.compile(r"<[^<>]{1,40}>|\[/?[A-Z_]{2,20}\]")
_END_TOKENS = re.compile(
    r"(?:(?:<[|｜][^<>]{1,40}[|｜]>|</s>|<(?:eos|eot|pad|end_of_turn|end_of_text)>)\s*)+\Z"
)
# {python}, .python, python3, python:file.py, python title=x
_LANGUAGE = re.compile(r"[{\s.]*([A-Za-z_+#-]*)")
_THOUGHT = "think|thinking|thoughts?|reasoning|reflection|scratchpad"
_THINKS = re.compile(rf"^[ \t]*(?:<(?:{_THOUGHT})>|\[THINK\])", re.IGNORECASE | re.MULTILINE)
_THOUGHT_ENDS = re.compile(rf"</(?:{_THOUGHT})>|\[/THINK\]", re.IGNORECASE)
# The prompt may have opened the thoughts. A closing tag inside a program's string has a quote behind it, none of these.
_OPEN_BEFORE = re.compile(rf"(?:{_THOUGHT_ENDS.pattern})(?=\s|```|~~~|<|\Z)", re.IGNORECASE)
# columns that a closing fence may be indented beyond its opening one, as in CommonMark
_FURTHER_IN = 3
# blocks of a response: one with more answers nothing, and reading them would take a minute
_MOST = 1_000
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
    place = 0
    thought_end = _OPEN_BEFORE.search(response)
    if thought_end and not _THINKS.search(response, 0, thought_end.start()):
        place = thought_end.end()
    while place < len(response):
        end = _line_end(response, place)
        line = response[place:end].rstrip()
        thought = _THINKS.match(line)
        opening = _opening(line)
        if thought:
            thought_end = _THOUGHT_ENDS.search(response, place + thought.end())
            place = thought_end.end() if thought_end else len(response)
        elif opening:
            if len(blocks) == _MOST:
                return []
            blocks.append(_block(response, place, end, opening))
            place = blocks[-1].after
        else:
            place = end
    return blocks


def without_end_tokens(text: str) -> str:
    """The text without the tokens that end a turn.

    >>> without_end_tokens("f(1)<|im_end|></s>")
    'f(1)'
    """
    return _END_TOKENS.sub("", text)


def _line_end(text: str, place: int) -> int:
    return text.find("\n", place) + 1 or len(text)


def _opening(line: str) -> re.Match[str] | None:
    opening = _OPENS.match(line)
    is_inline = opening and "`" in opening["fence"] and "`" in opening["info"]
    return None if is_inline else opening


def _language(opening: re.Match[str]) -> str:
    return _LANGUAGE.match(opening["info"])[1].lower()


def _block(response: str, opened: int, start: int, opening: re.Match[str]) -> Block:
    quotes, lead = opening["lead"].count(">"), opening["lead"].rpartition(">")[2]
    spaced = bool(quotes) and lead.startswith(" ")  # that space belongs to the quote sign
    indent = len(lead) - spaced

    def block_to(end: int, after: int, *, closed: bool) -> Block:
        code = response[start:end]
        if quotes:
            space = " ?" if spaced else ""
            code = re.sub(rf"^(?:[ \t]*>){{1,{quotes}}}{space}", "", code, flags=re.MULTILINE)
        if code.lstrip("\r\n").startswith((" ", "\t")):
            code = textwrap.dedent(code)
        return Block(_language(opening), code, opened, start, end, after, closed)

    # the block to the first closing fence, used unless that is in a string of the program
    first = None
    place, n_tried, in_text = start, 0, False
    while place < len(response) and n_tried < _TRIED:
        end = _line_end(response, place)
        line = response[place:end].rstrip()
        fence_end = _closing_fence_end(line, opening, quotes, indent)
        inner = _opening(line)
        if fence_end:
            block = block_to(place, place + fence_end, closed=True)
            if first is None:
                is_whole = not _ends_in_text(block.code)
            else:
                is_whole = parse_quietly(block.code) is not None
            if is_whole:
                return block
            first = first or block
            n_tried += 1
        elif (
            inner
            and not in_text
            and len(inner["lead"]) <= indent + _FURTHER_IN
            and _language(inner)
        ):
            # the next one begins before this one is closed
            block = block_to(place, place, closed=False)
            in_text = _ends_in_text(block.code)
            if not in_text:
                return first or block
        place = end
    return first or block_to(len(response), len(response), closed=False)


def _closing_fence_end(line: str, opening: re.Match[str], quotes: int, indent: int) -> int:
    """The place in the line where the closing fence ends; 0 if the line closes nothing."""
    closing = _CLOSES.match(line)
    if not closing or not closing["fence"].startswith(opening["fence"]):
        return 0
    _, quote, lead = closing["lead"].rpartition(">")
    fits = (quotes or not quote) and len(lead) <= indent + _FURTHER_IN
    return closing.end("fence") if fits and is_blank(_GLUED.sub("", closing["glued"])) else 0


def _ends_in_text(code: str) -> bool:
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
    # defines, imports, loops, reads or prints: more than the output `x = 5` or `Counter({1: 2})`
    acts: bool
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
    unnamed = _programs(plain)
    candidates = _programs(named) if named else unnamed
    if not candidates:
        is_alone = len(named) == 1 and all(block.closed for block in blocks)
        return named[0] if is_alone else None  # callers find that it is no Python
    unmarked = {key: p for key, p in unnamed.items() if p.acts and key not in candidates}
    programs = unmarked | candidates
    if len(programs) > _MOST_PROGRAMS:
        return None
    answers = []
    for program in programs.values():
        rivals = [rival for rival in programs.values() if rival is not program]
        if not any(_belongs_to(program, rival) for rival in rivals):
            answers.append(program)
    is_one = len(answers) == 1 and answers[0].key in candidates
    return answers[0].block if is_one else None


def _programs(blocks: Sequence[Block]) -> dict[str, _Program]:
    """The different programs of the blocks by their key; the last block of equal ones."""
    return {program.key: program for program in map(_program, blocks) if program}


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
        block=block,
        key=key,
        lines=[line.strip() for line in block.code.splitlines() if line.strip()],
        acts=bool(called & {"print", "input"})
        or any(isinstance(node, _ACTS) for node in nodes),
        defines=defines,
        binds=defines | {name.id for name in names if isinstance(name.ctx, ast.Store)},
        uses={name.id for name in names if isinstance(name.ctx, ast.Load)},
    )


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    # "Sum: ten" is words
    return isinstance(statement, ast.AnnAssign) and statement.value is None


def _belongs_to(program: _Program, rival: _Program) -> bool:
    """Whether the program is no second answer beside the rival but a part of it, or an example or a test of it."""
    is_earlier = program.block.start < rival.block.start
    if len(program.lines) < len(rival.lines) and (is_earlier or not program.defines):
        rival_lines = iter(rival.lines)
        if all(line in rival_lines for line in program.lines):
            return True
    only_tests = all(map(_TESTS.match, program.defines)) and not program.binds & rival.defines
    return only_tests and bool(program.uses & rival.defines)
