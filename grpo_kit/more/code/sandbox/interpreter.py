"""The files that a Python program must be able to read: the interpreter, its standard library, shared libraries.

Run as a script, it prints them as JSON; it imports no package of the kit.
"""

from __future__ import annotations

import glob
import importlib
import json
import os
import sys
import sysconfig

# Folders of installed packages: not part of the interpreter, and they may hold answers.
_PACKAGES = ("site-packages", "dist-packages")
_NOT_NEEDED = ("_tkinter", "_curses", "_curses_panel", "readline")


def _load_extensions(folder: str) -> None:
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        module = name.split(".")[0]
        if (
            name.endswith(".so")
            and module not in _NOT_NEEDED
            and not module.startswith(("_test", "xx"))
        ):
            try:
                importlib.import_module(module)
            except ImportError:
                pass  # its library is not installed, so a program cannot have it either


def _aliases(path: str) -> list[str]:
    """`path` and the links beside it that lead to it: the loader opens libz.so.1, the file is libz.so.1.2.13."""
    folder = os.path.dirname(path)
    stem = os.path.basename(path).split(".so")[0]
    siblings = [
        os.path.join(folder, name)
        for name in os.listdir(folder)
        if name.startswith(stem + ".so")
    ]
    return [path] + [
        sibling for sibling in siblings if sibling != path and os.path.realpath(sibling) == path
    ]


def describe() -> dict:
    """executable, prefix, stdlib (a folder), entries (in it, without installed packages), masked (folders of those),
    libraries (files)."""
    stdlib = os.path.realpath(os.path.dirname(os.__file__))
    platform_stdlib = os.path.realpath(sysconfig.get_path("platstdlib"))
    _load_extensions(os.path.join(platform_stdlib, "lib-dynload"))
    _load_extensions(os.path.join(stdlib, "lib-dynload"))
    libraries: set[str] = set()
    mapped: set[str] = set()
    if sys.platform == "linux":
        with open("/proc/self/maps") as maps:
            mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    for path in mapped:
        in_stdlib = path.startswith((stdlib + os.sep, platform_stdlib + os.sep))
        if ".so" in os.path.basename(path) and not in_stdlib and os.path.isfile(path):
            libraries.update(_aliases(path))
    for loader in glob.glob("/lib*/ld-linux*"):  # named by the executable itself
        folder, name = os.path.split(loader)
        libraries.add(os.path.join(os.path.realpath(folder), name))
    entries, masked = [], []
    for folder in {stdlib, platform_stdlib}:
        for entry in os.scandir(folder):
            if entry.name not in _PACKAGES:
                entries.append(entry.path)
            elif entry.is_dir():
                masked.append(entry.path)
    return {
        "executable": os.path.realpath(sys.executable),
        "prefix": sys.base_prefix,
        "stdlib": stdlib,
        "entries": sorted(entries),
        "masked": sorted(masked),
        "libraries": sorted(libraries),
        "platlibdir": sys.platlibdir,
        "version": f"python{sys.version_info.major}.{sys.version_info.minor}",
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
