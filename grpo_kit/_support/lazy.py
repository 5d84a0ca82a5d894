"""Public names of a package that are imported at their first use, so that one name does not load the others.

And what is said where one cannot be imported, for a package that was built for another torch. transformers loads
torchvision when a trainer is imported, and then names whatever it was loading ("Could not import module
'PrinterCallback'"), not the package that failed. The kit needs neither.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import sys
from importlib import metadata
from threading import Timer
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package whose public names and modules are imported at their first use.

    If a name is also its module's (`tasks.largest.largest`), the package's attribute is the function: importing the
    module does not hide it.
    """

    # public name -> full name of its module, but for modules of the package itself
    _names: dict[str, str]
    # of a package that has it: a name that stood there -> what is written today
    _MOVED: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            self.__dict__[name] = getattr(_load(self._names[name]), name)
            return self.__dict__[name]
        # Python and notebooks ask any module for names that begin with an underscore.
        if (
            not name.startswith("_")
            and importlib.util.find_spec(f"{self.__name__}.{name}") is not None
        ):
            return _load(f"{self.__name__}.{name}")
        if name in vars(self).get("_MOVED", {}):
            raise AttributeError(f"{name} is called {self._MOVED[name]} now")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in self._names):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})


def lazy(package: str) -> list[str]:
    """Make a package's public names load at their first use; returns them, sorted, for its `__all__`.

    package: its `__name__`. The names are what its source imports under `if TYPE_CHECKING`, which editors read too.
    """
    module = sys.modules[package]
    tree = ast.parse(module.__spec__.loader.get_source(package))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING"
    )
    module_of = {
        alias.name: imports.module for imports in block.body for alias in imports.names
    }
    module.__class__ = _LazyPackage
    vars(module)["_names"] = {
        name: origin for name, origin in module_of.items() if origin != package
    }
    return sorted(module_of)


def _load(module: str) -> ModuleType:
    """A module of the kit, and what it needs; a notebook is told where that takes seconds.

    Collecting garbage while torch and transformers load finds none and takes a quarter of the time: it waits.
    """
    waits, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    notice = Timer(0.3, _say_what_loads)
    if waits and "ipykernel" in sys.modules and "transformers" not in sys.modules:
        notice.start()
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError):
        check_builds()  # transformers does not name the package that failed
        raise
    finally:
        notice.cancel()
        if waits:
            # with the next lines: what was loaded counts as old, and is not looked through at once
            gc.freeze()
            if not frozen:  # else somebody has set objects apart before, and they stay so
                gc.unfreeze()
            gc.enable()


def _say_what_loads() -> None:
    """Once, though torch may come with one module and transformers with the next."""
    if "torch" in sys.modules and _UNSAID:
        print(_UNSAID.pop(), flush=True)


_UNSAID = ["Loading torch and transformers: some seconds."]
_BUILT_FOR_ONE = ("torchvision", "torchaudio")


def misfits() -> list[str]:
    """A sentence for each package here that was built for another torch and cannot be imported, with what mends it.

    Only one whose version tells of another torch is tried; that takes a second.
    """
    try:
        torch = metadata.version("torch").split("+")[0]
    except metadata.PackageNotFoundError:
        return []
    names = [
        name for name in _BUILT_FOR_ONE if _is_of_another(name, torch) and not _loads(name)
    ]
    return [
        f"{name} {metadata.version(name)} was built for another torch than {torch}, which is here, and cannot be "
        f"imported; loading a trainer would fail. The kit does not need it: run `pip uninstall -y {name}`, or "
        f"`pip install -U {name} torch=={torch}` for one that fits, then restart Python"
        for name in names
    ]


def check_builds() -> None:
    """Raises ImportError with the sentences of misfits, where there are any."""
    messages = misfits()
    if messages:
        raise ImportError("\n".join(messages))


def _is_of_another(name: str, torch: str) -> bool:
    """By the torch that the package asks for; torchaudio asks for none, and bears its number."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(text) for text in metadata.requires(name) or ()]
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    for requirement in required:
        if requirement.name == "torch" and requirement.specifier:
            return not requirement.specifier.contains(torch, prereleases=True)
    return name == "torchaudio" and version.split(".")[:2] != torch.split(".")[:2]


def _loads(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:
        # an operator that is not there, a library that cannot be loaded, a symbol
        return False
    return True
