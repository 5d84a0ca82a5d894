"""Whether a model in memory was trained already, so that a new run says from where it starts."""

from __future__ import annotations

from typing import Any

import torch

from grpo_kit.models import base_model

_MARK = "_grpo_kit_trained"


def mark_trained(model: Any, folder: str, steps: int) -> None:
    """The model has the weights that a run made."""
    setattr(base_model(model), _MARK, (folder, steps))


def trained_before(model: Any, folder: str) -> str | None:
    """The run, other than the one in `folder`, that a model in memory was trained in; None for one as it was loaded."""
    mark = getattr(base_model(model), _MARK, None) if isinstance(model, torch.nn.Module) else None
    return f"{mark[1]} steps in {mark[0]}" if mark is not None and mark[0] != folder else None
