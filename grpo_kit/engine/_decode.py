"""One batch of rows from its prompts to its last token, with the model's own layers.

Longer than 300 lines because prompts and steps of one batch share slots, layers and graphs, which change together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from grpo_kit.engine._attention import NAME as OVER_SLOTS
from grpo_kit.engine._attention import attention_over_prompts
from grpo_kit.engine._kv_cache import CacheSize, KVCache, fill_holes, row_bucket
from grpo_kit.engine._supported_models import attention_named
from grpo_kit.engine.card._fused_layers import FusedLayers
from grpo_kit.engine.card._graphs import DecodeGraphs
from grpo_kit.engine.cpu._decode_step import CompiledStep
from grpo_kit.engine.cpu._kv_prefill import TreeKVPrefill, common_length
from grpo_kit.engine.cpu._layers import PlainLayers, head_of, plain_layers
from grpo_kit.engine.sampling import Sampled, Sampler, uniform
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
        self.limit, self.prompt_width = limit, max(map(len, prompts))
        padding = [self.prompt_width - len(prompt) for prompt in prompts]
        padded = [
            [pad_id] * pads + list(prompt) + [pad_id] * limit
            for pads, prompt in zip(padding, prompts, strict=True)
        ]
        self.input_ids = torch.tensor(padded, device=device)
        self.padding = torch.tensor(padding, device=device)
        self.length = torch.full((rows,), limit, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self._numbers = torch.zeros(3, rows, limit, dtype=torch.float32, device=device)
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
        is_stop = (sampled.token[:, None] == self._stop_ids).any(dim=1)
        if self._stop_text is not None:
            is_stop |= self._stop_text(self.so_far(rows, step + 1), None)
        is_first_stop = is_stop & ~self.done[rows]
        self.length[rows] = torch.where(is_first_stop, step + 1, self.length[rows])
        self.done[rows] |= is_stop

    def read(self) -> list[tuple[list[int], list[float], list[float], list[float]]]:
        """By row: token ids, log-probabilities under sampler and policy, entropies. Waits for the device."""
        tokens = self.input_ids[:, self.prompt_width :].tolist()
        rows = zip(self.length.tolist(), tokens, *self._numbers.tolist(), strict=True)
        return [tuple(values[:length] for values in columns) for length, *columns in rows]


class EndWatch:
    """The host's view of which rows are done, a few steps old, so that the host never waits for a card."""

    def __init__(self, is_done: torch.Tensor, every: int) -> None:
        self._is_done, self._every = is_done, every
        self._copy: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def look(self, step: int) -> list[bool] | None:
        """Which rows were done `every` steps ago, or None when no check is due."""
        if step % self._every:
            return None
        is_done = None
        if self._arrived is not None:
            self._arrived.synchronize()  # an old event: no wait
        if self._copy is not None:
            is_done = self._copy.tolist()
        if self._is_done.is_cuda:  # CUDA only
            self._copy = torch.empty(self._is_done.shape, dtype=torch.bool, pin_memory=True)
            self._copy.copy_(self._is_done, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._copy = self._is_done.clone()
        return is_done


class Decoder:
    """Decodes batches with one model; keeps slots and graphs between batches until released.

    bucketed: padded shapes and CUDA graphs; False: exactly the live rows, no graphs (CPU). bits: see RolloutEngine.
    """

    def __init__(self, base: PreTrainedModel, *, bucketed: bool, bits: int = 32) -> None:
        self.base, self.bucketed, self.bits = base, bucketed, bits
        self.device = base.get_input_embeddings().weight.device
        self.slots: KVCache | None = None
        self.graphs = DecodeGraphs(torch.cuda if self.device.type == "cuda" else None)
        self.fused: FusedLayers | None = None
        self._layers: PlainLayers | None = None
        self._tree_prefill = TreeKVPrefill()
        self._cache_name = cache_name(base.get_decoder().forward)

    def release(self) -> None:
        """Drop slots, graphs and stored prompts."""
        self.slots = self.fused = None
        self._tree_prefill.release()
        self.graphs.clear()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        rows: torch.Tensor,
        output: OutputBuffer,
        sampler: Sampler,
        *,
        keep: bool = False,
    ) -> Spent:
        """Write the completions of `prompts` (n, those of one prompt adjacent) into `output`.

        rows: long (n,) on the device, their ids for sampler and processors. keep: the next batch's prompts continue
        these.
        """
        start = time.perf_counter()
        self._tokens = {"prefill": 0, "decode": 0}
        self._layers = None if self.bucketed else plain_layers(self.base, self.bits)
        self._compiled = CompiledStep.of(self._layers)
        if self.bits == 16 and self._layers is None:
            raise ValueError(
                "bits=16 needs a plain float32 Llama, Qwen2 or Qwen3, without autocast; use 32"
            )
        if self.bucketed:
            self._read_fused_layers()
        self._head = head_of(self.base)
        groups = [list(group) for _, group in groupby(prompts)]
        distinct = [group[0] for group in groups]
        lengths = [len(prompt) for prompt in distinct]
        counts = [len(group) for group in groups]
        longest = max(lengths)
        if self.bucketed:
            longest = -(-longest // 64) * 64
        size = CacheSize(
            len(groups), self._bucket(len(prompts)), longest, max(counts), output.limit
        )
        if self._layers is None:
            with attention_over_prompts(self.base):
                first_logits = self._prefill_by_modules(distinct, size)  # (P, V)
        else:
            first_logits = self._prefill_tree(distinct, size, keep)
        self.slots.set_prompts(lengths)
        middle = self._clock()
        self._decode(counts, first_logits, rows, output, sampler)
        end = self._clock()
        if self.bits == 16:
            self._layers = self._compiled = None  # a copy of weights that change
        return Spent({"prefill": middle - start, "decode": end - middle}, self._tokens)

    def _read_fused_layers(self) -> None:
        """The fused layers with the present weights; the same ones while graphs may have been captured over them."""
        parts = FusedLayers.parts_of(self.base)
        if parts is None:
            self.fused = None
            return
        if self.fused is None:
            self.fused = FusedLayers(self.base, parts)
        self.fused.refresh()

    def _clock(self) -> float:
        """Seconds, once the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    # ---- prompts ------------------------------------------------------------------------------------------------

    def _prefill_tree(
        self, prompts: Sequence[Sequence[int]], size: CacheSize, keep: bool
    ) -> torch.Tensor:
        """Prompts into the prefix slots, by plain functions of layers; the logits behind their last tokens, (P, V)."""
        prefilled = self._tree_prefill(self.base, self._layers, prompts, keep=keep)
        self._tokens["prefill"] += prefilled.computed
        heads, _, dim = prefilled.keys[0].shape
        self._allocate(size, (len(prefilled.keys), heads, dim), prefilled.keys[0].dtype)
        for part, layers in enumerate((prefilled.keys, prefilled.values)):
            for layer, states in enumerate(layers):
                for prompt, place in enumerate(prefilled.places):
                    self.slots.prefix[part, layer, prompt, :, : len(place)] = (
                        states.index_select(1, place)
                    )
        return self._layers.head(prefilled.hidden)

    def _prefill_by_modules(
        self, prompts: Sequence[Sequence[int]], size: CacheSize
    ) -> torch.Tensor:
        """Prompts into the prefix slots, by the model's modules; the logits behind their last tokens, (P, V)."""
        shared = common_length(prompts)
        if len(prompts) == 1 or shared < _SHORTEST_PREFIX:
            shared = 0
        prefix = self._prefix_cache(prompts[0][:shared])
        last_states = []
        for begin, end in self._chunks([len(prompt) for prompt in prompts], shared):
            tails = [list(prompt[shared:]) for prompt in prompts[begin:end]]
            count, width = len(tails), max(map(len, tails))
            # Padded on the right: causal attention hides the padding, and no mask is needed.
            ids = torch.tensor(
                [tail + [0] * (width - len(tail)) for tail in tails], device=self.device
            )
            self._tokens["prefill"] += ids.numel()
            # without a config: layers with a sliding window keep everything too
            cache = DynamicCache()
            for number, layer in enumerate(prefix.layers):
                keys, values = (x.expand(count, -1, -1, -1) for x in (layer.keys, layer.values))
                cache.update(keys, values, number)
            positions = (shared + torch.arange(width, device=self.device)).expand(count, -1)
            hidden = self._hidden(ids, positions, cache)
            last = torch.tensor([len(tail) - 1 for tail in tails], device=self.device)
            last_states.append(hidden[torch.arange(count, device=self.device), last])
            if begin == 0:
                _, heads, _, dim = cache.layers[0].values.shape
                self._allocate(
                    size, (len(cache.layers), heads, dim), cache.layers[0].values.dtype
                )
            for number, layer in enumerate(cache.layers):
                self.slots.prefix[0, number, begin:end, :, : shared + width] = layer.keys
                self.slots.prefix[1, number, begin:end, :, : shared + width] = layer.values
        return self._head(torch.cat(last_states))

    def _prefix_cache(self, prefix: Sequence[int]) -> DynamicCache:
        """Keys and values of the prefix, one row."""
        cache = DynamicCache()
        if prefix:
            self._tokens["prefill"] += len(prefix)
            ids = torch.tensor([list(prefix)], device=self.device)
            self._hidden(ids, torch.arange(len(prefix), device=self.device)[None], cache)
        return cache

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Last hidden states (rows, T, hidden) of the model's own decoder, which writes the cache."""
        options = {self._cache_name: cache, "use_cache": True}
        return self.base.get_decoder()(
            input_ids=ids, position_ids=positions, **options
        ).last_hidden_state

    def _chunks(self, lengths: Sequence[int], shared: int) -> Iterator[tuple[int, int]]:
        """Ranges of prompts that are computed together: on a CPU one prompt at a time, unless few tokens are left."""
        if self.bucketed:
            budget = _PREFILL_TOKENS  # a card's memory holds all of each
        else:
            budget = _SHORT_TOKENS if shared else 0
            lengths = [length - shared for length in lengths]
        begin = 0
        for end in range(1, len(lengths) + 1):
            if (
                end == len(lengths)
                or (end + 1 - begin) * max(lengths[begin : end + 1]) > budget
            ):
                yield begin, end
                begin = end

    def _allocate(
        self, size: CacheSize, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        """The KV cache of this batch: the last one where it fits. shape: layers, key heads, their dimension."""
        if torch.is_autocast_enabled(self.device.type):
            dtype = torch.get_autocast_dtype(self.device.type)
        groups = 0 if self.fused is None else self.fused.groups
        if self.slots is not None and self.slots.fits(size, dtype, groups):
            return
        self.slots = None
        self.graphs.clear()
        self.slots = KVCache(
            shape, size, dtype=dtype, device=self.device, bucketed=self.bucketed, groups=groups
        )

    # ---- completions ----------------------------------------------------------------------------------------------

    def _decode(
        self,
        counts: Sequence[int],
        first_logits: torch.Tensor,
        rows: torch.Tensor,
        output: OutputBuffer,
        sampler: Sampler,
    ) -> None:
        slots, tokens = self.slots, token_rows(self.base)
        prompt_of_slot = (
            torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).tolist()
        )
        row_of_slot = list(range(len(prompt_of_slot)))
        # row_of_slot, on the device.
        output_rows = torch.arange(len(row_of_slot), device=self.device)
        prompt_lengths = output.prompt_width - output.padding  # (n,)
        first_prompts = torch.tensor(prompt_of_slot, device=self.device)
        logits = first_logits[:, :tokens].index_select(0, first_prompts)
        slots.arrange(prompt_of_slot, self._bucket(len(row_of_slot)))
        watch = EndWatch(output.done, _LOOK_EVERY) if self.bucketed else None
        # Of all steps at once: one by one they would be 40 kernels a token.
        chances = uniform(
            sampler.seed, rows[:, None], torch.arange(output.limit, device=self.device)
        )
        input_ids = padding = None
        for step in range(output.limit):
            if sampler.changes_scores:
                input_ids, padding = (
                    output.so_far(output_rows, step),
                    output.padding[output_rows],
                )
            chance = chances[:, step].index_select(0, output_rows)
            sampled = sampler(logits, rows[output_rows], input_ids, padding, chance)
            output.write(step, output_rows, sampled)
            if step + 1 == output.limit:
                return
            token = sampled.token
            is_done = output.done.tolist() if watch is None else watch.look(step)
            if is_done is not None:
                live = [not is_done[row] for row in row_of_slot]
                if not any(live):
                    return
                if self._bucket(sum(live)) < self._bucket(len(live)):
                    former_slots, prompt_of_slot = self._drop(live, prompt_of_slot, step)
                    row_of_slot = [row_of_slot[slot] for slot in former_slots]
                    places = torch.tensor(former_slots, device=self.device)
                    token, output_rows = (
                        token.index_select(0, places),
                        output_rows.index_select(0, places),
                    )
            # columns to attend to: those written, or the next power of two of them
            width = step + 1
            if self.bucketed:
                width = min(max(_SHORTEST_BUCKET, 1 << step.bit_length()), slots.size.width)
            slots.set_step(token, prompt_lengths[output_rows] + step, step, width)
            logits = self._step()[: len(row_of_slot), :tokens]

    def _drop(
        self, live: Sequence[bool], prompt_of_slot: list[int], columns: int
    ) -> tuple[list[int], list[int]]:
        """Fill the holes of ended rows; returns for each remaining slot its former slot, and its prompt."""
        moves = fill_holes(live)
        former_slots = list(range(sum(live)))
        for target, source in moves:
            former_slots[target] = source
        self.slots.move_rows(moves, columns)
        prompt_of_slot = [prompt_of_slot[slot] for slot in former_slots]
        if not self.bucketed:
            prompt_of_slot = self.slots.drop_prompts(prompt_of_slot)
        self.slots.arrange(prompt_of_slot, self._bucket(len(former_slots)))
        return former_slots, prompt_of_slot

    def _bucket(self, rows: int) -> int:
        return row_bucket(rows) if self.bucketed else rows

    def _step(self) -> torch.Tensor:
        """Logits (rows, V) of the step for which the slots were set."""
        slots, layers = self.slots, self._layers
        if layers is None:
            self._tokens["decode"] += slots.rows
            return self.graphs.run((slots.rows, slots.width), self._forward)
        slots.begin_step()
        self._tokens["decode"] += slots.rows
        ids, positions = slots.input_ids[: slots.rows, 0], slots.position_ids[: slots.rows, 0]
        if self._compiled is not None:
            return self._compiled(ids, positions, slots)
        return layers.head(layers.hidden(ids, positions, slots.attend_rows))

    def _forward(self, out: torch.Tensor | None = None) -> torch.Tensor:
        slots = self.slots
        slots.begin_step()
        ids, positions = slots.input_ids[: slots.rows], slots.position_ids[: slots.rows]
        if self.fused is not None:
            return self.fused.logits(ids[:, 0], positions[:, 0], slots, out)
        with attention_named(self.base, OVER_SLOTS):
            self.base.config.handed_to_attention = slots
            hidden = self._hidden(ids, positions, slots)  # (rows, 1, hidden)
        return self._head(hidden[:, 0])
