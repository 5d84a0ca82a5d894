"""Imports run one way: what a reader can learn from without TRL must not need it."""

import ast
from pathlib import Path

import pytest

import grpo_kit

ROOT = Path(grpo_kit.__file__).parent
FREE_OF_TRL = [
    "prompts.py",
    "schedules.py",
    "evaluate.py",
    "intervals.py",
    "decoding.py",
    "readiness.py",
    "preferences.py",
    "sample_files.py",
    "trained_tokens.py",
    "trainer_checks.py",
    "lengths.py",
    "aha.py",
    "pass_curves.py",
    "diversity.py",
    "flags.py",
    "monitor.py",
    "method_tree.py",
    "which_method.py",
    "lab_statistics.py",
    "comparison.py",
    "packing.py",
    "activations.py",
    "memory.py",
    "memory_plan.py",
    "optim.py",
    "precision.py",
    "split_adamw.py",
]
FILES = (
    [ROOT / name for name in FREE_OF_TRL]
    + sorted((ROOT / "rewards").glob("*.py"))
    + sorted((ROOT / "tasks").glob("*.py"))
    + sorted((ROOT / "rollout").glob("*.py"))
    + sorted((ROOT / "sandbox").glob("*.py"))
    + sorted((ROOT / "objectives").glob("*.py"))
)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_knows_nothing_of_trl_or_the_trainer(path):
    forbidden = ("trl", "grpo_kit.trainer", "grpo_kit.recorder", "grpo_kit.live")
    assert not [name for name in imported(path) if name.split(".")[0] == "trl" or name in forbidden]


def test_objectives_know_torch_and_themselves_alone():
    names = {name for path in (ROOT / "objectives").glob("*.py") for name in imported(path)}
    allowed = {"__future__", "typing", "torch", "torch.nn.functional"}
    assert not [n for n in names if n not in allowed and not n.startswith("grpo_kit.objectives")]


def test_only_one_file_touches_trl_internals():
    users = {p.name for p in ROOT.rglob("*.py") if any(n.startswith("trl.trainer") for n in imported(p))}
    assert users == {"trl_internals.py"}
