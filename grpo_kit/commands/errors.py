"""Error output of a command: one line, once."""

from __future__ import annotations

import os
import sys


def tell(text: str) -> None:
    """Print a line on stderr; with several processes only on the first."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def in_a_line(error: BaseException) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
