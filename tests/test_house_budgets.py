"""The house in numbers that may only fall. What raises one says in the changelog what it bought."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import forked
import pytest

import grpo_kit

ROOT = Path(grpo_kit.__file__).parent
# Documented, in spite of the underscore: os._exit and the methods of a NamedTuple.
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields"}

BUDGETS = {
    "private reaches in the core": 0,
    "private reaches across files": 36,
    "private reaches into the trainer": 0,
    "classes that take the trainer": 0,
    "modules loaded by importing the loop": 52,
    "modules loaded by importing the trainer": 136,
    "modules loaded by import grpo_kit.tasks.largest": 23,
    "public names": 985,
    "public names shown nowhere": 600,
    "file names that repeat another": 0,
    "lines": 43810,
}

ROOM_LINES = {
    "rollout": 3818, "watch": 3659, "verdicts": 3379, "more/episodes": 2979, "more/code": 2932,
    "rewards": 2896, "loop": 2649, "evaluation": 2480, "more/lab": 2184, "tasks": 1976, "more/export": 1974,
    "more/bridges": 1875, "models": 1401, "engine": 1246, "objectives": 1120, "memory": 1092,
    "record": 1022, "hooks": 917, "doctor": 754, "prompts": 529, "more/tasks": 458, "commands": 358,
    "optim": 350, "display": 344, "argument_checks": 270, "config_checks": 208, "presets": 194,
    "schedules": 184, "literal_calls": 120, "__init__": 95, "lazy": 82, "cuda": 72, "torch_builds": 61,
    "__main__": 56, "unsloth": 55, "more/__init__": 18, "version": 3,
}  # fmt: skip


def sources(root):
    """path below the package -> its syntax tree."""
    return {p.relative_to(root): ast.parse(p.read_text()) for p in sorted(root.rglob("*.py"))}


def own_names(tree):
    """Names that a file defines: functions, classes, variables, and attributes that it sets on self or cls."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def is_trainer(node):
    """`trainer`, `self.trainer`, `self._trainer` and the like."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_") == "trainer"
    return False


def private_reaches(tree):
    """(attribute, is it a trainer's?) of each private attribute of another object that this file does not define."""
    own = own_names(tree)
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.Attribute)
            or not re.match(r"_(?!_)", node.attr)
            or node.attr in DOCUMENTED
        ):
            continue
        match node.value:
            case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
                continue
        if is_trainer(node.value) or node.attr not in own:
            yield node.attr, is_trainer(node.value)


def takes_the_trainer(tree):
    """Names of the classes whose __init__ has a parameter `trainer`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    if any(arg.arg == "trainer" for arg in (*method.args.args, *method.args.kwonlyargs)):
                        yield node.name


def public_names(tree):
    """Functions and classes at the top of a file, without an underscore in front."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def shown_words(repository):
    """Every word of README, the docs and the notebooks' cells."""
    pages = [
        repository / "README.md",
        *(repository / "docs").glob("*.md"),
        *(repository / "notebooks").glob("*.ipynb"),
    ]
    return {word for page in pages for word in re.findall(r"[A-Za-z_]\w*", page.read_text())}


def loaded_by(module, root):
    """How many of the kit's modules `import module` loads in a process that has none of them."""
    code = f"import sys, {module}; print(sum(name.split('.')[0] == 'grpo_kit' for name in sys.modules))"
    done = forked.bare().run("-c", code, cwd=root.parent)
    assert not done.returncode, done.stderr
    return int(done.stdout)


@functools.cache
def counts(root):
    """Each number that has a budget."""
    trees = sources(root)
    reaches = [reach for tree in trees.values() for reach in private_reaches(tree)]
    shown = shown_words(root.parent)
    names = Counter(path.name for path in trees if path.name != "__init__.py")
    core = [reach for path, tree in trees.items() if is_core(path) for reach in private_reaches(tree)]
    return {
        "private reaches in the core": len(core),
        "private reaches across files": len(reaches),
        "private reaches into the trainer": sum(of_trainer for _, of_trainer in reaches),
        "classes that take the trainer": sum(len([*takes_the_trainer(tree)]) for tree in trees.values()),
        "modules loaded by importing the loop": loaded_by("grpo_kit.loop.grpo", root),
        "modules loaded by importing the trainer": loaded_by("grpo_kit.hooks.standard", root),
        "modules loaded by import grpo_kit.tasks.largest": loaded_by("grpo_kit.tasks.largest", root),
        "public names": sum(len(public_names(tree)) for tree in trees.values()),
        "public names shown nowhere": sum(
            n not in shown for tree in trees.values() for n in public_names(tree)
        ),
        "file names that repeat another": sum(n - 1 for n in names.values()),
        "lines": sum(len((root / path).read_text().splitlines()) for path in trees),
    }


def room_lines(root):
    """room -> lines of its files; the files at the top are a room each."""
    found = Counter()
    for path in root.rglob("*.py"):
        below = path.relative_to(root)
        room = "/".join(below.parts[: 2 if below.parts[0] == "more" else 1]).removesuffix(".py")
        found[room] += len(path.read_text().splitlines())
    return dict(found)


def is_core(path):
    """Is this file in a room that the loop stands on? See test_house.py."""
    from test_house import CORE

    return path.parts[0].removesuffix(".py") in CORE - {"cuda", "display"}  # of a driver, of a notebook


def test_no_number_rises():
    found = counts(ROOT)
    risen = {name: (value, BUDGETS[name]) for name, value in found.items() if value > BUDGETS[name]}
    assert not risen, "now, budget"
    assert found.keys() == BUDGETS.keys()


def test_no_room_grows():
    found = room_lines(ROOT)
    grown = {
        room: (lines, ROOM_LINES.get(room, 0))
        for room, lines in found.items()
        if lines > ROOM_LINES.get(room, 0)
    }
    assert not grown, (
        "lines, budget: make room by merging or deleting, or raise it with a line in CHANGELOG.md"
    )


def test_a_budget_is_no_wish():
    """A budget that the house has left behind is lowered, so that what was won is not lost again."""
    found = counts(ROOT)
    loose = {
        name: (found[name], budget) for name, budget in BUDGETS.items() if found[name] < 0.95 * budget - 2
    }
    lines = room_lines(ROOT)
    loose |= {
        room: (lines.get(room, 0), n) for room, n in ROOM_LINES.items() if lines.get(room, 0) < 0.9 * n - 20
    }
    assert not loose, "now, budget"


@pytest.mark.parametrize(
    "code, found",
    [
        ("def f(a):\n    return a._x", [("_x", False)]),
        ("def f(a):\n    return a._x + _x\n_x = 1", []),
        ("class A:\n    def __init__(self):\n        self._x = self._y = 1", []),
        (
            "class A:\n    def f(self, other):\n        return other._x\n    def g(self):\n        self._x = 1",
            [],
        ),
        ("def f(trainer):\n    trainer._x = 1\n_x = 1", [("_x", True)]),
        (
            "class A:\n    def f(self):\n        return self.trainer._x, self._trainer._y",
            [("_x", True), ("_y", True)],
        ),
        ("class A(B):\n    def f(self):\n        return super()._f()", []),
        ("import os\nos._exit(1)\na.__dict__\na._replace(b=1)", []),
    ],
)
def test_reaches_are_counted(code, found):
    assert sorted(private_reaches(ast.parse(code))) == sorted(found)


def test_classes_that_take_the_trainer_are_counted():
    code = "class A:\n    def __init__(self, trainer): ...\nclass B:\n    def __init__(self, model, *, trainer): ..."
    assert [*takes_the_trainer(ast.parse(code + "\nclass C:\n    def f(self, trainer): ..."))] == ["A", "B"]
