"""A Python file as a user writes it, for the tests: a task of their own whose reward varies on a random model."""

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
RECIPE = """
recipe = kit.Recipe(
    task, profile=kit.preset("smoke", steps=4, learning_rate=1e-2), temperature=kit.linear(1.2, 0.8), held_out_every=2
)
"""


def written(folder, *, recipe=True, name="my_recipe.py"):
    """The path of such a file, with the recipe or the task alone."""
    path = folder / name
    path.write_text(FILE + (RECIPE if recipe else ""))
    return path
