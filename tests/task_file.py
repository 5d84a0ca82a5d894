"""A Python file as a user writes it, for the tests: a task of their own whose reward varies on a random model."""

import few_words

FILE = """
import grpo_kit as kit


def letters(completions, **columns):
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def is_even(text, row):
    return bool(text)


rows = [{"question": f"Say {n} words", "answer": str(n)} for n in range(20)]
task = kit.tasks.from_rows(
    "words", rows, reward=letters, system="Speak.", prefill="<answer>", max_completion_tokens=6
)
"""
# What makes it train on the tiny model, and learn.
TRAINED = [
    "--preset",
    "smoke",
    "--set",
    "steps=4",
    "--set",
    "learning_rate=1e-2",
    "--held-out-every",
    "2",
]
TRAINED += ["--set", f"model={few_words.folder()}"]
COOLING = ["--set", "temperature=linear(1.2, 0.8)"]


def written(folder, name="my_task.py"):
    """The path of such a file."""
    path = folder / name
    path.write_text(FILE)
    return path
