"""What is not installed with the kit and lies in its repository: recorded runs, benchmarks."""

from pathlib import Path

_AROUND_THE_KIT = Path(__file__).resolve().parents[2]


def in_repository(path: str) -> Path:
    """A file or folder of the repository that this kit was installed from in place, or that a notebook is run in.

    path: as in `"benchmarks/results/advice"`.
    Raises FileNotFoundError where there is none: of an installed copy of the kit, with a notebook that is alone.

    >>> in_repository("benchmarks/nothing")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FileNotFoundError: 'benchmarks/nothing' lies in the kit's repository, which is neither around ...
    """
    here = Path.cwd()
    for root in (_AROUND_THE_KIT, here, here.parent):
        if (root / "grpo_kit").is_dir() and (root / path).exists():
            return root / path
    raise FileNotFoundError(
        f"{path!r} lies in the kit's repository, which is neither around the installed kit nor around {str(here)!r}; "
        "clone it and open this notebook there. Cells that do not read it run without"
    )
