"""Free memory as a process may use it: a card's cache and control groups' limits."""

import psutil
import pytest
import torch

from grpo_kit.engine.memory import _free as free
from grpo_kit.engine.memory._free import container_bytes, free_bytes

CPU = torch.device("cpu")
GIB = 2**30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """f(/proc/self/cgroup's text, {group: (limit, used, cache)}, names) -> nothing; as a machine that has them."""

    def make(mine, groups, names):
        monkeypatch.setattr(free, "_CGROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(free, "_MINE", tmp_path / "mine")
        (tmp_path / "mine").write_text(mine)
        for group, (limit, used, cache) in groups.items():
            folder = tmp_path / "cgroup" / group
            folder.mkdir(parents=True, exist_ok=True)
            (folder / names[0]).write_text(f"{limit}\n")
            (folder / names[1]).write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cache}\n")

    return make


def test_a_container_of_version_two_sees_its_own_group_as_the_root(cgroups):
    cgroups("0::/\n", {".": (8 * GIB, 3 * GIB, GIB)}, V2)
    assert container_bytes() == 6 * GIB
    assert free_bytes(CPU) <= 6 * GIB


def test_the_tightest_of_nested_groups_counts(cgroups):
    groups = {
        "slurm": (20 * GIB, 16 * GIB, 0),
        "slurm/job": (12 * GIB, 2 * GIB, 0),
        "slurm/job/step": ("max", 2 * GIB, 0),
    }
    cgroups("0::/slurm/job/step\n", groups, V2)
    assert container_bytes() == 4 * GIB


def test_version_one(cgroups):
    groups = {
        "memory": (2**63 - 4096, 9 * GIB, 0),
        "memory/docker/abc": (4 * GIB, 5 * GIB, 0),
    }
    cgroups("5:cpu:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n", groups, V1)
    assert container_bytes() == 0  # over its limit
    # The host's path, of which a container sees nothing: its own group is the root.
    cgroups("4:memory:/docker/of-the-host\n", {"memory": (4 * GIB, GIB, GIB // 2)}, V1)
    assert container_bytes() == 3.5 * GIB


def test_without_control_groups_the_systems_figure_counts(cgroups, monkeypatch, tmp_path):
    cgroups("0::/\n", {}, V2)
    assert container_bytes() == float("inf")
    monkeypatch.setattr(free, "_MINE", tmp_path / "nowhere")
    assert container_bytes() == float("inf")
    available = psutil.virtual_memory().available
    assert free_bytes(CPU) == pytest.approx(available, abs=GIB // 2)


# ---- a card, by what torch's allocator says of itself ------------------------------------------------------------


def segment(*blocks, pool=(0, 0), expandable=False, device=0):
    """As torch.cuda.memory_snapshot gives it; blocks: GiB, below 0 in use, a string waiting for another stream."""
    states = {str: "active_awaiting_free", True: "active_allocated", False: "inactive"}
    found = [
        {
            "size": int(abs(float(b)) * GIB),
            "state": states[str if isinstance(b, str) else b < 0],
        }
        for b in blocks
    ]
    total = sum(b["size"] for b in found)
    return {
        "device": device, "segment_pool_id": pool, "is_expandable": expandable, "blocks": found, "total_size": total
    }  # fmt: skip


@pytest.fixture
def card(monkeypatch):
    """f(segments, free=GiB, fraction) -> a card of 24 GiB that torch says these segments are cached of."""

    def make(segments, *, free=10, fraction=1.0, backend="native"):
        size = {
            state: sum(
                b["size"]
                for s in segments
                for b in s["blocks"]
                if state in b["state"] and not s["device"]
            )
            for state in ("", "allocated")
        }
        answers = {
            "mem_get_info": (free * GIB, 24 * GIB),
            "memory_reserved": size[""],
            "memory_allocated": size["allocated"],
            "get_per_process_memory_fraction": fraction,
            "get_allocator_backend": backend,
            "memory_snapshot": segments,
            "current_device": 0,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)

    return make


@pytest.mark.parametrize(
    ("segments", "gib", "why"),
    [
        ([], 10, "nothing is cached"),
        ([segment(-2)], 10, "all is in use"),
        ([segment(2)], 12, "a segment that nothing is in goes back"),
        ([segment(1, 1)], 12, "of several parts, too"),
        ([segment(-1, 3)], 10, "a hole beside a tensor does not"),
        ([segment(-1, 3, -1, 1, expandable=True)], 14, "it does where segments are expandable"),
        ([segment("1", 1)], 10, "what waits for a stream is in use"),
        ([segment(3, pool=(0, 1)), segment(2)], 12, "a graph's memory is the graph's"),
        ([segment(3, device=1), segment(2)], 12, "another card's is another card's"),
    ],
)
def test_what_a_cards_cache_can_give(card, segments, gib, why):
    card(segments)
    assert free_bytes(torch.device("cuda")) == gib * GIB, why
    assert free_bytes(torch.device("cuda", 0)) == gib * GIB, why


def test_a_capped_share_of_a_card(card):
    card([segment(-4), segment(2)], fraction=0.5)
    assert free_bytes(torch.device("cuda")) == (12 - 6 + 2) * GIB
    card([segment(-13), segment(2)], fraction=0.5)
    assert free_bytes(torch.device("cuda")) == 2 * GIB, (
        "over the cap: what is cached is all there is"
    )


def test_the_drivers_own_allocator_has_no_segments(card):
    card([segment(-4, 1)], backend="cudaMallocAsync")
    assert free_bytes(torch.device("cuda")) == 11 * GIB
