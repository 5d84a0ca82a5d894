"""What belongs to the process that trains: its share of the prompts, its random numbers, its stop button.

The stop button is heard at once in a rollout or a backward pass, and after the step where weights or files change.

Several processes train one model, each on its share of a step's prompts; one alone needs none of this. Started by
torchrun, which ends all where one ends; the last checkpoint then goes on. Every process has all weights and makes the
same updates: a gradient is the sum over processes, once an update. The main one writes the run's folder and runs the
hooks; what they change or stop is sent to the others between two steps.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_kit.loop.config import Config


class Processes:
    """The processes of a run. rank: this one's number, from 0. count: how many there are.

    Joins the group that torchrun describes in the environment, if nobody has. Raises ValueError where `prompts`, those
    of a step, are no multiple of the count.
    """

    def __init__(self, prompts: int, device: torch.device) -> None:
        self.rank = 0
        self.count = 1
        self._runs_on_main = False
        if (
            int(os.environ.get("WORLD_SIZE", 1)) > 1
            and dist.is_available()
            and not dist.is_initialized()
        ):
            backend = "nccl" if device.type == "cuda" else "gloo"
            # The other processes wait while one evaluates.
            dist.init_process_group(backend, timeout=timedelta(days=1))
        if dist.is_available() and dist.is_initialized():
            self.rank, self.count = dist.get_rank(), dist.get_world_size()
        if prompts % self.count:
            raise ValueError(
                f"prompts_per_step={prompts} must be a multiple of the {self.count} processes"
            )

    def check(self, config: Config, dropout: bool) -> None:
        """Raises ValueError for what makes several processes train otherwise than one. dropout: has the model any?"""
        if self.count == 1:
            return
        uses = {
            "minibatches": config.minibatches > 1,
            "dynamic_sampling": config.dynamic_sampling > 0,
            "dropout": dropout,
        }
        names = [name for name, is_used in uses.items() if is_used]
        if names:
            raise ValueError(
                f"{', '.join(names)} with {self.count} processes is another run than with one: each would cut up its "
                "own prompts, fill up its own groups and draw its own dropout; give minibatches=1, dynamic_sampling=0 "
                "and dropouts of 0 (of adapters: lora={'lora_dropout': 0.0}), or start one process"
            )

    @property
    def is_main(self) -> bool:
        """Does this one write and run the hooks?"""
        return self.rank == 0

    def first(self, prompts: int) -> int:
        """The place of this process's first prompt among those of a step."""
        return self.rank * (prompts // self.count)

    def share(self, rows: Sequence[Any]) -> Sequence[Any]:
        """This process's part of a step's prompts."""
        begin = self.first(len(rows))
        return rows[begin : begin + len(rows) // self.count]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the order of ranks."""
        values: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    def sums(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Each number's sum over the processes."""
        gathered = self.gather(dict(numbers))
        return {name: sum(of_process[name] for of_process in gathered) for name in numbers}

    def from_main(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """make(*arguments) of the main process, for all. What it raises is raised in all."""
        if self.count == 1 or self._runs_on_main:  # a hook saves: the others wait for the hook
            return make(*arguments)
        value = error = None
        if self.is_main:
            self._runs_on_main = True
            try:
                value = make(*arguments)
            except BaseException as raised:
                error = raised
            self._runs_on_main = False
        value_and_error = [value, error]
        dist.broadcast_object_list(value_and_error)
        value, error = value_and_error
        if error is not None:
            raise error
        return value

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make each gradient the sum over the processes. Every parameter must have one."""
        if self.count > 1:
            for parameter in parameters:
                dist.all_reduce(parameter.grad)

    def take_mains(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give the main process's weights to all."""
        if self.count > 1:
            for parameter in parameters:
                dist.broadcast(parameter.data, 0)


class Stopped(KeyboardInterrupt):
    """train() was stopped by the stop button, Ctrl-C or a control, and has saved what it says.

    Raised so that what comes after training does not take the half-trained model for a finished one: in a notebook it
    ends "Run all", shown as one line; a script ends. step: whole steps done.
    """

    def __init__(self, message: str, step: int = 0) -> None:  # a pickled one is made without it
        super().__init__(message)
        self.step = step

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [
            f"{self} Cells queued below were not run. To go on: trainer.train(). To do without the rest of the steps, "
            "run the cells below."
        ]


class InterruptGuard:
    """Context manager that turns SIGINT into KeyboardInterrupt at a moment when nothing is half done.

    An interrupt waits, but inside `at_once`, where it is raised where it lands. Between `begin_finish_first` and
    `end_finish_first` it waits there too. One that waits is raised by `raise_if_pending`.
    The first one counts: until the guard closes nothing cuts short what it has set in motion. One that is raised where
    Python drops exceptions (in a `__del__`) waits as well.
    say: given a sentence at the first one, at once.
    patient: it waits wherever it arrives, until somebody looks at `pending`.
    Off the main thread Python delivers no signals, so there it does nothing.
    """

    def __init__(self) -> None:
        self.pending = self.patient = False
        self.say = print
        self._waits = False  # is an interrupt to wait?
        self._previous_handler = None

    def __enter__(self) -> InterruptGuard:
        self.pending = False
        self._waits = True
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None
        self.pending = self._waits = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.pending:
            # It may interrupt a print, or stdout be a file on a full disk: the stop counts all the same.
            with suppress(Exception):
                self.say(
                    "Stop heard. The run ends as soon as nothing is half done, and is saved."
                )
        self.pending = True
        if not self._waits:
            self.raise_if_pending()

    def begin_finish_first(self) -> None:
        """From here on an interrupt waits, until `end_finish_first`."""
        self._waits = True

    def end_finish_first(self) -> None:
        """Interrupts are raised at once again, and one that waited is raised now."""
        self._waits = False
        self.raise_if_pending()

    def raise_if_pending(self) -> None:
        """Raise the KeyboardInterrupt that waited, if one did; from then on further ones wait."""
        if self.pending and not self.patient:
            self._waits = True
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A long part (training, an evaluation inside a step) that an interrupt may cut short."""
        waited = self._waits
        self._waits = False
        try:
            self.raise_if_pending()
            yield
        finally:
            self._waits = waited


def _seed_of(*parts: Any) -> int:
    """A seed that is a function of its parts alone, such as (seed, step, "sample").

    >>> _seed_of(0, 1) == _seed_of(0, 1) != _seed_of(0, 2)
    True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def rows_of_step(
    rows: Sequence[dict[str, Any]], config: Config, step: int, attempt: int = 0
) -> list[dict[str, Any]]:
    """The prompts of a step, by (seed, step, attempt) alone: pass after pass over all rows, each in its own order.

    What is left of a pass, fewer than a step needs, is dropped. attempt: above 0 where groups are drawn anew; those
    come from anywhere.
    """
    count = config.prompts_per_step
    per_pass = len(rows) // count
    seed, first = ("order", step // per_pass), step % per_pass * count
    if attempt:
        seed, first = (step, "again", attempt), 0
    generator = torch.Generator().manual_seed(_seed_of(config.seed, *seed))
    places = torch.randperm(len(rows), generator=generator)[first:][:count]
    return [rows[place] for place in places.tolist()]


def seed_everything(*parts: Any) -> None:
    """Python's, NumPy's and torch's random numbers, as a function of the parts, such as (seed, step, "sample")."""
    number = _seed_of(*parts)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


@contextmanager
def random_state_comes_back() -> Iterator[None]:
    """Training draws what it likes inside; the notebook's own random numbers go on as if it had not."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count()), device_type="cuda"):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def modes_of_training(device: str) -> Iterator[None]:
    """Gradients on and autocast off inside, whatever the notebook has set. device: the model's, by type.

    Torch drops autocast's copies of the weights where the outermost autocast ends. So none is opened here, and inside
    a notebook's own no copies are kept: those of the first step would be read in all later ones.
    """
    enabled = torch.is_autocast_enabled(device)
    keeps_copies = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, False)
    torch.set_autocast_cache_enabled(keeps_copies and not enabled)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_cache_enabled(keeps_copies)


def autocast(config: Config, device: torch.device) -> Any:
    """The context in which the model's products are computed in config.autocast."""
    if config.autocast == "none":
        return nullcontext()
    # Inside a caller's context the cache would hold copies of weights before their last step.
    torch.clear_autocast_cache()
    return torch.autocast(device.type, getattr(torch, config.autocast))
