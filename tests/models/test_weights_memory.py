"""Where a CPU's weights lie: not in the file that they came from, each in memory of its own, in large pages."""

import copy
import io
from pathlib import Path

import pytest
import torch

from grpo_kit.models._precision import in_huge_pages
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
        copies = in_huge_pages(tensors, dtype)
        for tensor, made in zip(tensors, copies, strict=True):
            assert torch.equal(made, tensor.to(dtype or tensor.dtype))
            assert made.data_ptr() % 64 == 0 and made.is_contiguous()
            assert made.is_leaf and not made.requires_grad
    assert in_huge_pages([]) == []


@pytest.mark.skipif(
    not PAGES.exists() or "[never]" in PAGES.read_text(), reason="no pages of 2 MB here"
)
def test_linux_is_asked_for_large_pages():
    """Of 64 MB: below 32 glibc may give memory that it has. Whether Linux has some is its own affair."""
    weights = in_huge_pages([torch.ones(512, 512)] * 64)
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
