"""How one gradient stands to another: cosine and norm, over any set of parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch

Gradient = dict[str, torch.Tensor]


def place(name: str) -> str:
    """embeddings, layer 0 or other layers."""
    if ".layers." not in name:
        return "embeddings" if "embed" in name or "lm_head" in name else "other layers"
    return "layer 0" if ".layers.0." in name else "other layers"


class Likeness:
    """How one gradient stands to the reference, from sums over tensors."""

    def __init__(self, gradient: Gradient, reference: Gradient) -> None:
        self.sums = {}  # name -> (product, own square, the reference's square)
        for name, tensor in reference.items():
            own, theirs = gradient[name].flatten(), tensor.flatten()
            pairs = ((own, theirs), (own, own), (theirs, theirs))
            self.sums[name] = torch.tensor([(a.double() @ b.double()).item() for a, b in pairs]).double()

    def of(self, names: list[str] | None = None) -> dict[str, float]:
        """cosine, norm by the reference's norm, and the reference's norm, over these tensors (None: all)."""
        product, own, theirs = sum(self.sums[name] for name in names or self.sums).tolist()
        known = own > 0 and theirs > 0
        return {
            "cosine": product / (own * theirs) ** 0.5 if known else float("nan"),
            "norm": (own / theirs) ** 0.5 if theirs > 0 else float("nan"),
            "reference norm": theirs**0.5,
        }

    def table(self, key: Callable[[str], str]) -> dict[str, dict[str, float]]:
        """`of` for the tensors that share a key(name)."""
        groups: dict[str, list[str]] = {}
        for name in self.sums:
            groups.setdefault(key(name), []).append(name)
        return {name: self.of(members) for name, members in groups.items()}


def layer_of(name: str) -> str:
    """'7' of model.layers.7.mlp.up_proj.weight; else the module's name."""
    return name.split(".layers.")[1].split(".")[0] if ".layers." in name else name.split(".")[-2]


def kind_of(name: str) -> str:
    """'up_proj' of model.layers.7.mlp.up_proj.weight."""
    return name.split(".")[-2]
