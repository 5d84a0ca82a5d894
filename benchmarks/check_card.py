"""Does check_card see a fault in a fast part, and is it silent where there is none? Faults, put in.

    python -m benchmarks.check_card                                # a tiny random model: a minute
    python -m benchmarks.check_card --model smollm2-135m-instruct  # how far apart right and wrong are

On a card the fast ways are compared with the plain ones once a card, versions and kind of model
(kit.engine.card.check_card); here a CPU is asked. Each fault is put into the code that runs: a mask through which too
much or too little is seen, another temperature, an exception, a NaN. Every fault has to be found in the part that it is
in, and nothing where there is none, in float32, bfloat16 autocast and bfloat16 weights, full and LoRA. "off" is how far
the part was from the plain way, "most" what rounding explains. Saves benchmarks/results/check_card_<model>.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, save
from grpo_kit import Config, load_policy
from grpo_kit.engine import packed_update
from grpo_kit.engine._decode import Decoder
from grpo_kit.engine._first_use import FEW_KERNELS
from grpo_kit.engine._kv_cache import KVCache
from grpo_kit.engine.card import check_card
from grpo_kit.engine.cpu._tree_attention import Block
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.engine.rollout import RolloutEngine
from grpo_kit.engine.sampling import Sampler
from grpo_kit.models._model_facts import base_model

# ---- faults: context managers that patch what will run -------------------------------------------------------------


@contextlib.contextmanager
def changed(owner: type, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """owner.name is make(what it was)."""
    was = owner.__dict__[name]
    was = was.__func__ if isinstance(was, (classmethod, staticmethod)) else was
    with mock.patch.object(owner, name, make(was)):
        yield


def raising(*_: Any, **__: Any) -> Any:
    """What a kernel that cannot be compiled does."""
    raise RuntimeError("no valid triton configs for this card")


def _own_token_unseen(set_step: Callable) -> Callable:
    return lambda self, tokens, positions, column, width: set_step(
        self, tokens, positions, column, max(1, width - 1)
    )


def _unwritten_seen(begin_step: Callable) -> Callable:
    def begin(self: KVCache) -> None:
        begin_step(self)
        self._suffix_bias = torch.zeros_like(self._suffix_bias)
        if self._bucket_attention is not None:
            self._bucket_attention.begin_step(self._prefix_bias[:, 0, 0], self._suffix_bias)

    return begin


@contextlib.contextmanager
def _as_on_a_card() -> Iterator[None]:
    """Decoding over padded shapes, with the masks that a captured graph has."""

    def bucketed(_: Callable) -> Callable:
        return lambda self: Decoder(base_model(self.model), bucketed=True)

    with (
        changed(RolloutEngine, "_new_decoder", bucketed),
        changed(KVCache, "begin_step", _unwritten_seen),
    ):
        yield


def _hotter(from_config: Callable) -> classmethod:
    def make(cls: type, *args: Any, **kwargs: Any) -> Sampler:
        sampler = from_config(cls, *args, **kwargs)
        return dataclasses.replace(sampler, temperature=1.25 * sampler.temperature)

    return classmethod(make)


def _siblings_seen(plan: Callable) -> Callable:
    """Every token sees all before it, other completions of its prompt too."""

    def wrong(tree: Any) -> Any:
        made = plan(tree)
        made.blocks = [Block("causal", 0, made.tokens, 0, made.tokens)]
        return made

    return wrong


def _head(
    change: Callable[[torch.Tensor], torch.Tensor], temperature: float = 1.0
) -> Callable[[], Any]:
    def wrap(inner: Callable) -> Callable:
        def head(self: PackedUpdate, base: Any, hidden: Any, labels: Any, own: float) -> Any:
            logprobs, entropies = inner(self, base, hidden, labels, temperature * own)
            return change(logprobs), entropies

        return head

    return lambda: changed(PackedUpdate, "_head", wrap)


FAULTS: dict[tuple[str, str], Callable[[], Any]] = {
    ("engine", "wrong mask"): lambda: changed(KVCache, "set_step", _own_token_unseen),
    ("engine", "wrong mask, shapes of a card"): _as_on_a_card,
    ("engine", "wrong temperature"): lambda: changed(Sampler, "from_config", _hotter),
    ("engine", "exception"): lambda: changed(Decoder, "_step", lambda _: raising),
    ("engine", "NaN"): lambda: changed(
        Decoder, "_step", lambda step: lambda self: step(self) * torch.nan
    ),
    ("packed update", "wrong mask"): lambda: changed(packed_update, "TreePlan", _siblings_seen),
    ("packed update", "wrong temperature"): _head(lambda logprobs: logprobs, 1.25),
    ("packed update", "exception"): _head(raising),
    ("packed update", "NaN"): _head(lambda logprobs: logprobs * torch.nan),
}
ARITHMETIC: dict[str, tuple[dict[str, Any], Config]] = {  # of load_policy, and the run's
    "full, float32": ({}, Config()),
    "full, bfloat16 autocast": ({}, Config(autocast="bfloat16")),
    "full, bfloat16 weights": ({"dtype": "bfloat16"}, Config(autocast="bfloat16")),
    "LoRA, float32": ({"tuning": "lora"}, Config()),
    "LoRA, bfloat16 weights": (
        {"tuning": "lora", "dtype": "bfloat16"},
        Config(autocast="bfloat16"),
    ),
}


def rows_of(name: str, model: str) -> list[dict[str, Any]]:
    """What check_card finds without a fault and with each, in one arithmetic."""
    loads, config = ARITHMETIC[name]
    policy, _ = load_policy(model, quiet=True, **loads)
    # else its logits are so alike that no mask and no temperature is seen
    if model == "tiny-random":
        with torch.no_grad():
            policy.get_output_embeddings().weight.mul_(10)
    made = []
    for part, fault in [("", "none"), *FAULTS]:
        with FAULTS[part, fault]() if part else contextlib.nullcontext():
            found = check_card(policy, config)
        outcomes = {one.part: one.outcome for one in found}
        # Decoding in few kernels is of the engine: what is wrong with one may be found in both.
        own = {part, FEW_KERNELS} if part == "engine" else {part}
        others = {outcome for name, outcome in outcomes.items() if name not in own} - {
            "equal",
            "cannot tell",
        }
        seen = not part or outcomes[part] in ("differs", "failed")
        row = {
            "arithmetic": name,
            "part": part,
            "fault": fault,
            "as it should be": seen and not others,
        }
        made.append(
            row
            | {
                one.part: f"{one.outcome}, off {one.apart:.2g}, most {one.most:.2g}"
                for one in found
            }
        )
    return made


def main() -> None:
    """Ask in each arithmetic, print, save."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="tiny-random")
    options = parser.parse_args()
    command = f"python -m benchmarks.check_card --model {options.model}"
    result = origin(command, "torch", "transformers", "peft") | {
        "weights": WEIGHTS.get(options.model, options.model),
        "rows": [],
    }
    for name in ARITHMETIC:
        for row in rows_of(name, options.model):
            result["rows"].append(row)
            print(row, flush=True)
    print(save(RESULTS, f"check_card_{options.model}", result))


if __name__ == "__main__":
    main()
