"""What transformers and trl say while they train that a reader can do nothing about."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import trainer


@contextmanager
def quiet(model: Any) -> Iterator[None]:
    """Leaves out old names that trl asks transformers for at each rollout, and that a tied matrix is saved once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})

    def of_interest(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not ("missing keys in the checkpoint" in message and _names(message) <= tied)

    log = logging.getLogger(trainer.__name__)
    log.addFilter(of_interest)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
            yield
    finally:
        log.removeFilter(of_interest)


def _names(message: str) -> set[str]:
    """The names in quotes: "There were missing keys in the checkpoint model loaded: ['lm_head.weight']."."""
    return set(message.split("'")[1::2])
