"""What the tests on a card share: the counters of the pretend one, small models, runs."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in (".", "engine")]

from grpo_kit.engine import _first_use as first_use  # noqa: E402


@pytest.fixture
def counter():
    """The pretend card, which counts from zero; a real one counts nothing."""
    card = sys.modules.get("card")
    if card is None or card.lib is None:
        pytest.skip("only the pretend card counts")
    card.reset()
    yield card
    card.put("fraction", 1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What an earlier version found of this card counts for nothing here; models that are cached stay so."""
    monkeypatch.setattr(first_use, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture(autouse=True)
def nothing_left():
    """Each test begins with an empty cache of the card's memory, and float32 that is float32."""
    torch.cuda.empty_cache()
    torch.set_float32_matmul_precision("highest")
    yield
