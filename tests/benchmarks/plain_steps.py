"""A plain GRPO loop, to compare with the oracle's steps: no trl, no engine, no packing.

Its completions are the recorded ones. Its class attributes are where tests break it.
"""

from collections import defaultdict
from statistics import fmean, stdev

import torch

from benchmarks.oracle.step_runs import EPSILON, EPSILON_HIGH, MAX_GRAD_NORM, STEPS
from benchmarks.oracle.steps import change, weights
from grpo_kit.models._model_facts import end_ids
from grpo_kit.more.episodes.observation import Renderer
from grpo_kit.more.episodes.rollout_episodes import Written, rollout_episodes
from grpo_kit.objectives import dapo, token_logprobs
from grpo_kit.rewards.scoring import score_all


def padded_logprobs(model, prompt_ids, completion_ids, temperature):
    """(R, T) log-probabilities of the completions, with their graph, and the mask of their tokens."""
    width, longest = max(map(len, prompt_ids)), max(map(len, completion_ids))
    ids = torch.zeros(len(prompt_ids), width + longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
        inside = slice(width - len(prompt), width + len(completion))
        ids[row, inside] = torch.tensor([*prompt, *completion])
        mask[row, inside] = 1
    logits = model(
        input_ids=ids, attention_mask=mask, logits_to_keep=longest + 1, use_cache=False
    ).logits
    logprobs = token_logprobs(logits[:, :-1], ids[:, width:], temperature=temperature)
    return logprobs, mask[:, width:]


class Plain:
    """plain = Plain(); plain(run, forced) -> steps."""

    shift = 0  # tokens at the beginning of each completion that the mask leaves out
    hotter = 1.0  # what the temperature is multiplied by in the log-probabilities
    twice = None  # the name of a reward that is counted twice
    high = EPSILON_HIGH

    def __call__(self, run, forced):
        task, (model, tokenizer) = run.task(), run.policy()
        start, reference, update, made = weights(model), run.policy()[0], 0, []
        optimizer = torch.optim.AdamW(list(model.parameters()), lr=1.0, weight_decay=0.0)
        for number, recorded in enumerate(forced):
            temperature = run.temperature(number / (STEPS - 1))
            batch = self.scored(run, task, model, tokenizer, recorded)
            rows = [batch["prompt_ids"], batch["completion_ids"], temperature * self.hotter]
            with torch.no_grad():
                old, mask = padded_logprobs(model, *rows)
                before = padded_logprobs(reference, *rows)[0]
            kept = [row[:n].tolist() for row, n in zip(old, mask.sum(1).tolist(), strict=True)]
            made.append(
                batch | {"temperature": temperature, "sampler_logprobs": kept, "updates": []}
            )
            for _ in range(run.iterations):
                logprobs = padded_logprobs(model, *rows)[0]
                inside = mask.clone()
                inside[:, : self.shift] = 0
                kl = (
                    {"beta": run.beta, "ref_logprobs": before, "correct_kl": True}
                    if run.beta
                    else {}
                )
                loss = dapo(
                    logprobs, old, torch.tensor(batch["advantages"]), inside, epsilon=EPSILON,
                    epsilon_high=self.high, num_tokens=inside.sum(), **kl,
                )  # fmt: skip
                optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.param_groups[0]["lr"] = rate = run.rate(update)
                optimizer.step()
                update += 1
                done = {"loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate}
                made[-1]["updates"].append(done | {"weights": change(model, start)})
        return made

    def scored(self, run, task, model, tokenizer, recorded):
        """The recorded completions behind prompts that are rendered anew, with rewards and advantages."""
        batch = {name: recorded[name] for name in ("rows", "episodes", "completion_ids")}
        if run.episodes:
            episodes, size = self.played(task, model, tokenizer, recorded), run.group_size
            totals = [episode.total for episode in episodes]
            advantages = self.advantages(totals, size)
            turns = [(i, turn) for i, episode in enumerate(episodes) for turn in episode.turns]
            earned = [totals[i] for i, _ in turns]
            batch["prompt_ids"] = [turn.prompt_ids for _, turn in turns]
            batch["parts"] = {"episode_return": earned}
            return batch | {"rewards": earned, "advantages": [advantages[i] for i, _ in turns]}
        rows = [task.train[place] for place in recorded["rows"]]
        texts = tokenizer.batch_decode(recorded["completion_ids"], skip_special_tokens=True)
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        parts = score_all(task.rewards, texts, prefill=[task.prefill] * len(rows), **columns)
        weight = dict(zip(parts, task.reward_weights, strict=True))
        if self.twice:
            weight[self.twice] *= 2
        totals = self.totals(parts, weight, run.group_size)
        batch["prompt_ids"] = [
            tokenizer(text).input_ids for text in task.render(tokenizer, rows)
        ]
        return batch | {
            "parts": parts,
            "rewards": totals,
            "advantages": self.advantages(totals, run.group_size),
        }

    def played(self, task, model, tokenizer, recorded):
        """The episodes of the recorded turns."""
        renderer, turns = Renderer(tokenizer, task.view), defaultdict(list)
        renderer.ends = frozenset(end_ids(model, tokenizer))
        for episode, ids in zip(recorded["episodes"], recorded["completion_ids"], strict=True):
            turns[episode].append(ids)
        rows = [
            task.train[place]
            for place in dict(zip(recorded["episodes"], recorded["rows"], strict=True)).values()
        ]
        write = lambda prompts, episodes, turn: Written([turns[i][turn - 1] for i in episodes])  # noqa: E731
        return rollout_episodes(task, rows, renderer, task.world(), write)

    def totals(self, parts, weight, size):
        """Weighted sums over the rewards that judge any of the group; None where one of them does not judge."""
        made = []
        for row in range(len(next(iter(parts.values())))):
            group = slice(row // size * size, row // size * size + size)
            judged = [
                name for name in parts if any(score is not None for score in parts[name][group])
            ]
            scores = [(weight[name], parts[name][row]) for name in judged]
            made.append(
                None if any(s is None for _, s in scores) else sum(w * s for w, s in scores)
            )
        return made

    def advantages(self, totals, size):
        """Less the mean of the group, divided by its spread; 0 without a total."""
        made = []
        for group in (totals[i : i + size] for i in range(0, len(totals), size)):
            there = [total for total in group if total is not None]
            spread = stdev(there) + 1e-4 if len(there) > 1 else 1.0
            made += [
                0.0 if total is None else (total - fmean(there)) / spread for total in group
            ]
        return made
