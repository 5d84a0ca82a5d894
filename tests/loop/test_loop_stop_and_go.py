"""A run that was stopped, killed or damaged ends with the weights, rows and completions of one that was not."""

import json
import random
import shutil
import time
from pathlib import Path

import forked
import pytest
from loop_runs import KINDS, letters, make, press_after, press_stop, record, same, task, weights

from grpo_kit.engine.cpu._matmul import compiled
from grpo_kit.loop import checkpoint
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.record.files import RunFolderError
from grpo_kit.rewards.scoring import RewardError


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """kind -> (weights, record, seconds) of a run that nobody touched."""
    known = {}
    compiled()  # once a process; no part of a run's seconds

    def of(kind):
        if kind not in known:
            trainer = make(tmp_path_factory.mktemp("undisturbed") / "run", **KINDS[kind])
            began = time.monotonic()
            trainer.train()
            known[kind] = weights(trainer), record(trainer.folder), time.monotonic() - began
        return known[kind]

    return of


def train_to_the_end(trainer, **options):
    """Call train() again after each stop; returns how often it was stopped."""
    stops = 0
    while True:
        try:
            trainer.train(**options)
            return stops
        except Stopped:
            stops, options = stops + 1, {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.campaign) for n in range(2, 8))]
)
def test_a_stop_at_any_moment_moves_nothing(tmp_path, undisturbed, kind, seed):
    expected, rows, seconds = undisturbed(kind)
    draw = random.Random(f"{kind} {seed}")
    trainer = make(tmp_path / "run", **KINDS[kind])
    delays, presses = [draw.uniform(0, seconds) for _ in range(draw.choice([1, 1, 2]))], []
    try:
        for delay in delays:  # inside: on a busy machine a press comes before the next line
            presses.append(press_after(delay))
        train_to_the_end(trainer)
    except KeyboardInterrupt:  # pressed outside train()
        train_to_the_end(trainer)
    for press in presses:
        press.cancel()
        press.join()
    assert trainer.step == 4 and same(weights(trainer), expected)
    assert record(trainer.folder) == rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_and_a_new_process_move_nothing(tmp_path, undisturbed, kind):
    expected, rows, _ = undisturbed(kind)
    before = 1 + random.Random(kind).randrange(3)

    class Stop(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == before:
                press_stop()

    with pytest.raises(
        Stopped, match=f"after step {before} of 4 .interrupted., saved to .*checkpoint-{before}"
    ):
        make(tmp_path / "run", hooks=[Stop()], **KINDS[kind]).train()
    trainer = make(tmp_path / "run", **KINDS[kind])
    trainer.train(resume=True)
    assert same(weights(trainer), expected) and record(trainer.folder) == rows


KILLED = """
import sys, os
sys.path.insert(0, {tests!r})
import torch; torch.set_num_threads(1)
from loop_runs import KINDS, make
make({folder!r}, save_steps=1, save_total_limit=2, **KINDS[{kind!r}]).train(resume={resume})
print("done")
"""


@pytest.mark.parametrize("kind", ["full", "two iterations", "a buffer"])
def test_a_kill_at_any_moment_moves_nothing(tmp_path, undisturbed, kind):
    expected, rows, seconds = undisturbed(kind)
    folder, draw = tmp_path / "run", random.Random(kind)

    def child(resume, kill_after=None):
        code = KILLED.format(
            tests=str(Path(__file__).parents[1]), folder=str(folder), kind=kind, resume=resume
        )
        process = forked.start("-c", code)
        began = time.monotonic()
        while process.poll() is None:
            ready = (folder / "checkpoint-1").exists()
            if kill_after is not None and ready:
                time.sleep(kill_after)
                process.kill()
                kill_after = None
            time.sleep(0.01)
            assert time.monotonic() - began < 120
        return process.returncode

    killed = child(False, draw.uniform(0, seconds))
    if killed:
        assert not child(True)
    trainer = make(folder, save_steps=1, **KINDS[kind])
    trainer.load(folder / "checkpoint-4")
    assert same(weights(trainer), expected)
    kept = record(folder)
    assert kept == rows or [{**r, "config": 0} for r in kept[0]] == [
        {**r, "config": 0} for r in rows[0]
    ]


def test_a_reward_that_fails_drops_its_step_and_the_mended_run_is_the_undisturbed_one(
    tmp_path, undisturbed
):
    calls = []

    def fails_once(completions, **columns):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the judge is down")
        return letters(completions)

    from dataclasses import replace

    own = replace(task(), rewards=[*task().rewards[:-1], fails_once])
    trainer = make(tmp_path / "run", task=own)
    with pytest.raises(RewardError, match="the judge is down"):
        trainer.train()
    assert trainer.step == 2 and (tmp_path / "run/checkpoint-2").exists()
    trainer.train()
    assert same(weights(trainer), undisturbed("full")[0])


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path, undisturbed, capsys
):
    """Each file of the last one: cut short, changed in one byte, gone."""
    whole = tmp_path / "whole"
    make(whole, save_steps=1, save_total_limit=4).train()
    draw = random.Random(0)
    names = files_of(whole / "checkpoint-3")
    assert {
        "model.safetensors",
        "optimizer.pt",
        "run_state.json",
        "digests.json",
        "config.json",
    } <= {*names}
    for number, name in enumerate(names):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(whole, folder)
        shutil.rmtree(folder / "checkpoint-4")
        path, how = folder / "checkpoint-3" / name, draw.choice(["cut", "changed", "gone"])
        data = path.read_bytes()
        if how == "gone":
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[: len(data) // 2])
        else:
            place = draw.randrange(len(data))
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        trainer = make(folder)
        trainer.train(resume=True)
        said = capsys.readouterr().out
        assert (
            "checkpoint-3 is damaged and is passed over" in said and "Going on from" in said
        ), (
            name,
            how,
        )
        assert same(weights(trainer), undisturbed("full")[0]), (name, how)


def test_without_a_whole_checkpoint_there_is_a_clear_word(tmp_path):
    make(tmp_path / "run", save_steps=4).train()
    (tmp_path / "run/checkpoint-4/optimizer.pt").write_bytes(b"PK")
    with pytest.raises(
        RunFolderError, match="no whole checkpoint to go on from .*optimizer.pt is cut"
    ):
        make(tmp_path / "run").train(resume=True)


def test_a_full_disk_loses_nothing(tmp_path, undisturbed, monkeypatch):
    """No checkpoint can be written while it is full, rows wait; the next train() goes on from memory."""
    trainer = make(tmp_path / "run", save_steps=1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    class Fill(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == 2:
                monkeypatch.setattr(checkpoint.torch, "save", full)

    trainer.hooks.append(Fill())
    with pytest.warns(RuntimeWarning, match="cannot be written .*No space left"):
        trainer.train()
    assert trainer.step == 4 and same(weights(trainer), undisturbed("full")[0])
    assert record(trainer.folder) == undisturbed("full")[1]
    assert (
        not list((tmp_path / "run").glob(".saving*"))
        and (tmp_path / "run/checkpoint-1").exists()
    )


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    make(tmp_path / "run").train()
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="already holds a run.*run-2"):
        make(tmp_path / "run").train()
    with pytest.raises(RunFolderError, match="holds no run to go on with"):
        make(tmp_path / "other").train(resume=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_run_that_goes_on_leaves_out_what_it_does_again_and_deletes_nothing(
    tmp_path, undisturbed
):
    folder = tmp_path / "run"
    make(folder, save_steps=2, save_total_limit=2).train()
    shutil.rmtree(folder / "checkpoint-4")
    trainer = make(folder)
    trainer.train(resume=True)
    assert (
        same(weights(trainer), undisturbed("full")[0])
        and record(folder)[1] == undisturbed("full")[1][1]
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("step", "resumed") for line in lines] == [1, 2, 3, 4, "resumed", 3, 4]
