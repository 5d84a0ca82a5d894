"""A run's folder that was damaged while nobody trained, or cannot be written: named, and what would do."""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import forked
import pytest
from loop_runs import make, record, same, weights

from grpo_kit.loop.protocols import Hook
from grpo_kit.models import load_policy
from grpo_kit.models._gguf_reader import PolicyLoadError
from grpo_kit.more.lab._job import model_in
from grpo_kit.record._jsonl_run import RunLog
from grpo_kit.record.files import RunFolderError
from grpo_kit.trainer.watch_run import WatchRun
from grpo_kit.watch.run_card import model_card


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps with a checkpoint after the second and the fourth."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    trainer = make(folder, save_steps=2, save_total_limit=2)
    trainer.train()
    return folder, weights(trainer), record(folder)


@pytest.fixture
def run(trained, tmp_path):
    """A copy that lacks the last checkpoint: two steps are to be done again."""
    folder = shutil.copytree(trained[0], tmp_path / "run")
    shutil.rmtree(folder / "checkpoint-4")
    return folder


def again(folder):
    trainer = make(folder, save_steps=2, save_total_limit=2)
    trainer.train(resume=True)
    return trainer


HOWS = {
    "cut": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "flipped": lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:],
    "gone": None,
}


def damage(path, how):
    path.write_bytes(HOWS[how](path.read_bytes())) if HOWS[how] else path.unlink()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "config.json", "run_state.json"]
)
def test_load_refuses_a_damaged_checkpoint_and_names_the_one_to_take(
    name, how, trained, tmp_path
):
    """train(resume=True) passes it over; who asks for it by name is told."""
    folder = shutil.copytree(trained[0], tmp_path / "run")
    damage(folder / "checkpoint-4" / name, how)
    trainer = make(folder)
    own = weights(trainer)
    words = rf"checkpoint-4 is no whole checkpoint: {name} .*checkpoint-2 is whole, train\(resume=True\) takes it"
    with pytest.raises(RunFolderError, match=words):
        trainer.load(folder / "checkpoint-4")
    assert same(weights(trainer), own) and trainer.step == 0


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_load_policy_refuses_a_checkpoint_of_other_bytes_than_were_written(tuning, tmp_path):
    """A library loads such weights without a word: one number is another."""
    trainer = make(tmp_path / "run", tuning=tuning, save_steps=2, save_total_limit=2)
    trainer.train()
    name = "model.safetensors" if tuning == "full" else "adapter_model.safetensors"
    last = tmp_path / "run/checkpoint-4"
    data = (last / name).read_bytes()
    (last / name).write_bytes(data[:-99] + bytes([data[-99] ^ 64]) + data[-98:])
    words = f"checkpoint-4' is damaged: {name} holds other bytes than were written; .*checkpoint-2 is whole, or delete"
    for how in ("full", tuning):
        with pytest.raises(PolicyLoadError, match=words):
            load_policy(last, tuning=how, quiet=True)
    load_policy(last.with_name("checkpoint-2"), tuning=tuning, quiet=True)
    (last / "digests.json").unlink()
    load_policy(last, tuning=tuning, quiet=True)


def test_the_model_of_a_run_whose_last_checkpoint_is_damaged_is_the_one_before_by_name(
    trained, tmp_path, capsys
):
    folder = shutil.copytree(trained[0], tmp_path / "run")
    damage(folder / "checkpoint-4/model.safetensors", "flipped")
    assert model_in(folder)[0].name == "checkpoint-2"
    assert (
        "checkpoint-4 is damaged and is passed over: model.safetensors holds other"
        in capsys.readouterr().out
    )
    damage(folder / "checkpoint-2/model.safetensors", "flipped")
    with pytest.raises(RunFolderError, match="no whole checkpoint .*checkpoint-2 is damaged"):
        model_in(folder)


def test_a_folder_in_place_of_a_checkpoint_or_of_true_says_what_to_give(trained, tmp_path):
    folder = trained[0]
    trainer = make(folder)
    with pytest.raises(
        RunFolderError,
        match=r"is the folder of a run; .*checkpoint-4 is whole, train\(resume=True\)",
    ):
        trainer.load(folder)
    with pytest.raises(
        RunFolderError,
        match="checkpoint-9 is no whole checkpoint: it is not there; .*checkpoint-4",
    ):
        trainer.load(folder / "checkpoint-9")
    for given in (folder, str(folder), folder / "checkpoint-2", "auto", 1, None):
        with pytest.raises(
            ValueError,
            match="resume=.*give True, which goes on from the last whole checkpoint of",
        ):
            trainer.train(resume=given)
    with pytest.raises(
        RunFolderError,
        match=rf"is a checkpoint; give the run's folder, '{folder}', and train.resume=True",
    ):
        make(folder / "checkpoint-2")


@pytest.mark.parametrize("how", ["cut", "emptied", "gone"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_lines_of_done_steps_that_were_lost_are_said_and_the_rest_is_as_ever(
    name, how, run, trained, capsys
):
    path = run / name
    done = b"".join(
        line
        for line in path.read_bytes().splitlines(keepends=True)
        if json.loads(line)["step"] <= 2
    )
    path.write_bytes(done)
    damage(path, how)
    trainer = again(run)
    said = capsys.readouterr().out
    lost = "[12]" if how == "cut" else "2"
    assert re.search(
        f"{name} lacks lines of {lost} of the 2 steps that are done .the first is step [12].",
        said,
    )
    assert same(weights(trainer), trained[1])
    whole, now = trained[2], record(run)
    table = name == "completions.jsonl"
    assert now[1 - table] == whole[1 - table], "the other table is whole"
    assert [line for line in now[table] if line["step"] > 2] == [
        line for line in whole[table] if line["step"] > 2
    ]


def test_completions_of_steps_that_are_done_again_are_taken_back_though_the_metrics_are_gone(
    run, trained
):
    (run / "metrics.jsonl").unlink()
    again(run)
    assert record(run)[1] == trained[2][1]


@pytest.mark.parametrize(
    "tail", [b'{"step": 4, "rew', b"\0" * 100, b'{"step": 4}' + b"\0" * 9, b"\xff\xfe"]
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_a_torn_last_line_costs_nothing(name, tail, run, trained, capsys):
    with open(run / name, "ab") as file:
        file.write(tail)
    assert same(weights(again(run)), trained[1]) and record(run) == trained[2]
    assert "lacks" not in capsys.readouterr().out


def test_a_line_in_the_middle_that_cannot_be_read_is_named_with_what_to_do(
    run, trained, capsys
):
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0][:20] + b"\0" * 5 + lines[0][25:] + b"".join(lines[1:]))
    with pytest.raises(
        RunFolderError,
        match="metrics.jsonl, line 1 cannot be read .*: .*Mend the line or delete it",
    ):
        again(run)
    path.write_bytes(b"".join(lines[1:]))
    assert (
        same(weights(again(run)), trained[1])
        and "(the first is step 1)" in capsys.readouterr().out
    )


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_a_changed_byte_of_a_table_is_named_by_its_line_and_goes_with_it(
    name, run, trained, capsys
):
    """JSON reads it: a digit of a reward, a letter of a completion. The line's checksum does not agree."""
    path = run / name
    lines = path.read_bytes().splitlines(keepends=True)
    digit = lines[1].index(b'"reward": ') + 10
    lines[1] = lines[1][:digit] + bytes([lines[1][digit] ^ 1]) + lines[1][digit + 1 :]
    path.write_bytes(b"".join(lines))
    with pytest.raises(
        RunFolderError,
        match=f"{name}, line 2 cannot be read .other bytes than were written .*delete it",
    ):
        again(run)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))
    assert same(weights(again(run)), trained[1])


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_run_goes_on_by_its_checkpoint_where_run_json_is_damaged(how, run, trained):
    """What the run was begun with is in the checkpoint too, under its digests."""
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"seed": 3', '"seed": 4'))
    if how == "gone":
        (run / "run.json").unlink()
    assert same(weights(again(run)), trained[1])


def test_a_run_json_that_lacks_a_name_says_so_and_ends_no_run(run, trained):
    """One changed byte of a key: JSON still reads it."""
    path = run / "run.json"
    whole = path.read_text()
    for name in ("reward_weights", "learning_rate"):  # at the top, and inside the config
        path.write_text(whole.replace(f'"{name}"', f'"{name[:-1]}t"'))
        words = f"run.json cannot be read .it has no '{name}'.. Mend it or move it away"
        with pytest.raises(RunFolderError, match=words):
            model_card(run)
    path.write_text(whole.replace('"config"', '"confih"'))
    with pytest.raises(RunFolderError, match="run.json cannot be read .it has no"):
        model_card(run)
    path.write_text(whole.replace('"learning_rate"', '"learning_ratt"'))
    trainer = make(
        run, save_steps=2, save_total_limit=2, hooks=[WatchRun(live=None, on_flag="warn")]
    )
    with pytest.warns(RuntimeWarning, match=f"The model card was not written .*{words}"):
        trainer.train(resume=True)
    assert same(weights(trainer), trained[1])


OTHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from loop_runs import make
from grpo_kit.loop.protocols import Hook
class Wait(Hook):
    def after_step(self, trainer, row, batch):
        print("begun", flush=True)
        while not Path({go!r}).exists():
            time.sleep(0.01)
make({folder!r}, hooks=[Wait()], steps=1).train()
"""


def test_a_second_process_on_the_folder_is_refused_and_changes_nothing(run, tmp_path):
    go, tests = tmp_path / "go", str(Path(__file__).parents[1])
    code = OTHER.format(tests=tests, folder=str(tmp_path / "both"), go=str(go))
    first = make(tmp_path / "both")  # made before the other process began
    process = forked.start("-c", code)
    while "begun" not in process.text("out"):
        assert process.poll() is None, process.text("err")
        time.sleep(0.01)
    with pytest.raises(RunFolderError, match="being trained into by another process"):
        first.train()
    go.touch()
    assert process.wait() == 0 and first.step == 0 and len(record(tmp_path / "both")[0]) == 1
    with pytest.raises(RunFolderError, match="already holds a run"):
        first.train()


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_moves_no_number_of_the_run(jump, tmp_path, trained, monkeypatch):
    real, offset = time.time, [0.0]

    class Jump(Hook):
        def after_step(self, trainer, row, batch):
            offset[0] += jump if trainer.step == 2 else 0.0

    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    trainer = make(tmp_path / "run", hooks=[Jump()], save_steps=2, save_total_limit=2)
    trainer.train()
    rows = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert same(weights(trainer), trained[1]) and all(
        0 <= row["step_seconds"] < 600 for row in rows
    )
    (
        os.utime(tmp_path / "run/checkpoint-2", (0, 0)),
        os.utime(tmp_path / "run/checkpoint-4", (1, 1)),
    )
    assert again(tmp_path / "run").step == 4, "by number, not by time"


def test_a_file_that_is_changed_behind_the_clocks_back_is_seen_by_a_new_process(run, tmp_path):
    """The same size and the same time of change: a process that read it before may know it by these."""
    path = run / "checkpoint-2/optimizer.pt"
    stat = path.stat()
    damage(path, "flipped")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(
        RunFolderError,
        match="no whole checkpoint to go on from .*optimizer.pt holds other bytes",
    ):
        again(run)


class Refuses:
    """Every write below a folder fails from now on, as on a disk that the kernel has made read-only."""

    def __init__(self, folder):
        self.folder, self.on = str(folder), False
        sys.addaudithook(self)

    def __call__(self, event, given):
        writes = (
            event == "open"
            and given[2] is not None
            and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if self.on and (
            writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
        ):
            if str(given[0]).startswith(self.folder):
                raise OSError(30, "Read-only file system", str(given[0]))


def test_a_folder_that_becomes_read_only_loses_nothing(tmp_path, trained):
    """Rows wait in memory and checkpoints are tried again; the next train() says so, or writes what is missing."""
    refuses = Refuses(tmp_path / "run")

    class Turn(Hook):
        def after_step(self, trainer, row, batch):
            refuses.on = refuses.on or trainer.step == 1

    trainer = make(tmp_path / "run", hooks=[Turn()], save_steps=2, save_total_limit=2)
    with pytest.warns(RuntimeWarning, match="cannot be written .*Read-only file system"):
        trainer.train()
    assert trainer.step == 4 and same(weights(trainer), trained[1])
    with pytest.raises(
        RunFolderError, match="cannot be written .Read-only file system.; make it writable"
    ):
        trainer.train()
    refuses.on, trainer.hooks = False, []
    trainer.train()
    assert record(trainer.folder) == trained[2] and again(trainer.folder).step == 4
    assert (
        not list((tmp_path / "run").glob(".saving*")) and RunLog(tmp_path / "run").lost(4) == []
    )
