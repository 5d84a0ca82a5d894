"""How much of an optimizer step is computed at once: from free memory, and less for a while when memory runs out."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint

from grpo_kit.engine._supported_models import attention_named, is_tested
from grpo_kit.engine.cpu._layers import shipped_norms
from grpo_kit.engine.cpu._tree_attention import NAME as TREE
from grpo_kit.engine.memory._activations import PREFERRED_TOKENS, has_sizes, update_budget
from grpo_kit.engine.memory._free import Backoff, free_bytes, without_holes
from grpo_kit.engine.tree import Row, build_tree, make_chunks
from grpo_kit.models._model_facts import base_model, has_adapters

PACKED = "grpo_kit_packed"  # packed_update registers it with transformers
_DENSE_TOKENS = 1024  # positions under a dense mask, if a group has no more
_LAYERS_TO_ONE_AGAIN = 14
# Shapes that FlexAttention is compiled for in a process, of all models together; torch's own limit is 8.
_SHAPES = 64
# Modules that raise an error, or are passed by it, where FlexAttention failed; nobody else compiles anything.
_COMPILED = ("torch._inductor.", "triton.")
_COMPILERS = (*_COMPILED, "torch._dynamo.")
_FLEX = (
    *_COMPILED,
    "torch.nn.attention.flex_attention.",
    "torch._higher_order_ops.flex_attention.",
    "transformers.integrations.flex_attention.",
)


class Sizes(NamedTuple):
    """Packed positions of the longest completion with its prompt, of the largest group, and of all rows."""

    longest: int
    group: int
    total: int


class UpdateMemory:
    """The chunk size and what is done when it does not fit, for one model.

    chunk_tokens: packed positions at once, None until memory ran out; after a while larger ones are tried again.
    checkpointed_layers: so many layers, from the first, compute their activations again in the backward pass.
    attention: "flex_attention" (CUDA), the kit's own for a tree (CPU), or "sdpa" under a dense mask.
    compute_itemsize: bytes a number under autocast, None without it. by_layer: see PackedMasks.
    entropy_bonus: do entropies have a gradient?
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        *,
        compute_itemsize: int | None = None,
    ) -> None:
        self.model, self.device, self.compute_itemsize = model, device, compute_itemsize
        self.attention = _attention(model, device)
        # Layers may have windows, soft caps, sinks.
        self.by_layer = self.attention != TREE and not is_tested(model)
        self.chunk_tokens: int | None = None
        self.checkpointed_layers = 0
        self.entropy_bonus = False
        # frees what others keep; was there anything?
        self.give_back: Callable[[], bool] = lambda: False
        self._layers = list(base_model(model).get_decoder().layers)
        self._checkpoint_all, self._seconds = False, 0.0
        self._backoff = Backoff()

    def run(self, work: Callable[[int], Any], rows: list[Row]) -> Any:
        """work(packed positions at once), on `rows`; out of memory, it starts over with half.

        Where FlexAttention fails, it starts over with SDPA. What anything else raises passes as it is.
        Raises torch.OutOfMemoryError, with what to change, when one completion does not fit.
        """
        sizes = self._sizes(rows)
        while True:
            # would half of what is free allow as much as any memory does? Else it is short
            free, most = free_bytes(self.device), self._budget(sizes, 2**60)
            if self._budget(sizes, free // 2) != most:
                with without_holes(self.device):
                    free = free_bytes(self.device)
            limit, self.checkpointed_layers = self._budget(sizes, free)
            is_short = self._budget(sizes, free // 2) != most
            self._checkpoint_layers()
            start = time.perf_counter()
            try:
                with without_holes(self.device) if is_short else nullcontext():
                    result = work(limit)
                # the loss is a number: the card is done, too
                self._seconds = time.perf_counter() - start
                self._try_more(min(limit, sizes.total))
                return result
            except torch.OutOfMemoryError:
                out_of_memory = True
            except Exception as error:
                if self.attention != "flex_attention" or not _is_flex_attentions(error):
                    raise
                out_of_memory = any(
                    isinstance(e, torch.OutOfMemoryError) for e in _chain(error)
                )
                if not out_of_memory:
                    self.attention = "sdpa"
                    first_line = str(error).strip().partition("\n")[0]
                    print(
                        f"FlexAttention failed ({type(error).__name__}: {first_line}); using SDPA with a dense mask."
                    )
            given_back = out_of_memory and self.give_back()
            self._forget()  # out here the error, and the tensors its frames hold, are gone
            if out_of_memory and not given_back:
                self._take_less(min(limit, sizes.total), sizes.longest)

    @contextmanager
    def attention_of(self, model: Any) -> Iterator[None]:
        """Inside, the model has the packed mask's attention, also while backward recomputes checkpointed layers; on a
        card its norms are one kernel.

        FlexAttention that torch would run unfused, because it compiled too many shapes, is an error: see run().
        """
        base = base_model(model)
        name = base.config._attn_implementation
        if self.by_layer:
            name = PACKED
        elif self.attention != "sdpa" or name not in ("sdpa", "eager"):
            name = self.attention
        compiler = norms = nullcontext()
        if self.attention == "flex_attention":
            limits = {"recompile_limit": _SHAPES, "fail_on_recompile_limit_hit": True}
            compiler = torch._dynamo.config.patch(limits)
        if self.device.type == "cuda":
            norms = norms_in_one_kernel(model)
        with attention_named(base, name), compiler, norms:
            yield

    def spares(
        self, held: int, rows: list[Row], free: int | None = None, *, seconds: float = 0.0
    ) -> bool:
        """Can `held` bytes stay in use while these rows are computed, at less than making them anew costs?

        They can where chunks stay as long as without them, or long enough for good matrix sizes, and at most one layer
        in 14 more is checkpointed for them: of an update's three passes a 14th of one is computed again, 2.4 %. Where
        chunks stay the same, and with them all numbers, more layers may be that cost less than `seconds`.
        free: bytes besides what is held, None: as it is.
        """
        sizes = self._sizes(rows)
        if free is None:
            free = free_bytes(self.device)
        tokens, layers = self._budget(sizes, free)
        most_tokens, fewest_layers = self._budget(sizes, free + held)
        share = (layers - fewest_layers) / len(self._layers)
        if 0 < share * self._seconds / 3 < seconds:
            if make_chunks(rows, tokens) == make_chunks(rows, most_tokens):
                return True
        enough_tokens = min(most_tokens, max(sizes.group, PREFERRED_TOKENS))
        return share * _LAYERS_TO_ONE_AGAIN <= 1 and tokens >= enough_tokens

    def _sizes(self, rows: list[Row]) -> Sizes:
        # without a completion there is nothing to score
        scored = [row for row in rows if row[1]]
        groups: dict[tuple[int, ...], list[Row]] = {}
        for row in scored:
            groups.setdefault(row[0], []).append(row)
        longest = max(
            (len(prompt) + len(completion) - 1 for prompt, completion in scored), default=1
        )
        group = max((len(build_tree(members)) for members in groups.values()), default=1)
        return Sizes(longest, group, len(build_tree(scored)) if scored else 1)

    def _checkpoint_layers(self) -> None:
        """The first checkpointed_layers layers recompute their activations, the rest keep them."""
        for i, layer in enumerate(self._layers):
            layer.gradient_checkpointing = i < self.checkpointed_layers
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def _try_more(self, computed: int) -> None:
        """So many positions at once fitted: where an earlier lack of memory allows no more, it may at times."""
        is_limited = self._checkpoint_all or computed >= (self.chunk_tokens or math.inf)
        if not is_limited or not self._backoff.again():
            return
        if self._checkpoint_all:
            self._checkpoint_all = False
        else:
            self.chunk_tokens *= 2

    def _take_less(self, failed: int, longest: int) -> None:
        self._backoff.failed()
        if failed > longest:
            self.chunk_tokens = max(longest, failed // 2)
            remedy = f"with {self.chunk_tokens}"
        elif self.checkpointed_layers < len(self._layers):
            self._checkpoint_all = True
            remedy = "with every layer checkpointed"
        else:
            raise torch.OutOfMemoryError(
                f"one completion of {longest} tokens does not fit, with every layer checkpointed: shorten "
                "max_completion_length, or take LoRA, a smaller model or another optimizer (see plan_memory)"
            )
        print(
            f"Out of memory with {failed} tokens at once: the step starts over {remedy}; nothing is lost"
        )

    def _forget(self) -> None:
        """Nothing of the failed attempt stays: its gradients are a part of the step's only."""
        for parameter in self.model.parameters():
            parameter.grad = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _budget(self, sizes: Sizes, free: int) -> tuple[int, int]:
        """Packed positions of a chunk, whole groups if that fits, and how many layers are checkpointed."""
        longest, group, total = sizes
        base, lora = base_model(self.model), has_adapters(self.model)
        all_layers = len(self._layers)
        preferred = max(group, PREFERRED_TOKENS)
        if self.chunk_tokens is not None:
            total = min(total, self.chunk_tokens)
        total = max(longest, total)
        if self.attention == "sdpa":  # a dense mask over several groups is mostly empty
            total = min(total, max(group, _DENSE_TOKENS))
        elif self.device.type == "cpu":
            # longer is no faster, and who runs out of memory here is killed
            total = min(total, max(longest, preferred))
        # nothing to estimate from: trying measures it, and run() takes less
        if not has_sizes(base.config):
            return min(total, max(longest, preferred)), all_layers * self._checkpoint_all
        trained = [p for p in self.model.parameters() if p.requires_grad and p.grad is None]
        missing_gradients = sum(p.nbytes for p in trained)
        tokens, layers = update_budget(
            free - missing_gradients,
            base.config,
            base.dtype.itemsize,
            longest=longest,
            total=total,
            preferred=min(total, preferred),
            compute_itemsize=self.compute_itemsize,
            trainable="lora" if lora else "full",
            rank=getattr(self.model.active_peft_config, "r", 16) if lora else 16,
            mask_keys=total if self.attention == "sdpa" else 0,
            fused_norms=self.device.type == "cuda",
            entropy_bonus=self.entropy_bonus,
        )
        return tokens, all_layers if self._checkpoint_all else layers


def _is_flex_attentions(error: BaseException) -> bool:
    """Did FlexAttention fail, or who compiles it? Not where the card itself reports an error: nothing works then."""
    if any(isinstance(e, torch.AcceleratorError) for e in _chain(error)):
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    if f"{type(error).__module__}.".startswith(_COMPILERS):
        return True
    return any(f"{module}.".startswith(_FLEX) for module in modules)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _attention(model: torch.nn.Module, device: torch.device) -> str:
    if device.type == "cuda":
        # Below capability 8.0 Triton has no fast products, and FlexAttention does not compile.
        compiled = find_spec("triton") and torch.cuda.get_device_capability(device) >= (8, 0)
        return "flex_attention" if compiled else "sdpa"
    dropout = getattr(base_model(model).config, "attention_dropout", 0.0)
    # of other devices only SDPA is sure
    return "sdpa" if dropout or device.type != "cpu" else TREE


# ---- RMSNorm as one kernel each way, on a card ------------------------------------------------------------------
# By transformers' module it is some 20 kernels over every token, in float32, and two copies are kept for the backward
# pass. torch's own rms_norm computes the same in float32, rounds once in place of twice, and keeps its input and a
# number a token.


@contextmanager
def norms_in_one_kernel(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model's norms are torch's; also while the backward pass recomputes layers. Not on a CPU."""
    forwards = {norm: norm.forward for norm in shipped_norms(model)}
    for norm, forward in forwards.items():
        norm.forward = _in_one_kernel(forward)
    try:
        yield
    finally:
        for norm, forward in forwards.items():
            norm.forward = forward


def _in_one_kernel(forward: Any) -> Any:
    def norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if hidden_states.dtype != weight.dtype:
            return forward(self, hidden_states)
        # Autocast would make 16 bits float32.
        with torch.autocast(hidden_states.device.type, enabled=False):
            return rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)

    return norm
