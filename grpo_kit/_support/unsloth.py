"""Unsloth beside the kit: did it come too late, what did it replace, which of TRL's defaults did it change?

Unsloth rewrites transformers' model classes, TRL's trainers and their configs when it is imported. Nothing here imports
it; docs/tasks_and_rewards.md says how the two are used together, and what of it was run.
Only files that load transformers import this one, so that it is there from when the kit loaded transformers.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from dataclasses import MISSING, fields
from typing import Any

# the order of sys.modules would not tell: Unsloth enters itself anew
_CAME_FIRST = "unsloth" in sys.modules


def warn_if_late() -> None:
    """A RuntimeWarning where unsloth was imported after the kit had loaded transformers, and what to do."""
    if "unsloth" in sys.modules and not _CAME_FIRST:
        warnings.warn(
            "unsloth was imported after grpo_kit, which had loaded transformers by then: what was taken from there "
            "before is not Unsloth's, the rest is. Start Python again with `import unsloth` as its first line",
            RuntimeWarning,
            stacklevel=3,
        )


def replaced_layers(model: Any) -> str | None:
    """The name of one module of `model` that computes by Unsloth's code, None where none does.

    The kit's engine and packed update know transformers' own decoders; for such a model the plain ways are taken.
    """
    for module in model.modules():
        origin = getattr(module.forward, "__module__", None) or ""
        if origin.startswith("unsloth"):
            return type(module).__name__
    return None


def changed_defaults(config: type) -> dict[str, Any]:
    """TRL's own defaults of those arguments whose default Unsloth changed: given explicitly they are as in TRL.

    config: trl.GRPOConfig as it is imported now; one that nobody replaced gives {}.
    """
    original = [base for base in config.__mro__ if base.__name__ == "GRPOConfig"][-1]
    if original is config:
        return {}
    parameters = inspect.signature(config.__init__).parameters
    defaults = {}
    for field in fields(original):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in parameters or default is MISSING:
            continue
        if parameters[field.name].default != default:
            defaults[field.name] = default
    return defaults
