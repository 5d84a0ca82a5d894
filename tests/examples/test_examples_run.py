"""Every example says how it is run, is listed, and trains in the smoke size.

But for the two samplers: tests/loop/test_older_weights.py and test_hinted.py train with them.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest

import grpo_kit as kit
from grpo_kit.__main__ import main

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py")
TASKS = [path for path in FILES if path.stem not in ("older_weights", "hinted")]
RUN = re.compile(r"python -m grpo_kit train (examples/(\w+)\.py:(\w+)) --preset smoke")


def command(path):
    """(what to train, its module, its function), from the line in the docstring that says how."""
    (found,) = RUN.findall(ast.get_docstring(ast.parse(path.read_text())))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_says_how_it_is_run_and_is_listed(path):
    if path in TASKS:
        assert command(path)[1] == path.stem
    else:
        assert f"from examples.{path.stem} import" in ast.get_docstring(
            ast.parse(path.read_text())
        )
    assert f"| [{path.name}]({path.name}) |" in (ROOT / "examples" / "README.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_stands_on_public_names_alone(path):
    """So that it can be copied: no underscored name of the kit, and no other example."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else []
        )
        module = (getattr(node, "module", "") or "") if names else ""
        assert not [
            part
            for name in [module, *names]
            for part in name.split(".")
            if re.match("_(?!_)", part)
        ]
        assert not [name for name in [module, *names] if name.split(".")[0] == "examples"]


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_an_example_trains_in_the_smoke_size(path, tmp_path):
    _, module, name = command(path)
    if module == "textarena_games":
        pytest.importorskip("textarena")
    make = getattr(importlib.import_module(f"examples.{module}"), name)
    task = make(n_train=8, n_held_out=4)
    assert (len(task.train), len(task.held_out)) == (8, 4)
    model, tokenizer = kit.load_policy("tiny-random", quiet=True)
    config = kit.Config(steps=1, prompts_per_step=2, group_size=2)
    trainer = kit.GRPOTrainer(
        model, task, config, tokenizer=tokenizer, folder=tmp_path / "run", live=None
    )
    trainer.train()
    assert kit.read_metrics(tmp_path / "run")["step"].max() == 1


def test_the_command_of_the_docstrings_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    what, *_ = command(ROOT / "examples" / "calculator.py")
    options = ["--preset", "smoke", "--set", "steps=1", "--set", "group_size=2"]
    assert main(["train", what, *options, "--folder", str(tmp_path / "run")]) == 0
    assert "The model is in" in capsys.readouterr().out
    assert kit.read_metrics(tmp_path / "run")["step"].max() == 1


def test_rows_that_run_out_are_said():
    calculator = importlib.import_module("examples.calculator").calculator
    with pytest.raises(
        ValueError, match="calculator of 1 operations has too few distinct questions"
    ):
        calculator(n_train=8_000, operations=1)
