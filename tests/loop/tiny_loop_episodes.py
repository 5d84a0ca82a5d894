"""Small real runs of episodes in the loop."""

import copy
import functools
import random
from contextlib import contextmanager

import few_words
import torch

from grpo_kit.loop import Config, Loop
from grpo_kit.more.episodes._episode_sample import (
    EngineTurns,
    EpisodeSample,
    Written,
    fast_episodes,
)
from grpo_kit.more.episodes.episode_task import EpisodeTask
from grpo_kit.more.episodes.observation import View

LONG = " Read on." * 60  # a prompt whose keys are worth keeping from turn to turn


class Letters:
    """Pays for letters, and a little by chance; over after the row's turns. Its chance is Python's generator."""

    fault = staticmethod(lambda row, turn: None)

    def reset(self, row):
        self.row, self.turn, self.invalid = row, 0, False
        return f"Say {row['question']}.{LONG}"

    def step(self, text):
        self.turn += 1
        Letters.fault(self.row, self.turn)
        share = sum(c.isalpha() for c in text) / max(len(text), 1)
        self.invalid = share < 0.5
        paid = (share + random.random() / 10) * self.row.get("pays", 1)
        return f"You wrote {len(text)} characters.", paid, self.turn == self.row["turns"]


class Coin:
    """Pays 1 for "1" at once, 0.5 a turn for "5"; "." ends the episode."""

    def reset(self, row):
        return "go"

    def step(self, text):
        return "on", {"1": 1.0, "5": 0.5}.get(text.strip(), 0.0), "." in text


def task(
    rows=6,
    *,
    view=None,
    tokens=6,
    max_turns=3,
    seconds=None,
    environment=Letters,
    credit="episode",
    discount=1.0,
    **columns,
):
    made = [{"question": f"row {i}", "turns": 2 + i % 3, **columns} for i in range(rows + 1)]
    return EpisodeTask(
        "letters", made[:rows], made[rows:], environment, view or View(chat=True), max_turns=max_turns,
        max_completion_tokens=tokens, seconds=seconds, credit=credit, discount=discount,
    )  # fmt: skip


@functools.cache
def _policy():
    model, tokenizer = few_words.policy()
    with torch.no_grad():  # some completions end
        head = model.get_output_embeddings().weight
        head[tokenizer.eos_token_id] = 28 * head[50]
    return model, tokenizer


def policy():
    """A model of its own, and the tokenizer."""
    model, tokenizer = _policy()
    return copy.deepcopy(model), tokenizer


def make(folder, seams="fast", *, of=None, sample=None, hooks=(), **config):
    """A loop of episodes. seams: "fast" or "plain"."""
    model, tokenizer = policy()
    given = {
        "steps": 3,
        "prompts_per_step": 2,
        "group_size": 4,
        "learning_rate": 1e-2,
        "warmup": 0,
    }
    config = Config(**given | {"optimizer": "adamw", "seed": 3} | config)
    chosen = {"sample": EpisodeSample()}
    if seams == "fast":
        made = fast_episodes(model, config)
        assert made.why_not is None and isinstance(made.sample.writer, EngineTurns)
        chosen = {"sample": made.sample, "update": made.update}
    chosen |= {"sample": sample} if sample else {}
    return Loop(
        model, of or task(), config, tokenizer=tokenizer, folder=folder, hooks=hooks, **chosen
    )


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def written_as(turns, seen=None):
    """A writer: turns[episode][turn - 1] are the completion's tokens. seen: keeps the prompts."""

    @contextmanager
    def writer(*_):
        def write(prompts, episodes, turn):
            if seen is not None:
                seen.update(
                    {(i, turn): prompt for i, prompt in zip(episodes, prompts, strict=True)}
                )
            return Written([turns[i][turn - 1] for i in episodes])

        yield write

    return writer


def rolled_out(trainer):
    """The batch of a step that is not trained on."""
    torch.manual_seed(0)
    random.seed(0)
    return trainer.roll_out(trainer.config.at(0))[0]
