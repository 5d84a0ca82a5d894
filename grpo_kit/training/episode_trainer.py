"""EpisodeTrainer: GRPO over episodes of several turns, each turn a row with exactly the tokens it was made of.

trl's own code makes padded tensors, old and reference log-probabilities, masks and counts of these rows, as it does
of completions; here are the episodes, their advantages, and what is recorded of them. What turns share (a worked
example, earlier turns, the prompt of a group) is computed once by the packed update, as prompts are.
"""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from functools import partial
from statistics import fmean
from typing import Any

import torch
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_kit.argument_checks import check_choice
from grpo_kit.episodes.episode_task import EpisodeTask
from grpo_kit.episodes.observation import Renderer, View
from grpo_kit.episodes.rollout_episodes import Episode, rollout_episodes
from grpo_kit.episodes.template_audit import audit_turns
from grpo_kit.episodes.turn_advantages import CREDITS, turn_advantages
from grpo_kit.models import tokenizer_of
from grpo_kit.models.context import context_length
from grpo_kit.rollout.complete import end_ids
from grpo_kit.training.batch import Batch
from grpo_kit.training.trainer import GRPOTrainer
from grpo_kit.training.turn_rows import Turns

_MEANS_OVER_ROWS = ("grpo", "sapo", "luspo", "dr_grpo")
RECORDED = ("episode", "turn", "observation", "result", "turn_reward", "invalid", "done")
_NOT_HERE = ("reward_funcs", "train_dataset", "eval_dataset", "rollout_func", "tools", "environment_factory")


class EpisodeTrainer(GRPOTrainer):
    """GRPOTrainer of an EpisodeTask: groups of episodes of one row, every turn of every episode trained.

    credit: what a turn's completion is credited with. "episode": the episode's advantage in its group (rewards summed).
    "return": what was earned from that turn on, against the other episodes' at that turn. "state": the episode's
    advantage, plus that of the return among turns of the group with the same prompt (GiGPO, arXiv:2505.10978).
    discount: of later rewards, a turn, in (0, 1].
    What a step divides by is the loss type's, with turns as rows: dapo, cispo and vespo all tokens of the step; bnpo
    those of the micro-batch; grpo, sapo and luspo take the mean over turns; dr_grpo turns x task.max_completion_tokens,
    which is a turn's limit: an episode may take task.max_turns times that.
    Options: as GRPOTrainer's. Stop, resume, changes, red flags and records are as there; completions.parquet has a
    row a turn, with episode, turn, observation, result, turn_reward, invalid and done; `reward` is the episode's.
    Metrics: episodes/turns, episodes/invalid and episodes/cut_off (shares of turns), episodes/unfinished,
    episodes/success (shares of episodes); episodes/repeated, the same action as in the turn before with the same reply,
    and, with chat, episodes/forked (shares of later turns) and episodes/reread, the mean share of a later prompt that
    was read before and is computed anew.
    Raises ValueError for what GRPOTrainer refuses, several processes, and rewards or data given beside the task;
    EpisodeError, after saving, for an environment that raises or breaks its contract.

    >>> EpisodeTrainer(model, episodes.grid(), args).train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        task: EpisodeTask,
        args: GRPOConfig | None = None,
        processing_class: Any = None,
        *,
        credit: str = "episode",
        discount: float = 1.0,
        **options: Any,
    ) -> None:
        check_choice("credit", credit, CREDITS)
        if not 0 < discount <= 1:
            raise ValueError(f"discount={discount!r} must lie in (0, 1]")
        if credit == "episode" and discount != 1:
            raise ValueError(
                f"discount={discount!r} is not used by credit='episode'; use credit='return' or 'state'"
            )
        if args is not None and args.reward_weights not in (None, [1.0]):
            raise ValueError(
                f"reward_weights={args.reward_weights!r}: the environment's is the one reward, taken as it is; leave "
                "them out"
            )
        if not isinstance(task, EpisodeTask):
            raise ValueError(
                f"task={task!r:.200} is a {type(task).__name__}; EpisodeTrainer takes an EpisodeTask"
            )
        for name in _NOT_HERE:
            if options.get(name) is not None:
                raise ValueError(
                    f"{name} is not for EpisodeTrainer: rows, prompts and rewards are those of `task`"
                )
        tokenizer = tokenizer_of(model) if processing_class is None else processing_class
        self.credit, self.discount = credit, discount
        self._world = task.world()
        self._renderer = Renderer(tokenizer, task.view)
        self._turns: Turns | None = None  # of the rollout that trl makes rows of
        self._filled = 1.0  # rows of the rollout, fillers too, for each that is a turn
        _check_thoughts(tokenizer, task.view)
        super().__init__(
            model,
            task,
            args,
            processing_class=tokenizer,
            **options,
        )
        if self.accelerator.num_processes > 1:
            raise ValueError(
                f"{self.accelerator.num_processes} processes: episodes are played by one; start one"
            )
        self._renderer.ends = frozenset(end_ids(self.accelerator.unwrap_model(self.model), tokenizer))
        self.rollout_func = _made  # trl asks it for the rows instead of sampling them
        most = self.args.generation_batch_size * task.max_turns + self.args.steps_per_generation
        longer = partial(deque, maxlen=most)
        for name, kept in list(self._logs.items()):
            self._logs[name] = defaultdict(longer) if isinstance(kept, dict) else longer()

    def _rewards_of(self, task: EpisodeTask) -> list:
        return [episode_return]

    def own_options(self) -> dict[str, Any]:
        """For run.json."""
        view = self.task.view
        shown = {name: getattr(view, name) for name in ("chat", "actions", "repeat_goal", "thoughts")}
        return {
            "credit": self.credit,
            "discount": self.discount,
            "max_turns": self.task.max_turns,
            "view": shown,
        }

    # ---- a step: episodes, then their turns as rows ---------------------------------------------------------------

    def _fill(self, batch: Batch, trl_does: Any) -> dict[str, Any]:
        mode = "train" if batch.settings.training else "eval"
        # trl's tables are of this rollout alone, however many turns the last one had.
        for kept in self._logs.values():
            kept.clear()
        size = batch.settings.group_size
        parts = self.args.steps_per_generation if mode == "train" else 1
        episodes, entropies = self._play(batch.rows)
        turns = self._turns = Turns(episodes, batch.rows, size, parts, self._tokenizer.decode)
        batch.rows, batch.groups = turns.rows, [row["group"] for row in turns.rows]
        batch.fillers, batch.completions = turns.fillers, [row["completion"] for row in turns.rows]
        sizes = self.num_generations, self.num_generations_eval
        self.num_generations = self.num_generations_eval = 1  # none of these rows is another's sibling to trl
        try:
            output = trl_does(turns.rows)
        finally:
            self.num_generations, self.num_generations_eval = sizes
        advantages = turn_advantages(
            episodes, size, credit=self.credit, discount=self.discount, scale=self.scale_rewards
        )
        flat = [a for line in advantages for a in line]
        self._filled = len(turns.rows) / len(flat)
        output["advantages"] = torch.tensor([*flat, *[0.0] * turns.fillers], device=self.accelerator.device)
        if turns.fillers:
            output["num_items_in_batch"] = (
                output["num_items_in_batch"] - output["completion_mask"][-turns.fillers :].sum()
            )
            output["completion_mask"][-turns.fillers :] = 0
        batch.entropies = entropies and [*entropies, *[[0.0]] * turns.fillers]
        self._measure(turns, mode)
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """trl's; rows that fill up the last micro-batch count in no mean over rows."""
        loss = super()._compute_loss(model, inputs)
        return loss * self._filled if self.loss_type in _MEANS_OVER_ROWS and model.training else loss

    def _play(self, inputs: list[dict[str, Any]]) -> tuple[list[Episode], list[list[float]] | None]:
        """Episodes, and the entropies of their turns in order, where the kit's engine made them."""
        entropies: dict[tuple[int, int], list[float]] = {}
        trl_turn = partial(TRLGRPOTrainer._generate_single_turn, self)

        def complete(prompts: list[list[int]], who: list[int], turn: int) -> list[tuple[list[int], Any]]:
            (ids, logprobs), nats = self.sampling.turn(trl_turn, prompts, None, {}, 1)
            if nats is not None:
                entropies.update({(i, turn): e for i, e in zip(who, nats, strict=True)})
            return list(zip(ids, logprobs or [None] * len(ids), strict=True))

        rows = [self.task.train[row["row"]] for row in inputs]
        context = context_length(self.model)
        with self.sampling.turns():
            episodes = rollout_episodes(
                self.task, rows, self._renderer, self._world, complete, context=context
            )
        order = [(i, t) for i, e in enumerate(episodes) for t in range(1, len(e.turns) + 1)]
        return episodes, [entropies[key] for key in order] if len(entropies) == len(order) else None

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, ids: list) -> torch.Tensor:
        """(turns, 1): to each what its episode earned."""
        parts = torch.tensor([[row["total"]] for row in inputs], device=self.accelerator.device)
        self.batch.parts = parts
        for column in RECORDED:
            self._log_completion_extra(column, [row[column] for row in inputs])
        return parts

    def _measure(self, turns: Turns, mode: str) -> None:
        """Metrics by episode where trl has them by row."""
        metrics = self._metrics[mode]
        totals = torch.tensor([e.total for e in turns.episodes]).view(-1, turns.size)  # (B, G)
        spread = totals.amax(1) - totals.amin(1)
        several = totals.numel() > 1
        measured = {
            "reward": totals.mean().item(),
            "reward_std": totals.std().item() if several else 0.0,
            "frac_reward_zero_std": (spread < 1e-9).float().mean().item(),
            f"rewards/{episode_return.__name__}/mean": totals.mean().item(),
            f"rewards/{episode_return.__name__}/std": totals.std().item() if several else 0.0,
            "completions/mean_length": fmean(len(t.completion_ids) for e in turns.episodes for t in e.turns),
        }
        for name, value in measured.items():
            metrics[name][-1] = value
        for name, value in turns.measured(self.task.success, chat=self.task.view.chat).items():
            metrics[f"episodes/{name}"].append(value)


def _check_thoughts(tokenizer: Any, view: View) -> None:
    """Warns where training would read what the served model never does."""
    if view.thoughts == "kept" and audit_turns(tokenizer).table.loc["a user turn", "in_text"] == "dropped":
        warnings.warn(
            "View(thoughts='kept'), but the chat template drops the thoughts of earlier turns: the served model will "
            "never read the prompts that this run trains on. thoughts='as served' trains on what is served; "
            "kit.audit_turns(tokenizer) says more.",
            stacklevel=4,
        )


def episode_return(completions: list, **columns: Any) -> list[float]:
    """The one reward of episodes: what the environment gave, which nobody can ask again."""
    raise RuntimeError("episodes are rewarded by their environment")


def _made(prompts: list[str], trainer: EpisodeTrainer) -> dict[str, Any]:
    made = trainer._turns.made
    logprobs = [turn.logprobs for turn in made]
    return {
        "prompt_ids": [turn.prompt_ids for turn in made],
        "completion_ids": [turn.completion_ids for turn in made],
        "logprobs": None if None in logprobs else logprobs,
    }
