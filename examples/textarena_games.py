"""textarena's games for one player as environments, each with its own random numbers.

    pip install "textarena>=0.7.4,<0.8"
    python -m grpo_kit train examples/textarena_games.py:guess_the_number --preset smoke

trains a tiny random model for two steps, to see that it runs; leave --preset out for what fits this machine. Another
game is `from_textarena("Wordle-v0")` in place of that one's environment. Games with words load them through nltk, some
need Python 3.12.
"""

from __future__ import annotations

import difflib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from grpo_kit.more.episodes import Environment, EpisodeTask, View

# textarena's games seed Python's own generator and draw from it, so only one of them moves at a time.
_MOVES = threading.Lock()
_MINE = "PLAYER_ACTION"


def from_textarena(
    name: str, *, highest: float = 1.0, **options: Any
) -> Callable[[], Environment]:
    """A game of textarena for one player, such as "GuessTheNumber-v0", as environments; options are passed to the game.

    Row: seed, a whole number of at least 0, which selects the game. Every game has its own random numbers, so that it
    runs the same way whatever is played beside it, and the caller's random state is unchanged.
    The first observation is the game's prompt, a later one the news since the last. Actions stand in square
    brackets; all variants but "-raw" add them. A move that the game reports as invalid is invalid; textarena ends the
    game at the second invalid move in a row.
    Reward: at the end, the game's pay divided by `highest`, clipped to [0, 1]: a lost or aborted game pays -1, hence
    0. highest: the pay of the best game, such as 20 in "Set-v0".
    Raises ImportError without the package; ValueError for an unknown game, one for several players, and unknown
    options; also the game's own errors if it needs words of nltk, a key or a newer Python.
    Source: github.com/LeonGuertler/TextArena, 0.7.4.

    >>> guess_the_number()  # doctest: +SKIP
    EpisodeTask('number', train=64, held_out=16)
    """
    if not highest > 0:
        raise ValueError(
            f"highest={highest!r} must be a number above 0: what the best game pays"
        )
    _Game(name, highest, options).reset({"seed": 0})  # raises errors now
    return lambda: _Game(name, highest, options)


def guess_the_number(
    n_train: int = 64, n_held_out: int = 16, *, max_turns: int = 6
) -> EpisodeTask:
    """A number from 1 to 20, with "higher" and "lower" after each guess; a game a seed."""
    rows = [
        {"question": "Guess the number.", "seed": seed} for seed in range(n_held_out + n_train)
    ]
    return EpisodeTask(
        "number",
        train=rows[n_held_out:],
        held_out=rows[:n_held_out],
        environment=from_textarena("GuessTheNumber-v0"),
        view=View(chat=True, repeat_goal=False, system="Answer with one number."),
        max_turns=max_turns,
        max_completion_tokens=8,
        actions=tuple(map(str, range(1, 21))),
    )


class _Game:
    """One game after another."""

    def __init__(self, name: str, highest: float, options: Mapping[str, Any]) -> None:
        self.name, self.highest, self.invalid = name, highest, False
        self.numbers = random.Random(0).getstate()
        with self._own_numbers():
            self.played = _made(name, options)
        self.inner = self.played
        # wrappers; observation wrappers would repeat everything
        while hasattr(self.inner, "env"):
            self.inner = self.inner.env

    def reset(self, row: Mapping[str, Any]) -> str:
        """The game's prompt, and its board if it has one."""
        seed = row.get("seed")
        if type(seed) is not int or seed < 0:
            raise ValueError(
                f"a row for {self.name!r}: seed={seed!r} must be a whole number of at least 0: which game it is"
            )
        self.numbers, self.invalid = random.Random(seed).getstate(), False
        with self._own_numbers():
            try:
                self.played.reset(num_players=1, seed=seed)
            except (AssertionError, ValueError) as error:
                raise ValueError(
                    f"name={self.name!r} is no game for one player: {error}"
                ) from error
            if not isinstance(self.inner.state, _textarena().SinglePlayerState):
                raise ValueError(f"name={self.name!r} is no game for one player")
            return self._news()

    def step(self, text: str) -> tuple[str, float, bool]:
        """One move."""
        with self._own_numbers():
            done, _ = self.played.step(text.strip())
            news, state = self._news(), self.inner.state
        about = state.game_info[0]
        self.invalid = bool(about["invalid_move"] or state.error_count)
        if not done:
            return news or "Go on.", 0.0, False
        pays = state.rewards[0]
        if about["invalid_move"] and isinstance(pays, str):
            pays = 0.0  # four games return the reason in the reward's place
        reward = min(1.0, max(0.0, pays / self.highest))
        return "\n".join(filter(None, [news, about.get("reason")])), reward, True

    def _news(self) -> str:
        """The game's messages since the last call, without the player's own moves."""
        _, messages = self.inner.get_observation()
        # Three games report the move itself in another order, its text in the kind's place.
        told = [
            text.strip() for _, text, kind in messages if getattr(kind, "name", _MINE) != _MINE
        ]
        return "\n".join(filter(None, told))

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Sets Python's generator to this game's state, and restores the caller's afterwards."""
        with _MOVES:
            callers = random.getstate()
            random.setstate(self.numbers)
            try:
                yield
            finally:
                self.numbers = random.getstate()
                random.setstate(callers)


def _textarena() -> Any:
    try:
        import textarena
    except ImportError as error:
        raise ImportError(
            'from_textarena needs the package textarena: run `pip install "textarena>=0.7.4,<0.8"`'
        ) from error
    return textarena


def _made(name: str, options: Mapping[str, Any]) -> Any:
    textarena = _textarena()
    known = textarena.envs.registration.ENV_REGISTRY
    if name not in known:
        close = difflib.get_close_matches(name, known, n=5, cutoff=0.3)
        raise ValueError(
            f"name={name!r} is no game of textarena; the nearest are {', '.join(close)}"
        )
    try:
        return textarena.make(name, **options)
    except TypeError as error:
        raise ValueError(f"options={dict(options)!r} do not fit {name!r}: {error}") from error
