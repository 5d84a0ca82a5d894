"""TensorBoard: event files in the run folder, one scalar a column, texts for config, completions, changes and flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_kit.trackers.tracker_hook import TrackerHook
from grpo_kit.trackers.tracker_table import rows_of


class TensorBoard(TrackerHook):
    """Event files in <run folder>/tensorboard, with numbers in 32 bits. Steps done again hide those of before."""

    name, takes_back = "tensorboard", True

    def _open(
        self, folder: Path, settings: dict[str, Any], kept: dict[str, Any], step: int
    ) -> tuple[dict, str]:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if kept else None)
        if not kept:
            self._text(step, "INFO", "config", json.dumps(settings, indent=2, default=str))
        return {"folder": "tensorboard"}, f"look at it with: tensorboard --logdir {folder.parent}"

    def _numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _text(self, step: int, level: str, title: str, text: str) -> None:
        self._writer.add_text(title, _shown(text), step)

    def _table(self, step: int, table: Mapping[str, list]) -> None:
        cells = [list(map(_shown, row)) for row in (table, *rows_of(table))]
        lines = [" | ".join(row) for row in (cells[0], ["---"] * len(table), *cells[1:])]
        self._writer.add_text("completions", "\n".join(f"| {line} |" for line in lines), step)

    def _close(self, failed: bool) -> None:
        self._writer.close()


def _shown(value: Any) -> str:
    """So that TensorBoard, which reads Markdown, shows just this text; html.unescape gives it back."""
    text = "" if value is None else str(value)
    return "".join(c if c.isalnum() or c in " .,:;!?()" else f"&#{ord(c)};" for c in text)
