"""A run folder's path: absolute once, whatever becomes of the working directory; names that hold no run are refused."""

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import few_words
import pytest
from loop_runs import letters, make, task

import grpo_kit as kit
from grpo_kit import read_metrics
from grpo_kit.__main__ import main
from grpo_kit.evaluation.accuracy import Evaluation
from grpo_kit.record._digests import checkpoints, what_is_wrong
from grpo_kit.record._lines import RunFolderError
from grpo_kit.record._run_folder import run_path
from grpo_kit.record.files import cached_json, settings_folder
from grpo_kit.tasks.rows import read_rows
from grpo_kit.trainer.watch_run import WatchRun
from grpo_kit.watch._flags import Flag


@pytest.mark.parametrize("folder, words", [
    ("/", "where other things lie"),
    ("/..", "where other things lie"),
    ("~", "where other things lie"),
    ("/proc/run", "nothing can be written to /proc"),
    ("/dev/null/run", "nothing can be written to /dev"),
    ("", "is blank"),
    (" \n", "is blank"),
    ("a\0b", "null character"),
    ("bad-\udcff", "no text in UTF-8"),
    ("x" * 256, "at most 255 bytes"),
    ("é" * 128, "at most 255 bytes"),  # 256 bytes
    ("~no-such-user/run", "write the whole path"),
    (b"runs/x", "a text or a path"),
    (5, "a text or a path"),
    (None, "a text or a path"),
])  # fmt: skip
def test_a_name_that_holds_no_run_is_refused(folder, words):
    with pytest.raises(RunFolderError, match="output_dir=") as error:
        run_path(folder, "output_dir")
    assert words in str(error.value)


def test_the_path_is_absolute_and_links_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "other" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to("other/real")
    assert run_path("runs/x") == tmp_path / "runs" / "x"
    assert run_path("~/x") == tmp_path / "home" / "x"
    assert run_path("link/x") == tmp_path / "link" / "x"
    assert run_path("runs/../x") == tmp_path / "x"
    assert run_path("link/../x") == tmp_path / "link" / ".." / "x"  # which is beside the target
    assert run_path(Path("é" * 127)).name == "é" * 127
    assert run_path("/dev/shm/x") == Path("/dev/shm/x")


def test_a_run_stays_in_its_folder_where_a_reward_changes_the_working_directory(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    trainer = make("rel", steps=2, save_steps=1)
    with contextlib.chdir(tmp_path / "elsewhere"):
        trainer.train()
    assert (
        len(read_metrics(tmp_path / "rel")) == 2
        and (tmp_path / "rel" / "checkpoint-2").is_dir()
    )
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_in_the_home_folder_is_read_by_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make("~/seen", steps=1).train()
    assert len(read_metrics("~/seen")) == 1 and "~" not in os.listdir(tmp_path)


class Named(os.PathLike):
    """A path that is neither a text nor a Path."""

    def __init__(self, text):
        self.text = text

    def __fspath__(self):
        return self.text


READ = {  # what lies in the home folder, and who reads it by its name there
    "load_policy": ("model", lambda p: kit.load_policy(p, quiet=True)),
    "load_policy, an adapter": (
        "adapter",
        lambda p: kit.load_policy(p, tuning="lora", quiet=True),
    ),
    "chat": ("model", kit.chat),
    "read_metrics": ("run", lambda p: len(kit.read_metrics(p))),
    "read_completions": ("run", lambda p: len(kit.read_completions(p))),
    "read_changes": ("run", lambda p: kit.record.read_changes(p) == []),
    "read_flags": ("run", lambda p: kit.watch.read_flags(p)),
    "plot_run": ("run", kit.plot_run),
    "plot_run, compare": ("run", lambda p: kit.plot_run("~/run", compare=p)),
    "browse": ("run", lambda p: len(kit.browse(p))),
    "rescore": ("run", lambda p: kit.rescore(p, letters)),
    "branches": ("run", kit.branches),
    "control": ("run", lambda p: kit.control(p).folder.is_dir()),
    "results": ("", lambda p: "run" in kit.results(p).index),
    "next_run_folder": ("", lambda p: kit.next_run_folder(p, "run") == Path.home() / "run-2"),
    "from_file": (
        "task.py",
        lambda p: kit.tasks.from_file(p).file == f"{Path.home() / 'task.py'}:task",
    ),
    "from_file, a name": (
        "task.py:other",
        lambda p: kit.tasks.from_file(p).file.endswith("/task.py:other"),
    ),
    "a file of rows": ("rows.jsonl", lambda p: read_rows("train", p, "a file")),
    "Evaluation.load": ("evaluation.json", Evaluation.load),
    "RecordedEnv": ("world.jsonl", kit.episodes.RecordedEnv),
    "checkpoints": ("run", checkpoints),
    "what_is_wrong": ("run/checkpoint-1", lambda p: what_is_wrong(p) is None),
}
WRITTEN = {  # who writes under a name in the home folder
    "save_model": lambda p: make("~/other", steps=1).save_model(p),
    "a trainer": lambda p: make(p, steps=1).open() or True,
    "export": lambda p: kit.export(*few_words.policy(), p, quant="f32", proof=False),
    "a chart": lambda p: kit.plot_run("~/run").save(p),
    "an evaluation": lambda p: Evaluation.load("~/evaluation.json").save(p) or True,
    "settings_folder": lambda p: settings_folder(p, "sweep"),
    "cached_json": lambda p: cached_json(p, lambda: [1]),
}
KINDS = {"text": str, "Path": Path, "PathLike": Named}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home folder with a run, its model, an adapter, and files of all kinds."""
    folder = tmp_path_factory.mktemp("home")
    trainer = make(folder / "run", steps=1, save_steps=1, hooks=[WatchRun(live=None)])
    trainer.train()
    flag = Flag("a name", 1, "saw", "why", "first")
    (folder / "run" / "flags.jsonl").write_text(json.dumps(asdict(flag)) + "\n")
    trainer.save_model(folder / "model")
    make(folder / "lora", tuning="lora").save_model(folder / "adapter")
    evaluation = kit.evaluate(trainer.model, trainer.tokenizer, task())
    evaluation.save(folder / "evaluation.json")
    kit.compare(evaluation, evaluation).save(folder / "run")
    (folder / "task.py").write_text(
        "import grpo_kit as kit\ntask = other = kit.tasks.largest(n_train=8)\n"
    )
    (folder / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    line = {"row": "{}", "said": [], "observation": "x", "seconds": 0.1}
    (folder / "world.jsonl").write_text(json.dumps(line) + "\n")
    return folder


@pytest.mark.parametrize("door", READ)
def test_a_name_in_the_home_folder_is_read_there(door, home, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    name, read = READ[door]
    for kind in KINDS.values():
        assert read(kind(f"~/{name}")) is not False, kind
    with pytest.raises((ValueError, FileNotFoundError)):
        read("~no-such-user/run")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("door", WRITTEN)
def test_a_name_in_the_home_folder_is_written_there(door, home, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    for kind, make_path in KINDS.items():
        name = f"{door.replace(' ', '-')}-{kind}.svg"
        assert WRITTEN[door](make_path(f"~/{name}")) is not False
        assert (home / name).exists()
    with pytest.raises(ValueError):
        WRITTEN[door]("~no-such-user/run.svg")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "command",
    [["watch", "~/run", "--once"], ["diagnose", "~/run"], ["watch", "~/none", "--once"]],
)
def test_the_command_line_reads_a_name_that_the_shell_did_not_expand(
    command, home, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    code, said = main(command), capsys.readouterr()
    assert str(home / "none") in said.err if command[1] == "~/none" else code == 0, said
