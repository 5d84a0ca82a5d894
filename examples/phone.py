"""The menus of a phone: a goal names the way, and every screen has its own order of buttons. Mocked.

    python -m grpo_kit train examples/phone.py:phone --preset smoke

trains a tiny random model for two steps, to see that it runs; leave --preset out for what fits this machine. In
Python, in the repository's folder: `from examples.phone import phone`, then `phone()` is a task.
For models of 0.5B or more.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping
from typing import Any

from grpo_kit.more.episodes import EpisodeTask, View, worked

# App -> menu -> switches; four of each, and no name twice.
MENUS = {
    "Settings": {
        "Sound": ("Vibrate", "Ringtone", "Chime", "Mute"),
        "Screen": ("Dark mode", "Rotation", "Zoom", "Night light"),
        "Battery": ("Power saver", "Percentage", "Fast charging", "Sleep"),
        "Network": ("Wifi", "Bluetooth", "Hotspot", "Roaming"),
    },
    "Mail": {
        "Inbox": ("Threads", "Preview", "Spam filter", "Images"),
        "Writing": ("Signature", "Spelling", "Quotes", "Drafts"),
        "Alerts": ("Badge", "Banner", "Digest", "Reminder"),
        "Storage": ("Archive", "Offline", "Backup", "Cleanup"),
    },
    "Camera": {
        "Photo": ("Flash", "Timer", "Raw", "Mirror"),
        "Video": ("Slow motion", "Stabilizer", "Microphone", "Autofocus"),
        "View": ("Grid lines", "Level", "Histogram", "Hints"),
        "Saving": ("Location", "Copies", "Albums", "Watermark"),
    },
    "Clock": {
        "Alarm": ("Snooze", "Sunrise", "Repeat", "Weekend"),
        "Stopwatch": ("Laps", "Beep", "Countdown", "History"),
        "World": ("Home city", "Day names", "Weather", "Map"),
        "Look": ("Seconds", "Analog", "Full date", "Colours"),
    },
}
HOME = "Home"
BUTTONS = 4  # of every screen
_WORKED = ((0, 3, 1), (2, 0, 3), (3, 1, 2))  # the buttons that the worked episodes tap, from 0


class Phone:
    """Row: screens {screen: [buttons]}, path [app, menu, switch]. Reward 1 for the right switch, 0 for a wrong one.

    An action that the menu does not offer is invalid, and changes nothing.
    """

    actions = (*(f"tap {n}" for n in range(1, BUTTONS + 1)), "back")

    def reset(self, row: Mapping[str, Any]) -> str:
        """The home screen."""
        self.screens, self.wanted = row["screens"], row["path"][-1]
        self.way, self.invalid = [HOME], False
        return self._screen()

    def step(self, text: str) -> tuple[str, float, bool]:
        """tap N: opens a menu, or turns on a switch, which ends the episode; back: to the screen before."""
        words = text.strip().lower().removesuffix(".")
        if words == "back" and len(self.way) > 1:
            self.way.pop()
            return self._screen(), 0.0, False
        if tap := re.fullmatch(f"tap ([1-{BUTTONS}])", words):
            button = self.screens[self.way[-1]][int(tap[1]) - 1]
            if button not in self.screens:
                return f"{button} is on.", float(button == self.wanted), True
            self.way.append(button)
            return self._screen(), 0.0, False
        self.invalid = True
        return f"That cannot be done here. {self._screen()}", 0.0, False

    def _screen(self) -> str:
        name = self.way[-1]
        buttons = ", ".join(f"{n} {button}" for n, button in enumerate(self.screens[name], 1))
        return f"{name}: {buttons}. You can: tap N{'' if name == HOME else ', back'}."


def tapper(row: Mapping[str, Any], rng: random.Random) -> Any:
    """The policy that taps the buttons named in the goal."""

    def respond(observation: str) -> str:
        for name in row["path"]:
            if button := re.search(rf"(\d) {name}[,.]", observation):
                return f"tap {button[1]}"
        return "back"

    return respond


def phone(
    n_train: int = 256, n_held_out: int = 64, *, max_turns: int = 5, seed: int = 0
) -> EpisodeTask:
    """Three right taps. The 64 tap sequences are right equally often.

    Raises ValueError for fewer than 3 turns, and for a split without rows.
    """
    if not isinstance(max_turns, int) or max_turns < 3:
        raise ValueError(
            f"max_turns={max_turns!r} leaves no turns for three taps; give at least 3"
        )
    rng = random.Random(seed)
    ways = list(itertools.product(range(BUTTONS), repeat=3))
    rng.shuffle(ways)
    count = len(_WORKED) + n_held_out + n_train
    rows = [
        _row(rng, way)
        for way in (*_WORKED, *(ways[place % len(ways)] for place in range(3, count)))
    ]
    shown, rows = rows[: len(_WORKED)], rows[len(_WORKED) :]
    return EpisodeTask(
        "phone",
        train=rows[n_held_out:],
        held_out=rows[:n_held_out],
        environment=Phone,
        view=View(
            chat=True,
            repeat_goal=False,
            system="Answer with one action: tap N or back.",
            examples=tuple((row["question"], worked(Phone(), tapper, row)) for row in shown),
        ),
        max_turns=max_turns,
        max_completion_tokens=8,
        optimum=tapper,
        actions=Phone.actions,
    )


def _row(rng: random.Random, way: tuple[int, int, int]) -> dict[str, Any]:
    """way: places, from 0, of the three right buttons."""
    app = rng.choice(list(MENUS))
    menu = rng.choice(list(MENUS[app]))
    path = [app, menu, rng.choice(MENUS[app][menu])]
    screens = {HOME: list(MENUS)} | {a: list(m) for a, m in MENUS.items()}
    screens |= {
        name: list(switches) for menus in MENUS.values() for name, switches in menus.items()
    }
    for buttons in screens.values():
        rng.shuffle(buttons)
    for name, button, place in zip((HOME, app, menu), path, way, strict=True):
        screens[name].remove(button)
        screens[name].insert(place, button)
    return {
        "question": f"In {app}, under {menu}, turn on {path[-1]}.",
        "answer": path[-1],
        "path": path,
        "screens": screens,
    }
