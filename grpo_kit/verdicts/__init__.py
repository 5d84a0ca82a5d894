"""Verdicts: is an answer what the gold is? Read whole, by written rules, compared exactly.

decide: the verdict itself, which the answer rewards give. spelling: one text in many ways of writing. formula,
rational, value: a tree, and what it is worth. reading: which of the kinds an answer is, out of quantities, relations
and sentences. compare: when two of them are the same.
"""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.verdicts.compare import Rules
    from grpo_kit.verdicts.decide import number, verdict

__all__ = lazy(__name__)
