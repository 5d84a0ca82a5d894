"""Files of the kit's repository that are not installed with it: recorded runs, benchmarks."""

from pathlib import Path

_AROUND_THE_KIT = Path(__file__).resolve().parents[2]


def in_repository(path: str) -> Path:
    """A file or folder of the repository from which the kit was installed in place, or in which a notebook runs.

    path: as in `"benchmarks/results/advice"`.
    Raises FileNotFoundError if there is no repository: the kit is installed as a copy, and the notebook lies alone.

    >>> in_repository("benchmarks/nothing")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FileNotFoundError: 'benchmarks/nothing' lies in the kit's repository, which is neither around ...
    """
    folder = Path.cwd()
    for root in (_AROUND_THE_KIT, folder, folder.parent):
        if (root / "grpo_kit").is_dir() and (root / path).exists():
            return root / path
    raise FileNotFoundError(
        f"{path!r} lies in the kit's repository, which is neither around the installed kit nor around {str(folder)!r}; "
        "clone it and open this notebook there. Cells that do not read it run without"
    )
