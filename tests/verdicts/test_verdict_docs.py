"""The examples of the room's docstrings."""

import doctest
import importlib
import pkgutil

import pytest

import grpo_kit.verdicts

NAMES = [
    "grpo_kit.verdicts",
    *(f"grpo_kit.verdicts.{m.name}" for m in pkgutil.iter_modules(grpo_kit.verdicts.__path__)),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_are_what_happens(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    tried = [doctest.testmod(importlib.import_module(name)).attempted for name in NAMES]
    assert sum(tried) >= 12
