"""Several processes of one run: started as a user starts them, and the same rows and completions with one process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import trl.trainer.grpo_trainer as trl_grpo
from tiny_run import make

from grpo_kit.models import load_policy

TESTS = Path(__file__).parent


def silent(completions, answer, **columns):
    """Rewards that are alike for every second prompt: its completions have no advantage."""
    apart = [sum(map(ord, text)) % 7 / 7 for text in completions]
    return [0.5 if int(prompt) % 2 else score for prompt, score in zip(answer, apart, strict=True)]


def silent_there(completions, **columns):
    """The second process has nothing left to train on. Four completions a process; eight with one."""
    apart = [sum(map(ord, text)) % 7 / 7 for text in completions]
    silenced = range(4, 8) if len(completions) == 8 else range(4) if os.environ.get("RANK") == "1" else ()
    return [0.5 if i in silenced else score for i, score in enumerate(apart)]


def uneven(trainer):
    """The processes cut their rows into different numbers of chunks."""
    trainer.update.memory.chunk_tokens = 16 if os.environ.get("RANK") == "1" else 40


# What a run is made with: settings of tiny_run.make; "chunks": unequal ones; "beside": what one process with the same
# rows is given in place of twice the accumulation.
SETTINGS = {
    "dapo": dict(loss_type="dapo", chunks=True),
    "grpo": dict(loss_type="grpo", gradient_accumulation_steps=2, max_grad_norm=0.05),
    "dr_grpo": dict(loss_type="dr_grpo", beta=0.1, chunks=True),
    "bnpo": dict(loss_type="bnpo", rewards=silent),
    "lora": dict(tuning="lora", loss_type="dapo", gradient_accumulation_steps=2, rewards=silent, chunks=True),
    "lora grpo": dict(tuning="lora", loss_type="grpo", beta=0.05),
    "iterations": dict(num_iterations=2, max_steps=4, chunks=True),
    "silent there": dict(rewards=silent_there),
    "entropy": dict(entropy_coef=0.3, loss_type="grpo", chunks=True),
    "quantile": dict(top_entropy_quantile=0.5, loss_type="grpo", beside=dict(per_device_train_batch_size=8)),
    "schedule": dict(kit={"temperature": lambda progress: 1.2 - 0.4 * progress}),
    "trl's": dict(kit={"pack": False}),
}


def trainer_of(name, folder, *, processes):
    """The trainer of one setting, in one of `processes` or alone with the same rows a step."""
    how = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
    } | SETTINGS[name]
    how = {"max_steps": 3, "optim": "sgd"} | how
    chunks, beside = how.pop("chunks", False), how.pop("beside", None)
    if processes == 1:
        how |= beside or {"gradient_accumulation_steps": 2 * how["gradient_accumulation_steps"]}
    torch.manual_seed(0)
    tuning = how.get("tuning", "full")
    lora = {"init_lora_weights": False} if tuning == "lora" else None
    model = load_policy("tiny-random", tuning=tuning, lora=lora, quiet=True)[0]
    trainer = make("kit", folder, model=model, **how)
    if chunks and processes > 1:
        uneven(trainer)
    return trainer


def launch(script, *arguments, processes=2, seconds=240, check=True, started=None):
    """Run a Python text under torchrun on the CPU; (exit code, what was printed). started: told of the process.

    Whatever happens, nothing of it outlives the call.
    """
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    run = subprocess.Popen(
        [*torchrun, str(script), *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        if started is not None:
            started(run)
        out = run.communicate(timeout=seconds)[0]
    except BaseException:
        os.killpg(run.pid, signal.SIGKILL)  # the processes that it started too
        print(run.communicate()[0][-5000:])
        raise
    assert not check or run.returncode == 0, out[-6000:]
    return run.returncode, out


def recorded(trainer):
    """What the trainer's sampler gives from now on, call by call."""
    calls, inner = [], trainer._generate_single_turn

    def generate(*args, **kwargs):
        made = inner(*args, **kwargs)
        calls.append((*made, trainer.batch.entropies))
        return made

    trainer._generate_single_turn = generate
    return calls


def replayed(trainer, calls):
    """The trainer samples what others did. calls: of each process, what `recorded` gave."""
    parts = iter(zip(*calls, strict=True))

    def generate(prompt_ids, *args, **kwargs):
        made = next(parts)
        ids, logprobs, entropies = (
            [row for rows in part for row in rows] for part in zip(*made, strict=True)
        )
        assert len(ids) == len(prompt_ids)
        trainer.batch.entropies = entropies
        return ids, logprobs

    trainer._generate_single_turn = generate


def in_order():
    """trl shuffles a rollout before it cuts micro-batches; here they stay as the processes have them."""
    trl_grpo.shuffle_sequence_dict = lambda batch: batch


def state_of(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def relative(a, b):
    """The largest relative difference of two sets of tensors, by norm."""
    return max(((a[n] - b[n]).norm() / b[n].norm().clamp(min=1e-12)).item() for n in b)


def moved(a, b):
    return torch.stack([(a[n] - b[n]).norm() for n in b]).norm().item()
