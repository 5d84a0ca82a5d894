"""A task that a Python file defines, for the command line and for notebooks."""

from __future__ import annotations

import os
import sys
import traceback
import types
from dataclasses import replace

from grpo_kit.record._run_folder import path_of
from grpo_kit.tasks.task import Task


def from_file(path: str | os.PathLike, name: str = "task") -> Task:
    """The task that a Python file has under a name: what stands there, or what a function of that name returns.

    The file is run. What it imports may stand beside it. What trains in it belongs under `if __name__ == "__main__":`.
    Its field `file` says where it was found, as FILE.py:NAME, which `path` may be too; a run folder keeps that.
    Raises ValueError, naming file and line, for a file that is not there, fails, or has no such task.

    >>> from_file("my_task.py")  # doctest: +SKIP
    """
    path = path_of(path).absolute()
    if ".py:" in path.name:
        file, _, name = path.name.rpartition(":")
        path = path.with_name(file)
    if not path.is_file():
        raise ValueError(
            f"{path} is no file; give a Python file with a line task = kit.tasks.from_rows(...)"
        )
    module = types.ModuleType(f"task_file_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where a class of the file looks for its module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(path.read_text(encoding="utf-8-sig"), str(path), "exec"), vars(module))
        task = vars(module).get(name)
        if isinstance(task, types.FunctionType):
            task = task()
    except Exception as error:
        steps = traceback.extract_tb(error.__traceback__)
        lines = [step.lineno for step in steps if step.filename == str(path)]
        if isinstance(error, UnicodeDecodeError) and not lines:
            raise ValueError(
                f"{path} is no text in UTF-8 ({error}); save it as that"
            ) from error
        line = lines[-1] if lines else getattr(error, "lineno", None)
        raise ValueError(f"{path}, line {line}: {type(error).__name__}: {error}") from error
    if isinstance(task, type) or not (hasattr(task, "train") and hasattr(task, "file")):
        problem = f"has a {type(task).__name__} called `{name}`"
        if task is None:
            problem = f"defines no `{name}`"
        raise ValueError(
            f"{path} {problem}; write {name} = kit.tasks.from_rows(...) in it, or a function {name}() that returns a "
            "task"
        )
    return replace(task, file=f"{path}:{name}")
