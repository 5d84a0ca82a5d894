"""FSDP2 over two processes on a CPU, for test_sharded.py: trl's own path, chosen without being asked.

accelerate ignores FSDP on a CPU without a word, so it is told that these are cards before it looks.
"""

import os
import signal
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from packaging.version import Version

built = PartialState.__init__


def as_on_cards(state, *args, **kwargs):
    built(state, *args, **kwargs)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = as_on_cards

from tiny_run import make  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from grpo_kit import tasks  # noqa: E402
from grpo_kit.evaluation.held_out import HeldOut  # noqa: E402
from grpo_kit.loop.interrupts import Stopped  # noqa: E402

torch.set_num_threads(1)
RANK, HERE = int(os.environ["RANK"]), Path(sys.argv[1])
FSDP = dict(
    fsdp=True,
    fsdp_config={
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
        "reshard_after_forward": True,
    },
)


def sharded(which, name, **more):
    how = dict(per_device_train_batch_size=4, max_steps=4, learning_rate=1e-3)
    return make(which, HERE / name, **FSDP, **how | more)


def whole(trainer):
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in trainer.model.named_parameters()}


def difference(a, b):
    return max((a[n] - b[n]).abs().max().item() for n in b)


plain = sharded("plain", "plain")
plain.train()
kit = sharded("kit", "kit", kit={"live": False, "temperature": None})
assert kit.ranks.sharded == "FSDP2" and not kit.ranks.together
kit.train()
assert any(isinstance(p, DTensor) for p in kit.model.parameters()), "nothing is sharded"
assert difference(whole(kit), whole(plain)) == 0

stopped = sharded("kit", "stopped")
inner = stopped._generate_single_turn


def pressed(*args, **kwargs):
    if stopped.state.global_step == 1 and RANK == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return inner(*args, **kwargs)


stopped._generate_single_turn = pressed
with pytest.raises(Stopped, match="after step 2"):
    stopped.train()
again = sharded("kit", "stopped")
again.train(resume_from_checkpoint=True)
assert again.state.global_step == 4
# Before accelerate 1.15 what it saves of sharded weights and moments does not come back to the last bit.
assert difference(whole(again), whole(kit)) == 0 or Version(accelerate.__version__) < Version("1.15")

task = tasks.largest(n_train=16, n_held_out=8)
for given, words in (
    ({"held_out": HeldOut(task, rows=4)}, "held_out"),
    ({"optimizer": "adamw-8bit"}, "optimizer"),
):
    with pytest.raises(ValueError, match=f"{words} needs all weights"):
        sharded("kit", "refused", kit=given)
sys.stdout.write(f"done {RANK}\n")  # in one piece: the other process writes too
