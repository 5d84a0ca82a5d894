"""Memory that a packed update takes, measured beside what grpo_kit.more.memory.plan predicts.

    python -m benchmarks.memory

Real: SmolLM2-135M in float32 on the CPU, one chunk forward and backward and AdamW's step, full and LoRA; every
tensor's storage is counted from birth to death, and the process's resident memory is a second witness.
Fake: Qwen2.5-1.5B's shapes under FakeTensorMode, where tensors have sizes and no data, as the second chunk of a
step. SDPA with a dense mask. Optimizers that need a card are stood for by a tensor of their size.
The head is the packed update's on a card. Saves benchmarks/results/memory_cpu.json.

Unverified: what CUDA adds (kernels' workspaces, the allocator's fragmentation, FlexAttention, CUDA graphs).
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM

from benchmarks.result import RESULTS, command_line, origin, save
from grpo_kit import load_policy, preset
from grpo_kit.engine.cpu._layers import shipped_norms
from grpo_kit.engine.memory._activations import ChunkMemory
from grpo_kit.engine.optim.choose import OPTIMIZERS
from grpo_kit.engine.packed_update import tiled_logprobs
from grpo_kit.models._model_facts import base_model, config_of
from grpo_kit.more.memory._request import USABLE, Request, counted

GIB = 2**30


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of live tensor storages; `peak` since the last reset(). events: (storage, bytes; 0 if gone)."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0
        self.events: list[tuple[int, int]] = []

    def hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.live and storage.nbytes():
            self.live[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.events.append((storage._cdata, storage.nbytes()))
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        self.now -= self.live.pop(key)
        self.events.append((key, 0))

    def reset(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.hold(tensor)
        self.peak = max(self.peak, self.now)
        return out


def measure_chunk(
    model: Any,
    *,
    tokens: int,
    scored: int,
    checkpointed: int,
    gradients: bool,
    autocast: bool,
    dense_mask: bool = True,
) -> dict:
    """Peak bytes (weights included) of one chunk's forward and backward pass, and of AdamW's step after it.

    dense_mask: SDPA's; False: causal without one, which keeps what FlexAttention keeps. "events": PeakMemory's, up to
    the optimizer.
    """
    base = base_model(model)
    model.train()
    if checkpointed:
        base.activation_checkpointing_enable(
            activation_checkpointing_kwargs={"use_reentrant": False}
        )
    for number, layer in enumerate(base.model.layers):
        layer.gradient_checkpointing = number < checkpointed
    trained = [p for p in model.parameters() if p.requires_grad]
    memory = PeakMemory()
    for p in model.parameters():
        memory.hold(p)
    weights = memory.now
    if gradients:
        for p in trained:
            p.grad = torch.zeros_like(p)
            memory.hold(p.grad)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril() if dense_mask else None
    positions = torch.arange(tokens)[None]
    with memory, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        hidden = base.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        )
        # As the update does with a mask of labels, whose shape fake tensors cannot know.
        states = hidden.last_hidden_state[0, tokens - scored :].clone()
        del hidden
        logprobs, entropy = tiled_logprobs(
            base.lm_head, states, torch.zeros(scored, dtype=torch.long), 1.0
        )
        loss = -logprobs.sum()
    del states
    with memory:
        loss.backward()
    update, events = memory.peak, list(memory.events)
    del loss, logprobs, entropy
    memory.reset()
    with memory:  # foreach: as torch chooses on CUDA
        torch.optim.AdamW(trained, foreach=True).step()
    return {
        "weights": weights,
        "update": update,
        "optimizer step": memory.peak,
        "events": events,
    }


class _OneKernel(torch.autograd.Function):
    """A norm that keeps what a card's kernel keeps (engine/_update_memory.py): its input and a number a token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(
            x, weight, (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        )
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return (
            torch.empty_like(x),
            torch.empty_like(weight) if weight.requires_grad else None,
            None,
        )


@contextmanager
def norms_of_a_card(model: Any) -> Any:
    """For fake tensors, whose numbers nobody reads."""
    before = {kind: kind.forward for kind in shipped_norms(model)}
    for kind in before:
        kind.forward = lambda self, x: _OneKernel.apply(x, self.weight, self.variance_epsilon)
    try:
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward


def fake_model(config: Any, dtype: torch.dtype, *, lora: bool) -> Any:
    """The model with tensors of the active FakeTensorMode for weights."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if lora:
            model = get_peft_model(
                model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
            )
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                fake = torch.nn.Parameter(
                    torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad
                )
                module._parameters[name] = made.setdefault(id(p), fake)
        for name, b in module._buffers.items():
            module._buffers[name] = torch.empty(b.shape, dtype=b.dtype)
    return model


@contextmanager
def resident_memory(readings: list[int]) -> Any:
    """Resident bytes of this process while the block runs, every 5 ms."""
    stop, process = threading.Event(), psutil.Process()

    def watch() -> None:
        while not stop.is_set():
            readings.append(process.memory_info().rss)
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def row(case: str, predicted: float, measured: float, **more: Any) -> dict:
    error = 100 * (predicted / measured - 1)
    print(
        f"{case:<92} predicted {predicted / GIB:6.2f}  measured {measured / GIB:6.2f} GiB  {error:+5.1f} %",
        flush=True,
    )
    numbers = {
        "predicted_gib": predicted / GIB,
        "measured_gib": measured / GIB,
        "error_percent": error,
    }
    return {"case": case} | {k: round(v, 3) for k, v in numbers.items()} | more


def real_case(
    tuning: str, checkpointed: int, *, tokens: int = 1024, scored: int = 900
) -> list[dict]:
    """SmolLM2 on the CPU."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    model, _ = load_policy("smollm2-135m-instruct", tuning=tuning, quiet=True)
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    readings: list[int] = []
    with resident_memory(readings):
        measured = measure_chunk(
            model,
            tokens=tokens,
            scored=scored,
            checkpointed=checkpointed,
            gradients=False,
            autocast=False,
        )
    peak = ChunkMemory(model.config, 4, trainable=tuning, mask_keys=tokens).peak(
        tokens=tokens,
        scored_tokens=scored,
        checkpointed_layers=checkpointed,
        gradients=False,
        gradient_bytes=trained,
    )
    update = measured["weights"] + peak.kept + peak.working + peak.gradients * trained
    name = f"SmolLM2-135M float32 {tuning}, {tokens} tokens, {checkpointed} of 30 layers checkpointed"
    step = measured["weights"] + trained * (1 + 2 + 1)  # gradients, moments, the step's own
    rss = {"rss_gib": round((max(readings) - before) / GIB, 3)}
    return [
        row(f"{name}: update", update, measured["update"], **rss),
        row(f"{name}: AdamW's step", step, measured["optimizer step"]),
    ]


def fake_case(dtype: str, optimizer: str, tuning: str, checkpointed: int) -> list[dict]:
    """Qwen2.5-1.5B's shapes: plan_memory's moments, one group (256 + 8 x 512) a chunk, not its first."""
    cfg = preset(
        "gpu24",
        tuning=tuning,
        **({"dtype": dtype, "optimizer": optimizer} if tuning == "full" else {}),
    )
    group = 255 + 8 * 512
    usable, counts = 24 * USABLE * GIB, counted(cfg.model, 16)
    request = Request(cfg, config_of(cfg.model), 256, 256, "sdpa", 16, usable, counts)
    plan = request.plan(group, checkpointed)
    full, weights = tuning == "full", getattr(torch, cfg.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(config_of(cfg.model), weights, lora=not full)
        state = sum(p.numel() for p in model.parameters() if p.requires_grad)
        state *= OPTIMIZERS[optimizer].state_bytes if full else 8
        with norms_of_a_card(model):
            measured = measure_chunk(
                model,
                tokens=group,
                scored=8 * 512,
                checkpointed=checkpointed,
                gradients=True,
                autocast=not full or weights == torch.float32,
            )
    name = (
        f"Qwen2.5-1.5B {tuning}, {plan.title.split(', ')[2]}, {optimizer if full else 'adamw'}"
    )
    name += f", {group} tokens, {checkpointed} of 28 layers checkpointed"
    predicted = {
        m: sum(v for k, v in p.items() if k != "reserve") for m, p in plan.parts.items()
    }
    rows = [row(f"{name}: update", predicted["update"], measured["update"] + state)]
    if optimizer == "adamw":
        rows.append(
            row(
                f"{name}: AdamW's step", predicted["optimizer step"], measured["optimizer step"]
            )
        )
    return rows


def main() -> None:
    """Run every case, print and save."""
    command_line(__doc__).parse_args()
    cases = [("full", 0), ("full", 30), ("lora", 0), ("lora", 30)]
    # A process each: memory that an earlier case gave back to the allocator would hide a later one's.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        real = [r for rows in pool.starmap(real_case, cases, chunksize=1) for r in rows]
    fake_cases = [("bfloat16", "flash-adamw", "full", k) for k in (0, 14, 19, 28)]
    fake_cases += [("float32", "adamw-8bit", "full", k) for k in (0, 28)]
    fake_cases += [
        ("float32", "adamw", "full", 28),
        ("bfloat16", "adamw", "lora", 0),
        ("bfloat16", "adamw", "lora", 28),
    ]
    fake = [r for case in fake_cases for r in fake_case(*case)]
    result = origin("python -m benchmarks.memory", "torch", "transformers", "peft") | {
        "unverified": "CUDA: kernels' workspaces, the allocator's fragmentation, FlexAttention, CUDA graphs",
        "real tensors on the CPU": real,
        "fake tensors": fake,
    }
    save(RESULTS, "memory_cpu", result)


if __name__ == "__main__":
    main()
