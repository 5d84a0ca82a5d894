"""Full disks, kills, wrong folders, changed bytes: nothing is lost, and nothing half-written looks whole."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

import grpo_kit as kit
from grpo_kit import load_policy, tasks
from grpo_kit.models._gguf_reader import PolicyLoadError
from grpo_kit.more.export import ExportError, export, push_to_hub, verify

TASK = tasks.largest(n_train=8, n_held_out=6)


@pytest.fixture(scope="module")
def tiny():
    return load_policy("tiny-random", quiet=True)


EXPORT = """
import json, os, resource, sys
from grpo_kit import load_policy
from grpo_kit.more.export import export
model, tokenizer = load_policy("tiny-random", quiet=True)
for line in sys.stdin:
    folder, *exports = json.loads(line)
    if child := os.fork():  # a process for each line, which loads nothing again
        os.waitpid(child, 0)
        print("ended", flush=True)
        continue
    print(os.getpid(), flush=True)
    for asked in exports:
        format, quant, room = asked.split(":")
        if room:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(room), resource.RLIM_INFINITY))
        try:
            export(model, tokenizer, folder, format=format, quant=quant, proof=False)
        except ValueError as error:
            print(error, flush=True)
    print("done", flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def exporter():
    """f(folder, *exports): begins them in a process of their own, whose id is returned; f.said(): what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    def begin(folder, *exports):
        process.stdin.write(json.dumps([str(folder), *exports]) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    def said():
        """What it printed besides the lines as each part begins."""
        lines = [line.rstrip() for line in iter(process.stdout.readline, "ended\n")]
        return [line for line in lines if not line.startswith("export: ")]

    begin.said = said
    yield begin
    process.communicate()


def test_no_room(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ExportError, match="needs 0.1 GB of disk and 0.0 GB are free"):
        export(*tiny, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_on_the_way(exporter, tmp_path):
    """What finds no room first: the weights at once, their end, the tokenizer's file, a GGUF's words, its weights."""
    asked = (
        "merged:f32:100000",
        "merged:f32:6000000",
        "merged:f16:3300000",
        "gguf:f32:1000000",
        "gguf:f32:5000000",
    )
    exporter(tmp_path / "out", *asked)
    *failed, done = exporter.said()
    assert len(failed) == len(asked) and done == "done"
    assert all("was not written" in s and "nothing is left of it" in s for s in failed)
    assert not list(tmp_path.iterdir())


def test_killed_at_any_moment_it_is_whole_or_not_there(exporter, tiny, tmp_path):
    draw, seen = random.Random(3), set()
    for number in range(7):
        target = tmp_path / f"out{number}"
        child, moment = exporter(target, "merged:f32:"), draw.random() * 0.6
        if number:
            time.sleep(moment)
            with contextlib.suppress(ProcessLookupError):  # it was quicker
                os.kill(child, signal.SIGKILL)
        whole = exporter.said() == ["done"]
        seen.add(whole)
        assert target.exists() or not whole
        if target.exists():
            model = AutoModelForCausalLM.from_pretrained(target)
            assert torch.equal(model.lm_head.weight, tiny[0].lm_head.weight), moment
            assert json.loads((target / "export.json").read_text())["stored"] == "f32"
    assert True in seen


def test_what_a_killed_export_left_goes_with_the_next_one(tiny, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    node = os.uname().nodename
    left, live, far = (
        tmp_path / f".out-exporting-{name}"
        for name in (
            f"{node}-{ended.stdout.strip()}",
            f"{node}-{os.getppid()}",
            f"another-{ended.stdout.strip()}",
        )
    )
    for folder in (left, live, far):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ExportError, match="an export that was not finished"):
        kit.chat(left)
    export(*tiny, tmp_path / "out", proof=False)
    assert not left.exists() and live.exists() and far.exists(), (
        "one that is still written stays"
    )


def test_folders_that_cannot_be_made(tiny, tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder, said in (
        (tmp_path / "file" / "out", "cannot be made .*give one that can be written"),
        (
            "/proc/nowhere/out",
            "folder='/proc/nowhere/out': nothing can be written to /proc; name another",
        ),
    ):
        with pytest.raises(ExportError, match=said):
            export(*tiny, folder, proof=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(ExportError, match="was not written"):
        export(*tiny, tmp_path / "link", proof=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "link"]
    assert export(*tiny, tmp_path / "empty", proof=False).folder == tmp_path / "empty"


@pytest.mark.parametrize("format", ["merged", "gguf"])
def test_weights_that_are_no_numbers(format, tmp_path):
    model, tokenizer = load_policy("tiny-random", quiet=True)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(
        ExportError,
        match="layers.1.mlp.up_proj.weight that are not finite: the training diverged",
    ):
        export(model, tokenizer, tmp_path / "out", format=format, quant="f32", proof=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dies", ["os.kill(os.getpid(), 9)", "raise MemoryError('no more')"])
def test_a_reader_that_dies_leaves_the_export_unproved(dies, tiny, tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "_reader.py").write_text(f"import os\n{dies}\n")
    monkeypatch.setattr(verify, "__file__", str(package / "verify.py"))
    said = (
        r"was killed \(signal 9\), as happens where memory runs out"
        if "kill" in dies
        else "MemoryError: no more"
    )
    with pytest.raises(
        ExportError, match=f"(?s)was not proved: .*{said}.*It lies in .*out-refused"
    ):
        export(*tiny, tmp_path / "out")
    refused = tmp_path / "out-refused"
    assert not (tmp_path / "out").exists()
    left = AutoModelForCausalLM.from_pretrained(refused)
    assert torch.equal(left.lm_head.weight.half(), tiny[0].lm_head.weight.half())
    with pytest.raises(ExportError, match="was refused"):
        push_to_hub(refused, "me/mine", dry_run=True)
    with pytest.warns(UserWarning, match="was refused"):
        kit.chat(refused)


def test_a_changed_byte_is_seen(tiny, tmp_path, read_here):
    made = export(*tiny, tmp_path / "out", task=TASK, rows=2)
    (made.folder / "README.md").write_text("my own words")
    assert "README.md" in push_to_hub(made.folder, "me/mine", dry_run=True), (
        "the card is the reader's"
    )
    kit.chat(made.folder)
    weights = made.folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for used in (kit.chat, lambda folder: push_to_hub(folder, "me/mine", dry_run=True)):
        with pytest.raises(
            ExportError,
            match="is not what was exported: model.safetensors is another; copy it again",
        ):
            used(made.folder)
    with pytest.raises(
        PolicyLoadError,
        match="is damaged: model.safetensors is another; .* delete its export.json",
    ):
        load_policy(made.folder, quiet=True)
    weights.unlink()
    with pytest.raises(ExportError, match="model.safetensors is gone"):
        kit.chat(made.folder)
    (made.folder / "export.json").write_text("{")
    with pytest.raises(ExportError, match="export.json cannot be read"):
        kit.chat(made.folder)


def test_wrong_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolicyLoadError, match="holds no config.json"):
        kit.chat(tmp_path / "empty")
    with pytest.raises(PolicyLoadError, match="no such folder"):
        kit.chat(tmp_path / "nowhere")
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "metrics.csv").write_text("step\n")
    with pytest.raises(ExportError, match="is the folder of a run; and holds no model yet"):
        kit.chat(run)
    with pytest.raises(PolicyLoadError, match="is the folder of a run"):
        load_policy(run)
    (run / "model").mkdir()
    with pytest.raises(ExportError, match="is the folder of a run; ask .*run/model"):
        kit.chat(run)
    with pytest.raises(ExportError, match="is no export"):
        push_to_hub(run, "me/mine", dry_run=True)
