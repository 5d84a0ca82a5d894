"""Other libraries beside the loop: a script of TRL's runs here, and a task of the kit runs there.

trl.py            from_trl: the pieces of a TRL GRPO script -> a trainer of the loop; to_trl: the way out of one card
_trl_fields.py     what becomes of each field of GRPOConfig
_trl_config.py     a GRPOConfig as the loop's Config, and back
_trl_task.py       TRL's data set and reward functions as a task of the loop
vllm.py            vLLM as the loop's sampler
_vllm_engines.py   vLLM in this process or as a server; vllm_heads.py: its worker
trackers.py        TensorBoard, trackio, Weights & Biases as hooks
diagnose.py        the red flags on a log of TRL, wandb, TensorBoard or a table; _log_rows.py reads them
"""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.more.bridges.trl import from_trl, to_trl

__all__ = lazy(__name__)
