"""The Python file that a recipe or a task stands in: read, run, found again, and kept beside what was made with it."""

from __future__ import annotations

import re
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_kit.episodes.episode_task import EpisodeTask
from grpo_kit.tasks import Task

NAMES = ("recipe", "task")  # what is looked for in a file, in this order
_reading: list[Path] = []  # files that are run this moment


@dataclass(frozen=True)
class Source:
    """A name in a Python file. path: where it was read, text: as it was then; that is what is run."""

    path: Path
    name: str
    text: str

    @classmethod
    def of(cls, where: str | Path) -> Source:
        """Of "my_recipe.py", or "my_task.py:name". Raises ValueError for what is no such file, or has no such name."""
        path, _, name = str(where).partition(".py:")
        path = Path(path + ".py" if name else path).expanduser()
        if not path.is_file():
            raise ValueError(f"{path} is no file; give a Python file that defines `recipe` or `task`")
        text = path.read_text(encoding="utf-8")
        return cls(path, name or _first_name(path, text), text)

    def value(self) -> Any:
        """What the name stands for, the file run anew: a Recipe, a Task, or what a function of that name gives.

        Beside it may stand what the file imports: it is run as if from where it was read, from a copy too.
        Raises ValueError, naming file and line, for a file that fails.
        """
        module = types.ModuleType(f"recipe_file_{re.sub(r'[^0-9a-zA-Z]', '_', self.path.stem)}")
        module.__file__ = str(self.path.absolute())
        sys.modules[module.__name__] = module
        if (folder := str(self.path.absolute().parent)) not in sys.path:
            sys.path.append(folder)
        self._run(lambda: exec(compile(self.text, module.__file__, "exec"), vars(module)))
        found = vars(module).get(self.name)
        if found is None:
            raise ValueError(f"{self.path} defines no `{self.name}`; write {self.name} = ... in it")
        if isinstance(found, types.FunctionType):
            found = self._run(found)
        return found

    def _run(self, call: Callable[[], Any]) -> Any:
        _reading.append(self.path)
        try:
            return call()
        except Exception as error:
            lines = [
                step.lineno
                for step in traceback.extract_tb(error.__traceback__)
                if step.filename == str(self.path.absolute())
            ]
            line = lines[-1] if lines else getattr(error, "lineno", None)
            at = f", line {line}" if line else ""
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{self.path}{at}: {kind}{error}") from error
        finally:
            _reading.pop()


def check_not_reading() -> None:
    """A file that trains when it is read would train again each time it is asked for its task. Raises ValueError."""
    if _reading:
        raise ValueError(
            "it trains while it is read; put what trains under `if __name__ == '__main__':`, so that the recipe can be "
            "read without it"
        )


def home_of(*things: Any) -> Source | None:
    """The module-level name in a Python file that one of these things has: what was imported from there; else None."""
    for thing in things:
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            own = str(getattr(module, "__name__", "")).split(".")[0] == "grpo_kit"
            if own or not file or not file.endswith(".py"):
                continue
            with suppress(RuntimeError):  # a dict that changes meanwhile
                for name, value in list(vars(module).items()):
                    if value is thing and not name.startswith("_"):
                        path = Path(file)
                        return Source(path, name, path.read_text(encoding="utf-8"))
    return None


def as_task(value: Any, where: str) -> Task | EpisodeTask:
    """A Task. Raises ValueError, naming where it is from, for anything else."""
    if not isinstance(value, Task | EpisodeTask):
        raise ValueError(
            f"{where} is a {type(value).__name__}; give a Task, as kit.tasks.from_rows(...) makes it, or a function "
            "that makes one"
        )
    return value


def _first_name(path: Path, text: str) -> str:
    for name in NAMES:
        if re.search(rf"^(?:{name}\s*(?::[^=\n]*)?=|def {name}\()|^from .* import .*\b{name}\b", text, re.M):
            return name
    raise ValueError(
        f"{path} defines neither `recipe` nor `task`; write recipe = kit.Recipe(...) or task = "
        "kit.tasks.from_rows(...) in it, or name what it is called: FILE.py:NAME"
    )
