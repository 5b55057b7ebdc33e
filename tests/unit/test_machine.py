"""Memory and processors are the machine's, or what its container leaves a process."""

import os
import types

import psutil
import pytest

from stagehand.core import machine as machine_file
from stagehand.core.machine import (
    free_host_bytes,
    give_back_freed,
    host_bytes,
    processors,
)

GB = 10**9


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    memory = types.SimpleNamespace(available=60 * GB, total=64 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.fixture(autouse=True)
def _processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.fixture
def machine(tmp_path):
    """Writes the files of a machine's control groups."""

    def machine(membership, groups, *, old=False):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(membership)
        limit = "memory.limit_in_bytes" if old else "memory.max"
        used = "memory.usage_in_bytes" if old else "memory.current"
        total = "total_" if old else ""
        for path, (most, held, cached) in groups.items():
            folder = tmp_path / "sys/fs/cgroup" / ("memory" if old else "") / path
            folder.mkdir(parents=True, exist_ok=True)
            (folder / limit).write_text(f"{most}\n")
            (folder / used).write_text(f"{held}\n")
            (folder / "memory.stat").write_text(
                f"anon {held - cached}\n{total}inactive_file {cached - 1000}\n"
                f"{total}active_file 1000\n"
            )
        return tmp_path

    return machine


V2 = "0::/pod/one\n"
V1 = "9:name=systemd:/\n4:memory:/pod/one\n1:cpu,cpuacct:/pod/one\n0::/\n"


@pytest.mark.parametrize(("membership", "old"), [(V2, False), (V1, True)])
def test_container_leaves_its_limit_less_what_is_used_and_is_no_cache(
    machine, membership, old
):
    root = machine(membership, {"pod/one": (8 * GB, 5 * GB, 3 * GB)}, old=old)
    assert free_host_bytes(root) == 6 * GB
    assert host_bytes(root) == 8 * GB


def test_smallest_of_the_groups_around_a_process_counts(machine):
    groups = {"pod": (8 * GB, 7 * GB, GB), "pod/one": (6 * GB, GB, 0)}
    root = machine(V2, groups)
    assert free_host_bytes(root) == 2 * GB
    assert host_bytes(root) == 6 * GB


def test_container_that_knows_itself_by_the_machines_path_is_found_at_the_top(machine):
    root = machine(V1, {"": (8 * GB, GB, 0)}, old=True)
    assert free_host_bytes(root) == 7 * GB


def test_group_over_its_limit_leaves_nothing(machine):
    assert free_host_bytes(machine(V2, {"pod/one": (GB, 2 * GB, 0)})) == 0


@pytest.mark.parametrize("limit", ["max", 9223372036854771712])
def test_group_without_a_limit_leaves_the_machines_memory(machine, limit):
    root = machine(V2, {"pod/one": (limit, GB, 0)})
    assert free_host_bytes(root) == 60 * GB
    assert host_bytes(root) == 64 * GB


def test_group_that_does_not_tell_what_caches_files_leaves_what_is_not_used(machine):
    root = machine(V2, {"pod/one": (8 * GB, 5 * GB, 3 * GB)})
    (root / "sys/fs/cgroup/pod/one/memory.stat").write_text(f"anon {2 * GB}\n")
    assert free_host_bytes(root) == 3 * GB


def test_name_of_a_group_may_have_colons(machine):
    root = machine("0::/pod:cri:one\n", {"pod:cri:one": (8 * GB, 5 * GB, 0)})
    assert free_host_bytes(root) == 3 * GB


def test_system_without_control_groups_leaves_the_machines_memory(tmp_path):
    assert free_host_bytes(tmp_path) == 60 * GB
    assert host_bytes(tmp_path) == 64 * GB


class Function:
    """One of the C library."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args):
        self.calls.append(args)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["malloc_trim"], {"malloc_trim": [(0,)]}),
        (
            ["malloc_trim", "MallocExtension_ReleaseFreeMemory"],
            {"malloc_trim": [(0,)], "MallocExtension_ReleaseFreeMemory": [()]},
        ),
        ([], {}),
    ],
    ids=["glibc", "tcmalloc", "another"],
)
def test_each_allocator_of_the_process_is_asked_to_give_back(
    monkeypatch, names, expected
):
    """With tcmalloc, a model that is pinned took its memory twice."""
    process = types.SimpleNamespace(**{name: Function() for name in names})
    monkeypatch.setattr(machine_file, "_releases", machine_file._releases.__wrapped__)
    monkeypatch.setattr(machine_file.ctypes, "CDLL", lambda _: process)
    monkeypatch.setattr(machine_file.sys, "platform", "linux")
    give_back_freed()
    assert {name: f.calls for name, f in vars(process).items()} == expected


def test_no_c_library_is_looked_for_where_it_is_another(monkeypatch):
    def refuse(_):
        raise TypeError

    monkeypatch.setattr(machine_file, "_releases", machine_file._releases.__wrapped__)
    monkeypatch.setattr(machine_file.ctypes, "CDLL", refuse)
    monkeypatch.setattr(machine_file.sys, "platform", "win32")
    give_back_freed()


# --------------------------------------------------------------------------- processors


@pytest.mark.parametrize(
    ("membership", "folder", "files", "expected"),
    [
        (V2, "", {"cpu.max": "400000 100000\n"}, 4),
        (V2, "", {"cpu.max": "50000 100000\n"}, 1),
        (V2, "", {"cpu.max": "max 100000\n"}, 16),
        (V2, "", {"cpu.max": "6400000 100000\n"}, 16),
        (V2, "", {"cpu.max": "400000 0\n"}, 16),
        (V1, "cpu", {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"}, 2),
        (V1, "cpu", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 16),
        (
            "2:cpuset:/pod\n1:cpu,cpuacct:/\n",
            "cpu",
            {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"},
            16,
        ),
    ],
)
def test_container_may_give_less_than_all_processors(
    tmp_path, membership, folder, files, expected
):
    root = tmp_path
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    group = root / "sys/fs/cgroup" / folder / "pod"
    group.mkdir(parents=True)
    for name, text in files.items():
        (group / name).write_text(text)
    assert processors(root) == expected


def test_processors_are_those_on_which_the_process_may_run(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 9})
    assert processors(tmp_path) == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert processors(tmp_path) == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors(tmp_path) == 1
