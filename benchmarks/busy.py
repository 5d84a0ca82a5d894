"""A rollout on a machine that is quiet, and on one where other processes work: threads that spin, sleep, or one alone.

    python -m benchmarks.busy --others 0 4               # 4 minutes; 8 completions of 24 tokens, SmolLM2

Each arm is a process of its own with its environment, since libgomp reads GOMP_SPINCOUNT when torch is imported: how$
often a thread looks whether the others are done before it sleeps. Writes results/busy.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from benchmarks.result import RESULTS, command_line, origin, write_result

ARMS = {
    "two threads, libgomp's own wait": {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": "2"},
    "two threads that sleep soon (the kit's)": {
        "GOMP_SPINCOUNT": "1000",
        "OMP_NUM_THREADS": "2",
    },
    "one thread": {"OMP_NUM_THREADS": "1"},
}
ROUNDS, LIMIT = 3, 90


def measured() -> dict[str, list[float]]:
    """Seconds by the clock and of the processor of each rollout behind the first."""
    from transformers import GenerationConfig

    from grpo_kit import load_policy
    from grpo_kit.engine import RolloutEngine

    model, tokenizer = load_policy("smollm2-135m-instruct", quiet=True)
    engine = RolloutEngine(model)
    prompts = [tokenizer("Tell me a story about a fox and a well.")["input_ids"]] * 8
    clock, processor = [], []
    for _ in range(ROUNDS):
        begin, cpu = time.perf_counter(), time.process_time()
        engine.generate(prompts, GenerationConfig(max_new_tokens=24, do_sample=True), seed=1)
        clock.append(time.perf_counter() - begin)
        processor.append(time.process_time() - cpu)
    return {"seconds": clock[1:], "processor seconds": processor[1:]}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--others",
        type=int,
        nargs="+",
        default=[0, 4],
        help="processes that only work, beside it",
    )
    parser.add_argument(
        "--measure", action="store_true", help="one arm, here; its numbers as JSON"
    )
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measured()))
        return
    rows = []
    for others in args.others:
        working = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)
        ]
        try:
            for arm, environment in ARMS.items():
                words = [sys.executable, "-m", "benchmarks.busy", "--measure"]
                row = {"others": others, "arm": arm, "load before": os.getloadavg()[0]}
                try:
                    done = subprocess.run(
                        words,
                        env=os.environ | environment,
                        capture_output=True,
                        text=True,
                        timeout=LIMIT,
                        check=True,
                    )
                    row |= json.loads(done.stdout.splitlines()[-1])
                except subprocess.TimeoutExpired:
                    row["longer than, seconds"] = LIMIT
                rows.append(row)
                print(row, flush=True)
        finally:
            for process in working:
                process.kill()
    about = origin(
        f"python -m benchmarks.busy --others {' '.join(map(str, args.others))}", "torch"
    )
    write_result(RESULTS / "busy.json", about | {"cores": os.cpu_count(), "rows": rows})


if __name__ == "__main__":
    main()
