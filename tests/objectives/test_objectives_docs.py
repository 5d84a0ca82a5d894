"""The objectives as a text: examples that run, a source for each, bodies short enough to read."""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import pytest

from grpo_kit import objectives

FILES = sorted(Path(objectives.__file__).parent.glob("*.py"))
NO_PAPER = {
    "token_logprobs",
    "sequence_logprobs",
    "masked_sum",
    "masked_mean",
    "token_ratio",
    "clip_fraction",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_give_what_they_say(path):
    name = "grpo_kit.objectives" + ("" if path.stem == "__init__" else f".{path.stem}")
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0 and (result.attempted > 0 or path.stem == "__init__")


@pytest.mark.parametrize("name", objectives.__all__)
def test_each_has_a_source_an_example_and_a_short_body(name):
    function = getattr(objectives, name)
    text = inspect.getdoc(function)
    assert ">>>" in text and (name in NO_PAPER or "Source" in text)
    (tree,) = ast.parse(inspect.getsource(function)).body
    body = tree.body[1:]  # behind the docstring
    assert body[-1].end_lineno - body[0].lineno < 15
    parameters = inspect.signature(function).parameters.values()
    assert all(p.annotation is not p.empty for p in parameters)


def test_what_is_public_is_listed():
    defined = {
        node.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    shared = {
        "clipped_surrogate",
        "column",
        "require_same_shape",
        "importance_ratio",
        "kl_term",
    }
    shared |= {"row_mean", "token_mean"}  # between the files, not for users
    assert {n for n in defined if not n.startswith("_")} - shared == set(objectives.__all__)
    assert objectives.__all__ == sorted(objectives.__all__)
