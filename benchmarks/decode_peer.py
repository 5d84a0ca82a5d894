"""A decoding step of the kit on a CPU beside llama.cpp's, on the same weights, by the number of rows.

    pip install --target /tmp/llama llama-cpp-python==0.3.36     # compiles llama.cpp, 4 to 11 minutes
    PYTHONPATH=/tmp/llama python -m benchmarks.decode_peer
    PYTHONPATH=/tmp/llama python -m benchmarks.decode_peer --rows 1 8 --bits 32

Rows are completions of one prompt of 250 tokens. llama.cpp reads the kit's own GGUF export, in float32 or bfloat16,
shares the prompt's keys and values between its sequences (llama_memory_seq_cp, one unified cache) and is timed over
llama_decode alone; the kit's step is from sampler to sampler, and once more without the sampler. All in one process,
in turn, the least of all steps. Writes results/decode_peer.json.
"""

from __future__ import annotations

import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

import grpo_kit as kit
from benchmarks.decode import sampler_clock
from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, save
from grpo_kit.engine import RolloutEngine
from grpo_kit.models import load_policy

ROWS = (1, 2, 4, 8, 16, 32)
PROMPT, STEPS = 250, 32


class Peer:
    """llama.cpp on a GGUF file, with as many threads as torch."""

    def __init__(self, file: Path, rows: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)  # it is called later
        llama_cpp.llama_log_set(self._quiet, None)
        model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = 4096, 512, rows
        options.kv_unified = True
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.type_k = options.type_v = 0  # float32, as the kit's
        self._context = llama_cpp.llama_init_from_model(model, options)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)

    def _decode(self, tokens: list[int], first: int, rows: list[int]) -> float:
        """Seconds of one call: tokens at positions from `first` on, or one token of each of these rows."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            is_prompt = len(rows) == 1 and len(tokens) > 1
            batch.token[place] = token
            batch.pos[place] = first + place if is_prompt else first
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0 if is_prompt else rows[place]
            batch.logits[place] = not is_prompt or place == len(tokens) - 1
        start = time.perf_counter()
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        return time.perf_counter() - start

    def steps(self, rows: int, prompt: list[int]) -> list[float]:
        """Seconds of each step of so many rows."""
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_clear(memory, True)
        self._decode(prompt, 0, [0])
        for row in range(1, rows):
            self._lib.llama_memory_seq_cp(memory, 0, row, -1, -1)
        return [
            self._decode([100 + row for row in range(rows)], PROMPT + step, list(range(rows)))
            for step in range(STEPS)
        ]


def kit_steps(
    engine: RolloutEngine, rows: int, prompt: list[int]
) -> tuple[list[float], list[float]]:
    """Seconds of each step of the kit but the first, from sampler to sampler; and without the sampler."""
    settings = GenerationConfig(
        max_new_tokens=STEPS, do_sample=True, top_k=0, eos_token_id=[], pad_token_id=0
    )
    with sampler_clock() as clock:
        engine.generate([prompt] * rows, settings, seed=0)
    steps = list(pairwise(clock[1:]))
    whole = [later - earlier for (earlier, _), (later, _) in steps]
    return whole, [later - ended for (_, ended), (later, _) in steps]


def main() -> None:
    """Measure in turn, save, print."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    policy, tokenizer = load_policy(options.model, quiet=True)
    policy.eval()
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(
        20, policy.config.vocab_size - 20, (PROMPT,), generator=draw
    ).tolist()
    result: dict[str, Any] = origin(
        "python -m benchmarks.decode_peer", "torch", "llama-cpp-python"
    )
    result |= {
        "weights": WEIGHTS.get(options.model, options.model),
        "seed": 0,
        "unit": "ms a step",
    }
    result |= {"threads": torch.get_num_threads(), "load average before": load}
    result |= {"n": f"the least of {options.rounds * STEPS}"}
    with tempfile.TemporaryDirectory() as folder:
        for bits in options.bits:
            name = {32: "f32", 16: "bf16"}[bits]
            place = Path(folder) / name
            kit.export(policy, tokenizer, place, format="gguf", quant=name, proof=False)
            file = next(place.rglob("*.gguf"))
            engine, peer = RolloutEngine(policy, bits=bits), Peer(file, max(options.rows))
            arms = ("the kit", "without sampling", "llama.cpp")
            least: dict[str, dict[int, float]] = {arm: {} for arm in arms}
            for _ in range(options.rounds):
                for rows in options.rows:
                    found = (*kit_steps(engine, rows, prompt), peer.steps(rows, prompt))
                    for arm, seconds in zip(arms, found, strict=True):
                        now = 1e3 * min(seconds)
                        least[arm][rows] = min(least[arm].get(rows, now), now)
            result[name] = least
            for rows in options.rows:
                print(
                    name, rows, *(f"{arm} {least[arm][rows]:.1f}" for arm in least), flush=True
                )
    print(save(options.out, "decode_peer", result))


if __name__ == "__main__":
    main()
