"""What stands around a run, on a card: evaluation, readiness, doctor, a run that is killed, and its export."""

import signal
import subprocess
import sys
from pathlib import Path

import few_words
import pytest
import torch
from loop_runs import make, same, task, weights
from safetensors.torch import load_file

import grpo_kit as kit
from grpo_kit.more.doctor import _self_check as self_check

HERE = Path(__file__).resolve().parents[1]
TESTS = HERE.parent
KILLED = """
import sys
sys.path[:0] = {paths}
if {pretend}:
    import card_plugin
import os, signal, torch
from loop_runs import make
from grpo_kit.loop.protocols import Hook
import few_words

class Kill(Hook):
    def before_step(self, trainer):
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

torch.set_float32_matmul_precision({precision!r})
model = few_words.policy()[0].cuda()
make({folder!r}, model=model, seams="fast", save_steps=1, hooks=[Kill()]).train()
"""


@pytest.fixture
def on_card():
    model, tokenizer = few_words.policy()
    return model.cuda(), tokenizer


def test_evaluation_and_readiness(on_card):
    found = kit.evaluate(*on_card, task(), samples=2, k=(1,), max_completion_tokens=4)
    assert found.strict.n == len(found.rows) == 4
    ready = kit.readiness(
        *on_card, task(), samples=2, group_size=2, max_completion_tokens=4, seconds=None
    )
    assert str(ready)


@pytest.mark.parametrize("check", ["fast_ways", "optimizer", "save_and_resume"])
def test_the_doctors_checks(check, tmp_path):
    getattr(self_check, check)(tmp_path)


def test_an_export_holds_what_was_trained(on_card, tmp_path):
    """Its proof is read by a fresh process, which has no pretend card; on a real one it is asked for."""
    model, tokenizer = on_card
    proof = "card" not in sys.modules
    made = kit.export(
        model,
        tokenizer,
        tmp_path / "out",
        task=task(),
        quant="f32",
        temperature=0.7,
        proof=proof,
    )
    stored = load_file(made.folder / "model.safetensors")
    wanted = dict(model.named_parameters())
    assert stored and all(
        torch.equal(stored[name], wanted[name].detach().cpu()) for name in stored
    )


def test_a_run_that_is_killed_goes_on(tmp_path):
    """The pretend card repeats bit for bit. Sums on a real one have no fixed order, so that a token may be drawn
    otherwise: there both runs move the same way."""

    def run(folder, **more):
        model = few_words.policy()[0].cuda()
        return make(folder, model=model, seams="fast", save_steps=1, **more)

    pretend = "card" in sys.modules
    folder = str(tmp_path / "run")
    paths, precision = (
        [str(HERE), str(TESTS), str(TESTS.parent)],
        torch.get_float32_matmul_precision(),
    )
    code = KILLED.format(paths=paths, pretend=pretend, folder=folder, precision=precision)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    whole = run(tmp_path / "whole")
    start = weights(whole)
    whole.train()
    resumed = run(folder)
    resumed.train(resume=True)
    assert resumed.step == 4
    one, other = weights(resumed), weights(whole)
    if pretend:
        assert same(one, other)
    else:
        apart, moved = (
            sum(float((one[name] - there[name]).square().sum()) for name in start)
            for there in (other, start)
        )
        assert apart < 0.25 * moved
