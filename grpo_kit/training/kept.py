"""Which step's weights a run ended with, on record and in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_kit.record.files import KEPT, read_metrics, write_whole


def record_kept(trainer: Any, say: Any) -> None:
    """All steps are done: say and write (kept.json) that the best evaluation's weights were loaded, where they were.

    Where the last step's are kept, say that an evaluation before was better, if one was by 5 points or more.
    """
    args, state = trainer.args, trainer.state
    if not args.should_save:  # of several processes the first writes
        return
    folder = Path(args.output_dir)
    if args.load_best_model_at_end and state.best_model_checkpoint is not None:
        by, value = args.metric_for_best_model, state.best_metric
        say(
            f"The model has the weights of step {state.best_global_step}, the best evaluation ({by} {value:.4g})."
        )
        found = {"step": state.best_global_step, "of": state.global_step, "by": by, "value": value}
        write_whole(folder / KEPT, json.dumps(found).encode())
        return
    from grpo_kit.watch.held_out_words import HOW_TO_KEEP, better_before

    (folder / KEPT).unlink(missing_ok=True)
    if said := better_before(read_metrics(folder)):
        say(f"{said} {HOW_TO_KEEP}")
