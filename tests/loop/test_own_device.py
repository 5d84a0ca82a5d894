"""Each of several processes loads its model onto its own card. No card is needed: torch is asked in its place."""

import pytest
import torch

from grpo_kit._support.cuda import own_device


@pytest.mark.parametrize(("rank", "own"), [(None, 0), ("0", 0), ("1", 1), ("3", 1)])
def test_a_process_takes_its_own_card(monkeypatch, rank, own):
    """Of two visible cards; 3: where each process sees its own cards alone, or there are fewer cards than processes."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert own_device() == torch.device("cuda", own) and current == [own]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device() == torch.device("cpu")
