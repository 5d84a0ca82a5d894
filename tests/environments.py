"""Environments that hold some of this one's distributions and nothing else, made in a second: links in place of files.

What cannot be imported there is not installed there, as far as Python and pip can tell.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(requirements):
    """Names of the installed distributions that the requirements ask for, with what those ask for in turn.

    Raises importlib.metadata.PackageNotFoundError where one is missing here.
    """
    found, ahead = set(), [Requirement(text) for text in requirements]
    while ahead:
        wanted = ahead.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (
                (name, extra) in found
                or wanted.marker
                and not wanted.marker.evaluate({"extra": ""})
            ):
                continue
            found.add((name, extra))
            for text in metadata.requires(name) or []:
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    inner.marker = None
                    ahead.append(inner)
    return {name for name, _ in found}


def make(folder, names):
    """A virtual environment in the folder with links to these distributions' files; the path of its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path(folder) / "lib" / version / "site-packages"
    files = {name: _entries(metadata.distribution(name)) for name in names}
    everyone = [
        entry for d in metadata.distributions() for entry in {f.parts[0] for f in d.files or []}
    ]
    for entries in files.values():
        for root, entry, below in entries:
            if everyone.count(entry) == 1:
                _link(root / entry, packages / entry)
            else:  # a folder that several distributions share: only what is this one's
                for path in below:
                    _link(root / path, packages / path)
    return Path(folder) / "bin" / "python"


def _entries(distribution):
    """(root, first part, its files) of what lies in site-packages, scripts left out."""
    root, below = Path(str(distribution.locate_file(""))), {}
    for file in distribution.files or []:
        if file.parts[0] not in ("..", "__pycache__") and not Path(file).is_absolute():
            below.setdefault(file.parts[0], []).append(Path(*file.parts))
    return [(root, entry, paths) for entry, paths in below.items()]


def _link(source, target):
    if source.exists() and not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
