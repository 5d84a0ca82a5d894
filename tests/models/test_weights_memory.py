"""Where a CPU's weights lie: not in the file that they came from, each in memory of its own, in large pages."""

import copy
import io
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from grpo_kit.models._precision import from_pretrained, in_huge_pages
from grpo_kit.models.loading import load_policy

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_file_that_is_written_over_does_not_change_a_policy(tiny, tuning, tmp_path):
    """In place, as `cp` writes: a mapping of the file would show the new bytes."""
    for part in tiny:
        part.save_pretrained(tmp_path)
    model, _ = load_policy(tmp_path, tuning=tuning, quiet=True)
    before = [parameter.clone() for parameter in model.parameters()]
    for file in tmp_path.glob("*.safetensors"):
        with file.open("r+b") as open_file:
            open_file.write(bytes(file.stat().st_size))
    assert all(map(torch.equal, before, model.parameters()))


def test_weights_are_those_of_the_file_and_tied_as_before(tiny, tmp_path):
    for part in tiny:
        part.save_pretrained(tmp_path)
    model, _ = load_policy(tmp_path, quiet=True)
    wanted, made = tiny[0].state_dict(), model.state_dict()
    assert wanted.keys() == made.keys()
    assert all(torch.equal(wanted[name], made[name]) for name in wanted)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert all(p.requires_grad and p.is_contiguous() for p in model.parameters())


def test_one_weight_alone_can_be_saved_and_copied(tiny, tmp_path):
    """Neighbours in memory, but no views of one tensor, which would be saved and copied whole."""
    for part in tiny:
        part.save_pretrained(tmp_path)
    model, _ = load_policy(tmp_path, quiet=True)
    norm = model.model.norm.weight
    file = io.BytesIO()
    torch.save(norm, file)
    assert len(file.getvalue()) < norm.nbytes + 4096
    assert copy.deepcopy(norm).untyped_storage().nbytes() == norm.nbytes


def test_copies_are_equal_in_any_shape_and_dtype():
    """Sizes that fill no line of 64 bytes, a single number, no number, a transposed matrix, several dtypes."""
    draw = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=draw) for shape in [(3, 5), (), (0,), (7,), (64, 64)]
    ]
    tensors += [tensors[0].t(), tensors[3].bfloat16(), tensors[3].double(), torch.arange(3)]
    tensors[0].requires_grad_()
    for dtype in (None, torch.bfloat16):
        copies = list(in_huge_pages(tensors, dtype))
        for tensor, made in zip(tensors, copies, strict=True):
            assert torch.equal(made, tensor.to(dtype or tensor.dtype))
            assert made.data_ptr() % 64 == 0 and made.is_contiguous()
            assert made.is_leaf and not made.requires_grad
    assert list(in_huge_pages([])) == []


def test_an_original_can_go_before_the_next_is_copied():
    """Else loading would need memory for all weights twice, where transformers converts their dtype."""
    first, second = torch.zeros(2), torch.zeros(2)
    copies = in_huge_pages([first, second])
    next(copies)
    second += 1  # not copied yet
    assert torch.equal(next(copies), torch.ones(2))


def test_too_little_memory_is_no_broken_file(tiny, tmp_path, monkeypatch):
    for part in tiny:
        part.save_pretrained(tmp_path)
    full = SimpleNamespace(empty=Mock(side_effect=MemoryError("no room")), uint8=None)
    monkeypatch.setattr("grpo_kit.models._precision.np", full)
    with pytest.raises(MemoryError, match="no room"):
        load_policy(tmp_path, quiet=True)


def test_buffers_of_the_file_are_copied_too(tmp_path):
    """As experts' correction biases are; parameters alone were, at first."""
    config = AutoConfig.for_model(
        "glm4_moe",
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        vocab_size=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = from_pretrained(tmp_path, {"dtype": torch.float32})
    buffers = dict(model.named_buffers())
    name = next(name for name in buffers if name.endswith("e_score_correction_bias"))
    addresses = [w.data_ptr() for w in (*model.parameters(), buffers[name])]
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "model.safetensors" in line:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            assert not any(start <= address < end for address in addresses)


def test_a_4_bit_weight_is_left_alone(tiny, tmp_path):
    """Its class moves what it keeps beside its numbers, in place, whenever it is moved."""
    pytest.importorskip("bitsandbytes")
    for part in tiny:
        part.save_pretrained(tmp_path)
    options = {
        "dtype": torch.float32,
        "quantization_config": BitsAndBytesConfig(load_in_4bit=True),
    }
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    ids = torch.arange(5, 15)[None]
    wanted = plain(ids).logits
    assert any(type(p).__name__ == "Params4bit" for p in plain.parameters())
    assert torch.equal(from_pretrained(tmp_path, options)(ids).logits, wanted)


@pytest.mark.skipif(
    not PAGES.exists() or "[never]" in PAGES.read_text(), reason="no pages of 2 MB here"
)
def test_linux_is_asked_for_large_pages():
    """Of 64 MB: below 32 glibc may give memory that it has. Whether Linux has some is its own affair."""
    weights = list(in_huge_pages([torch.ones(512, 512)] * 64))
    wanted, inside = weights[32].data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            start, end = (int(address, 16) for address in name.split("-"))
            inside = start <= wanted < end
        elif inside and name == "VmFlags:":
            assert "hg" in rest, "no MADV_HUGEPAGE"
            return
    pytest.skip("this system does not say how its memory lies")
