"""TensorBoard: event files in the run folder, one scalar a column, texts for config, completions, changes and flags."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers.integrations import TensorBoardCallback

from grpo_kit.trackers.names import is_told_otherwise, numbers_of
from grpo_kit.trackers.tracker_table import rows_of


class TensorBoard(TensorBoardCallback):
    """transformers' callback, which is told the kit's rows. Event files: <run folder>/tensorboard.

    TENSORBOARD_LOGGING_DIR moves them to a folder of the run's name below it.
    """

    name, takes_back = "tensorboard", True

    def begin(
        self, args: Any, state: Any, model: Any, config: Mapping[str, Any], kept: Mapping[str, Any], step: int
    ) -> dict[str, Any]:
        """Write on after `step`; what is there of later steps is taken back. Returns what finds the run again."""
        folder = Path(args.output_dir)
        root = os.getenv("TENSORBOARD_LOGGING_DIR")
        own = Path(root).expanduser() / folder.name if root else folder / "tensorboard"
        self.logging_dir = kept.get("folder") or str(own.absolute())
        self.tb_writer = self._SummaryWriter(log_dir=self.logging_dir, purge_step=max(step + 1, 0))
        super().on_train_begin(args, state, None, model=model)
        self._text("config", "```\n" + json.dumps(config, indent=2, default=str) + "\n```", max(step, 0))
        self.where = (
            f"{self.logging_dir}; look at it with: tensorboard --logdir {Path(args.output_dir).parent}"
        )
        return {"folder": self.logging_dir}

    def row(self, step: int, row: Mapping[str, Any]) -> None:
        """Scalars, in 32 bits."""
        for name, value in numbers_of(row).items():
            self.tb_writer.add_scalar(name, value, step)
        self.tb_writer.flush()

    def alert(self, step: int, level: str, title: str, text: str) -> None:
        """A text at its step."""
        self._text(title, _shown(text), step)

    def table(self, step: int, table: Mapping[str, list]) -> None:
        """A text of rows and columns, the first row the columns' names."""
        cells = [list(table), *rows_of(table)]
        self._text("completions", np.array([list(map(_shown, row)) for row in cells], dtype=object), step)

    def _text(self, name: str, text: Any, step: int) -> None:
        """Under just this name, where add_text appends to it. text: one, or an array (rows, columns)."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self.tb_writer._get_file_writer().add_summary(text_pb(name, text), step)
        self.tb_writer.flush()

    def end(self, *, failed: bool) -> None:
        """Close the files."""
        if self.tb_writer is not None:
            writer, self.tb_writer = self.tb_writer, None
            writer.close()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: begin() opens the files, once there is something to tell."""

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: end() closes the files, after an interrupt and an error too."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """What is no row of metrics.csv goes transformers' way."""
        if self.tb_writer is not None and not is_told_otherwise(logs):
            super().on_log(args, state, control, logs=logs, **kwargs)


def _shown(value: Any) -> str:
    """So that TensorBoard, which reads Markdown, shows just this text; html.unescape gives it back."""
    text = "" if value is None else str(value)
    return "".join(c if c.isalnum() or c in " .,:;!?()" else f"&#{ord(c)};" for c in text)
