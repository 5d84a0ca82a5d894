"""Public names of a package that are imported at their first use, so that one name does not load the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package whose public names are imported at their first use.

    If a name is also its module's (`tasks.largest.largest`), the package's attribute is the function: importing the
    module does not hide it.
    """

    _names: Mapping[str, str]  # public name -> full name of its module

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = getattr(import_module(self._names[name]), name)
        self.__dict__[name] = found
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in self._names):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self._names})


def lazy(package: str, modules: Mapping[str, list[str]]) -> list[str]:
    """Make a package's public names load at their first use; returns them, in order, for its `__all__`.

    package: its `__name__`. modules: {module of the package: public names that it defines}. Editors read the
    same names in the package's `if TYPE_CHECKING` block.
    """
    module = sys.modules[package]
    module.__class__ = _LazyPackage
    module.__dict__["_names"] = {
        name: f"{package}.{file}" for file, names in modules.items() for name in names
    }
    return sorted(module.__dict__["_names"])
