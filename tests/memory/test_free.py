"""Free memory as a process may use it: control groups' limits, and what malloc keeps."""

import platform

import psutil
import pytest
import torch

from grpo_kit.memory import free
from grpo_kit.memory.free import container_bytes, free_bytes, kept_by_malloc
from grpo_kit.training.freed_memory import kept_for_the_next_step

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
    assert free_bytes(CPU) <= 6 * GIB + kept_by_malloc()


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
    assert free_bytes(CPU) == pytest.approx(available + kept_by_malloc(), abs=GIB // 2)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_a_step_freed_is_free_though_the_process_keeps_it():
    size = 2**28  # floats: 1 GiB
    with kept_for_the_next_step(CPU):
        kept = kept_by_malloc()
        block = torch.ones(size)
        assert kept_by_malloc() - kept < 0.1 * GIB
        held = free_bytes(CPU)
        del block
        assert kept_by_malloc() - kept > 0.9 * GIB
        assert free_bytes(CPU) - held > 0.8 * GIB  # the rest: what else the machine does meanwhile
    assert kept_by_malloc() - kept < 0.4 * GIB  # given back, it is the system's, and not counted twice


def test_another_c_library_keeps_nothing_that_we_know_of(monkeypatch):
    monkeypatch.setattr(free, "glibc", lambda: None)
    assert kept_by_malloc() == 0
