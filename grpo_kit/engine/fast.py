"""fast: the engine and the packed update as the loop's `sample` and `update`, for models that they know.

EngineSample makes the completions of a step, on the weights that are trained; there is no second copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from grpo_kit._support import cuda
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine._first_use import WRONG
from grpo_kit.engine._supported_models import is_tested
from grpo_kit.engine._update_memory import UpdateMemory
from grpo_kit.engine.card.checks import checked
from grpo_kit.engine.memory._free import free_bytes
from grpo_kit.engine.packed_update import PackedUpdate, why_not_packed
from grpo_kit.engine.tree import as_rows
from grpo_kit.loop.batch import Batch, as_batch, generate, generation_config, prompts_of_groups
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate, autocast
from grpo_kit.models._model_facts import end_ids
from grpo_kit.models.token_lists import why_not_padded

# bytes free after a rollout above which its keys and values are kept
_ROOM_ON_A_CPU = 16 * 2**30


class EngineSample:
    """Called as `generate` is. may_stay(engine, prompt_ids, completion_ids): may keys, values and graphs be kept?

    bits: of the engine's products. Its log-probabilities are those that it sampled by.
    """

    def __init__(
        self, model: Any, may_stay: Callable[[RolloutEngine, list, list], bool], bits: int = 32
    ) -> None:
        self.engine, self.may_stay, self.bits = RolloutEngine(model, bits=bits), may_stay, bits

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        task: Any,
        rows: Sequence[dict[str, Any]],
        config: Config,
        numbers: StepNumbers,
    ) -> Batch:
        """group_size completions of each row's prompt, with their log-probabilities and entropies."""
        prompts = prompts_of_groups(model, tokenizer, task, rows, config)
        ends = end_ids(model, tokenizer)
        sampling = generation_config(tokenizer, ends, config, numbers)
        first = numbers.first * config.group_size
        # a completion's draws do not depend on who makes it
        places = range(first, first + len(prompts))
        stays = False
        try:
            with autocast(config, next(model.parameters()).device):
                seed = int(torch.randint(2**62, ()))
                rollouts = self.engine.generate(prompts, sampling, seed=seed, rows=places)
            stays = self.may_stay(self.engine, prompts, rollouts.completion_ids)
        finally:
            if not stays:
                self.engine.release()
        return as_batch(
            tokenizer,
            rows,
            config.group_size,
            prompts,
            rollouts.completion_ids,
            ends,
            sampler_logprobs=rollouts.policy_logprobs,
            entropies=rollouts.entropies,
        )


class Seams(NamedTuple):
    """What a Loop takes. why_not: why sample or update is a plain one, None if neither is."""

    sample: Any
    update: Any
    why_not: str | None


def fast(model: Any, config: Config) -> Seams:
    """The fast ways for this model, or the plain ones where it is none that they know.

    On a card each is compared with its plain way first, once a card and versions (see check_card), and one that is off
    is left out; one that fails in a run gives way to the plain one, with a line that says so. On a CPU, where they are
    tested, an error is raised. Both share the card: the update has its bytes back, unless it is as fast without them.

    >>> seams = fast(model, config)  # doctest: +SKIP
    >>> seams.why_not is None  # doctest: +SKIP
    True
    """
    if config.rollout_bits == 16 and config.importance_sampling_cap is None:
        raise ValueError(
            "rollout_bits=16 samples another policy, by rounding: give importance_sampling_cap, such as 2.0"
        )
    no_engine, no_packing = _problems(model, config)
    may_fail = cuda.may_fail(next(model.parameters()).device)
    plain_update = PaddedUpdate(config)
    sample, update, memory = generate, plain_update, None
    if not no_packing:
        packed_update = PackedUpdate(model, config)
        memory = packed_update.memory
        update = (
            _UpdateOrPlainly(packed_update, plain_update, model) if may_fail else packed_update
        )
    if not no_engine:
        engine_sample = EngineSample(model, partial(_may_stay, memory), config.rollout_bits)
        sample = OrPlainly(engine_sample, generate, "engine") if may_fail else engine_sample
        if memory is not None:
            memory.give_back = partial(_give_back, weakref.ref(engine_sample))
    why_not = None
    if no_engine:
        why_not = f"the engine cannot sample: {no_engine}"
    elif no_packing:
        why_not = f"the packed update cannot do this model: {no_packing}"
    if why_not and (unhidden := why_not_padded(model, gradient=bool(no_packing))):
        why_not += f"; {unhidden}, so it takes prompts of one length at a time"
    return Seams(sample, update, why_not)


def _problems(model: Any, config: Config) -> tuple[str | None, str | None]:
    """Why the engine and the packed update are left out, None for each that is not. An optimizer that is off on this
    machine is replaced in the config."""
    sampling = GenerationConfig(
        max_new_tokens=1,
        do_sample=True,
        temperature=1.0,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p or None,
        repetition_penalty=config.repetition_penalty,
    )
    no_engine, no_packing = RolloutEngine.unsupported(model, sampling), why_not_packed(model)
    tested = is_tested(model)
    if cuda.may_fail(next(model.parameters()).device) or not (tested or no_packing):
        wrong = {
            finding.part: str(finding)
            for finding in checked(model, config)
            if finding.outcome in WRONG[tested]
        }
        no_engine, no_packing = (
            no_engine or wrong.get("engine"),
            no_packing or wrong.get("packed update"),
        )
        if "optimizer" in wrong:
            print(
                "torch's AdamW takes the place of an optimizer that is off on this machine: "
                f"{wrong['optimizer']}."
            )
            config.optimizer = "adamw"
    return no_engine, no_packing


def _may_stay(
    memory: UpdateMemory | None, engine: RolloutEngine, prompt_ids: list, completion_ids: list
) -> bool:
    """On a card where the update does as well without these bytes; on a CPU where there is room."""
    device = next(engine.model.parameters()).device
    if device.type != "cuda":
        return free_bytes(device) >= _ROOM_ON_A_CPU
    if memory is None:
        return False
    rows = as_rows(prompt_ids, completion_ids)
    return memory.spares(engine.nbytes(), rows, seconds=engine.capture_seconds())


def _give_back(sample_of: weakref.ref) -> bool:
    """The engine's bytes for the update. By a weak reference: in a circle they would outlive the trainer on a card."""
    sample = sample_of()
    if sample is None:
        return False
    had_bytes = sample.engine.nbytes() > 0
    sample.engine.release()
    return had_bytes


class OrPlainly:
    """A fast way, and from its first failure on the plain one: a card may be one that nobody has tried."""

    def __init__(
        self,
        fast_way: Any,
        plain_way: Any,
        name: str,
        start_over: Callable[[], None] = lambda: None,
    ) -> None:
        self._way, self._plain, self._name, self._start_over = (
            fast_way,
            plain_way,
            name,
            start_over,
        )
        self.failed: str | None = None  # why the plain way is taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._way, name)

    def __call__(self, *arguments: Any) -> Any:
        """As the way that is in use. Lack of memory, which the ways deal with themselves, is no failure."""
        if self.failed is None:
            try:
                return self._way(*arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.failed = f"{type(error).__name__}: {str(error)[:200]}"
            print(
                f"The {self._name} failed on this machine ({self.failed}); the plain way is taken from now on, slower. "
                "Please paste this and `python -m grpo_kit doctor` into an issue of grpo_kit.",
                flush=True,
            )
            self._start_over()
        return self._plain(*arguments)


class _UpdateOrPlainly:
    """The packed update, and from its first failure on the padded one."""

    def __init__(self, packed: PackedUpdate, plain: PaddedUpdate, model: Any) -> None:
        self.memory = packed.memory
        self.logprobs = OrPlainly(packed.logprobs, plain.logprobs, "packed update")
        self.gradients = OrPlainly(
            packed.gradients, plain.gradients, "packed update", model.zero_grad
        )
