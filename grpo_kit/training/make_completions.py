"""Stage 3 of a step: completions, by the kit's engine on the trainer's own weights, or by trl's ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from grpo_kit.memory.free import free_bytes
from grpo_kit.models import base_model
from grpo_kit.models.renamed import enable_checkpointing, is_checkpointing
from grpo_kit.training.batch import Batch
from grpo_kit.training.in_step import InStepCheck
from grpo_kit.training.restore import weights_come_back

_ROOM_ON_A_CPU = 16 * 2**30  # bytes free after a rollout above which its keys and values are kept


class Sampling:
    """Who makes the completions of one trainer (its `rollout`): "kit", "hf", "vllm" or "continuous"."""

    def __init__(self, trainer: Any, say: Callable[[str], None]) -> None:
        self.trainer, self.say = trainer, say
        self.engine: Any = None  # a RolloutEngine, from the first rollout that it makes
        self.goes_on = False  # the next prompts begin with these: turns of episodes
        self._in_step = InStepCheck(trainer, say)
        if trainer.use_vllm:
            trainer.vllm_generation.end_with(trainer.eos_token_ids)

    def turn(
        self,
        trl_turn: Callable[..., Any],
        prompt_ids: list,
        images: Any,
        fields: dict,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, list[list[float]] | None]:
        """One turn of completions: what trl's way gives (ids, log-probabilities, ...), and the tokens' entropies.

        trl_turn: trl's own way, for what the engine does not do; it gives no entropies.
        """
        with self._evaluating():
            if self._uses_engine(images, fields):
                made = self.trainer.first_contact.rollout(partial(self.with_engine, prompt_ids), prompt_ids)
                if made is not None:
                    return made[:2], made[2]
            with (
                weights_come_back(self.trainer.model)
                if self.trainer.use_transformers_continuous_batching
                else nullcontext()
            ):
                if self.trainer.use_vllm and self.trainer.vllm_generation.is_behind:
                    self.trainer._last_loaded_step = (
                        -1
                    )  # trl goes by the step; weights change for other reasons too
                return trl_turn(prompt_ids, images, fields, *args, **kwargs), None

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode (no LoRA dropout); mode and checkpointing are put back whatever happens."""
        trainer, model = self.trainer, base_model(self.trainer.model)
        training, checkpointing = trainer.model.training, is_checkpointing(model)
        trainer.model.eval()
        own = trainer.rollout in ("kit", "hf")
        try:
            # One outer context keeps the cast weights between tokens.
            with trainer.accelerator.autocast() if own else nullcontext():
                yield
        finally:
            trainer.model.train(training)
            if checkpointing and not is_checkpointing(model):
                enable_checkpointing(model, trainer.args)

    def _uses_engine(self, images: Any, fields: dict) -> bool:
        trainer = self.trainer
        if trainer.rollout != "kit" or images is not None or fields:
            return False
        from grpo_kit.rollout import RolloutEngine

        why_not = RolloutEngine.unsupported(trainer.model, trainer.generation_config)
        if why_not:
            trainer.rollout = "hf"
            self.say(f"The kit's rollout engine cannot do this run ({why_not}); rollouts are trl's own.")
        return not why_not

    def with_engine(
        self, prompt_ids: list[list[int]]
    ) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
        """Completion ids, their log-probabilities and their entropies."""
        trainer = self.trainer
        if self.engine is None:
            from grpo_kit.rollout import RolloutEngine

            self.engine = RolloutEngine(trainer.accelerator.unwrap_model(trainer.model_wrapped))
            trainer.update.memory.give_back = self._give_back
        rollouts = None
        try:
            rollouts = self.engine.generate(
                prompt_ids,
                trainer.generation_config,
                tokenizer=trainer.text_tokenizer,
                keep=self.goes_on,
            )
        finally:
            stays = rollouts is not None and (
                self.goes_on or self._may_stay(prompt_ids, rollouts.completion_ids)
            )
            if not stays:
                self.engine.release()
        return rollouts.completion_ids, rollouts.policy_logprobs, rollouts.entropies

    def _may_stay(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> bool:
        """Can the engine keep what it holds until the next rollout, to capture no graph again?

        On a card where the update does as well without these bytes. Before the first step the optimizer's moments are
        not there yet, and nothing knows what they take.
        """
        trainer = self.trainer
        if trainer.accelerator.device.type != "cuda":
            return free_bytes(trainer.accelerator.device) >= _ROOM_ON_A_CPU
        if not getattr(trainer.optimizer, "state", None) or not trainer.logprobs.packs({}):
            return False
        rows = [(tuple(p), c) for p, c in zip(prompt_ids, completion_ids, strict=True)]
        return trainer.update.memory.spares(self.engine.nbytes(), rows)

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Rollouts inside go on from each other; what they keep is given back where it may not stay."""
        self.goes_on = True
        try:
            yield
        finally:
            self.goes_on = False
            device = self.trainer.accelerator.device
            if self.engine is not None and (device.type == "cuda" or free_bytes(device) < _ROOM_ON_A_CPU):
                self.engine.release()

    def begin(self) -> None:
        """A run begins or resumes: it goes on from no keys of the one before, so that it computes what that one did."""
        if self.engine is not None:
            self.engine.release()
        self._in_step.begin()

    def forget(self) -> None:
        """The engine is off for the rest of the run: it holds no memory."""
        self.engine.release()

    def check(self, prompt_ids: list[list[int]]) -> None:
        """Raises the ValueErrors of RolloutEngine.generate that are about the prompts."""
        from grpo_kit.rollout import RolloutEngine

        RolloutEngine.check(self.trainer.model, prompt_ids, self.trainer.generation_config.max_new_tokens)

    def _give_back(self) -> bool:
        held = self.engine.nbytes() > 0
        self.engine.release()
        return held

    def check_in_step(self, batch: Batch) -> None:
        """Of a rollout by vLLM: raises SamplerNotInStep where its weights are not the trainer's."""
        trainer = self.trainer
        if not trainer.use_vllm:
            return
        with self._evaluating():
            gap = self._in_step.compare(batch)
        metrics, sampler = trainer._metrics["train"], trainer.vllm_generation
        if not trainer.logprobs.packs({}):  # the packed update logs it
            metrics["rollout/logprob_gap"].append(gap)
        metrics["rollout/sync_seconds"].append(sampler.sync_seconds)
