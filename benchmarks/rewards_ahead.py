"""What a step gains where code rewards begin while others still write: python -m benchmarks.rewards_ahead

A forced workload: SmolLM2-135M writes given programs (4 prompts x 4, one each, as long as the task's right answers), so
that all arms decode and judge the same. A pair is the stages "completions" and "rewards" of one step without and with
beginning ahead, in turn; the update is left out, which neither changes. Every program differs from all others.
--torch-threads: what is left of the machine's cores runs the programs.
Writes results/rewards_ahead_<threads>_threads.json.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import statistics
import sys
import tempfile
import time

import torch
from trl import GRPOConfig

from benchmarks.result import RESULTS, command_line, origin, save, spread
from grpo_kit.models import load_policy
from grpo_kit.rollout import RolloutEngine
from grpo_kit.tasks import code
from grpo_kit.training.trainer import GRPOTrainer

PROMPTS, GROUP = 4, 4


def forced(scripts: list[list[int]]):
    """A processor after which row r can only draw scripts[r]."""
    width: list[int] = []

    def force(input_ids, scores, rows):
        if not width or input_ids.size(1) < width[0]:
            width[:] = [input_ids.size(1)]
        step = input_ids.size(1) - width[0]
        wanted = torch.tensor([scripts[r][min(step, len(scripts[r]) - 1)] for r in rows.tolist()])
        return torch.full_like(scores, -torch.inf).scatter_(1, wanted[:, None], 0.0)

    return force


def programs(rows: list[dict], rng: random.Random, number: itertools.count) -> list[str]:
    """A right program a row, none like another; up to three comments make some longer."""
    made = []
    for row in rows:
        head, _, body = row["answer"].rstrip().partition("\n")
        pause = "    # and now the next step\n" * rng.randrange(4)
        made.append(f"{head}\n{pause}{body}\n# {next(number)}\n```")
    return made


def main() -> None:
    """Run, print, save."""
    parser = command_line(__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--torch-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--workers", type=int, default=1, help="programs at a time while others still write")
    parser.add_argument("--seconds", type=float, default=50, help="no further pair is begun then")
    options = parser.parse_args()
    torch.set_num_threads(options.torch_threads)
    task, (model, tokenizer) = code(), load_policy("smollm2-135m-instruct", quiet=True)
    data, rng, number = task.dataset(tokenizer), random.Random(0), itertools.count()
    took: dict[int, list[float]] = {0: [], options.workers: []}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            task,
            GRPOConfig(
                output_dir=f"{folder}/run",
                per_device_train_batch_size=PROMPTS * GROUP,
                num_generations=GROUP,
                use_cpu=True,
                bf16=False,
                report_to=[],
                max_steps=1,
            ),  # fmt: skip
            processing_class=tokenizer,
            live=None,
        )
        trainer.model.train()
        trainer.recorder.completions = lambda *_: None  # no run folder here
        inputs = [dict(data[p]) for p in range(PROMPTS) for _ in range(GROUP)]
        engine = trainer.sampling.engine = RolloutEngine(model)
        began = time.perf_counter()
        for pair in range(options.pairs + 1):
            if pair > 1 and time.perf_counter() - began > options.seconds:
                break
            for workers in took:
                texts = programs(inputs, rng, number)
                scripts = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
                force = {"processors": [forced(scripts)]}
                engine.generate = functools.partial(RolloutEngine.generate, engine, **force)
                trainer._ahead.spare = workers
                started = time.perf_counter()
                trainer._generate_and_score_completions(inputs)
                both = time.perf_counter() - started
                if trainer.parts.tolist() != [[1.0, 1.0, 1.0]] * len(inputs):
                    raise AssertionError(f"a right program has other rewards: {trainer.parts}")
                if pair:  # the first warms up
                    took[workers].append(both)
            print({workers: round(found[-1], 2) for workers, found in took.items() if found}, flush=True)
    lengths = sorted(map(len, scripts))
    result = origin(
        "python -m benchmarks.rewards_ahead " + " ".join(sys.argv[1:]), "torch", "transformers", "trl"
    )
    result |= {"cores": os.cpu_count(), "torch_threads": options.torch_threads, "load": os.getloadavg()[0]}
    result["tokens"] = {"shortest": lengths[0], "median": statistics.median(lengths), "longest": lengths[-1]}
    without, ahead = took.values()
    saved = [a - b for a, b in zip(without, ahead, strict=True)]
    result["seconds"] = {"without": without, "workers": options.workers, "ahead": ahead, "saved": saved}
    result["saved"] = spread(saved)
    print(result["seconds"], result["saved"], result["tokens"])
    print(save(RESULTS, f"rewards_ahead_{options.torch_threads}_threads", result))


if __name__ == "__main__":
    main()
