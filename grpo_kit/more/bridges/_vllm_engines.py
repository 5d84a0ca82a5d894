"""Where vLLM runs: in this process, or as a server. Both load weights and write completions, and nothing more.

A stop of the training lands outside of vLLM, whose work is done in threads of its own.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from grpo_kit.loop.processes import random_state_comes_back
from grpo_kit.models._model_facts import base_model
from grpo_kit.more.bridges.vllm_heads import InStep, pack_tied_heads
from grpo_kit.record._run_folder import path_of

EXTENSION = f"{InStep.__module__}.{InStep.__qualname__}"
_SPARE_TOKENS = 1024  # blocks are not filled to their ends, and vLLM keeps one for itself
_AT_ONCE = 64  # requests that a server gets at a time

Written = tuple[list[int], list[float]]
"""A completion's tokens, the end token included, and their log-probabilities."""


class InThisProcess:
    """vLLM beside the trainer, on the same card or CPU. It begins with random weights: what no load brings shows.

    dtype: what it computes in. sequences: that it works on at once. arguments: of vllm.LLM, over the kit's.
    Raises ValueError where vLLM cannot start with this model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        dtype: torch.dtype,
        sequences: int,
        arguments: dict[str, Any],
    ) -> None:
        self._stop, self._thread = threading.Event(), ThreadPoolExecutor(1, "vllm")
        self._sleeps = bool(arguments.get("enable_sleep_mode"))
        base, on_cpu = base_model(model), next(model.parameters()).device.type == "cpu"

        def start() -> Any:
            import vllm

            if "VLLM_LOGGING_LEVEL" not in os.environ:
                logging.getLogger("vllm").setLevel(logging.WARNING)
            options = {
                "load_format": "dummy",
                # sequences end where the trainer says, not where a file says
                "generation_config": "vllm",
                "logprobs_mode": "processed_logprobs",
                "dtype": str(dtype).removeprefix("torch."),
                "max_num_seqs": sequences,
                **arguments,
            }
            if on_cpu:
                options.setdefault("enforce_eager", True)
                options.setdefault("kv_cache_memory_bytes", _cache_bytes(base.config, options))
            with tempfile.TemporaryDirectory() as folder:
                base.config.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                return vllm.LLM(model=folder, **options)

        try:
            # vLLM seeds everything as it starts
            with _environment_restored(), random_state_comes_back():
                self.llm = self._in_thread(start)
        except Exception as error:
            raise ValueError(
                f"vLLM cannot start with this model: {error}; leave sample out, for the kit's engine"
            ) from error
        self.dtype: torch.dtype = self.llm.llm_engine.model_config.dtype

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take these weights, and forget keys and values of those from before."""

        def work() -> None:
            if self._sleeps:
                self.llm.wake_up(tags=["weights"])
            # a tied head: "failed to load"
            with _quiet("vllm.model_executor.model_loader.reload.layerwise"):
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self.llm.apply_model(pack_tied_heads)
            if self._sleeps:
                self.llm.wake_up(tags=["kv_cache"])
            self.llm.reset_prefix_cache()

        self._in_thread(work)

    def complete(
        self, prompts: Sequence[list[int]], sampling: dict[str, Any], seeds: Sequence[int]
    ) -> list[Written]:
        """A completion of each prompt. sampling: of vLLM's SamplingParams. seeds: one each."""

        def work() -> list[Written]:
            from vllm import SamplingParams

            params = [SamplingParams(**sampling, seed=seed, detokenize=False) for seed in seeds]
            ids = self.llm.enqueue(
                [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False
            )
            engine, outputs = self.llm.llm_engine, []
            while engine.has_unfinished_requests() and not self._stop.is_set():
                outputs += [output for output in engine.step() if output.finished]
            if self._stop.is_set():
                engine.abort_request(ids, internal=True)
                return []
            outputs.sort(key=lambda output: int(output.request_id))
            return [_written(output.outputs[0]) for output in outputs]

        return self._in_thread(work)

    def sleep(self) -> None:
        """With enable_sleep_mode: its memory goes to the update. Returns after the next load."""
        if self._sleeps:
            self._in_thread(lambda: self.llm.sleep(level=2))

    def _in_thread(self, function: Callable[[], Any]) -> Any:
        """function() in vLLM's thread: all of vLLM runs there."""
        future = self._thread.submit(function)
        try:
            return future.result()
        except KeyboardInterrupt:
            self._stop.set()
            wait([future])
            self._stop.clear()
            raise


class Server:
    """A vLLM server at this address. It must see `folder`, through which it is given weights.

    Raises ValueError where it cannot be reached within `seconds`, or was started without what weights need.
    """

    def __init__(self, url: str, folder: str | None, seconds: float) -> None:
        self.url = url.rstrip("/")
        self.folder = None if folder is None else path_of(folder, "through").absolute()
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._ask("/health")
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"no vLLM server answers at {url!r} within {seconds:g} s: {error}"
                    ) from error
            time.sleep(1)
        try:
            info = self._ask("/server_info?config_format=json")["vllm_config"]
        except OSError as error:
            raise ValueError(
                f"the vLLM server at {url!r} takes no weights ({error}); start it with VLLM_SERVER_DEV_MODE=1"
            ) from error
        if info["parallel_config"].get("worker_extension_cls") != EXTENSION:
            raise ValueError(
                f"start the vLLM server at {url!r} with --worker-extension-cls {EXTENSION}"
            )
        self.dtype = getattr(torch, str(info["model_config"]["dtype"]).removeprefix("torch."))
        self._name = self._ask("/v1/models")["data"][0]["id"]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send these weights, and let the server forget keys and values of those from before."""

        def work() -> None:
            folder = Path(tempfile.mkdtemp(prefix="grpo_kit_for_vllm_", dir=self.folder))
            try:
                tensors = {name: weight.detach().contiguous().cpu() for name, weight in weights}
                save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
                self._ask("/collective_rpc", {"method": "load_in_step", "args": [str(folder)]})
                self._ask("/reset_prefix_cache", {})
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        # a stop waits for it: half of them would be weights of no step
        with ThreadPoolExecutor(1) as thread:
            thread.submit(work).result()

    def complete(
        self, prompts: Sequence[list[int]], sampling: dict[str, Any], seeds: Sequence[int]
    ) -> list[Written]:
        """A completion of each prompt. sampling: of vLLM's SamplingParams. seeds: one each."""
        sampling = sampling | {"model": self._name, "return_token_ids": True}

        def ask(prompt: list[int], seed: int) -> Written:
            (choice,) = self._ask(
                "/v1/completions", sampling | {"prompt": prompt, "seed": seed}
            )["choices"]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        threads = ThreadPoolExecutor(_AT_ONCE)
        try:
            return list(threads.map(ask, prompts, seeds))
        finally:
            # After a stop the server ends what it has begun.
            threads.shutdown(wait=False, cancel_futures=True)

    def sleep(self) -> None:
        """A server keeps its memory."""

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST of a body as JSON, else GET; the answer. Raises OSError, with the server's words."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise OSError(
                f"{path}: {error.code} {error.read().decode(errors='replace')[:500]}"
            ) from error
        return json.loads(text) if text else None


def _written(completion: Any) -> Written:
    ids = list(completion.token_ids)
    return ids, [
        table[token].logprob for token, table in zip(ids, completion.logprobs, strict=True)
    ]


def _cache_bytes(config: Any, options: dict[str, Any]) -> int:
    """Bytes for a rollout's on a CPU, where vLLM would reserve a share of the machine; at most that share."""
    width = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    size = getattr(torch, options["dtype"]).itemsize
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * width * size
    length = options.get("max_model_len") or config.max_position_embeddings
    share = options.get("gpu_memory_utilization", 0.5) * psutil.virtual_memory().total
    return int(min((options["max_num_seqs"] * length + _SPARE_TOKENS) * token_bytes, share))


@contextmanager
def _environment_restored() -> Iterator[None]:
    """vLLM in this process, not in a child; what it sets that other parts read is as before afterwards."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    value_before, set_threads = os.environ.get(name), torch.set_num_threads
    os.environ[name] = "0"
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        del os.environ[name]
        if value_before is not None:
            os.environ[name] = value_before


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
