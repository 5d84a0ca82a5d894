"""torch.cuda's own Python on the pretend card: memory, random numbers, properties; torch_streams.py has the rest.

Pretends: the names that torch, transformers, peft, bitsandbytes and the kit use.
Does not: several cards, NVML, profiling, memory history.
"""

import collections
import types
from typing import Any

import torch_streams


def patch(torch: Any, lib: Any, get: Any, put: Any, model: Any) -> None:
    """Replace what asks for a driver."""
    cuda = torch.cuda
    names = (
        torch_streams.streams(torch, lib, get)
        | _memory(lib, get, put)
        | _device(torch, get, model)
    )
    names |= torch_streams.graphs(torch, lib, names)
    _set(cuda, names)
    _set(cuda, _random(torch, lib))  # making a generator asks torch.cuda whether it is there
    cuda.device, cuda.device_of, cuda._DeviceGuard = _Device, _Device, _Device
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    stream = names["current_stream"]
    below = {
        "_cuda_getCurrentStream": lambda device: (stream().stream_id, 0, 1),
        "_cuda_getCurrentRawStream": lambda device: stream().stream_id,
        "_cuda_setStream": lambda stream_id=0, **rest: lib.card_set_stream(stream_id),
        "_cuda_synchronize": names["synchronize"],
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda device: None,
        "_cuda_exchangeDevice": lambda device: 0,
        "_cuda_maybeExchangeDevice": lambda device: 0,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_emptyCache": names["empty_cache"],
        "_cuda_isInBadFork": lambda: False,
        "_cuda_isCurrentStreamCapturing": names["is_current_stream_capturing"],
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_get_sync_debug_mode": lambda: 0,
    }
    for name, value in below.items():
        setattr(torch._C, name, value)
    cuda._initialized = True


def _set(cuda: Any, names: dict[str, Any]) -> None:
    for name, value in names.items():
        setattr(cuda, name, value)
        for module in (cuda.memory, cuda.random, cuda.streams, cuda.graphs):
            if name in vars(module):
                setattr(module, name, value)


class _Device:
    """torch.cuda.device: there is one."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def _memory(lib: Any, get: Any, put: Any) -> dict[str, Any]:
    def one(name):
        return lambda device=None: int(get(name))

    def memory_stats(device=None):
        stats = collections.OrderedDict()
        for key, name in (
            ("allocated_bytes", "allocated"),
            ("reserved_bytes", "reserved"),
            ("active_bytes", "allocated"),
        ):
            stats[f"{key}.all.current"], stats[f"{key}.all.peak"] = (
                int(get(name)),
                int(get(f"peak_{name}")),
            )
        stats["num_ooms"], stats["num_alloc_retries"] = int(get("out_of_memory")), 0
        stats["inactive_split_bytes.all.current"] = 0
        return stats

    def memory_snapshot(*given, **more):
        made = []
        for line in lib.card_snapshot().decode().splitlines():
            address, size, pool, stream, small, *blocks = line.split()
            parts = [tuple(map(int, block.split(":"))) for block in blocks]
            made.append({
                "device": 0, "address": int(address), "total_size": int(size), "stream": int(stream),
                "allocated_size": sum(size for size, used, _ in parts if used), "active_size": 0,
                "segment_type": "small" if small == "1" else "large", "segment_pool_id": (0, int(pool)),
                "is_expandable": False, "frames": [],
                "blocks": [
                    {"size": size, "requested_size": asked, "frames": [],
                     "state": "active_allocated" if used else "inactive"}
                    for size, used, asked in parts
                ],
            })  # fmt: skip
        return made

    def mem_get_info(device=None):
        return max(0, int(get("total") - get("context") - get("reserved"))), int(get("total"))

    return {
        "memory_allocated": one("allocated"), "memory_reserved": one("reserved"),
        "max_memory_allocated": one("peak_allocated"), "max_memory_reserved": one("peak_reserved"),
        "reset_peak_memory_stats": lambda device=None: lib.card_reset_peak(),
        "memory_stats": memory_stats, "memory_stats_as_nested_dict": lambda device=None: {},
        "memory_snapshot": memory_snapshot, "mem_get_info": mem_get_info,
        "empty_cache": lambda: lib.card_empty_cache(), "ipc_collect": lambda: None,
        "get_allocator_backend": lambda: "native",
        "set_per_process_memory_fraction": lambda fraction, device=None: put("fraction", fraction),
        "get_per_process_memory_fraction": lambda device=None: get("fraction"),
    }  # fmt: skip


def _random(torch: Any, lib: Any) -> dict[str, Any]:
    lib.card_next_generator_is_default()
    default = torch.Generator(device="cuda")

    def manual_seed(seed):
        default.manual_seed(int(seed))

    return {
        "default_generators": (default,),
        "get_rng_state": lambda device="cuda": default.get_state(),
        "set_rng_state": lambda state, device="cuda": default.set_state(state),
        "get_rng_state_all": lambda: [default.get_state()],
        "set_rng_state_all": lambda states: default.set_state(states[0]),
        "manual_seed": manual_seed, "manual_seed_all": manual_seed,
        "seed": lambda: default.seed() and None, "seed_all": lambda: default.seed() and None,
        "initial_seed": default.initial_seed,
    }  # fmt: skip


def _device(torch: Any, get: Any, model: Any) -> dict[str, Any]:
    major, minor = model.capability
    properties = types.SimpleNamespace(
        name=model.name, major=major, minor=minor, total_memory=int(get("total")),
        multi_processor_count=model.processors, max_threads_per_multi_processor=1536, warp_size=32,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, shared_memory_per_multiprocessor=102400,
        shared_memory_per_block_optin=101376, L2_cache_size=72 * 2**20, is_integrated=False, is_multi_gpu_board=False,
        gcnArchName="", uuid="0", pci_bus_id=1,
    )  # fmt: skip
    return {
        "is_available": lambda: True, "is_initialized": lambda: True, "_is_compiled": lambda: True,
        "init": lambda: None, "_lazy_init": lambda: None, "_lazy_call": lambda call, **rest: call(),
        "_is_in_bad_fork": lambda: False, "device_count": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda device: None, "can_device_access_peer": lambda one, other: False,
        "get_device_name": lambda device=None: model.name,
        "get_device_capability": lambda device=None: model.capability,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "is_bf16_supported": lambda including_emulation=True: major >= 8 or including_emulation,
        "is_tf32_supported": lambda: major >= 8, "_sleep": lambda cycles: None, "utilization": lambda device=None: 0,
        "get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": lambda mode: None,
    }  # fmt: skip
