"""How many tokens a step really computes, and how much of a ratio that explains.

seconds of A / seconds of B = (tokens of A / tokens of B) x (tokens/s of B / tokens/s of A)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from grpo_kit.models._model_facts import base_model

KINDS = ("prefill", "decode", "update", "head")
PASSES = {"prefill": 1, "decode": 1, "forward-backward": 3}  # backward is twice a forward
_OF_PHASE = {"prefill": "prefill", "decode": "decode", "forward-backward": "update"}


class TokenCount:
    """Positions that go through a trainer's model, padding and ended rows included, since `start`.

    prefill, decode: forward passes inside a rollout, over several new tokens a row and over one. update: forward
    passes outside of it, with those that gradient checkpointing repeats. head: positions that the update projects
    onto the vocabulary.

    Seen in the forward functions of the decoder and of its first MLP (inside what is checkpointed), of which a code
    path may call one only or none. What the engine says of itself and what its sampler is asked for count where they
    are more (see `report`, `sampled`); one that says it is not watched meanwhile, which would slow it down.
    """

    def __init__(self, model: Any) -> None:
        self.in_rollout = False
        self._decoder = base_model(model).get_decoder()
        self._put_back = ExitStack()
        self.start()
        self._watch()

    def _watch(self) -> None:
        for place, module in (("decoder", self._decoder), ("mlp", self._decoder.layers[0].mlp)):
            self._watch_one(place, module)

    def _watch_one(self, place: str, watched: torch.nn.Module) -> None:
        cls = type(watched)
        inner = cls.forward

        @wraps(inner)
        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is watched:
                self._see(place, args, kwargs)
            return inner(module, *args, **kwargs)

        cls.forward = forward
        self._put_back.callback(setattr, cls, "forward", inner)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """The forward functions as they were, inside."""
        self._put_back.close()
        try:
            yield
        finally:
            self._watch()

    def start(self) -> None:
        """Every count back to zero."""
        self._counts = {
            place: dict.fromkeys(KINDS, 0) for place in ("decoder", "mlp", "engine", "sampler")
        }

    def close(self) -> None:
        """The forward functions as they were."""
        self._put_back.close()

    def report(self, tokens: dict[str, int] | None) -> None:
        """What an engine says that it computed: {"prefill": positions, "decode": positions}."""
        for kind, n in (tokens or {}).items():
            self._counts["engine"][kind] += n

    def sampled(self, rows: int) -> None:
        """So many rows are sampled behind a token that was decoded."""
        self._counts["sampler"]["decode"] += rows

    def tokens(self) -> dict[str, int | None]:
        """Positions by kind; None where none was seen."""
        return {
            kind: max(seen[kind] for seen in self._counts.values()) or None for kind in KINDS
        }

    def head(self, positions: int) -> None:
        """So many positions of the update are projected onto the vocabulary."""
        self._counts["decoder"]["head"] += positions

    def _see(self, place: str, args: tuple, kwargs: dict[str, Any]) -> None:
        names = ("input_ids", "inputs_embeds", "hidden_states")
        given = [*args[:1], *(kwargs.get(name) for name in names)]
        new = next((x for x in given if x is not None), None)
        if new is None or new.dim() < 2:
            return
        positions = new.numel() // (new.size(-1) if new.is_floating_point() else 1)
        kind = "update"
        if self.in_rollout:
            if new.is_floating_point() and new.dim() == 2:
                return  # hidden states without rows: the others tell whose they are
            kind = "prefill" if new.size(1) > 1 else "decode"
        self._counts[place][kind] += positions


def weighted(tokens: dict[str, int | None]) -> int | None:
    """Tokens of a whole step, each as often as it passes through the model: three times in the update."""
    counts = {phase: tokens[kind] for phase, kind in _OF_PHASE.items()}
    if None in counts.values():
        return None
    return sum(PASSES[phase] * n for phase, n in counts.items())


def factors(
    tokens: dict[str, int | None],
    seconds: dict[str, float],
    other_tokens: dict[str, int | None],
    other_seconds: dict[str, float],
) -> dict[str, dict[str, float]]:
    """By phase and for the "step": how often this is faster than the other, as fewer tokens x faster tokens.

    seconds: of the phases and of the "step". "share by tokens": of the ratio's logarithm, as factors multiply; None for
    ratios of less than a tenth.
    Phases whose tokens nobody counted are left out.

    >>> one = {"prefill": 10, "decode": 10, "update": 10, "head": 1}
    >>> same = {"prefill": 1.0, "decode": 1.0, "forward-backward": 2.0, "step": 4.0}
    >>> eight = {**one, "prefill": 80}
    >>> slow = {**same, "prefill": 16.0}
    >>> {k: round(v, 2) for k, v in factors(one, same, eight, slow)["prefill"].items()}
    {'ratio': 16.0, 'fewer tokens': 8.0, 'faster tokens': 2.0, 'share by tokens': 0.75}
    """
    pairs = {phase: (tokens[kind], other_tokens[kind]) for phase, kind in _OF_PHASE.items()}
    pairs["step"] = weighted(tokens), weighted(other_tokens)
    found = {}
    for phase, (mine, theirs) in pairs.items():
        if not (mine and theirs and seconds[phase] > 0 and other_seconds[phase] > 0):
            continue
        ratio, fewer = other_seconds[phase] / seconds[phase], theirs / mine
        share = math.log(fewer) / math.log(ratio) if max(ratio, 1 / ratio) >= 1.1 else None
        found[phase] = {
            "ratio": ratio,
            "fewer tokens": fewer,
            "faster tokens": ratio / fewer,
            "share by tokens": share,
        }
    return found
