"""GGUF files: dequantised once, found again, and a cache that cannot be used is said before the minutes are spent."""

import os
import shutil
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from grpo_kit.models import PolicyLoadError, load_policy
from grpo_kit.models import _gguf_reader as gguf_reader
from grpo_kit.models._gguf_reader import (
    _bytes_as_float32,
    _embedded_gguf,
    _tie_if_one_matrix,
    embedded_folder,
    load_gguf,
)
from grpo_kit.models._model_facts import model_name
from grpo_kit.more.export._gguf_writer import write_gguf


def test_a_file_is_dequantised_once_without_a_bar_and_equals_the_file(
    tmp_path, monkeypatch, capsys, tiny
):
    """Of a name of its own, and an adapter trained on it finds it from another folder; no copy drifts from it."""
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    write_gguf(tmp_path / "elsewhere" / "few.gguf", *tiny, "q8_0", name="few")
    Path("few.gguf").symlink_to(tmp_path / "elsewhere" / "few.gguf")
    of_the_file, parsed, theirs = [], [], gguf.GGUFReader
    parse = theirs.__init__
    monkeypatch.setattr(
        theirs, "__init__", lambda self, path: parsed.append(path) or parse(self, path)
    )
    monkeypatch.setattr(
        gguf_reader,
        "load_gguf",
        lambda path: of_the_file.append(load_gguf(path)) or of_the_file[0],
    )
    load_policy("few.gguf", quiet=True)
    said = capsys.readouterr()
    assert said.out.startswith("few.gguf is dequantised, once") and said.out.count("\n") == 1
    assert not said.err or not hasattr(logging, "set_tqdm_hook"), (
        "transformers before 5.5 keeps its bars"
    )
    converted = list((tmp_path / "cache").iterdir())
    assert len(parsed) == 1 and gguf.GGUFReader is theirs
    assert len(converted) == 1 and _size(converted[0]) <= _bytes_as_float32(Path("few.gguf"))

    monkeypatch.setattr(gguf_reader, "load_gguf", None)  # never again
    model, tokenizer = load_policy("few.gguf", tuning="lora", quiet=True)
    assert model_name(model) == "few.gguf" and capsys.readouterr().out == ""
    weights = {
        n.replace(".base_layer", ""): p for n, p in model.get_base_model().named_parameters()
    }
    ((fresh, _),) = of_the_file
    for (name, weight), exact in zip(
        tiny[0].named_parameters(), fresh.parameters(), strict=True
    ):
        assert torch.equal(weights[name], exact), name
        assert (weight - exact).abs().max() < weight.abs().max() / 100, name

    model.save_pretrained("adapter")
    assert tokenizer.get_vocab() == tiny[1].get_vocab() and len(tokenizer) == len(
        weights["model.embed_tokens.weight"]
    )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    monkeypatch.chdir("/")
    again, _ = load_policy(tmp_path / "adapter", tuning="lora", quiet=True)
    assert again.peft_config["default"].base_model_name_or_path == str(tmp_path / "few.gguf")
    # merged
    load_policy(tmp_path / "adapter", quiet=True)[0].save_pretrained(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


@pytest.mark.campaign
def test_the_embedded_models_copy_is_the_packages_file_bit_for_bit(smol):
    """Twenty seconds for what no file of ours can change; a small file is read above."""
    exact, tokenizer = load_gguf(_embedded_gguf())
    for (name, weight), other in zip(
        smol[0].named_parameters(), exact.parameters(), strict=True
    ):
        assert torch.equal(weight, other), name
    assert tokenizer.get_vocab() == smol[1].get_vocab()


@pytest.mark.parametrize("text", [b"", b"GGUF", b"no model" * 100, b"the first 5,000"])
def test_what_is_no_gguf_file_is_refused_in_words(tmp_path, monkeypatch, text):
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "cache"))
    if text == b"the first 5,000":  # a copy that was cut off
        text = _embedded_gguf().read_bytes()[:5000]
    (tmp_path / "model.gguf").write_bytes(text)
    with pytest.raises(
        PolicyLoadError, match="model.gguf' cannot be read as a language model in GGUF"
    ):
        load_policy(tmp_path / "model.gguf")
    assert not list((tmp_path / "cache").iterdir())


def test_of_a_file_that_was_replaced_the_new_one_is_read(tmp_path):
    """Also where nothing was loaded between: the first was too large for the disk."""
    for numbers in (8, 24):
        writer = gguf.GGUFWriter(tmp_path / "new.gguf", "llama")
        writer.add_tensor("a", np.zeros(numbers, np.float32))
        (
            writer.write_header_to_file(),
            writer.write_kv_data_to_file(),
            writer.write_tensors_to_file(),
        )
        writer.close()
        (tmp_path / "new.gguf").replace(tmp_path / "model.gguf")
        beside = _bytes_as_float32(tmp_path / "model.gguf") - 4 * numbers
        assert beside == gguf_reader._BESIDE_WEIGHTS


def test_one_matrix_stored_twice_is_tied_again():
    """As in Qwen2.5's GGUF files: a tied model comes back untied, at two precisions."""
    model = load_policy("tiny-random", quiet=True)[0]
    head = torch.nn.Linear(32, model.config.vocab_size, bias=False)
    head.weight.data = model.get_input_embeddings().weight.data + 1e-4 * torch.randn(
        model.config.vocab_size, 32
    )
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    _tie_if_one_matrix(model)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, head.weight)


def test_two_matrices_stay_two():
    model = load_policy("tiny-random", quiet=True)[0]
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(torch.nn.Linear(32, model.config.vocab_size, bias=False))
    _tie_if_one_matrix(model)
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight


# ---- the cache; a tiny model stands for what takes 20 s to dequantise ---------------------------------------------


@pytest.fixture
def converts(tiny, monkeypatch):
    """Says where it was asked to write."""
    asked = []

    def convert(path, part, folder):
        asked.append(folder)
        for saved in tiny:
            saved.save_pretrained(part)

    monkeypatch.setattr(gguf_reader, "_convert", convert)
    yield asked
    gguf_reader._for_this_process.cache_clear()


def test_a_file_that_changed_is_dequantised_again_in_place_of_the_old_copy(
    tmp_path, monkeypatch, converts
):
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "cache"))
    mine, other = tmp_path / "model.gguf", tmp_path / "other" / "model.gguf"
    other.parent.mkdir()
    for file in (mine, mine, other, mine):
        file.write_text("") if not file.exists() else None
        load_policy(file, quiet=True)
    assert len(converts) == len(set(converts)) == len(list((tmp_path / "cache").iterdir())) == 2
    mine.write_text("longer")
    load_policy(mine, quiet=True)
    os.utime(mine, (0, 0))
    load_policy(str(mine), quiet=True)
    assert len(set(converts)) == 4
    assert set((tmp_path / "cache").iterdir()) == {converts[1], converts[3]}


def test_a_cache_that_cannot_be_written_is_said_and_does_without(
    tmp_path, monkeypatch, converts
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="GRPO_KIT_CACHE='.*cache' cannot be written"):
        load_policy("smollm2-135m-instruct", quiet=True)
    with pytest.warns(RuntimeWarning, match="set GRPO_KIT_CACHE to a folder that can be"):
        load_policy("smollm2-135m-instruct", quiet=True)
    assert len(converts) == 1, "once a process"


def field(name, kind, value):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


HUGE = struct.pack("<Q", 2**60)
LIST = field(b"a", 9, struct.pack("<I", 8) + HUGE)  # of so many texts


@pytest.mark.parametrize(
    "fields, count, tensors",
    [
        (LIST, 1, 0),
        (field(b"a", 9, struct.pack("<I", 4) + HUGE), 1, 0),  # of numbers
        (field(b"a", 9, struct.pack("<I", 9) + HUGE), 1, 0),  # of lists
        (field(b"a", 8, HUGE), 1, 0),  # a text
        (HUGE, 1, 0),  # a name
        (b"", 2**60, 0),  # fields
        (b"", 0, 2**60),  # tensors
        (field(b"general.alignment", 4, struct.pack("<I", 0)), 1, 1),
        (field(b"a", 99, b"1234"), 1, 0),
    ],
)
def test_a_file_that_claims_more_than_it_holds_is_refused_at_once(
    fields, count, tensors, tmp_path, monkeypatch
):
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + fields)
    before = time.monotonic()
    with pytest.raises(PolicyLoadError, match="small.gguf"):
        load_policy(path, quiet=True)
    assert time.monotonic() - before < 60


def test_a_full_disk_is_said_before_dequantising(tmp_path, monkeypatch, converts):
    cache = tmp_path / "cache"
    monkeypatch.setenv("GRPO_KIT_CACHE", str(cache))
    full = {cache: True, Path("/"): False}

    def disk_usage(path):
        where = cache if Path(path).is_relative_to(cache) else Path("/")
        return SimpleNamespace(free=10**8 if full[where] else 10**12)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with pytest.warns(
        RuntimeWarning, match="it needs 0.6 GB, 0.1 GB are free.*set GRPO_KIT_CACHE"
    ):
        load_policy("smollm2-135m-instruct", quiet=True)
    assert (
        len(converts) == 1
        and not converts[0].is_relative_to(cache)
        and not list(cache.iterdir())
    )
    gguf_reader._for_this_process.cache_clear()
    full[Path("/")] = True
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(PolicyLoadError, match="needs 0.6 GB of disk as float32"),
    ):
        load_policy("smollm2-135m-instruct", quiet=True)
    assert len(converts) == 1


def test_what_a_killed_conversion_left_is_cleaned(tmp_path, monkeypatch, converts):
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path))
    old, running = tmp_path / ".converting-old", tmp_path / ".converting-running"
    old.mkdir(), running.mkdir()
    os.utime(old, (0, 0))
    load_policy("smollm2-135m-instruct", quiet=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".converting-running",
        embedded_folder().name,
    ]


def test_a_conversion_that_is_stopped_leaves_nothing(tmp_path, monkeypatch):
    def stop(path, part, folder):
        (part / "half").write_text("x")
        raise KeyboardInterrupt

    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf_reader, "_convert", stop)
    with pytest.raises(KeyboardInterrupt):
        load_policy("smollm2-135m-instruct", quiet=True)
    assert not list(tmp_path.iterdir())


def _size(folder):
    return sum(file.stat().st_size for file in folder.iterdir())
