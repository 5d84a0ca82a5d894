"""Which of a response's code blocks is the program that answers.

The answer is the one block whose fence names Python or, if none does, the one block without a language that is Python.
Blocks in thoughts and of other languages (json, bash, output, text) do not count. Beside the answer these blocks may
stand: text that is no program (a doctest session, an expected value, prose); the same program again; an earlier step
whose lines all stand in a later program; lines of the program shown again; an example or a test that uses what the
program defines. Any other second program is hedging, and the response has no answer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import NamedTuple

from grpo_kit._support.literal_calls import parse_quietly
from grpo_kit.more.code._code_blocks import Block, read_blocks
from grpo_kit.rewards.response import is_blank

_MOST_PROGRAMS = 16  # in one response; a response with more has no answer
_TESTS = re.compile(r"(?i)_*(?:test|check|main|demo|example|usage)")
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ACTS = (*_DEFINES, ast.Import, ast.ImportFrom, ast.For, ast.While, ast.With)


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
