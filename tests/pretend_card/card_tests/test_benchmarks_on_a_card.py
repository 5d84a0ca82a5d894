"""What `make card` times, in tiny shapes: that it runs. Nobody's seconds."""

import torch

from benchmarks.card import decode


def test_tokens_are_timed_full_and_by_lora():
    """On a CPU's build of torch nothing can be profiled, which is said and costs nothing else."""
    before = torch.cuda.get_per_process_memory_fraction()
    try:
        assert decode.capped_card() == torch.cuda.get_device_name()
        row = decode.measure("lora", small=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
    assert {f"{count}x{group}" for count, group in decode.ROWS} <= row.keys()
    assert row["peak GiB"] > 0 and row["generate 64 rows, ms a token"] > 0
    assert row["kernels"] or row["not profiled"]
