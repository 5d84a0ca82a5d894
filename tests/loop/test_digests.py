"""A checkpoint that was damaged after it was written: named, passed over, and the run goes on from the one before."""

import errno
import json
import random
import shutil

import pytest
from loop_runs import make

from grpo_kit.loop import checkpoint
from grpo_kit.record._digests import DIGESTS, last_whole, what_is_wrong, write_digests
from grpo_kit.record.files import RunFolderError


def cut(path, seed=0):
    path.write_bytes(path.read_bytes()[: random.Random(seed).randrange(path.stat().st_size)])


def flip(path, seed=0):
    data = bytearray(path.read_bytes())
    data[random.Random(seed).randrange(len(data))] ^= 1 << random.Random(seed).randrange(8)
    path.write_bytes(data)


def grow(path, seed=0):
    path.write_bytes(path.read_bytes() + b" ")


def remove(path, seed=0):
    path.unlink()


DAMAGES = {cut: "is cut: ", flip: "holds other bytes", grow: "has ", remove: "is missing"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps: checkpoint-2 and checkpoint-4 are there."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    make(folder, save_steps=2, save_total_limit=2).train()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def files(run):
    return sorted(
        p.name for p in (run / "checkpoint-4").iterdir() if p.name not in (DIGESTS, "README.md")
    )


def test_every_file_has_a_digest_and_a_whole_checkpoint_is_taken(run, capsys):
    assert {"model.safetensors", "optimizer.pt", "run_state.json"} <= set(files(run))
    assert sorted(json.loads((run / "checkpoint-4" / DIGESTS).read_text())["files"]) == files(
        run
    )
    assert last_whole(run) == run / "checkpoint-4"
    (run / "checkpoint-4/notes.txt").write_text("a person's own file is no damage")
    assert last_whole(run) == run / "checkpoint-4" and not capsys.readouterr().out


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_whatever_is_damaged_is_named_and_the_one_before_is_taken(damage, run, capsys):
    last, kept = run / "checkpoint-4", run / "whole"
    shutil.copytree(last, kept)
    for name in files(run):
        for seed in range(5):
            damage(last / name, seed)
            assert last_whole(run) == run / "checkpoint-2", (name, seed)
            said = capsys.readouterr().out
            assert said.count("checkpoint-4 is damaged and is passed over") == 1
            assert (
                f"{name} {DAMAGES[damage]}" in said
                and "Going on from" in said
                and "checkpoint-2" in said
            )
            assert (what_is_wrong(last, digests=False) is None) == (damage is flip), (
                "sizes do not show it"
            )
            shutil.copy2(kept / name, last / name)
            assert what_is_wrong(last) is None


def test_damaged_digests_and_a_run_without_a_whole_checkpoint(run):
    (run / "checkpoint-4" / DIGESTS).write_text('{"files": {"a": 3}}')
    assert what_is_wrong(run / "checkpoint-4") == "digests.json cannot be read"
    cut(run / "checkpoint-4" / DIGESTS)
    remove(run / "checkpoint-2/optimizer.pt")
    with pytest.raises(
        RunFolderError,
        match="no whole checkpoint.*checkpoint-2 .*optimizer.pt is missing.*another name",
    ):
        last_whole(run)


def test_a_checkpoint_without_digests_was_not_written_to_its_end(run, capsys):
    (run / "checkpoint-4" / DIGESTS).unlink()
    assert last_whole(run) == run / "checkpoint-2"
    assert "it was not written to its end" in capsys.readouterr().out


def test_digests_of_folders_within_a_checkpoint(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below/part.pt").write_bytes(b"abc")
    write_digests(tmp_path)
    assert what_is_wrong(tmp_path) is None
    flip(tmp_path / "below/part.pt")
    assert what_is_wrong(tmp_path) == "below/part.pt holds other bytes than were written"


def test_a_checkpoint_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    sync, seen, target = checkpoint.sync, [], tmp_path / "run/checkpoint-4"
    monkeypatch.setattr(
        checkpoint, "sync", lambda path: (seen.append((path.name, target.exists())), sync(path))
    )
    make(tmp_path / "run", save_steps=4).train()
    assert ("model.safetensors", False) in seen and ("optimizer.pt", False) in seen
    assert seen[-2:] == [(".saving", False), ("run", True)]


@pytest.mark.parametrize(
    ("number", "raises"),
    [(errno.EINVAL, False), (errno.EACCES, False), (errno.EIO, True), (errno.ENOSPC, True)],
)
def test_a_file_system_that_refuses_to_sync_is_no_error_and_a_full_disk_is(
    tmp_path, monkeypatch, number, raises
):
    def refuse(handle):
        raise OSError(number, "refused")

    monkeypatch.setattr(checkpoint.os, "fsync", refuse)
    trainer = make(tmp_path / "run", steps=1)
    trainer.train()
    if raises:
        with pytest.raises(checkpoint.CheckpointNotSaved, match="refused"):
            trainer.save()
    assert raises or trainer.save().name == "checkpoint-1"
    assert (tmp_path / "run/checkpoint-1").exists() != raises
