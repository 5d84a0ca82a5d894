"""Results made once and kept: a folder for their settings, a JSON file for each. Files where a user asks for them.

And files of the kit's repository that are not installed with it: recorded runs, benchmarks.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_kit.record._lines import read_json
from grpo_kit.record._run_folder import path_of
from grpo_kit.record.files import write_whole


def cached_json(path: str | Path, make: Callable[[], Any]) -> Any:
    """The contents of the JSON file; without it, the result of make(), written first. An interrupt leaves no file.

    The result is read from the file in both cases: keys are texts, tuples are lists. Raises RunFolderError for a file
    that cannot be read.
    """
    path = path_of(path)
    if not path.exists():
        write_whole(path, json.dumps(make()).encode())
    return read_json(path, object)


def settings_folder(root: str | Path, name: str, *settings: Any) -> Path:
    """The folder root/name_<digest of the settings>, made if missing: the same settings find it again.

    For results that are made once and kept, with cached_json for each file. A setting counts by its str():
    use numbers, texts, lists and configs, whose str() shows all their contents. Code is not in the digest.

    >>> settings_folder("runs", "sweep_cpu", [1e-5, 2e-5], 4)  # doctest: +SKIP
    PosixPath('runs/sweep_cpu_bf4593')
    """
    digest = hashlib.sha1("".join(map(str, settings)).encode()).hexdigest()[:6]
    folder = path_of(root, "root") / f"{name}_{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_where_asked(path: str | os.PathLike, data: bytes) -> Path:
    """Write a file where a user asked for it, into a folder that is made if it is not there; returns its path."""
    target = path_of(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, data)
    return target


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
