"""A checkpoint that was damaged after it was written: named, passed over, and the run goes on from the one before."""

import json
import random
import shutil

import pytest
from tiny_run import make, same, weights

from grpo_kit.loop.digests import DIGESTS, what_is_wrong, write_digests
from grpo_kit.training.checkpoints import choose, last_whole_checkpoint

SAVES = dict(save_strategy="steps", save_steps=2)
BINARY = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")


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
    """A run of four steps, and its weights: checkpoint-2 and checkpoint-4 are there."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    trainer = make("kit", folder, **SAVES)
    trainer.train()
    return folder, weights(trainer)


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained[0], tmp_path / "run")


def files(run):
    return sorted(p.name for p in (run / "checkpoint-4").iterdir() if p.name not in (DIGESTS, "README.md"))


def test_every_file_has_a_digest_and_a_whole_checkpoint_is_taken(run):
    assert set(BINARY) <= set(files(run))
    assert sorted(json.loads((run / "checkpoint-4" / DIGESTS).read_text())["files"]) == files(run)
    said = []
    assert choose(True, run, said.append) == str(run / "checkpoint-4") and not said
    (run / "checkpoint-4/notes.txt").write_text("a person's own file is no damage")
    assert choose(True, run, said.append) == str(run / "checkpoint-4") and not said


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_whatever_is_damaged_is_named_and_the_one_before_is_taken(damage, run):
    last, kept, before = run / "checkpoint-4", run / "whole", str(run / "checkpoint-2")
    shutil.copytree(last, kept)
    for name in files(run):
        for seed in range(5):
            damage(last / name, seed)
            said = []
            assert choose(True, run, said.append) == before, (name, seed)
            assert len(said) == 1 and "checkpoint-4 is damaged and is passed over" in said[0]
            assert f"{name} {DAMAGES[damage]}" in said[0] and before in said[0]
            with pytest.raises(ValueError, match=f"checkpoint-4' is damaged: {name}.*resume from '{before}'"):
                choose(str(last), run, said.append)
            assert last_whole_checkpoint(run).name == "checkpoint-2"
            seen = damage is flip  # sizes alone do not show it
            assert (what_is_wrong(last, digests=False) is None) == seen
            shutil.copy2(kept / name, last / name)
            assert what_is_wrong(last) is None


def test_damaged_digests_and_a_run_without_a_whole_checkpoint(run):
    (run / "checkpoint-4" / DIGESTS).write_text('{"files": {"a": 3}}')
    assert what_is_wrong(run / "checkpoint-4") == "digests.json cannot be read"
    cut(run / "checkpoint-4" / DIGESTS)
    remove(run / "checkpoint-2/optimizer.pt")
    with pytest.raises(
        ValueError, match="no whole checkpoint.*checkpoint-2: optimizer.pt is missing.*another name"
    ):
        choose(True, run, print)


def test_of_a_checkpoint_without_digests_a_file_that_was_cut_is_recognised(run):
    """As kits before this one, and trl's own trainer, save."""
    last, kept = run / "checkpoint-4", run / "whole"
    (last / DIGESTS).unlink()
    shutil.copytree(last, kept)
    assert choose(True, run, print) == str(last)
    for name in (*BINARY, "trainer_state.json"):
        size = len((last / name).read_bytes().rstrip(b"\n"))
        for end in (
            0,
            1,
            7,
            8,
            9,
            size // 2,
            size - 1,
            *(random.Random(3).randrange(size) for _ in range(5)),
        ):
            (last / name).write_bytes((kept / name).read_bytes()[:end])
            assert name in (what_is_wrong(last) or ""), (name, end)
            assert last_whole_checkpoint(run).name == "checkpoint-2"
        shutil.copy2(kept / name, last / name)
    (last / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    assert what_is_wrong(last) == "model-2.safetensors is missing"
    (last / "model.safetensors.index.json").write_text('{"weight')
    assert "index of its weights cannot be read" in what_is_wrong(last)


@pytest.mark.parametrize(
    "name, damage, digests",
    [("model.safetensors", cut, True), ("model.safetensors", cut, False), ("optimizer.pt", flip, True)],
)
def test_a_run_goes_on_from_the_one_before_to_the_weights_of_one_never_stopped(
    name, damage, digests, trained, run, capsys
):
    damage(run / "checkpoint-4" / name, 5)
    if not digests:
        for path in run.glob("checkpoint-*/" + DIGESTS):
            path.unlink()
    again = make("kit", run, **SAVES)
    again.train(resume_from_checkpoint=True)
    assert f"checkpoint-4 is damaged and is passed over: {name} " in capsys.readouterr().out
    assert again.state.global_step == 4 and same(trained[1], weights(again))
    assert what_is_wrong(run / "checkpoint-4") is None and (run / "redone/checkpoint-4").is_dir()


def test_digests_of_folders_within_a_checkpoint(tmp_path):
    """Sharded weights lie in one."""
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4/part.pt").write_bytes(b"abc")
    write_digests(tmp_path)
    assert what_is_wrong(tmp_path) is None
    flip(tmp_path / "global_step4/part.pt")
    assert what_is_wrong(tmp_path) == "global_step4/part.pt holds other bytes than were written"
