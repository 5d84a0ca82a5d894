"""A model that thinks, over several turns, under a template that drops earlier thoughts: what goes wrong, and how much.

    python -m benchmarks.thinking gap          # the same rollouts scored as sampled and as one long masked row: 5 min
    python -m benchmarks.thinking train        # as served and with thoughts kept, 3 seeds; goes on if stopped
    python -m benchmarks.thinking drift        # sampled tokens beside those of their text: a minute
    python -m benchmarks.thinking --table      # what is saved

SmolLM2 is first taught to think in <think> tags by a brief SFT on 72 episodes of the calculator (kept in
runs/thinking_taught); its tokenizer wears Qwen3's chat template, which drops thoughts before a user turn. "gap" also
has its episodes scored by a Qwen3 of random weights. Writes benchmarks/results/thinking_smollm2-135m-instruct.json.
gap: log-probabilities of the very same sampled tokens, behind the prompts that they were sampled from and in the long
row that other trainers make of the episode (all thoughts in it, what others said masked), before any update; the share
of tokens whose ratio of the two is outside of [0.8, 1.28], where GRPO clips; the angle between both policy gradients.
drift: of SmolLM2 as it comes, the share of turns whose text is cut into other tokens than were sampled.
train: held-out success, served as it is served, of models trained on what is served and on what was kept.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

from benchmarks.agents import MODEL, ROWS, SAMPLES, TASKS, difference, percent, share
from benchmarks.result import (
    RESULTS,
    ROOT,
    WEIGHTS,
    command_line,
    origin,
    read_result,
    write_result,
)
from examples.calculator import calculator
from grpo_kit import GRPOTrainer, load_policy, next_run_folder, preset
from grpo_kit.engine.tree import tree_tokens
from grpo_kit.evaluation.generate_and_score import Decoding, answer
from grpo_kit.models._model_facts import end_ids
from grpo_kit.more.episodes import Episode, EpisodeTask
from grpo_kit.more.episodes._turn_advantages import turn_advantages
from grpo_kit.more.episodes.observation import Renderer
from grpo_kit.more.lab.statistics import over_seeds
from grpo_kit.prompts import roundtrip_drift
from grpo_kit.record.files import read_metrics

PATH = RESULTS / f"thinking_{MODEL}.json"
TAUGHT = ROOT / "runs" / "thinking_taught"
TAUGHT_BY, STEPS, GROUP = 72, 8, 8
KEPT = ("as served", "kept")

Row = tuple[Sequence[int], Sequence[int]]


def task_of(thoughts: str = "as served") -> EpisodeTask:
    """The calculator, each answer behind a thought; nothing is shown, it has been taught."""
    task = calculator(96, ROWS)
    view = replace(
        task.view,
        examples=(),
        prefill="<think>\n",
        thoughts=thoughts,
        system="Use the calculator.",
    )
    return replace(task, view=view, max_completion_tokens=48)


def thinker(row: dict, rng: random.Random) -> Any:
    """The perfect policy, thinking aloud; what it says goes behind the prefill."""
    numbers, signs = re.findall(r"\d+", row["question"]), re.findall(r"[-+*]", row["question"])
    turn = 0

    def respond(observation: str) -> str:
        nonlocal turn
        turn += 1
        shown = re.findall(r"-?\d+", observation)
        left = [f"{sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True)][
            turn - 1 :
        ]
        if not left:
            return f"Nothing is left to do, {shown[-1]} it is.\n</think>\n\nsay {shown[-1]}"
        first = shown[-1] if shown else numbers[0]
        plan = f"I have {first} and need {', then '.join(left)}."
        return f"{plan}\n</think>\n\ncalc {first} {left[0]}"

    return respond


def dressed(tokenizer: Any) -> Any:
    """With Qwen3's chat template, of which trl has a copy."""
    import trl

    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


# ---- teaching ---------------------------------------------------------------------------------------------------


def played_by(
    policy: Any, task: EpisodeTask, tokenizer: Any, rows: Sequence[dict]
) -> list[Row]:
    """Prompt and completion of each turn of the policy's episodes, as served."""
    renderer, made = Renderer(tokenizer, task.view), []
    for row in rows:
        world, respond = task.world(), policy(row, random.Random(0))
        (seen,) = world.reset([row])
        talk = renderer.first(row["question"], seen)
        for turn in range(1, task.max_turns + 1):
            text = respond(seen)
            ids = [
                *tokenizer(text, add_special_tokens=False)["input_ids"],
                tokenizer.eos_token_id,
            ]
            made.append((list(talk.ids), ids))
            outcome = world.step({0: task.view.said(task.view.prefill + text)}, turn)[0]
            if outcome.done:
                break
            seen = outcome.observation
            renderer.next(talk, ids, seen)
    return made


def taught() -> tuple[Any, Any]:
    """The model that thinks, and its tokenizer; taught once."""
    if not TAUGHT.is_dir():
        set_seed(0)
        model, tokenizer = load_policy(MODEL, quiet=True)
        dressed(tokenizer)
        rows = played_by(thinker, task_of(), tokenizer, task_of().train[:TAUGHT_BY])
        random.Random(0).shuffle(rows)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
        for start in range(0, len(rows), 8):
            batch = rows[start : start + 8]
            loss = -sum(logprobs(model, row).sum() for row in batch) / sum(
                len(c) for _, c in batch
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(
                f"taught {start + len(batch)} of {len(rows)} turns, loss {loss.item():.3f}",
                flush=True,
            )
        model.save_pretrained(TAUGHT)
        tokenizer.save_pretrained(TAUGHT)
    model, tokenizer = load_policy(str(TAUGHT), dtype="float32", quiet=True)
    return model, dressed(tokenizer)


# ---- the same rollouts, scored in two ways ----------------------------------------------------------------------


def logprobs(model: Any, row: Row) -> torch.Tensor:
    """(T,) of the completion's tokens behind the prompt."""
    prompt, completion = row
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, logits_to_keep=len(completion) + 1).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def in_one_row(episode: Episode, renderer: Renderer) -> list[Row]:
    """The episode's turns as parts of a long row in which everything stays: each behind all that was before it."""
    talk = renderer.first(episode.row["question"], episode.turns[0].observation)
    rows = []
    for turn, later in zip(episode.turns, [*episode.turns[1:], None], strict=True):
        rows.append((list(talk.ids), turn.completion_ids))
        if later is not None:
            renderer.next(talk, turn.completion_ids, later.observation)
    return rows


def gap(name: str, model: Any, tokenizer: Any, episodes: list[Episode]) -> dict[str, Any]:
    """Both scores of the episodes by the model, and the gradients of GRPO's first step."""
    kept = Renderer(tokenizer, task_of("kept").view, end_ids(model, tokenizer))
    advantages = [a for line in turn_advantages(episodes, GROUP) for a in line]
    ways = {
        "as sampled": [(t.prompt_ids, t.completion_ids) for e in episodes for t in e.turns],
        "one long row": [row for e in episodes for row in in_one_row(e, kept)],
    }
    turns = [t for e in episodes for t in range(1, len(e.turns) + 1)]
    scores, gradients = {}, {}
    for way, made in ways.items():
        model.zero_grad(set_to_none=True)
        scores[way] = []
        for row, advantage in zip(made, advantages, strict=True):
            with torch.set_grad_enabled(bool(advantage)):
                scored = logprobs(model, row)
            if advantage:
                (-advantage * scored.sum() / sum(len(c) for _, c in made)).backward()
            scores[way].append(scored.detach())
        gradients[way] = torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        )
    one, other = gradients.values()
    apart = [b - a for a, b in zip(*scores.values(), strict=True)]
    by_turn = {}
    for turn in sorted(set(turns)):
        d = torch.cat([x for x, t in zip(apart, turns, strict=True) if t == turn])
        ratio = d.exp()
        by_turn[str(turn)] = {
            "tokens": len(d),
            "mean_gap": d.abs().mean().item(),
            "largest_gap": d.abs().max().item(),
            "mean_of_a_turn": fmean(
                x.sum().item() for x, t in zip(apart, turns, strict=True) if t == turn
            ),
            "would_be_clipped": ((ratio < 0.8) | (ratio > 1.28)).float().mean().item(),
        }
    cost = {
        way: {
            "rows": len(made),
            "tokens": sum(len(p) + len(c) for p, c in made),
            "computed": tree_tokens(made),
        }
        for way, made in ways.items()
    }
    lengths = [len(p) + len(c) for p, c in ways["one long row"]]
    last = [
        i
        for i, (turn, later) in enumerate(zip(turns, [*turns[1:], 1], strict=True))
        if later == 1
    ]
    cost["one long row"] |= {"rows": len(episodes), "tokens": sum(lengths[i] for i in last)}
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=0).item()
    return {
        "model": name,
        "episodes": len(episodes),
        "success": fmean(e.total >= 1 for e in episodes),
        "by_turn": by_turn,
        "gradient_cosine": cosine,
        "gradient_degrees": torch.rad2deg(torch.tensor(min(1.0, cosine)).acos()).item(),
        "gradient_norm_ratio": (other.norm() / one.norm()).item(),
        "cost": cost,
    }


def tiny_qwen3(tokenizer: Any) -> Any:
    """A Qwen3 of random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


# ---- tokens and their text ---------------------------------------------------------------------------------------


def drift(seed: int) -> list[dict[str, Any]]:
    """64 episodes of each world at temperature 1: the share of turns that their text does not give back."""
    model, tokenizer = load_policy(MODEL, quiet=True)
    shares = {}
    for name, make in TASKS.items():
        task = make()
        played = answer(
            model, tokenizer, task, task.train, Decoding(1, 1.0, seed=seed)
        ).episodes
        turns = [
            _without_end(t.completion_ids, tokenizer)
            for episode in played
            for t in episode.turns
        ]
        shares[name] = fmean(not roundtrip_drift(tokenizer, ids).same for ids in turns)
    common = {"seed": seed, "by_world": shares}
    return [
        {"arm": "as sampled", "differ": 0.0, **common},
        {"arm": "tokenized again", "differ": fmean(shares.values()), **common},
    ]


def _without_end(ids: Sequence[int], tokenizer: Any) -> list[int]:
    return list(ids[:-1]) if ids and ids[-1] == tokenizer.eos_token_id else list(ids)


# ---- trained on what is served, and on what is not --------------------------------------------------------------


def succeeded(model: Any, tokenizer: Any) -> list[int]:
    """Of each held-out row the episodes of SAMPLES that succeed, served as it is served."""
    found = answer(model, tokenizer, task_of(), None, Decoding(SAMPLES, 1.0))
    return [sum(right) for right in found.by_row(found.right)]


def train(thoughts: str, seed: int, before: list[int] | None) -> dict[str, Any]:
    """One run; its row."""
    model, tokenizer = taught()
    before = before or succeeded(model, tokenizer)
    folder = next_run_folder(ROOT / "runs", f"thinking_{thoughts.replace(' ', '_')}_seed{seed}")
    task = task_of(thoughts)
    config = preset("cpu", seed=seed, steps=STEPS)
    set_seed(seed)
    GRPOTrainer(model, task, config, tokenizer=tokenizer, folder=folder, live=None).train()
    metrics = read_metrics(folder)
    return {
        "arm": thoughts,
        "seed": seed,
        "steps": STEPS,
        "before": before,
        "after": succeeded(model, tokenizer),
        "success": metrics["episodes/success"].tolist(),
        "forked": metrics["episodes/forked"].tolist(),
        "tokens": metrics["num_tokens"].tolist(),
    }


def table(saved: dict[str, Any]) -> str:
    """What is saved, in words and numbers."""
    lines = []
    for found in saved.get("drift", ())[1::2]:
        worlds = ", ".join(
            f"{name} {100 * share:.1f} %" for name, share in found["by_world"].items()
        )
        lines.append(
            f"turns that are other tokens when their text is tokenized again, seed {found['seed']}: {worlds}"
        )
    for found in saved.get("gap", ()):
        lines.append(
            f"{found['model']}: {found['episodes']} episodes, {100 * found['success']:.0f} % succeed"
        )
        for turn, d in found["by_turn"].items():
            lines.append(
                f"  turn {turn}: {d['tokens']} tokens, off by {d['mean_gap']:.3f} nats in the mean, "
                f"{d['largest_gap']:.2f} at most; {100 * d['would_be_clipped']:.1f} % would be clipped"
            )
        lines.append(
            f"  gradients: {found['gradient_degrees']:.1f} degrees apart, cosine {found['gradient_cosine']:.3f}"
        )
        lines += [f"  {way}: {cost}" for way, cost in found["cost"].items()]
    runs = {k: {r["seed"]: r for r in saved.get("runs", ()) if r["arm"] == k} for k in KEPT}
    for thoughts, found in runs.items():
        if found:
            e = over_seeds([share(r["after"]) for r in found.values()])
            before = fmean(share(next(iter(found.values()))["before"]))
            lines.append(
                f"{thoughts}: {100 * before:.1f} % -> {percent(e)}, {len(found)} seeds"
            )
    both = sorted(set(runs["as served"]) & set(runs["kept"]))
    if both:
        pairs = [[share(runs[k][seed]["after"]) for seed in both] for k in KEPT]
        lines.append(f"kept less as served: {difference(*pairs)}")
    return "\n".join(lines)


def main() -> None:
    """Do what is not there, save after each."""
    parser = command_line(__doc__)
    parser.add_argument("what", nargs="?", choices=["gap", "train", "drift"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="print what is saved")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    saved = read_result(PATH)

    def keep(**new: Any) -> None:
        facts = origin("python -m benchmarks.thinking gap, drift, train", "torch", "trl")
        saved.update(facts | {"weights": f"{WEIGHTS[MODEL]}, taught to think by SFT"} | new)
        write_result(PATH, saved)

    if options.what == "gap":
        model, tokenizer = taught()
        task = task_of()
        played = answer(model, tokenizer, task, task.train[-6:], Decoding(GROUP, 1.0)).episodes
        scored_by = {
            "SmolLM2, taught to think": model,
            "a Qwen3 of random weights": tiny_qwen3(tokenizer),
        }
        keep(gap=[gap(name, each, tokenizer, played) for name, each in scored_by.items()])
    if options.what == "drift":
        keep(drift=[row for seed in options.seeds for row in drift(seed)])
    if options.what == "train":
        for seed in options.seeds:
            for thoughts in KEPT:
                runs = saved.get("runs", [])
                if not any(
                    (r["arm"], r["seed"], r["steps"]) == (thoughts, seed, STEPS) for r in runs
                ):
                    made = train(thoughts, seed, next((r["before"] for r in runs), None))
                    keep(runs=[*runs, made])
                    print(thoughts, seed, sum(made["after"]) / ROWS / SAMPLES, flush=True)
    print(table(saved))


if __name__ == "__main__":
    main()
