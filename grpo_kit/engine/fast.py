"""fast: the engine and the packed update as the loop's `sample` and `update`, for models that they know."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

from transformers import GenerationConfig

from grpo_kit.engine.engine_sample import EngineSample
from grpo_kit.engine.freed_memory import kept_for_the_next_step
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.engine.packing import why_not_packed
from grpo_kit.loop.generate import generate
from grpo_kit.loop.grpo_config import Config
from grpo_kit.loop.hooks import Hook
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.memory.free import free_bytes
from grpo_kit.rollout import RolloutEngine

_ROOM_ON_A_CPU = 16 * 2**30  # bytes free after a rollout above which its keys and values are kept


class KeepFreedMemory(Hook):
    """On a CPU, what a step frees stays with the process for the next step; see freed_memory.py."""

    def begin(self, trainer: Any) -> None:
        """Until the run ends."""
        self._inside = ExitStack()
        self._inside.enter_context(kept_for_the_next_step(trainer.device))

    def end(self, trainer: Any, error: BaseException | None) -> None:
        """Freed memory goes back to the system."""
        self._inside.close()


class Seams(NamedTuple):
    """What a GRPOTrainer takes. why_not: why sample or update is a plain one, None if neither is."""

    sample: Any
    update: Any
    hooks: list[Hook]
    why_not: str | None


def fast(model: Any, config: Config) -> Seams:
    """The fast ways for this model, or the plain ones where it is none that they know.

    Both share the card: the update has its bytes back, unless it is as fast without them.

    >>> seams = fast(model, config)  # doctest: +SKIP
    >>> seams.why_not is None  # doctest: +SKIP
    True
    """
    how = GenerationConfig(max_new_tokens=1, do_sample=True, temperature=1.0, top_k=0, top_p=config.top_p)
    no_engine, no_packing = RolloutEngine.unsupported(model, how), why_not_packed(model)
    update = PaddedUpdate(config) if no_packing else PackedUpdate(model, config)
    memory, hooks = getattr(update, "memory", None), [KeepFreedMemory()]

    def may_stay(engine: RolloutEngine, prompt_ids: list, completion_ids: list) -> bool:
        """On a card where the update does as well without these bytes; on a CPU where there is room."""
        device = next(model.parameters()).device
        if device.type != "cuda":
            return free_bytes(device) >= _ROOM_ON_A_CPU
        rows = [(tuple(p), list(c)) for p, c in zip(prompt_ids, completion_ids, strict=True)]
        return memory is not None and memory.spares(engine.nbytes(), rows)

    if no_engine:
        return Seams(generate, update, hooks, f"the engine cannot sample: {no_engine}")
    sample = EngineSample(model, may_stay)

    def give_back() -> bool:
        held = sample.engine.nbytes() > 0
        sample.engine.release()
        return held

    if memory is not None:
        memory.give_back = give_back
    return Seams(
        sample, update, hooks, no_packing and f"the packed update cannot do this model: {no_packing}"
    )
