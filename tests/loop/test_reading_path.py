"""How much a reader needs for one step: the files that docs/loop.md names, and all code that a step runs."""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from loop_runs import make

import grpo_kit
from grpo_kit.models.token_lists import why_not_padded

ROOT = Path(grpo_kit.__file__).parent
DOCS = ROOT.parent / "docs/loop.md"
# files to read, their lines of 96 columns; functions that a step runs, the lines of these
MOST = {"plain": (6, 1_739, 240, 1_980), "fast": (11, 3_603, 440, 4_150)}


def to_read(path):
    """The files that docs/loop.md names for this path."""
    (line,) = re.findall(
        rf"^{path.title()}: (.*?)\.$", DOCS.read_text(), re.MULTILINE | re.DOTALL
    )
    return re.findall(r"`([\w/]+\.py)`", line)


def lines_of(file):
    return len((ROOT / file).read_text().splitlines())


def run_in_a_step(folder, seams):
    """file -> first lines of the kit's functions that one step runs."""
    trainer = make(folder, seams=seams, steps=1)
    trainer.train()
    trainer.change(steps=2)
    for gradient in (False, True):  # asked once a model, in the first step that pads
        why_not_padded(trainer.model, gradient=gradient)
    found = defaultdict(set)

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            found[Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()].add(
                frame.f_code.co_firstlineno
            )

    with trainer.guard:
        sys.setprofile(note)
        try:
            trainer.one_step()
        finally:
            sys.setprofile(None)
    return found


def lines_of_functions(file, firsts):
    covered = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            if {first, node.lineno} & firsts:
                covered |= set(range(first, node.end_lineno + 1))
    return len(covered)


@pytest.mark.parametrize("path", MOST)
def test_a_step_is_read_in_few_files(path, tmp_path, capsys):
    files = to_read(path)
    lines = sum(map(lines_of, files))
    ran = run_in_a_step(tmp_path / "run", path)
    functions = sum(map(len, ran.values()))
    run_lines = sum(lines_of_functions(file, firsts) for file, firsts in ran.items())
    with capsys.disabled():
        print(
            f"\none {path} step: {len(files)} files of {lines} lines to read; it runs {functions} functions of "
            f"{run_lines} lines in {len(ran)} files"
        )
    assert {*files} <= {*ran}, "a step runs code of every file that it is read in"
    found = (len(files), lines, functions, run_lines)
    assert all(now <= most for now, most in zip(found, MOST[path], strict=True)), (
        found,
        MOST[path],
    )
