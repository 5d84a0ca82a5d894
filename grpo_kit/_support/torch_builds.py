"""Packages that are built for one torch: is one here that was built for another?

transformers loads torchvision when a trainer is imported, and then names whatever it was loading
("Could not import module 'PrinterCallback'"), not the package that failed. The kit needs neither of the two.
"""

from __future__ import annotations

import importlib
from importlib import metadata

_BUILT_FOR_ONE = ("torchvision", "torchaudio")


def misfits() -> list[str]:
    """A sentence for each package here that was built for another torch and cannot be imported, with what mends it.

    Only one whose version tells of another torch is tried; that takes a second.
    """
    try:
        torch = metadata.version("torch").split("+")[0]
    except metadata.PackageNotFoundError:
        return []
    names = [name for name in _BUILT_FOR_ONE if _is_of_another(name, torch) and not _loads(name)]
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
    except Exception:  # an operator that is not there, a library that cannot be loaded, a symbol
        return False
    return True
