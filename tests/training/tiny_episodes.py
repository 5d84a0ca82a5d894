"""Small real runs of EpisodeTrainer, and the moments at which something can happen to one."""

import itertools

import torch
import transformers
from tiny_run import letters, settings, tiny
from transformers.trainer_callback import TrainerState

import grpo_kit.training.update as update
from grpo_kit.episodes.episode_task import EpisodeTask
from grpo_kit.episodes.observation import View
from grpo_kit.record.files import read_completions
from grpo_kit.record.run_folder import RunFolder
from grpo_kit.rollout.layers import PlainLayers
from grpo_kit.training.episode_trainer import EpisodeTrainer


class Letters:
    """Pays for letters; over after the row's turns, or earlier where nothing but letters was written."""

    def reset(self, row):
        self.left, self.invalid = row.get("turns", 3), False
        return f"Say {row['question']} {'more ' * row.get('more', 0)}"

    def step(self, text):
        self.left -= 1
        share = letters([text])[0]
        self.invalid = share < 0.5
        return f"You wrote {len(text)} characters.", share / 3, self.left == 0 or share == 1


def task(rows=8, *, view=None, turns=3, max_turns=3, environment=Letters, tokens=6, seconds=None):
    made = [{"question": f"row {i}", "turns": turns, "more": i % 3} for i in range(rows + 2)]
    return EpisodeTask(
        "letters", made[:rows], made[rows:], environment, view or View(actions=1), max_turns=max_turns,
        max_completion_tokens=tokens, seconds=seconds,
    )  # fmt: skip


def make(folder, *, of=None, credit="episode", kit=None, **overrides):
    model, tokenizer = tiny()
    torch.manual_seed(0)
    args = settings(folder, **{"max_steps": 3, **overrides})
    options = {"warmup": 0, "live": None, **(kit or {})}
    return EpisodeTrainer(model, of or task(), args, processing_class=tokenizer, credit=credit, **options)


# ---- moments --------------------------------------------------------------------------------------------------

SAVING = {  # what writes a checkpoint
    "weights": (transformers.Trainer, "_save"),
    "optimizer's state": (transformers.Trainer, "_save_optimizer_and_scheduler"),
    "random state": (transformers.Trainer, "_save_rng_state"),
    "state": (TrainerState, "save_to_json"),
}
MOMENTS = {
    "reset": (Letters, "reset"),
    "environment": (Letters, "step"),
    "model": (PlainLayers, "hidden"),  # a patched class of transformers would be sampled from in another way
    "packing": (update, "pack_rows"),
    "backward": (torch.autograd, "backward"),
    "optimizer": (torch.optim.AdamW, "step"),
    "completions": (RunFolder, "write_completions"),
    "row": (RunFolder, "write_step"),
    **SAVING,
}
CALLS = {"reset": 8, "environment": 20, "model": 15}  # of a step at least; of the others one


def act_at(trainer, moment, act, *, step, call, after=False, patch=setattr):
    """Let act() happen once, before or after a call (from 1) of the moment's function, when `step` steps are done."""
    owner, name = MOMENTS[moment]
    inner, calls = getattr(owner, name), itertools.count(1)

    def watched(*args, **kwargs):
        now = trainer.state.global_step == step and next(calls) == call
        if now and not after:
            act()
        made = inner(*args, **kwargs)
        if now and after:
            act()
        return made

    patch(owner, name, watched)


def whole_episodes(folder, *, size=8):
    """read_completions, once every step in it is seen to have `size` episodes with all their turns, in order."""
    table = read_completions(folder)
    for step, rows in table.groupby("step"):
        assert rows["episode"].nunique() == size, step
        for _, turns in rows.groupby("episode"):
            assert turns["turn"].tolist() == list(range(1, len(turns) + 1)), step
            assert turns["done"].tolist() == [0] * (len(turns) - 1) + [1], step
    return table
