"""First contact with a card: the fast parts beside TRL's plain path, in a run's first step, on that very batch.

What runs on a card for the first time may fail there, or compute something else. So in each train()'s first step on
CUDA a few rows are computed a second time the plain way: the engine's completions are scored by the plain model, packed
log-probabilities and gradients stand beside TRL's, the optimizer beside torch's AdamW. A part that differs, gives NaN
or raises is off for the rest of the run before it has moved a weight; TRL's way takes its place. The checks leave no
trace in random numbers, gradients, metrics or modes. Later an exception out of engine or packing does the same; an
interrupt, a full memory and a NaN model do not. Of several processes each checks its own rows; an engine is off in
that one, packing and optimizer in all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from grpo_kit import cuda
from grpo_kit.models.renamed import is_asked
from grpo_kit.rollout.compare_logprobs import SHIFT, Limits, few, finite, gap, limits
from grpo_kit.training import plain_pass
from grpo_kit.training.contact_findings import Findings
from grpo_kit.training.optimizer import to_transformers_own
from grpo_kit.training.restore import get_random_state, set_random_state, undone
from grpo_kit.training.together import ProcessFailed

MicroBatch = dict[str, Any]


class FirstContact:
    """The checks of one trainer, and what takes a failed part's place.

    due: parts still to check; "scores", packed log-probabilities without gradient, where the run asks for them.
    """

    def __init__(self, trainer: Any, say: Callable[[str], None]) -> None:
        self.trainer, self.findings = trainer, Findings(trainer, say)
        self.due: set[str] = set()

    @property
    def active(self) -> bool:
        """Is this a run whose fast parts may fail without ending it?"""
        return cuda.may_fail(self.trainer.accelerator.device) and not self.trainer.ranks.sharded

    def begin(self) -> None:
        """A run begins or goes on: its first step checks what is in use."""
        trainer = self.trainer
        packs = trainer.logprobs.pack and not trainer.logprobs.plain
        used = {
            "engine": trainer.rollout == "kit",
            "scores": packs,
            "update": packs,
            "optimizer": trainer.optimizer_name is not None,
        }
        self.due = {part for part, there in used.items() if there and self.active}
        trainer.update.memory.flex_failed = partial(self.findings.off, "flex")
        self.findings.begin()

    # ---- completions ------------------------------------------------------------------------------------------

    def rollout(self, sample: Callable[[], tuple], prompt_ids: list[list[int]]) -> tuple | None:
        """What the engine makes; None where TRL's way has to, from the random state that it would have had."""
        if not self.active:
            return sample()
        self.trainer.sampling.check(prompt_ids)  # what raises here is about the user's data
        state, made, failed = get_random_state(), None, None
        try:
            made = sample()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if isinstance(error, FloatingPointError) and not self._plain_model_is_finite(prompt_ids):
                raise
            failed = error
        if made is not None and "engine" in self.due:
            failed = self._engine_differs(prompt_ids, *made[:2])
        if failed is None:
            return made
        set_random_state(state)
        self.due.discard("engine")
        self.trainer.rollout = "hf"
        self.trainer.sampling.forget()
        from grpo_kit.rollout.supported_models import engine_failed

        engine_failed(self.trainer.model, str(failed))
        self.findings.off("engine", failed)
        return None

    def _engine_differs(self, prompts: list, completions: list, logprobs: list) -> str | None:
        rows = few(list(map(tuple, prompts)), list(map(len, completions)))
        chosen = [prompts[i] for i in rows], [completions[i] for i in rows]
        plain = partial(plain_pass.plain_logprobs, self.trainer, *chosen)
        return self._differ("engine", [torch.tensor(logprobs[i]) for i in rows], plain)

    def _plain_model_is_finite(self, prompt_ids: list[list[int]]) -> bool:
        rows = few(list(map(tuple, prompt_ids)), list(map(len, prompt_ids)))
        prompts = [prompt_ids[i] for i in rows]
        return finite(plain_pass.plain_logprobs(self.trainer, prompts, [p[-1:] for p in prompts]))

    def _limits(self) -> Limits:
        args = self.trainer.args
        return limits(self.trainer.model, autocast=bool(args.bf16 or args.fp16))

    # ---- log-probabilities ------------------------------------------------------------------------------------

    def scores(
        self,
        packed: Callable[..., tuple],
        plain: Callable[..., tuple],
        ids: torch.Tensor,
        mask: torch.Tensor,
        width: int,
    ) -> tuple | None:
        """Packed log-probabilities and entropies; None where TRL's way has to. packed, plain: f(ids, mask, width)."""
        if not self.active:
            return packed(ids, mask, width)
        found, failed = None, None
        try:
            found = packed(ids, mask, width)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failed = error
        if found is not None and "scores" in self.due:
            lengths = [int(n) for n in mask[:, -width:].sum(1)]
            rows = few([tuple(row) for row in ids[:, :-width].tolist()], lengths)

            def cut(logprobs: torch.Tensor) -> list[torch.Tensor]:
                return [row[: lengths[i]] for i, row in zip(rows, logprobs, strict=True)]

            def moved(shift: int = 0) -> list[torch.Tensor]:
                return cut(plain(*(pad(x[rows], (shift, 0)) for x in (ids, mask)), width)[0])

            failed = self._differ("scores", cut(found[0][rows]), moved)
        if failed is None:
            return found
        self._packing_off("scores", failed)
        return None

    def _differ(self, part: str, found: list[torch.Tensor], plain: Callable[..., list]) -> str | None:
        """None where the log-probabilities are the plain ones, or those are no help. plain: f(shift=0)."""
        if not found:
            return None
        self.due.discard(part)
        try:
            wanted = plain()
            rounding = gap(plain(SHIFT), wanted)
            if not finite(wanted):
                raise FloatingPointError("the plain model's log-probabilities are not finite")
        except Exception as error:
            return self.findings.not_checked(part, error)
        most = {"logprobs": self._limits().beside(rounding).logprobs}
        return self.findings.judged(part, {"logprobs": gap(found, wanted)}, most, len(found))

    # ---- gradients --------------------------------------------------------------------------------------------

    def step(self, model: Any, window: list[MicroBatch]) -> torch.Tensor:
        """Gradients and loss of an optimizer step's micro-batches: packed, or TRL's way where that failed."""
        trainer = self.trainer
        if not self.active:
            return trainer.update.step(model, window)
        if "update" in self.due:
            with trainer.ranks.alone(trainer.accelerator):
                self._check_update(model, plain_pass.with_signal(window))
        if not self._off_in_any():
            try:
                with undone(trainer, always=False):
                    return self._packed(model, window)
            except (torch.OutOfMemoryError, ProcessFailed):
                raise
            except Exception as error:
                self._packing_off("update", error)
        return trainer.logprobs.plain_step(model, window)

    def _packed(self, model: Any, window: list[MicroBatch]) -> torch.Tensor:
        update, passes = self.trainer.update, (torch.OutOfMemoryError, ProcessFailed)
        made = self.trainer.ranks.all_or_none(lambda: update.gradients(model, window), passes)
        update.report(made[1])
        return made[0]

    def _off_in_any(self) -> bool:
        """Is packing off in any of the processes? Then it is in all."""
        off = self.trainer.ranks.any(self.trainer.logprobs.plain)
        if off and not self.trainer.logprobs.plain:
            self._packing_off("update", "it failed in another process")
        return off

    def _check_update(self, model: Any, micros: list[MicroBatch]) -> None:
        """On a few completions with an advantage, each a micro-batch; where there is none the next step does it."""
        trainer = self.trainer
        if not micros:
            return
        try:
            plain_pass.checkpoint_layers(model, True)  # the plain side has nothing that goes by free memory
            plain = self._measured(model, trainer.logprobs.plain_step, micros)
            again = self._measured(model, trainer.logprobs.plain_step, plain_pass.moved(micros))
        except Exception as error:
            self.due.discard("update")
            return self.findings.not_checked("update", error)
        if not finite([*plain[0], *plain[1], plain[2]]):
            return
        self.due.discard("update")
        rounding = gap(again[0], plain[0]), plain_pass.relative(again[1], plain[1])
        allowed = self._limits().beside(*rounding)
        failed = self._update_differs(model, micros, plain, allowed)
        if failed is not None and trainer.update.memory.attention == "flex_attention":
            self.findings.off("flex", failed)
            trainer.update.memory.attention = "sdpa"
            failed = self._update_differs(model, micros, plain, allowed)
        if failed is not None:
            self._packing_off("update", failed)

    def _measured(self, model: Any, step: Callable[..., torch.Tensor], micros: list[MicroBatch]) -> tuple:
        """Log-probabilities of each row, sampled gradients, loss."""
        logprobs = self.trainer.logprobs
        lengths = [int(micro["completion_mask"].sum()) for micro in micros]
        heard = logprobs.heard = []
        try:
            with undone(self.trainer), plain_pass.without_dropout(model):
                loss = step(model, [dict(micro) for micro in micros])
                gradients = plain_pass.gradients(model)
        finally:
            logprobs.heard = None
        rows = heard[-len(micros) :]  # the packed step's last ones are those that it reports
        return [row[0, :n] for row, n in zip(rows, lengths, strict=True)], gradients, loss

    def _update_differs(
        self, model: Any, micros: list[MicroBatch], plain: tuple, allowed: Limits
    ) -> str | Exception | None:
        try:
            found = self._measured(model, self.trainer.update.step, micros)
        except torch.OutOfMemoryError as error:
            return self.findings.not_checked("update", error)
        except Exception as error:
            return error
        numbers = {
            "logprobs": gap(found[0], plain[0]),
            "loss": gap([found[2]], [plain[2]]),
            "gradient": plain_pass.relative(found[1], plain[1]),
        }
        # A row's loss moves with its log-probabilities, times an advantage that is seldom above 2.
        most = {"logprobs": allowed.logprobs, "loss": 2 * allowed.logprobs, "gradient": allowed.gradient}
        return self.findings.judged("update", numbers, most, len(micros))

    def _packing_off(self, part: str, why: str | Exception) -> None:
        trainer = self.trainer
        self.due -= {"scores", "update"}
        trainer.logprobs.plain = True
        plain_pass.checkpoint_layers(trainer.model, is_asked(trainer.args))
        self.findings.off(part, why)

    # ---- the optimizer ----------------------------------------------------------------------------------------

    def before_optimizer_step(self) -> None:
        """Gradients are there, no weight has moved. Once all is checked one line says what is in use."""
        if "optimizer" in self.due:
            self._check_optimizer()
        if not self.due - {"scores"}:
            self.findings.all_checked()

    def _check_optimizer(self) -> None:
        from grpo_kit.optim.check_adamw import MOST, beside_adamw

        trainer, args = self.trainer, self.trainer.args
        slices = plain_pass.slices(trainer.optimizer)
        if not slices:
            return  # no gradient but 0, or one that is not finite: the next step has another
        self.due.discard("optimizer")
        weights, gradients, groups = zip(*slices, strict=True)
        state, failed = get_random_state(), None
        try:
            error = beside_adamw(
                trainer.optimizer_name,
                weights,
                gradients,
                learning_rate=groups[0]["lr"],
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                weight_decay=[group["weight_decay"] for group in groups],
            )
            failed = self.findings.judged("optimizer", {"change": error}, {"change": MOST}, len(weights))
        except torch.OutOfMemoryError as error:
            self.findings.not_checked("optimizer", error)
        except Exception as error:
            failed = error
        set_random_state(state)
        if trainer.ranks.any(failed is not None):
            failed = "it failed in another process" if failed is None else failed
            self.findings.off("optimizer", failed)
            to_transformers_own(trainer)

    def keeps_optimizer_off(self) -> bool:
        """Was it off in this run before? Then its checkpoints are of transformers' optimizer, which stays."""
        off = self.trainer.ranks.from_main(lambda: self.findings.was_off("optimizer"))
        if off:
            self.trainer.optimizer_name = None
        return off
