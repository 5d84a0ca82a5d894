"""A task that a Python file defines: found by its name, or refused with file and line."""

import pytest

import grpo_kit as kit

TASK = "import grpo_kit as kit\ntask = kit.tasks.largest(n_train=4, n_held_out=2)\n"


def test_the_name_may_be_a_task_or_a_function_and_beside_the_file_stands_what_it_imports(
    tmp_path,
):
    (tmp_path / "rows_beside_it.py").write_text("HOW_MANY = 5\n")
    (tmp_path / "mine.py").write_text(
        f"{TASK}from dataclasses import dataclass\nfrom rows_beside_it import HOW_MANY\n\n\n"
        "@dataclass\nclass Size:\n    n: 'int'\n\n\n"
        "def other():\n    return kit.tasks.largest(n_train=Size(HOW_MANY).n, n_held_out=2)\n"
    )
    assert len(kit.tasks.from_file(tmp_path / "mine.py").train) == 4
    assert len(kit.tasks.from_file(tmp_path / "mine.py", "other").train) == 5


@pytest.mark.parametrize(
    "text, said",
    [
        ("x = 1\n", r"bad.py defines no `task`; write task = kit.tasks.from_rows"),
        ("task = [1]\n", "bad.py has a list called `task`"),
        (
            "import grpo_kit as kit\ntask = kit.nothing\n",
            r"bad.py, line 2: AttributeError: .*nothing",
        ),
        ("def task():\n    return 1 / 0\n", r"bad.py, line 2: ZeroDivisionError"),
        ("task = (\n", r"bad.py, line 1: SyntaxError"),
    ],
)
def test_a_file_without_a_task_says_why(tmp_path, text, said):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=said):
        kit.tasks.from_file(tmp_path / "bad.py")
    with pytest.raises(ValueError, match="none.py is no file; give a Python file"):
        kit.tasks.from_file(tmp_path / "none.py")
