"""Short summaries of tensors, and how far two records are apart."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.oracle.cases import draw

NUMBERS = 8  # projections of a tensor
SMALL = (
    # a tensor's error is a share of its norm, but of no less than this share of the whole gradient's
    1e-3
)


class Difference(NamedTuple):
    """One comparison. error: relative. limit: the largest error that passes."""

    case: str
    what: str
    error: float
    limit: float

    @property
    def passes(self) -> bool:
        """Whether the error is within its limit; NaN is not."""
        return self.error <= self.limit


@functools.lru_cache(maxsize=64)
def _signs(name: str, size: int) -> np.ndarray:
    """(NUMBERS, size) of -1 and 1, drawn by the tensor's name."""
    bits = np.unpackbits(np.frombuffer(draw(name).bytes(NUMBERS * (size // 8 + 1)), np.uint8))
    return (bits[: NUMBERS * size].reshape(NUMBERS, size).astype(np.float32)) * 2 - 1


def summary(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Of each tensor its norm and NUMBERS projections on random signs.

    The mean square of the projections' errors is the square of the tensor's error, so 8 numbers see a wrong tensor.
    """
    made = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1).double().numpy()
        made[name] = [float(np.linalg.norm(flat)), *(_signs(name, flat.size) @ flat).tolist()]
    return made


def tensor_errors(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, float]:
    """The relative error of each tensor from two summaries; infinite for a tensor that one of them lacks."""
    whole = np.sqrt(sum(numbers[0] ** 2 for numbers in wanted.values()))
    errors = dict.fromkeys(got.keys() ^ wanted.keys(), float("inf"))
    for name in got.keys() & wanted.keys():
        apart = np.array(got[name]) - np.array(wanted[name])
        error = max(abs(apart[0]), np.sqrt(np.mean(apart[1:] ** 2)))
        errors[name] = float(error / max(wanted[name][0], SMALL * whole, 1e-12))
    return errors


def number_error(got: float, wanted: float, least: float = 0.0) -> float:
    """|got - wanted| as a share of |wanted|, or of `least` where that is larger."""
    return abs(got - wanted) / max(abs(wanted), least, 1e-12)


def worst(differences: list[Difference]) -> dict[str, float]:
    """The largest error of each kind of comparison ("gradient", "loss", ...)."""
    kinds: dict[str, float] = {}
    for one in differences:
        kind = one.what.split(" of ")[0]
        kinds[kind] = max(kinds.get(kind, 0.0), one.error)
    return kinds


def table(differences: list[Difference], most: int = 20) -> str:
    """The failures, the worst first, and a line that counts them."""
    failed = sorted((d for d in differences if not d.passes), key=lambda d: -d.error)
    lines = [
        f"  {d.case}: {d.what} differs by {d.error:.1e} (limit {d.limit:.0e})"
        for d in failed[:most]
    ]
    largest = ", ".join(f"{kind} {error:.1e}" for kind, error in worst(differences).items())
    return "\n".join(
        [f"{len(differences)} comparisons, {len(failed)} fail; largest: {largest}", *lines]
    )
