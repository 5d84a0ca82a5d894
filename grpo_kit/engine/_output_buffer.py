"""The output of a rollout, kept on the device and read once at the end; and which rows have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from grpo_kit.engine.sampling import Sampled


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
