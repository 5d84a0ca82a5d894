"""Set a profile's main numbers: fields in a notebook, the config cell elsewhere."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

from grpo_kit.browse import in_notebook

_WHOLE = {"steps": 1, "prompts_per_step": 1, "group_size": 2, "max_completion_tokens": 1, "seed": 0}
_REAL = ("learning_rate", "temperature", "beta")


class ConfigPanel:
    """A profile's main numbers as fields; `.value` has what was changed. Made by `config_panel`."""

    def __init__(self, profile: Any, *, widgets: bool) -> None:
        self.profile = profile
        self.fields: dict[str, Any] = {}
        self.widget = None
        if widgets:
            import ipywidgets as w

            style = {"description_width": "170px"}
            for name in self._names():
                value = getattr(profile, name)
                if name in _WHOLE:
                    field = w.BoundedIntText(
                        value, min=_WHOLE[name], max=2**31 - 1, description=name, style=style
                    )
                else:
                    field = w.FloatText(value, description=name, style=style, step=None)
                self.fields[name] = field
            self.widget = w.VBox(list(self.fields.values()))

    def _names(self) -> Sequence[str]:
        known = {field.name for field in dataclasses.fields(self.profile)}
        return [n for n in (*_WHOLE, *_REAL) if n in known and getattr(self.profile, n) is not None]

    @property
    def value(self) -> Any:
        """The profile with the numbers now in the fields; the same object if none was changed."""
        changed = {n: f.value for n, f in self.fields.items() if f.value != getattr(self.profile, n)}
        return dataclasses.replace(self.profile, **changed) if changed else self.profile

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={getattr(self.value, name)!r}" for name in self._names())
        return f"To change a number, give it in the config cell: {numbers}"

    def _repr_mimebundle_(self, **options: Any) -> dict:
        bundle = self.widget._repr_mimebundle_(**options) if self.widget is not None else {}
        return bundle | {"text/plain": repr(self)}


def config_panel(profile: Any) -> ConfigPanel:
    """A small panel with the profile's main numbers: show it in one cell, read `.value` in the next.

    profile: a `Profile`, or any dataclass with fields such as steps, group_size, learning_rate.
    Without widgets `.value` is the profile as given, and a line says how to change the config cell.

    >>> panel = config_panel(profile("cpu"))
    >>> cfg = panel.value
    """
    panel = ConfigPanel(profile, widgets=in_notebook() and importlib.util.find_spec("ipywidgets") is not None)
    if panel.widget is None:
        print(repr(panel))
    return panel
