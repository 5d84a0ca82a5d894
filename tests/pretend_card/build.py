"""Compiles cpp/card.cpp against the torch of this interpreter, once; the library is kept in the cache.

The library's name says what it was made of: the sources, torch's and Python's version, the compiler's flags, and where
torch lies, for the library looks for torch's own there. A change of any makes another. GRPO_KIT_CACHE names the cache,
default ~/.cache/grpo_kit, as for the kit itself. Nothing here may import torch: the library must be loaded first.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "cpp"
FLAGS = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w"]


class NotHere(Exception):
    """Why there can be no pretend card in this environment, in one line."""


def library() -> Path:
    """The compiled library; NotHere where there can be none. Takes half a minute the first time."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    torch_version = version("torch")
    if not sys.platform.startswith("linux"):
        raise NotHere(f"the pretend card is for Linux, not {sys.platform}")
    if compiler is None:
        raise NotHere("no C++ compiler: g++ is not on PATH, nor what CXX names")
    root = Path(find_spec("torch").submodule_search_locations[0])
    if list((root / "lib").glob("libtorch_cuda*")) or list(
        (root / "lib").glob("libtorch_hip*")
    ):
        raise NotHere(
            f"torch {torch_version} is built for cards; a pretend one needs the CPU's build"
        )
    path = _folder() / f"card-{_digest(torch_version, root)}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, root, path, torch_version)
    return path


def _folder() -> Path:
    cache = Path(os.environ.get("GRPO_KIT_CACHE") or "~/.cache/grpo_kit").expanduser()
    return cache / "pretend_card"


def _digest(torch_version: str, root: Path) -> str:
    made_of = hashlib.sha256(f"{torch_version} {sys.version_info[:3]} {FLAGS} {root}".encode())
    for source in sorted(SOURCES.iterdir()):
        made_of.update(source.name.encode() + source.read_bytes())
    return made_of.hexdigest()[:16]


def _compile(compiler: str, root: Path, path: Path, torch_version: str) -> None:
    """Under another name first: two processes may build at once."""
    include, lib = root / "include", root / "lib"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        paths = [
            f"-I{include}",
            f"-I{include}/torch/csrc/api/include",
            f"-L{lib}",
            f"-Wl,-rpath,{lib}",
        ]
        libraries = ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"]
        command = [
            compiler,
            *FLAGS,
            *paths,
            str(SOURCES / "card.cpp"),
            "-o",
            str(made),
            *libraries,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            first = next(
                (line for line in done.stderr.splitlines() if "error" in line),
                done.stderr[:200],
            )
            raise NotHere(f"it does not compile against torch {torch_version}: {first.strip()}")
        made.replace(path)


if __name__ == "__main__":
    try:
        print(library())
    except NotHere as reason:
        sys.exit(f"no pretend card: {reason}")
