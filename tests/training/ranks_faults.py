"""Faults in runs of two processes, for test_together.py. Each case checks itself, in both processes.

torchrun ... ranks_faults.py FOLDER CASE ...
"""

import os
import random
import signal
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks_run import state_of
from tiny_run import data, letters, make, settings
from transformers import TrainerCallback

from grpo_kit import tasks
from grpo_kit.evaluation.held_out import HeldOut
from grpo_kit.loop.interrupts import Stopped
from grpo_kit.models import load_policy
from grpo_kit.record.control import control
from grpo_kit.record.files import read_metrics
from grpo_kit.rewards.scoring import RewardError
from grpo_kit.training import first_contact
from grpo_kit.training.together import ProcessFailed
from grpo_kit.training.trainer import GRPOTrainer

torch.set_num_threads(1)
warnings.simplefilter("ignore")
RANK = int(os.environ["RANK"])
HERE = Path(sys.argv[1])
signal.signal(signal.SIGINT, lambda *_: None)  # what is pressed a moment too late hits nobody
EVALUATES = dict(eval_dataset=data(4), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)
WHOLE = {}
A_HUNDREDTH = 1e-5  # of a step at this rate: other chunks add up in another order, each machine in its own
SAVES = dict(save_strategy="steps", save_steps=2)


def small(name, **more):
    how = dict(per_device_train_batch_size=4, max_steps=4, learning_rate=1e-3, loss_type="dapo")
    how["kit"] = {"temperature": lambda progress: 1.2 - 0.4 * progress} | more.pop("kit", {})
    return make("kit", HERE / name, **how | more)


def equal(a, b):
    return all(torch.equal(a[n], b[n]) for n in b)


def untouched(**more):
    """The weights of a run that nothing happens to, and the seconds that it takes."""
    key = "whole " + " ".join(more)
    if key not in WHOLE:
        trainer = small(key, **more)
        began = time.monotonic()
        trainer.train()
        WHOLE[key] = state_of(trainer), time.monotonic() - began
    return WHOLE[key]


def press(at, who):
    """SIGINT after so many seconds, to these processes; both the same."""
    if RANK in who:
        timer = threading.Timer(at, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()


def to_the_end(make_trainer, pressed, *, fresh):
    """Train, however often it is stopped; in the trainer that was stopped, or in a new one."""
    trainer, stops, resumes = make_trainer(), 0, None
    pressed()
    while True:
        try:
            trainer.train(resume_from_checkpoint=resumes)
            assert trainer.state.global_step == trainer.state.max_steps
            return trainer, stops
        except Stopped as stopped:
            stops += 1
            assert trainer.interrupted
            if fresh and stopped.step:
                trainer, resumes = make_trainer(), True


def drawn_stops(name, draws, seed, **more):
    """Pressed at a moment that is drawn, in one process or in both: the run ends in the weights of one left alone."""
    whole, seconds = untouched(**more)
    draw, stopped = random.Random(seed), 0
    for i in range(draws):
        at, who, fresh = (
            draw.uniform(0.02, 1.05) * seconds,
            draw.choice([(0,), (1,), (0, 1)]),
            draw.random() < 0.5,
        )
        made, pressed = partial(small, f"{name} {i}", **more), partial(press, at, who)
        trainer, stops = to_the_end(made, pressed, fresh=fresh)
        stopped += stops > 0
        assert equal(state_of(trainer), whole), (i, at, who, fresh)
        rows = read_metrics(HERE / f"{name} {i}")["step"].tolist() if RANK == 0 else [1, 2, 3, 4]
        assert [step for step in rows if step] == [1, 2, 3, 4], rows
        time.sleep(0.05)
    if RANK == 0:
        print(f"{name}: {draws} draws, {stopped} stopped")
    return stopped


def case_stops():
    assert drawn_stops("stops", 4, seed=1, **EVALUATES) >= 2


def case_stops_in_a_buffer():
    """A rollout is trained on twice: each process keeps its own in the checkpoint."""
    assert drawn_stops("buffer", 3, seed=2, num_iterations=2) >= 1


def case_stop_at_the_optimizer():
    """Of one process, as it makes its optimizer: the other has one already when both begin again."""
    for who in (0, 1):
        trainer = small(f"optimizer {who}")
        make_one, stops = trainer.first_contact.keeps_optimizer_off, [RANK == who]

        def keeps_off(make_one=make_one, stops=stops):
            off = make_one()
            if stops.pop():
                raise KeyboardInterrupt
            stops.append(False)
            return off

        trainer.first_contact.keeps_optimizer_off = keeps_off
        with pytest.raises(Stopped):
            trainer.train()
        assert (trainer.optimizer is None) == (RANK == who)
        stops[:] = [False]
        trainer.train()
        assert equal(state_of(trainer), untouched()[0])


def case_reward_that_raises():
    whole, _ = untouched()
    broken = [True]

    def reward(completions, trainer_state, **columns):
        if broken[0] and RANK == 1 and trainer_state.global_step == 2:
            raise ZeroDivisionError("of this process alone")
        return letters(completions)

    reward.__name__ = "letters"
    trainer = small("raises", rewards=reward)
    with pytest.raises(RewardError if RANK == 1 else ProcessFailed, match="of this process alone") as raised:
        trainer.train()
    if RANK == 0:
        assert "process 1 of 2 failed" in str(raised.value)
    assert (HERE / "raises" / "checkpoint-2").is_dir()
    broken[0] = False
    trainer.train()
    assert equal(state_of(trainer), whole)


def case_out_of_memory():
    """In one process: a smaller chunk, fewer rows a rollout; the others wait for it and nothing else changes."""
    for more in ({}, {"top_entropy_quantile": 0.5, "num_iterations": 2}):
        whole, _ = untouched(**more)
        trainer = small("memory " + " ".join(more), **more)
        forward, failed = trainer.update._forward, []

        def full(model, rows, width, *args, forward=forward, failed=failed):
            if RANK == 1 and len(failed) < 2 and torch.is_grad_enabled():
                failed.append(len(rows))
                raise torch.OutOfMemoryError("of this process alone")
            return forward(model, rows, width, *args)

        trainer.update._forward = full
        trainer.train()
        assert len(failed) == 2 * (RANK == 1)
        assert max((state_of(trainer)[n] - whole[n]).abs().max() for n in whole) < A_HUNDREDTH
    trainer = small("memory for good")

    def never(*args):
        if RANK == 1:
            raise torch.OutOfMemoryError("of this process alone")
        return type(trainer.update)._forward(trainer.update, *args)

    trainer.update._forward = never
    with pytest.raises(torch.OutOfMemoryError if RANK == 1 else ProcessFailed, match="does not fit"):
        trainer.train()


def case_disk():
    """It does not take one process's part of a checkpoint: training goes on, and the folder holds no part of one."""
    for rank in (0, 1):
        whole, _ = untouched(**SAVES)
        trainer, save = small(f"disk {rank}", **SAVES), torch.save
        failed = []

        def full(value, path, *args, save=save, failed=failed, rank=rank):
            if RANK == rank and not failed:
                failed.append(path)
                raise OSError(28, "No space left on device")
            return save(value, path, *args)

        torch.save = full
        try:
            trainer.train()
        finally:
            torch.save = save
        assert len(failed) == (RANK == rank)
        assert equal(state_of(trainer), whole)
        assert [p.name for p in sorted((HERE / f"disk {rank}").glob("*checkpoint*"))] == ["checkpoint-4"]
        assert not (HERE / f"disk {rank}" / ".saving").exists()


def case_half_a_step():
    """An optimizer that fails in one process: no weights are worth saving, and that is said."""
    trainer = small("half", **SAVES)
    inner = trainer.create_optimizer

    def create_optimizer(*args, **kwargs):
        optimizer = inner(*args, **kwargs)
        step = optimizer.step

        def fails(*args, **kwargs):
            if RANK == 1 and trainer.state.global_step == 2:
                raise ArithmeticError("of this process alone")
            return step(*args, **kwargs)

        optimizer.step = fails
        return optimizer

    trainer.create_optimizer = create_optimizer
    with pytest.raises(ArithmeticError if RANK == 1 else ProcessFailed, match="of this process alone"):
        trainer.train()
    assert [p.name for p in (HERE / "half").glob("checkpoint-*")] == ["checkpoint-2"]
    with pytest.raises(ValueError, match="different steps"):
        trainer.train()
    again = small("half", **SAVES)
    again.train(resume_from_checkpoint=True)
    assert equal(state_of(again), untouched(**SAVES)[0])


class Asks(TrainerCallback):
    def __init__(self, trainer, asked):
        self.trainer, self.asked = trainer, asked

    def on_step_begin(self, args, state, control, **kwargs):
        for ask in self.asked.get((state.global_step, RANK), []):
            ask()


def case_changes():
    """What one process is asked for, all do at the same step; what comes by the folder, too."""
    trainer = small("changes", max_steps=6)
    folder = HERE / "changes"
    asked = {
        (1, 1): [lambda: trainer.change(learning_rate=2e-3)],
        (2, 0): [lambda: control(folder).change(max_steps=5), lambda: control(folder).save()],
        (3, 0): [lambda: trainer.change(temperature=lambda progress: 0.9)],
        (4, 1): [lambda: trainer.change(epsilon=0.1)],
    }
    trainer.add_callback(Asks(trainer, asked))
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates == [1e-3, 1e-3, 2e-3, 2e-3, 2e-3], rates
    assert trainer.state.global_step == 5 and (folder / "checkpoint-3").is_dir()
    assert trainer.epsilon_low == 0.2, "asked for in the last step, which had begun"
    assert trainer.temperature != 0.9, "a function that one process alone was given cannot be obeyed"
    weights = trainer.ranks.gather(state_of(trainer))
    assert equal(weights[0], weights[1])


def case_pause_and_stop():
    trainer = small("paused")
    folder = HERE / "paused"
    stop = threading.Timer(0.7, lambda: control(folder).stop())
    trainer.add_callback(Asks(trainer, {(1, 0): [lambda: control(folder).pause(), stop.start]}))
    with pytest.raises(Stopped):
        trainer.train()
    assert trainer.state.global_step == 2
    trainer.train()
    assert equal(state_of(trainer), untouched()[0])


def case_held_out():
    """Each process asks about every second row; all hear the same accuracy."""
    task = tasks.largest(n_train=32, n_held_out=16)
    model, tokenizer = load_policy("tiny-random", quiet=True)
    held = HeldOut(task, rows=7, every=2)
    more = dict(max_completion_length=task.max_completion_tokens, max_steps=2, save_strategy="no")
    trainer = GRPOTrainer(
        model, task, settings(HERE / "held out", **more), processing_class=tokenizer, warmup=0, live=None,
        held_out=held, keep="best",
    )  # fmt: skip
    trainer.train()
    measured = [line["eval_accuracy"] for line in trainer.state.log_history if "eval_accuracy" in line]
    assert len(measured) == 2
    assert trainer.ranks.gather(measured)[0] == measured
    asked = []
    right = trainer.ranks.divide(lambda rows: [asked.append(row) or bool(row % 3) for row in rows], range(7))
    assert right == [bool(row % 3) for row in range(7)] and asked == list(range(7))[RANK::2]


def case_first_contact():
    """As on a card: packing that fails in one process is off in both, before a weight differs."""
    own, first_contact.cuda.may_fail = first_contact.cuda.may_fail, lambda device: True
    try:
        clean = small("contact")
        clean.train()
        assert not clean.logprobs.plain
        broken = small("contact broken")
        gradients = broken.update.gradients

        def fails(model, window):
            if RANK == 1 and broken.state.global_step == 2:
                raise RuntimeError("of this process alone")
            return gradients(model, window)

        broken.update.gradients = fails
        broken.train()
        assert broken.logprobs.plain, "in both"
    finally:
        first_contact.cuda.may_fail = own
    for trainer in (clean, broken):
        assert max((state_of(trainer)[n] - w).abs().max() for n, w in untouched()[0].items()) < 1e-6
    weights = broken.ranks.gather(state_of(broken))
    assert equal(weights[0], weights[1])


def case_many_stops():
    drawn_stops("many", 25, seed=7, **EVALUATES)
    drawn_stops("many in a buffer", 25, seed=8, num_iterations=2, gradient_accumulation_steps=2)
    drawn_stops("many saved", 25, seed=9, **SAVES)


for name in sys.argv[2:]:
    began = time.monotonic()
    globals()[f"case_{name}"]()
    print(f"{name} holds in process {RANK} ({time.monotonic() - began:.1f} s)", flush=True)
