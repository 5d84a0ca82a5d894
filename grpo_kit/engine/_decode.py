"""One batch of rows from its prompts to its last token, with the model's own layers.

Longer than 300 lines because prompts and steps of one batch share slots, layers and graphs, which change together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from grpo_kit.engine._attention import NAME as OVER_SLOTS
from grpo_kit.engine._attention import attention_named, attention_over_prompts
from grpo_kit.engine._kv_cache import KVCache, fill_holes, row_bucket
from grpo_kit.engine.card._fused_layers import FusedLayers
from grpo_kit.engine.card._graphs import DecodeGraphs
from grpo_kit.engine.cpu._kv_prefill import TreeKVPrefill, common_length
from grpo_kit.engine.cpu._layers import PlainLayers, head_of, plain_layers
from grpo_kit.engine.cpu._matmul import padded_rows
from grpo_kit.engine.sampling import Sampled, Sampler
from grpo_kit.models._model_facts import cache_name, token_rows

_PREFILL_TOKENS = 16_384  # a padded batch of prompts on CUDA holds at most so many
_SHORT_TOKENS = 1024  # of the ends of prompts on a CPU
_SHORTEST_PREFIX = 16  # common tokens from which a separate forward pass for them pays
_LOOK_EVERY = 4  # steps between checks for ended rows, where a check would stall the device
_SHORTEST_BUCKET = 64  # columns of suffix attended at least, in bucketed decoding


class Spent(NamedTuple):
    """The cost of a batch, by phase: seconds, and the tokens that went through the model, padding included."""

    seconds: dict[str, float]
    tokens: dict[str, int]


class OutputBuffer:
    """Tokens and log-probabilities of n rows, and where each one ended.

    input_ids: long (n, T + limit), prompts left-padded to T; padding: long (n,), pad tokens before each prompt.
    length: long (n,), tokens written up to and with the first stop, `limit` where there was none.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        limit: int,
        *,
        stop_ids: Sequence[int],
        stop_text: Callable | None,
        pad_id: int,
        device: torch.device,
    ) -> None:
        rows = len(prompts)
        self.prompt_width = max(map(len, prompts))
        padded = [[pad_id] * (self.prompt_width - len(p)) + list(p) + [pad_id] * limit for p in prompts]
        self.input_ids = torch.tensor(padded, device=device)
        self.padding = torch.tensor([self.prompt_width - len(p) for p in prompts], device=device)
        self.length = torch.full((rows,), limit, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self._numbers = torch.zeros(3, rows, limit, dtype=torch.float32, device=device)
        self._limit = limit
        self._stop_ids = torch.tensor(list(stop_ids), dtype=torch.long, device=device)
        self._stop_text = stop_text

    def so_far(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """long (R, T + step): prompts and completions before this step."""
        return self.input_ids[:, : self.prompt_width + step].index_select(0, rows)

    def write(self, step: int, rows: torch.Tensor, sampled: Sampled) -> None:
        """One token of each of these rows (long (R,)); tokens after a row's end are cut off by read()."""
        self.input_ids[rows, self.prompt_width + step] = sampled.token
        numbers = torch.stack([sampled.logprob, sampled.policy_logprob, sampled.entropy])
        self._numbers[:, rows, step] = numbers
        stopped = (sampled.token[:, None] == self._stop_ids).any(dim=1)
        if self._stop_text is not None:
            stopped |= self._stop_text(self.so_far(rows, step + 1), None)
        first = stopped & ~self.done[rows]
        self.length[rows] = torch.where(first, step + 1, self.length[rows])
        self.done[rows] |= stopped

    def read(self) -> list[tuple[list[int], list[float], list[float], list[float]]]:
        """By row: token ids, log-probabilities under sampler and policy, entropies. Waits for the device."""
        lengths = self.length.tolist()
        tokens = self.input_ids[:, self.prompt_width :].tolist()
        columns = [tokens, *self._numbers.tolist()]
        return [tuple(c[r][:n] for c in columns) for r, n in enumerate(lengths)]


class EndWatch:
    """The host's view of which rows are done. On CUDA it is a few steps old, so that the host never waits."""

    def __init__(self, done: torch.Tensor, every: int) -> None:
        self._done, self._every = done, every
        self._copy: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def look(self, step: int) -> list[bool] | None:
        """Which rows are done, as of `every` steps ago (of this step if every is 1), or None when no check is due."""
        if self._every == 1:
            return self._done.tolist()
        if step % self._every:
            return None
        seen = None
        if self._copy is not None:
            if self._arrived is not None:
                self._arrived.synchronize()  # an old event: no wait
            seen = self._copy.tolist()
        if self._done.is_cuda:  # CUDA only
            self._copy = torch.empty(self._done.shape, dtype=torch.bool, pin_memory=True)
            self._copy.copy_(self._done, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._copy = self._done.clone()
        return seen


class Decoder:
    """Decodes batches with one model; keeps slots and graphs between batches until released.

    bucketed: padded shapes and CUDA graphs; False: exactly the live rows, no graphs (CPU). bits: see RolloutEngine.
    """

    def __init__(self, base: PreTrainedModel, *, bucketed: bool, bits: int = 32) -> None:
        self.bits = bits
        self.base, self.bucketed, self._cache_name = base, bucketed, cache_name(base.get_decoder().forward)
        self.device = base.get_input_embeddings().weight.device
        self.slots: KVCache | None = None
        self.graphs = DecodeGraphs(torch.cuda if self.device.type == "cuda" else None)
        self._layers: PlainLayers | None = None
        self.fused: FusedLayers | None = None
        self._tree_prefill = TreeKVPrefill()

    def release(self) -> None:
        """Drop slots, graphs and stored prompts."""
        self.slots = self.fused = None
        self._tree_prefill.release()
        self.graphs.clear()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        rows: torch.Tensor,
        tape: OutputBuffer,
        sampler: Sampler,
        limit: int,
        *,
        keep: bool = False,
    ) -> Spent:
        """Write the completions of `prompts` (n, those of one prompt adjacent) on the tape.

        rows: long (n,) on the device, their ids for sampler and processors. keep: the next batch's prompts continue
        these.
        """
        start = time.perf_counter()
        self._tokens = {"prefill": 0, "decode": 0}
        self._layers = None if self.bucketed else plain_layers(self.base, self.bits)
        if self.bits == 16 and self._layers is None:
            raise ValueError("bits=16 needs a plain float32 Llama, Qwen2 or Qwen3, without autocast; use 32")
        self._take_up_fused()
        self._head = head_of(self.base)
        groups = [(p, len(list(same))) for p, same in groupby(prompts)]
        with attention_over_prompts(self.base):
            first_logits = self._prefill(groups, limit, keep)  # (P, V)
        self._wait()
        middle = time.perf_counter()
        with attention_named(self.base, OVER_SLOTS):
            self._decode([n for _, n in groups], first_logits, rows, tape, sampler, limit)
        self._wait()
        if self.bits == 16:
            self._layers = None  # a copy of weights that change
        return Spent({"prefill": middle - start, "decode": time.perf_counter() - middle}, self._tokens)

    def _take_up_fused(self) -> None:
        """The fused layers with the present weights; the same ones while graphs may have been captured over them."""
        parts = FusedLayers.parts_of(self.base) if self.bucketed else None
        if parts is None:
            self.fused = None
            return
        if self.fused is None:
            self.fused = FusedLayers(self.base, parts)
        self.fused.refresh()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- prompts ------------------------------------------------------------------------------------------------

    def _prefill(self, groups: Sequence[tuple[Sequence[int], int]], limit: int, keep: bool) -> torch.Tensor:
        """Each prompt once, into the prefix slots; the logits behind its last token, (P, V)."""
        prompts = [p for p, _ in groups]
        if self._layers is not None:
            made = self._tree_prefill(self.base, self._layers, prompts, keep=keep)
            self._tokens["prefill"] += made.computed
            self._allocate(groups, limit, (len(made.keys), *made.keys[0].shape[::2]), made.keys[0].dtype)
            for part, layers in enumerate((made.keys, made.values)):
                for layer, held in enumerate(layers):
                    for prompt, place in enumerate(made.places):
                        self.slots.prefix[part, layer, prompt, :, : len(place)] = held.index_select(1, place)
            self.slots.set_prompts([len(p) for p in prompts])
            return self._layers.head(made.hidden)
        shared = common_length(prompts) if len(prompts) > 1 else 0
        shared = shared if shared >= _SHORTEST_PREFIX else 0
        last = []
        prefix = self._compute(prompts[0][:shared]) if shared else None
        for begin, end in self._chunks([len(p) - shared for p in prompts], shared):
            part = [p[shared:] for p in prompts[begin:end]]
            lengths = torch.tensor([len(p) for p in part], device=self.device)
            width = max(map(len, part))
            # Padded on the right: causal attention hides the padding, and no mask is needed.
            ids = torch.tensor([list(p) + [0] * (width - len(p)) for p in part], device=self.device)
            self._tokens["prefill"] += ids.numel()
            cache = DynamicCache()  # without a config: layers with a sliding window keep everything too
            for place, layer in enumerate(prefix.layers if prefix else ()):
                cache.update(*(x.expand(len(part), -1, -1, -1) for x in (layer.keys, layer.values)), place)
            hidden = self.base.get_decoder()(
                input_ids=ids,
                position_ids=(shared + torch.arange(width, device=self.device)).expand(len(part), -1),
                use_cache=True,
                **{self._cache_name: cache},
            ).last_hidden_state
            last.append(hidden[torch.arange(len(part), device=self.device), lengths - 1])
            if begin == 0:
                values = cache.layers[0].values
                self._allocate(
                    groups, limit, (len(cache.layers), values.size(1), values.size(3)), values.dtype
                )
            for layer, held in enumerate(cache.layers):
                self.slots.prefix[0, layer, begin:end, :, : shared + width] = held.keys
                self.slots.prefix[1, layer, begin:end, :, : shared + width] = held.values
        self.slots.set_prompts([len(p) for p in prompts])
        return self._head(torch.cat(last))

    def _compute(self, prefix: Sequence[int]) -> DynamicCache:
        """Keys and values of the prefix, one row."""
        cache = DynamicCache()
        ids = torch.tensor([list(prefix)], device=self.device)
        self._tokens["prefill"] += len(prefix)
        self.base.get_decoder()(input_ids=ids, use_cache=True, **{self._cache_name: cache})
        return cache

    def _chunks(self, ends: Sequence[int], shared: int) -> Iterator[tuple[int, int]]:
        """Prompts computed together, each with its number of tokens left: on a CPU one at a time, unless few remain."""
        budget = _PREFILL_TOKENS if self.bucketed else _SHORT_TOKENS if shared else 0
        lengths = (
            [shared + end for end in ends] if self.bucketed else ends
        )  # a card's memory holds all of each
        begin = 0
        for end in range(1, len(lengths) + 1):
            if end == len(lengths) or (end + 1 - begin) * max(lengths[begin : end + 1]) > budget:
                yield begin, end
                begin = end

    def _allocate(
        self,
        groups: Sequence[tuple[Sequence[int], int]],
        limit: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        """The KV cache of this batch, reusing the last one if it fits; shape: layers, key heads, their dimension."""
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        rows = sum(n for _, n in groups)
        wanted = dict(
            prompts=len(groups),
            rows=row_bucket(rows) if self.bucketed else rows,
            prompt_length=max(len(p) for p, _ in groups),
            group=max(n for _, n in groups),
            width=limit,
        )
        if self.bucketed:
            wanted["prompt_length"] = -(-wanted["prompt_length"] // 64) * 64
        groups = 0 if self.fused is None else self.fused.groups
        if self.slots is not None and self.slots.groups == groups and self.slots.fits(dtype, **wanted):
            return
        self.slots = None
        self.graphs.clear()
        self.slots = KVCache(
            shape,
            **wanted,
            dtype=dtype,
            device=self.device,
            bucketed=self.bucketed,
            groups=groups,
        )

    # ---- completions ----------------------------------------------------------------------------------------------

    def _decode(
        self,
        counts: Sequence[int],
        first_logits: torch.Tensor,
        rows: torch.Tensor,
        tape: OutputBuffer,
        sampler: Sampler,
        limit: int,
    ) -> None:
        slots = self.slots
        prompt = [p for p, n in enumerate(counts) for _ in range(n)]  # prefix slot of each row slot
        seat = list(range(len(prompt)))  # row on the tape of each row slot
        on_tape = torch.arange(len(seat), device=self.device)
        lengths = tape.prompt_width - tape.padding  # (n,)
        tokens = token_rows(self.base)
        logits = first_logits[:, :tokens].index_select(0, torch.tensor(prompt, device=self.device))
        slots.arrange(prompt, self._bucket(len(seat)))
        watch = EndWatch(tape.done, _LOOK_EVERY if self.bucketed else 1)
        chances, text = sampler.chances(rows, limit), (None, None)
        for step in range(limit):
            if sampler.changes_scores:
                text = tape.so_far(on_tape, step), tape.padding[on_tape]
            chance = chances[:, step].index_select(0, on_tape)
            sampled = sampler(logits, rows[on_tape], step, *text, chance)
            tape.write(step, on_tape, sampled)
            if step + 1 == limit:
                return
            token = sampled.token
            done = watch.look(step)
            if done is not None:
                live = [not done[r] for r in seat]
                if not any(live):
                    return
                if self._bucket(sum(live)) < self._bucket(len(seat)):
                    kept = self._drop(live, seat, prompt, step)
                    kept = torch.tensor(kept, device=self.device)
                    token, on_tape = token.index_select(0, kept), on_tape.index_select(0, kept)
            width = step + 1  # columns to attend to: those written, or the next power of two of them
            if self.bucketed:
                width = min(max(_SHORTEST_BUCKET, 1 << step.bit_length()), slots.width_held)
            slots.set_step(token, lengths[on_tape] + step, step, width)
            logits = self._step()[: len(seat), :tokens]

    def _drop(self, live: Sequence[bool], seat: list[int], prompt: list[int], written: int) -> list[int]:
        """Fill the holes of ended rows; returns for each remaining slot its former slot."""
        moves = fill_holes(live)
        kept = list(range(sum(live)))
        for to, source in moves:
            kept[to] = source
        seat[:], prompt[:] = [seat[s] for s in kept], [prompt[s] for s in kept]
        self.slots.move_rows(moves, written)
        if not self.bucketed:
            needed = [p in prompt for p in range(self.slots.prompt_count)]
            if not all(needed):
                place = self.slots.keep_prompts(needed)
                prompt[:] = [place[p] for p in prompt]
        self.slots.arrange(prompt, self._bucket(len(seat)))
        return kept

    def _bucket(self, rows: int) -> int:
        return row_bucket(rows) if self.bucketed else rows

    def _step(self) -> torch.Tensor:
        """Logits (rows, V) of the step for which the slots were set."""
        slots, layers = self.slots, self._layers
        if layers is None:
            self._tokens["decode"] += slots.rows
            return self.graphs.run((slots.rows, slots.width), self._forward)
        rows = padded_rows(slots.rows)
        self._tokens["decode"] += rows
        slots.begin_rows(layers.groups)
        unread = (0, rows - slots.rows)  # rows of token 0
        ids = torch.nn.functional.pad(slots.input_ids[: slots.rows, 0], unread)
        positions = torch.nn.functional.pad(slots.position_ids[: slots.rows, 0], unread)
        return layers.head(layers.hidden(ids, positions, slots.attend_rows))

    def _forward(self, out: torch.Tensor | None = None) -> torch.Tensor:
        slots = self.slots
        slots.begin_step()
        if self.fused is not None:
            return self.fused.logits(
                slots.input_ids[: slots.rows, 0], slots.position_ids[: slots.rows, 0], slots, out
            )
        self.base.config.handed_to_attention = slots
        hidden = self.base.get_decoder()(
            input_ids=slots.input_ids[: slots.rows],
            position_ids=slots.position_ids[: slots.rows],
            use_cache=True,
            **{self._cache_name: slots},
        ).last_hidden_state  # (rows, 1, hidden)
        return self._head(hidden[:, 0])
