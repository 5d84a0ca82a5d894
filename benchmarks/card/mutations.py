"""Do the tests on the pretend card see a fault in code that only a card runs? Faults, put in one at a time.

    python -m benchmarks.card.mutations                   # all: 15 minutes of one core
    python -m benchmarks.card.mutations --only 3 17       # some, nothing saved

Each replaces one text of one file of grpo_kit in a copy of the tree: a missing wait, a stale address, a wrong device.
The tests named beside it are run on the copy (tests/pretend_card, which needs g++ and no card), until one fails. Before
that all named tests have to pass without a fault. Saves benchmarks/results/card_mutations.json.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.result import RESULTS, ROOT, command_line, origin, save

CUDA = "../engine/test_cuda.py"
AROUND = "card_tests/test_around_a_run_on_a_card.py"
BESIDE = "card_tests/test_beside_the_cpu.py"
COUNTS = "card_tests/test_counts_on_a_card.py"
MEMORY = "card_tests/test_memory_on_a_card.py"
RULES = "card_tests/test_rules_of_a_card.py"
NO_TRITON = "card_tests/without_triton"


class Mutation(NamedTuple):
    """what: the fault in words. file: in grpo_kit. old, new: the text, there once, and what takes its place.

    tests: files. words: -k's. triton: whether the card has it; without, all tests of the files run.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    words: str = ""
    triton: bool = True


MUTATIONS = [
    Mutation(
        "a stream not joined: the warm-up of a graph does not wait for the step's inputs",
        "engine/card/_graphs.py",
        "        stream.wait_stream(cuda.current_stream())\n",
        "",
        (CUDA,),
        "graphs_write",
    ),
    Mutation(
        "a missing wait: the host reads which rows ended before the copy has arrived",
        "engine/_decode.py",
        "self._arrived.synchronize()",
        "pass",
        (CUDA,),
        "graphs_write",
    ),
    Mutation(
        "a wait for each token",
        "engine/_decode.py",
        "EndWatch(output.done, _LOOK_EVERY) if self.bucketed else None",
        "None",
        (COUNTS,),
        "decoded_token",
    ),
    Mutation(
        "a wait in a capture: the column is read on the host",
        "engine/_kv_cache.py",
        "unwritten = self._suffix_order[: self.width] > self.column",
        "unwritten = self._suffix_order[: self.width] > self.column.item()",
        (CUDA,),
        "graphs_write",
    ),
    Mutation(
        "a graph kept too long: after the weights moved",
        "engine/rollout.py",
        "            self._decoder.graphs.clear()\n",
        "",
        (CUDA,),
        "graphs_write",
    ),
    Mutation(
        "a graph kept too long: after the keys and values moved",
        "engine/_decode.py",
        "        self.slots = None\n        self.graphs.clear()\n",
        "        self.slots = None\n",
        (RULES,),
        "new_graphs",
    ),
    Mutation(
        "a graph kept too long: over adapters that were switched off",
        "engine/_supported_models.py",
        "                adapters.append(layer.disable_adapters)\n",
        "",
        (RULES,),
        "switched_off",
    ),
    Mutation(
        "a stale address: a step's tokens in a new tensor",
        "engine/_kv_cache.py",
        "self.input_ids[: len(tokens), 0] = tokens",
        "self.input_ids = torch.nn.functional.pad(tokens, (0, len(self.input_ids) - len(tokens)))[:, None]",
        (CUDA,),
        "graphs_write",
    ),
    Mutation(
        "a stale address: the places of attention's rows in new tensors, after rows ended",
        "engine/_attention.py",
        "self._to_rows[: rows * heads] = to_rows",
        "self._to_rows = to_rows",
        (CUDA,),
        "graphs_write",
    ),
    Mutation(
        "a fresh allocation in each capture: a pool of its own for each graph",
        "engine/card/_graphs.py",
        "        if self._pool is None:\n            self._pool",
        "        if True:\n            self._pool",
        (RULES, MEMORY),
        "pool or hold",
    ),
    Mutation(
        "a fresh allocation in a capture: autocast's own copies of the weights instead of kept ones",
        "engine/card/_graphs.py",
        "        if func is functional.linear:\n",
        "        if False:\n",
        (RULES,),
        "autocast",
    ),
    Mutation(
        "a stream for each capture",
        "engine/card/_graphs.py",
        "self._side = stream = self._side or cuda.Stream()",
        "self._side = stream = cuda.Stream()",
        (MEMORY,),
        "stream",
    ),
    Mutation(
        "a stale copy: fused adapters after an update",
        "engine/_decode.py",
        "            self.fused = FusedLayers(self.base, parts)\n        self.fused.refresh()",
        "            self.fused = FusedLayers(self.base, parts)\n            self.fused.refresh()",
        (CUDA,),
        "fast_ways and LoRA",
    ),
    Mutation(
        "a stale copy: autocast's 16-bit weights after an update",
        "engine/card/_graphs.py",
        "            copy.copy_(weight)\n",
        "            pass\n",
        (CUDA,),
        "fast_ways and autocast",
    ),
    Mutation(
        "a wrong device: a prompt's positions",
        "engine/_decode.py",
        "(shared + torch.arange(width, device=self.device))",
        "(shared + torch.arange(width))",
        (CUDA,),
        "graphs_write",
    ),
    Mutation(
        "a wrong device: the packed scores' places",
        "engine/packed_update.py",
        "        places.to(device),\n",
        "        places,\n",
        (COUNTS, BESIDE),
        "waits_and_copies or a_run_is",
    ),
    Mutation(
        "a generator on the wrong device: the notebook's random numbers of the card do not come back",
        "loop/processes.py",
        "torch.cuda.set_rng_state_all(cuda)",
        "pass",
        (RULES,),
        "random",
    ),
    Mutation(
        "a wrong dtype: keys and values in float32 beside bfloat16 weights",
        "engine/_decode.py",
        "        layers = self.fused or self._layers\n",
        "        layers, dtype = self.fused or self._layers, torch.float32\n",
        (MEMORY,),
        "plan_of_a_rollout",
    ),
    Mutation(
        "a wrong dtype: scores of attention rounded to 16 bits",
        "engine/_attention.py",
        "product = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)",
        "product = torch.bmm(a.flatten(0, -3), b.flatten(0, -3)).float()",
        (RULES,),
        "scores",
    ),
    Mutation(
        "autocast off in the update",
        "engine/packed_update.py",
        "        with autocast(self.config, self.memory.device):\n",
        "        if True:\n",
        (RULES,),
        "autocast",
    ),
    Mutation(
        "autocast off in the rollout",
        "engine/fast.py",
        "            with autocast(config, next(model.parameters()).device):\n",
        "            if True:\n",
        (RULES,),
        "autocast",
    ),
    Mutation(
        "the scaler skipped: the loss is not scaled",
        "loop/grpo.py",
        "self.scaler.scale(loss).backward()",
        "loss.backward()",
        (RULES,),
        "scaler",
    ),
    Mutation(
        "the scaler skipped: the gradient is clipped while it is scaled",
        "loop/grpo.py",
        "        self.scaler.unscale_(self.optimizer)\n",
        "",
        (RULES,),
        "scaler",
    ),
    Mutation(
        "a cap ignored: the limit on this process's share of the card",
        "engine/memory/_free.py",
        "max(0, min(free, capped))",
        "max(0, free)",
        (RULES,),
        "free",
    ),
    Mutation(
        "memory of graphs counted as free",
        "engine/memory/_free.py",
        'if segment["device"] != index or tuple(segment["segment_pool_id"]) != (0, 0):',
        'if segment["device"] != index:',
        (RULES,),
        "free",
    ),
    Mutation(
        "out of memory in the update: what the failed attempt added to the gradient stays",
        "engine/_update_memory.py",
        "            parameter.grad = None\n",
        "            pass\n",
        (MEMORY,),
        "in_an_update",
    ),
    Mutation(
        "out of memory in the optimizer: weights move before all states are there",
        "engine/optim/split_adamw.py",
        "                if p.grad is not None and not self.state[p]:\n",
        "                if False:\n",
        (MEMORY,),
        "moments",
    ),
    Mutation(
        "without Triton FlexAttention is taken, which then runs unfused",
        "engine/_update_memory.py",
        'return "flex_attention" if compiled else "sdpa"',
        'return "flex_attention"',
        (NO_TRITON,),
        triton=False,
    ),
    Mutation(
        "prompts silently unfused: key heads left to a kernel that does not share them",
        "engine/_attention.py",
        "            name = REPEATED_HEADS\n",
        "            pass\n",
        (RULES,),
        "one_kernel",
    ),
]


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the library and its tests, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for part in ("grpo_kit", "tests"):
            shutil.copytree(
                ROOT / part, Path(folder) / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", folder)
        yield Path(folder)


def failed(tree: Path, tests: tuple[str, ...], words: str, *, triton: bool = True) -> list[str]:
    """The first test that fails on the pretend card, as pytest names it, and its error; [] if none does."""
    here = tree / "tests" / "pretend_card"
    more = {
        "PRETEND_CARD": "rtx4090",
        "PRETEND_TRITON": str(int(triton)),
        "KIT_PROFILE": "smoke",
    }
    more |= {
        "PYTHONPATH": os.pathsep.join(map(str, (here, tree))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rf", "--tb=line", *tests]
    command += [
        word
        for name in ("card_plugin", "no:cacheprovider", "no:xdist")
        for word in ("-p", name)
    ]
    command += ["-k", words] if words else []
    done = subprocess.run(
        command, cwd=here, env=os.environ | more, capture_output=True, text=True
    )
    if done.returncode == 0:
        return []
    named = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S.*)$", done.stdout, re.M)
    return [one[:200] for one in named] or [
        f"exit {done.returncode}: {(done.stdout + done.stderr)[-300:]}"
    ]


def ask(mutation: Mutation, tree: Path) -> list[str]:
    """Which test fails with this fault."""
    path = tree / "grpo_kit" / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times, not once"
        )
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        return failed(tree, mutation.tests, mutation.words, triton=mutation.triton)
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Without a fault, then with each; print, save."""
    parser = command_line(__doc__)
    parser.add_argument("--only", type=int, nargs="+", help="numbers, from 1")
    options = parser.parse_args()
    chosen = [MUTATIONS[n - 1] for n in options.only] if options.only else MUTATIONS
    rows = []
    with copied() as tree:
        # all tests that are named, and a few more, in one process
        for triton in {m.triton for m in chosen}:
            some = [m for m in chosen if m.triton == triton]
            tests = tuple(dict.fromkeys(test for m in some for test in m.tests))
            words = (
                "" if not triton else " or ".join(dict.fromkeys(f"({m.words})" for m in some))
            )
            if wrong := failed(tree, tests, words, triton=triton):
                raise SystemExit(f"without a fault {wrong} fails")
        for mutation in chosen:
            by = ask(mutation, tree)
            rows.append(
                {name: getattr(mutation, name) for name in ("what", "file", "old", "new")}
            )
            rows[-1] |= {"caught": bool(by), "by": by}
            print(
                f"{MUTATIONS.index(mutation) + 1}. {mutation.what}: {by or 'NOT SEEN'}",
                flush=True,
            )
    seen = sum(row["caught"] for row in rows)
    print(f"{seen} of {len(rows)} seen")
    if not options.only:
        result = origin(
            "python -m benchmarks.card.mutations",
            "torch",
            "transformers",
            "peft",
            "bitsandbytes",
        )
        print(
            save(
                RESULTS,
                "card_mutations",
                result | {"seen": f"{seen} of {len(rows)}", "mutations": rows},
            )
        )


if __name__ == "__main__":
    main()
