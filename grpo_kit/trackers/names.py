"""What the trainer in training/ asks of a tracker's name; goes with it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

TRACKERS = ("tensorboard", "trackio", "wandb")


def check_installed(report_to: str | Iterable[str] | None) -> None:
    """Raises ValueError for one of TRACKERS that is asked for and not installed."""
    for name in [report_to] if isinstance(report_to, str) else list(report_to or ()):
        if name in TRACKERS and find_spec(name) is None:
            raise ValueError(f"report_to={name!r}, but {name} is not installed; pip install {name}")
