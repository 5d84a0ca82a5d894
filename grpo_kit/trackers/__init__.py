"""Trackers as hooks of a run: TensorBoard, trackio and Weights & Biases have what the run folder holds, step by step.

>>> from grpo_kit import trackers
>>> GRPOTrainer(model, task, config, tokenizer=tokenizer, hooks=[trackers.TensorBoard()])  # doctest: +SKIP
"""

from grpo_kit.argument_checks import check_choice
from grpo_kit.trackers.tensorboard import TensorBoard
from grpo_kit.trackers.tracker_hook import TrackerHook
from grpo_kit.trackers.trackio import Trackio
from grpo_kit.trackers.wandb import Wandb

_BY_NAME = {each.name: each for each in (TensorBoard, Trackio, Wandb)}
TRACKERS = tuple(_BY_NAME)


def by_name(name: str) -> TrackerHook:
    """The tracker of this name, one of TRACKERS. Raises ValueError for another, and for one that is not installed."""
    check_choice("tracker", name, TRACKERS)
    return _BY_NAME[name]()
