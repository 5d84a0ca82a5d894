"""vLLM as the sampler, in this process or as a server: started by trl, given the trainer's weights, and watched.

trl starts vLLM and asks it for completions. Different here: vLLM starts without weights, so that all of them come from
the trainer; adapters are added up in float32 without touching the base; on a CPU, where trl's way of handing weights
over fails, vLLM loads them again whole (a server: from a folder beside the run). Sequences end where the trainer says.

Not here: 4-bit bases, which every merge would round anew. Sharded weights go trl's way.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import trl.generation.vllm_generation as trl_vllm
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file

from grpo_kit.models import base_model
from grpo_kit.rollout.weight_version import versions
from grpo_kit.training.trl_internals import vllm_made_by
from grpo_kit.training.vllm_worker import InStep, pack_tied_heads

_EXTENSION = f"{InStep.__module__}.{InStep.__qualname__}"
_SPARE_TOKENS = 1024  # blocks are not filled to their ends, and vLLM keeps one for itself
_QUANTISED = ("is_loaded_in_4bit", "is_loaded_in_8bit")


class VllmSampler(trl_vllm.VLLMGeneration):
    """trl's VLLMGeneration whose weights are the trainer's after every sync, on a CPU too.

    run_folder: where weights for a server on a CPU lie while it loads them. sync_seconds: of the last sync.
    Raises ValueError where vLLM cannot be started or reached with this model, and for 4- and 8-bit bases.
    """

    def __init__(self, *args: Any, run_folder: str, **kwargs: Any) -> None:
        self.run_folder, self.sync_seconds = Path(run_folder), 0.0
        self._synced: tuple | None = None
        super().__init__(*args, **kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """What vLLM computes in."""
        if self.mode == "colocate":
            return self.llm.llm_engine.model_config.dtype
        return getattr(torch, str(self._server_info["model_config"]["dtype"]).removeprefix("torch."))

    @property
    def is_behind(self) -> bool:
        """Were weights written since the last sync? Of one process; of several, trl's count of steps decides."""
        return self.accelerator.num_processes == 1 and self._synced != versions(self.model)

    def _init_vllm(self) -> None:
        base = base_model(self.model)
        if any(getattr(base, name, False) for name in _QUANTISED):
            raise ValueError(
                "rollout='vllm' needs the sum of base and adapters, and a 4-bit or 8-bit base would be rounded anew "
                "at each; use rollout='kit', or tuning='lora'"
            )
        if "VLLM_LOGGING_LEVEL" not in os.environ:
            logging.getLogger("vllm").setLevel(logging.WARNING)
        colocated = self.mode == "colocate"
        try:
            if colocated:
                with _as_it_was(), tempfile.TemporaryDirectory() as folder:
                    self._start(base, folder)
            else:
                self._connect()
        except Exception as error:
            what = "start with this model" if colocated else "be used as a server"
            raise ValueError(f"rollout='vllm', but vLLM cannot {what}: {error}; use rollout='kit'") from error
        if not colocated and self._on_cpu() and base.config.tie_word_embeddings and not self._extended:
            raise ValueError(
                "rollout='vllm': on a CPU the server would keep the head that it began with, which is tied to the "
                f"embedding; start it with --worker-extension-cls {_EXTENSION}"
            )

    def end_with(self, ids: list[int]) -> None:
        """Tokens that end a completion, as trl counts them. Raises ValueError for generation_kwargs unknown to vLLM."""
        self.generation_kwargs = {"stop_token_ids": ids, **self.generation_kwargs}
        unknown = sorted({*self.generation_kwargs} - {*trl_vllm.SamplingParams.__struct_fields__})
        if unknown:
            raise ValueError(
                f"generation_kwargs has {', '.join(unknown)}, which vLLM's SamplingParams does not know (stop_strings "
                "is called stop there); leave it out, or use rollout='kit'"
            )

    def _on_cpu(self) -> bool:
        return self.accelerator.device.type == "cpu"

    def _start(self, base: Any, folder: str) -> None:
        """In this process, without weights: whatever the first sync does not bring shows in the first gap."""
        base.config.save_pretrained(folder)
        self.processing_class.save_pretrained(folder)
        # generation_config: sequences end where trl is told that they do, and not where a file says.
        given = {"model": folder, "load_format": "dummy", "generation_config": "vllm"}
        if self._on_cpu():
            narrow = self.accelerator.mixed_precision in ("bf16", "fp16")
            dtype = torch.bfloat16 if narrow else next(base.parameters()).dtype
            given |= {"dtype": str(dtype).removeprefix("torch."), "enforce_eager": True}
            given["kv_cache_memory_bytes"] = self._keys_and_values(base.config, dtype)
        start = trl_vllm.LLM
        trl_vllm.LLM = lambda **trl_gives: start(**{**trl_gives, **given})
        try:
            super()._init_vllm()
        finally:
            trl_vllm.LLM = start

    def _keys_and_values(self, config: Any, dtype: torch.dtype) -> int:
        """Bytes for a rollout's on a CPU, where vLLM would reserve a share of the machine; at most that share."""
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * dtype.itemsize
        length = self.max_model_length or config.max_position_embeddings
        most = self.gpu_memory_utilization * psutil.virtual_memory().total
        return int(min((self.max_num_seqs * length + _SPARE_TOKENS) * a_token, most))

    def _connect(self) -> None:
        """To a server; on a CPU without the NCCL group by which trl sends weights from a card."""
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        if not self._on_cpu():
            super()._init_vllm()
        elif self.accelerator.is_main_process:
            self.vllm_client = trl_vllm.VLLMClient(base_url=url, connection_timeout=self.server_timeout)
        asked = [self.vllm_client.get_server_info() if self.accelerator.is_main_process else None]
        self._server_info = broadcast_object_list(asked)[0]
        self._extended = self._server_info["parallel_config"].get("worker_extension_cls") == _EXTENSION

    # ---- weights ------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Give vLLM the trainer's weights, and make it forget keys and values of those from before."""
        begin = time.monotonic()
        if not self._on_cpu():
            super().sync_weights()
        elif self.mode == "colocate":
            worker = self.llm.llm_engine.model_executor.driver_worker
            with _quiet("vllm.model_executor.model_loader.reload.layerwise"):  # a tied head: "failed to load"
                worker.reload_weights(weights_iterator=self._iter_named_params())
            pack_tied_heads(worker.model_runner.get_model())
            self.llm.reset_prefix_cache()
        else:
            self._send_by_folder()
        self._synced, self.sync_seconds = versions(self.model), time.monotonic() - begin

    def _send_by_folder(self) -> None:
        if not self.accelerator.is_main_process:
            return
        self.run_folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="for_vllm_", dir=self.run_folder.absolute()))
        try:
            weights = {name: weight.detach().contiguous() for name, weight in self._iter_named_params()}
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            call: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            if self._extended:
                call = {"method": "load_in_step", "args": [str(folder)]}
            self.vllm_client._post(f"{self.vllm_client.base_url}/collective_rpc", json=call)
            self.vllm_client.reset_prefix_cache()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """trl's, but adapters are added up on a float32 copy: merging and unmerging would round the base each time."""
        sharded = self._dist.is_fsdp or self._dist.is_zero3
        if not isinstance(self.model, PeftModel) or sharded:
            yield from super()._iter_named_params()
            return
        whole: dict[int, torch.Tensor] = {}
        adapted = {
            id(weight): layer
            for layer in self.model.modules()
            if isinstance(layer, BaseTunerLayer)
            for weight in layer.get_base_layer().parameters()
        }
        for name, weight in self.model.named_parameters():
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if self.model.prefix in name or "original_module" in name:
                continue
            name = self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."])
            layer = adapted.get(id(weight))
            if layer is not None and id(weight) not in whole:
                whole = _added_up(layer)  # of one layer at a time
            yield name, whole.get(id(weight), weight.data)


def _added_up(layer: BaseTunerLayer) -> dict[int, torch.Tensor]:
    """The base layer's weights with its active adapters, in float32, by id; the layer stays bit for bit."""
    base = layer.get_base_layer()
    kept = [(weight, weight.data) for weight in base.parameters()]
    for weight, data in kept:
        weight.data = data.float().clone() if data.dtype == torch.float32 else data.float()
    try:
        layer.merge()
        return {id(weight): weight.data for weight, _ in kept}
    finally:
        layer.merged_adapters.clear()
        for weight, data in kept:
            weight.data = data


def sampled_by_vllm(args: Any) -> AbstractContextManager[None]:
    """trl's trainer made inside gets a VllmSampler, where args.use_vllm."""
    return vllm_made_by(partial(VllmSampler, run_folder=args.output_dir))


@contextmanager
def _as_it_was() -> Iterator[None]:
    """What trl and vLLM set for vLLM's start, and other parts of this process read, is as before afterwards."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before, set_threads = {name: os.environ.get(name) for name in names}, torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
