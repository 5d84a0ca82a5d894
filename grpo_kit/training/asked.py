"""Changes that some of several processes were asked for, made those of all."""

from __future__ import annotations

from typing import Any

from grpo_kit.training.ranks import Ranks

Asked = tuple[dict[str, Any], str]  # values, and who asked

CANNOT_TRAVEL = (
    "a function cannot go from one process to another; call change() in each, or give one of the kit's"
)


def asked_of_any(ranks: Ranks, mine: list[Asked]) -> tuple[list[Asked], list[dict[str, Any]]]:
    """What any process was asked for, once, the main one's first; and the values that cannot be given to all.

    mine: this process's, as a file holds them. A temperature that no file can hold is there by a function's name alone:
    each process has to have been asked for it.
    """
    if ranks.count == 1:
        return mine, []
    everyone = ranks.gather(mine)
    asked = list(everyone[0])
    for others in everyone[1:]:
        known = list(everyone[0])
        for one in others:
            if one in known:
                known.remove(one)
            else:
                asked.append(one)
    lost = [one for one in asked if _by_name(one) and not all(one in others for others in everyone)]
    return [one for one in asked if one not in lost], [values for values, _ in lost]


def _by_name(one: Asked) -> bool:
    temperature = one[0].get("temperature")
    return isinstance(temperature, str) and temperature.startswith("function ")
