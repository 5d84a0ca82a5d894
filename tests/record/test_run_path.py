"""A run folder's path: absolute once, whatever becomes of the working directory; names that hold no run are refused."""

import contextlib
import os
from pathlib import Path

import pytest

from grpo_kit import read_metrics
from grpo_kit.record.lines import RunFolderError
from grpo_kit.record.run_path import run_path
from tests.loop_runs import make


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
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert run_path("runs/x") == tmp_path / "runs" / "x"
    assert run_path("~/x") == tmp_path / "home" / "x"
    assert run_path("link/x") == tmp_path / "link" / "x"
    assert run_path(Path("é" * 127)).name == "é" * 127
    assert run_path("/dev/shm/x") == Path("/dev/shm/x")


def test_a_run_stays_in_its_folder_where_a_reward_changes_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    trainer = make("rel", steps=2, save_steps=1)
    with contextlib.chdir(tmp_path / "elsewhere"):
        trainer.train()
    assert len(read_metrics(tmp_path / "rel")) == 2 and (tmp_path / "rel" / "checkpoint-2").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_in_the_home_folder_is_read_by_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make("~/seen", steps=1).train()
    assert len(read_metrics("~/seen")) == 1 and "~" not in os.listdir(tmp_path)
