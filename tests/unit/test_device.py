"""Devices: the host, an accelerator (the simulated one), and how one is found."""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch

from stagehand import torch_private
from stagehand.core import device as device_module
from stagehand.core.device import (
    AcceleratorDevice,
    HostDevice,
    find_device,
    host_memory,
)
from stagehand.errors import ConfigError, StagehandWarning

MIB = 1 << 20
GIB = 1 << 30
HPU = torch.device("hpu")


def accelerator():
    return AcceleratorDevice(HPU)


# --------------------------------------------------------------------------- both kinds


@pytest.mark.parametrize("make", [HostDevice, accelerator])
@pytest.mark.parametrize("mode", [torch.inference_mode, contextlib.nullcontext])
def test_memory_is_of_the_size_asked_for_and_usable_in_every_mode(sim, make, mode):
    device = make()
    with mode():
        on_device, on_host = device.empty(1000), device.pinned(1000)
    for buffer, place in ((on_device, device.torch_device.type), (on_host, "cpu")):
        assert (buffer.dtype, buffer.shape) == (torch.uint8, (1000,))
        assert buffer.device.type == place
        assert buffer.untyped_storage().nbytes() == 1000
        assert not buffer.is_inference()


@pytest.mark.parametrize("make", [HostDevice, accelerator])
def test_copy_arrives_in_both_directions(sim, make):
    device = make()
    lane = device.new_stream()
    with device.on(lane):
        there = device.empty(1000)
        out, back = device.pinned(1000).fill_(7), device.pinned(1000)
        device.copy(there, out)
        device.copy(back, there)
    lane.synchronize()
    assert torch.equal(back, out)
    device.synchronize()


@pytest.mark.parametrize("make", [HostDevice, accelerator])
def test_thread_of_the_library_can_be_claimed(sim, make):
    make().claim_thread()


@pytest.mark.parametrize("make", [HostDevice, accelerator])
def test_events_order_streams_and_tell_time(sim, make):
    device = make()
    first, second = (device.new_event(timing=True) for _ in range(2))
    stream = device.new_stream(-1)
    first.record(stream)
    device.current_stream().wait_event(first)
    second.record(device.current_stream())
    second.synchronize()
    assert first.query()
    assert first.elapsed_time(second) >= 0


# ----------------------------------------------------------------------------- the host


def test_host_counts_nothing_and_knows_what_is_free():
    device = HostDevice()
    counts = (
        *(device.allocated_bytes(), device.peak_allocated_bytes()),
        device.reserved_bytes(),
    )
    assert counts == (None, None, None)
    assert MIB < device.free_bytes() < 2**60
    assert device.is_host
    assert repr(device) == "HostDevice()"
    assert device.new_stream() == device.current_stream()


def test_host_event_tells_milliseconds():
    start, end = HostDevice().new_event(), HostDevice().new_event()
    start._at, end._at = 1.0, 1.25
    assert start.elapsed_time(end) == 250


# ----------------------------------------------------------------------- an accelerator


def test_accelerator_without_index_is_the_current_one(sim):
    device = AcceleratorDevice(torch.device("hpu"))
    assert device.torch_device == torch.device("hpu", 0)
    assert not device.is_host
    assert repr(device) == "AcceleratorDevice('hpu:0')"


def test_accelerator_counts_its_memory(sim):
    sim.configure(capacity_bytes=10_000 + sim.allocated_bytes())
    device = accelerator()
    before = device.allocated_bytes()
    kept = device.empty(3000)
    device.empty(2000)
    assert device.allocated_bytes() - before == 3000
    assert device.peak_allocated_bytes() - before == 5000
    assert device.reserved_bytes() >= 3000
    assert device.free_bytes() == 7000
    del kept


@pytest.mark.parametrize("private", [True, False])
def test_bytes_are_those_that_torch_counts_by_whatever_way(sim, monkeypatch, private):
    if not private:
        monkeypatch.setattr(torch_private, "_device_stats", None)
    device = AcceleratorDevice(torch.device("hpu"))
    held = device.empty(3000)
    assert device.allocated_bytes() == torch.accelerator.memory_allocated() >= 3000
    assert device.reserved_bytes() == torch.accelerator.memory_reserved() >= 3000
    del held


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        (0, 0),
        (1, 512),
        (700 * 1024, MIB),
        (MIB, MIB),
        (4 * MIB, 4 * MIB),
        (7 * MIB, 10 * MIB),
        (10 * MIB - 1, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (32 * MIB + 8192, 34 * MIB),
        (34 * MIB, 34 * MIB),
    ],
)
def test_piece_takes_what_cudas_memory_loses_by_it(sim, asked, taken):
    assert registering().taken_bytes(asked) == taken
    assert accelerator().taken_bytes(asked) == asked
    assert HostDevice().taken_bytes(asked) == asked


class CachingAllocator:
    """What torch's allocator for CUDA takes from the device, as its source has it."""

    def __init__(self):
        self.reserved = 0
        self.free = {True: [], False: []}
        """What is left of segments, of small pieces and others."""

    def take(self, nbytes):
        nbytes = -(-nbytes // 512) * 512
        small = nbytes <= MIB
        free = self.free[small]
        fitting = [rest for rest in free if rest >= nbytes]
        if fitting:
            rest = min(fitting)
            free.remove(rest)
        else:
            rest = -(-nbytes // (2 * MIB)) * 2 * MIB
            if nbytes < 10 * MIB:
                rest = 2 * MIB if small else 20 * MIB
            self.reserved += rest
        rest -= nbytes
        if rest >= 512 if small else rest > MIB:
            free.append(rest)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 30])
def test_pieces_that_share_memory_take_no_more_of_it_than_is_counted(sim, count):
    """Of 7 MiB two lie in a segment of 20: more than a third more than their bytes."""
    device = registering()
    sizes = [700, 5000, 300_001, *range(MIB // 2, 24 * MIB, MIB // 3)]
    for size in sizes:
        allocator, taken = CachingAllocator(), device.taken_bytes(size)
        assert size <= taken == device.taken_bytes(taken)
        for _ in range(count):
            allocator.take(taken)
        shared = 0 if taken >= 10 * MIB else 2 * MIB if taken <= MIB else 20 * MIB
        assert allocator.reserved <= count * (taken + 511) + shared
        assert allocator.reserved >= count * taken


def report_memory(monkeypatch):
    """Let torch say that 500 bytes of 2000 are free, and that 300 are cached."""
    for name, value in (
        ("get_memory_info", (500, 2000)),
        ("memory_reserved", 1200),
        ("memory_allocated", 900),
    ):
        monkeypatch.setattr(torch.accelerator, name, lambda index, v=value: v)


def test_memory_cached_by_the_allocator_is_free(sim, monkeypatch):
    device = accelerator()
    report_memory(monkeypatch)
    assert device.free_bytes() == 500 + (1200 - 900)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_allocator_that_is_told_to_round_more_than_is_counted_is_warned_of(
    monkeypatch, name
):
    monkeypatch.setenv(name, "expandable_segments:True,roundup_power2_divisions:[>:2]")
    device_module._warn_of_rounding.cache_clear()
    with pytest.warns(StagehandWarning, match=f"{name} has roundup_power2"):
        AcceleratorDevice(torch.device("cuda", 0))
    AcceleratorDevice(torch.device("cuda", 0))  # once: another would be an error
    monkeypatch.setenv(name, "expandable_segments:True")
    device_module._warn_of_rounding.cache_clear()
    AcceleratorDevice(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("part", "free"),
    [(1.0, 800), (0.9, 800), (0.75, 600), (0.5, 100), (0.25, 0)],
)
def test_memory_beyond_the_part_that_a_process_may_have_is_not_free(
    sim, monkeypatch, part, free
):
    """torch raises there, however much the device has: by default 80 % were taken."""
    device = registering()
    report_memory(monkeypatch)
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", {device._index: part}.get
    )
    assert device.free_bytes() == free


def test_claimed_thread_works_on_the_device_that_claims_it(sim, monkeypatch):
    """Each thread begins on the first device, whichever its maker is on."""
    current = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    device = accelerator()
    device._index = 3
    device.claim_thread()
    assert current == [3]


def test_pinned_memory_is_pinned_and_of_the_exact_size(sim):
    before = sim.pinned_bytes()
    buffer = accelerator().pinned(1025)
    assert buffer.is_pinned()
    assert sim.pinned_bytes() - before == 1025
    assert accelerator().pinned(0).numel() == 0


def test_copies_of_pinned_memory_do_not_make_the_host_wait(sim):
    device = accelerator()
    there, here = device.empty(1000), device.pinned(1000).zero_()
    before = sim.syncs()
    device.copy(there, here)
    device.copy(here, there)
    assert sim.syncs() == before


def test_memory_is_that_of_the_stream_it_is_made_on(sim):
    device = accelerator()
    lane, other = device.new_stream(), device.new_stream()
    with device.on(lane):
        buffer = device.empty(64).zero_()
    del buffer  # the lane's own: nothing to wait for
    with device.on(lane):
        buffer = device.empty(64)
    with sim.expect_races("freed while"):
        with device.on(other):
            buffer.zero_()
        del buffer


def test_without_page_locking_copies_still_arrive_and_it_is_said_once(sim, monkeypatch):
    device = accelerator()
    empty = torch.empty

    def refuse(*args, **options):
        if options.pop("pin_memory", False):
            raise RuntimeError("out of locked memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.warns(
        StagehandWarning, match="1000 bytes .* hpu:0 .out of locked"
    ) as w:
        buffer = device.pinned(1000)
    assert len(w) == 1
    assert not buffer.is_pinned()
    there = device.empty(1000)
    device.copy(there, buffer.fill_(3))
    assert torch.equal(there.cpu(), buffer)
    device.pinned(1000)  # a second warning would be an error


# -------------------------------------------------------- CUDA's page locking, dry


class FakeCudart:
    """Writes down what is locked, and refuses from the n-th call on."""

    def __init__(self, refuse_from=1000):
        self.locked = {}
        self.present = []
        self.log = []
        self.refuse_from = refuse_from
        self.refuses_unlocking = False
        self.interrupts = False

    def cudaHostRegister(self, address, nbytes, flags):
        if len(self.log) >= self.refuse_from:
            return 2
        self.locked[address] = nbytes
        self.present.append(mapping(address)["Rss"])
        self.log.append(("lock", address, nbytes, flags))
        if self.interrupts:
            raise KeyboardInterrupt
        return 0

    def cudaHostUnregister(self, address):
        if self.refuses_unlocking:
            return 719
        self.log.append(("unlock", address, is_mapped(address)))
        del self.locked[address]
        return 0


def mapping(address):
    """What the system says of the memory at an address, by name; bytes in kB."""
    found = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if not first.endswith(":"):
            start, end = (int(n, 16) for n in first.split("-"))
            found = {"there": True} if start <= address < end else {}
        elif found:
            found[first[:-1]] = others
            if first == "VmFlags:":
                return found
    return {"Rss": ["0", "kB"]}


def is_mapped(address):
    return "there" in mapping(address)


@pytest.fixture
def cudart(monkeypatch):
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.log.append(("sync",)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


@pytest.mark.parametrize("nbytes", [2 * MIB, 2 * MIB + 1, 4 * MIB + 8192, 5 * MIB - 1])
def test_large_host_memory_begins_at_a_huge_page_whatever_its_size(nbytes):
    """A disk writes into small pages at two thirds of its rate."""
    pieces = [host_memory(nbytes) for _ in range(3)]
    for piece in pieces:
        assert piece.data_ptr() % (2 * MIB) == 0
        assert piece.numel() == piece.untyped_storage().nbytes() == nbytes
        assert not piece.any()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this system has no huge pages to give",
)
@pytest.mark.parametrize("make", [host_memory, lambda n: registering().pinned(n)])
def test_large_host_memory_asks_for_huge_pages(sim, cudart, make):
    large = make(8 * MIB)
    assert "hg" in mapping(large.data_ptr())["VmFlags"]


def registering():
    device = accelerator()
    device._is_cuda = True
    return device


@pytest.mark.parametrize("nbytes", [1, 5000, 2 * MIB, 2 * MIB + 1, 5 * MIB + 77])
def test_registered_memory_has_the_exact_size_and_is_locked_whole(sim, cudart, nbytes):
    buffer = registering().pinned(nbytes)
    assert buffer.numel() == nbytes
    [(address, locked)] = cudart.locked.items()
    assert address == buffer.data_ptr()
    assert locked == nbytes == buffer.untyped_storage().nbytes()
    assert cudart.log[0][3] == 1  # portable: every device may copy from it


def test_pages_are_there_before_they_are_locked(sim, cudart):
    """Touched by several threads: the driver does it with one."""
    buffer = registering().pinned(8 * MIB)
    [(there, _)] = cudart.present
    assert int(there) * 1024 >= buffer.numel()


def test_memory_is_locked_in_chunks_below_2_gib_without_gap_or_overlap(cudart):
    memory = device_module._RegisteredMemory(-1, 4096)
    memory.lock(1 << 40, 5 * GIB + 4096, 0)
    expected = 1 << 40
    for _, address, nbytes, _ in cudart.log:
        assert address == expected
        assert 0 < nbytes < 2 * GIB
        expected += nbytes
    assert expected == (1 << 40) + 5 * GIB + 4096
    del memory
    assert cudart.locked == {}


def test_memory_is_unlocked_after_all_copies_and_before_it_is_unmapped(sim, cudart):
    buffer = registering().pinned(3 * MIB)
    address = buffer.data_ptr()
    part = buffer[5:10]
    del buffer
    gc.collect()
    assert len(cudart.log) == 1  # a view keeps it
    del part
    gc.collect()
    assert cudart.log[1:] == [("sync",), ("unlock", address, True)]
    assert not is_mapped(address)


def test_memory_is_locked_and_unlocked_while_its_own_device_is_current(
    cudart, monkeypatch
):
    """On another one CUDA would set a context up, and a wait would be of no use."""

    @contextlib.contextmanager
    def current(index):
        cudart.log.append(("enter", index))
        yield
        cudart.log.append(("leave", index))

    monkeypatch.setattr(torch.accelerator, "device_index", current)
    device = registering()
    device._index = 1
    buffer = device.pinned(3 * MIB)
    del buffer
    gc.collect()
    steps = ["enter", "lock", "leave", "enter", "sync", "unlock", "leave"]
    assert [step[0] for step in cudart.log] == steps
    assert {step[1] for step in cudart.log if step[0] == "enter"} == {1}


def test_process_that_ends_leaves_locked_memory_to_the_driver(sim, cudart, monkeypatch):
    """Modules that unlocking needs may be gone, and it takes a second for some GB."""
    buffer = registering().pinned(3 * MIB)
    address = buffer.data_ptr()
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    del buffer
    gc.collect()
    assert [step[0] for step in cudart.log] == ["lock"]
    assert is_mapped(address)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["wait", "unlock"])
def test_memory_that_cannot_be_unlocked_stays_mapped(sim, cudart, monkeypatch, what):
    """CUDA would take what comes to lie there next for it, and copy the old pages."""

    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    buffer = registering().pinned(3 * MIB)
    address = buffer.data_ptr()
    if what == "wait":
        monkeypatch.setattr(torch.cuda, "synchronize", fail)
    cudart.refuses_unlocking = what == "unlock"
    del buffer
    gc.collect()
    assert list(cudart.locked) == [address]
    assert is_mapped(address)


def test_memory_that_is_collected_during_a_capture_goes_when_more_is_locked(
    sim, cudart, monkeypatch
):
    """CUDA refuses to wait then, and breaks the graph."""
    device = registering()
    buffer = device.pinned(3 * MIB)
    address = buffer.data_ptr()
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        del buffer
        gc.collect()
    assert [step[0] for step in cudart.log] == ["lock"]
    assert is_mapped(address)
    other = device.pinned(4096)
    assert [step[0] for step in cudart.log] == ["lock", "sync", "unlock", "lock"]
    assert cudart.log[2][1] == address
    assert cudart.log[2][-1]  # before it is unmapped
    assert not is_mapped(address)
    del other


def test_memory_is_unlocked_if_an_interrupt_comes_right_behind_its_locking(sim, cudart):
    cudart.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        registering().pinned(3 * MIB)
    gc.collect()
    assert [step[0] for step in cudart.log] == ["lock", "sync", "unlock"]
    assert cudart.log[-1][-1]  # before it is unmapped


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_has_nothing_of_locked_memory_and_reads_no_zeros_for_it(
    sim, cudart
):
    """Shared pages are replaced where one writes, while the device reads the old ones.

    What was mapped there in their place would be read as weights.
    """
    buffer = registering().pinned(8 * MIB).fill_(7)
    address = buffer.data_ptr()
    ends = []
    for reads in (False, True):
        child = os.fork()
        if not child:
            faulthandler.disable()
            status = 1
            with contextlib.suppress(BaseException):
                others = [host_memory(8 * MIB).fill_(1) for _ in range(3)]
                if reads:
                    buffer.sum()
                    os._exit(2)
                assert mapping(address)["Rss"] == ["0", "kB"]
                del buffer
                gc.collect()
                assert not is_mapped(address)
                assert [step[0] for step in cudart.log] == ["lock"]
                assert all(bool((other == 1).all()) for other in others)
                status = 0
            os._exit(status)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert ends == [0, -signal.SIGSEGV]
    assert (buffer == 7).all()


def test_refused_chunk_unlocks_the_earlier_ones_and_falls_back(
    sim, cudart, monkeypatch
):
    monkeypatch.setattr(device_module, "_REGISTER_CHUNK", 2 * MIB)
    cudart.refuse_from = 2
    device = registering()
    with pytest.warns(StagehandWarning, match="cudaHostRegister gave error 2"):
        buffer = device.pinned(5 * MIB)
    assert cudart.locked == {}
    assert [step[0] for step in cudart.log] == ["lock", "lock", "unlock", "unlock"]
    assert buffer.numel() == 5 * MIB
    buffer.fill_(1)
    assert not buffer.is_pinned()


def test_refusal_is_an_error_for_who_asks_for_locked_memory_only(sim, cudart):
    cudart.refuse_from = 0
    device = registering()
    for _ in range(2):  # and no warning, which would be another error
        with pytest.raises(RuntimeError, match="cudaHostRegister gave error 2"):
            device.page_locked(5 * MIB)
    with pytest.warns(StagehandWarning, match="cudaHostRegister gave error 2"):
        device.pinned(5 * MIB)
    assert cudart.locked == {}


def test_memory_is_locked_for_its_own_device_in_a_thread_on_another(
    sim, cudart, monkeypatch
):
    """The runtime would claim memory on the first device, where each thread begins."""
    entered = []
    inside = torch.accelerator.device_index

    def device_index(index):
        entered.append((index, list(cudart.log)))
        return inside(index)

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    device = registering()
    assert device.page_locked(100).numel() == 100
    assert entered[0] == (device.torch_device.index, [])  # before anything is locked


def test_refusal_is_not_told_again_by_the_next_kernel(sim, cudart, monkeypatch):
    """CUDA keeps an error until somebody asks; a kernel's launch does."""
    pending = ["out of memory"]
    ones = torch.ones

    def launch(*args, **options):
        if pending:
            raise RuntimeError(pending.pop())
        return ones(*args, **options)

    monkeypatch.setattr(torch, "ones", launch)
    cudart.refuse_from = 0
    with pytest.warns(StagehandWarning):
        registering().pinned(100)
    torch.ones(1, device=HPU)


def test_copy_never_spans_two_registrations(sim, cudart, monkeypatch):
    monkeypatch.setattr(device_module, "_REGISTER_CHUNK", 2 * MIB)
    copied = []
    copy_ = torch.Tensor.copy_

    def spy(self, source, **options):
        copied.append((source.data_ptr(), source.numel(), options))
        return copy_(self, source)

    device = registering()
    source = device.pinned(5 * MIB + 3)
    source.copy_(torch.arange(source.numel()) % 251)
    target = device.empty(source.numel())
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", spy)
        device.copy(target, source)
    assert [nbytes for _, nbytes, _ in copied] == [2 * MIB, 2 * MIB, MIB + 3]
    for address, nbytes, options in copied:
        start = max(a for a in cudart.locked if a <= address)
        assert address + nbytes <= start + cudart.locked[start]
        assert options == {"non_blocking": True}
    assert torch.equal(target.cpu(), source)
    del source
    gc.collect()


@pytest.mark.parametrize("is_alike", [True, False])
def test_copy_of_a_large_tensor_goes_in_pieces_however_it_lies(
    sim, cudart, monkeypatch, is_alike
):
    """A gradient that lay otherwise than its place was copied at once."""
    monkeypatch.setattr(device_module, "_REGISTER_CHUNK", 2 * MIB)
    copied = []
    copy_ = torch.Tensor.copy_

    def spy(self, source, **options):
        if self.device.type == "cpu":
            copied.append(self.nbytes)
        return copy_(self, source, **options)

    device = registering()
    place = device.pinned(5 * MIB).view(torch.float32).view(-1, 1024)
    grad = torch.arange(place.numel(), dtype=torch.float32, device=HPU)
    grad = grad.view_as(place) if is_alike else grad.view(1024, -1).t()
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", spy)
        device.copy(place, grad)
    assert copied == [2 * MIB, 2 * MIB, MIB]
    assert torch.equal(place, grad.cpu())
    del place
    gc.collect()


def test_memory_that_cannot_be_locked_is_unmapped_without_a_sync(sim, cudart):
    cudart.refuse_from = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registering().pinned(100)
    gc.collect()
    assert cudart.log == []


# --------------------------------------------------------------------- finding a device


def test_the_accelerator_is_found_by_default_and_by_every_name(sim):
    for name in (None, "hpu", "hpu:0", 0, torch.device("hpu", 0)):
        assert find_device(name).torch_device == torch.device("hpu", 0)
    assert isinstance(find_device("cpu"), HostDevice)


def test_without_an_accelerator_the_host_is_found(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    assert isinstance(find_device(None), HostDevice)
    with pytest.raises(ConfigError, match=r"'xpu:1', but .* accelerator is none; pass"):
        find_device("xpu:1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cuda",
            "device is 'cuda', but this machine's accelerator is hpu; pass device=",
        ),
        ("meta", "device is 'meta', but this machine's accelerator is hpu"),
        ("hpu:1", "device is 'hpu:1', but this machine has 1 of that kind"),
        ("gpu", "device is 'gpu': "),
        ("hpu:x", "device is 'hpu:x': "),
        (2.5, "device is 2.5: expected what torch.device takes"),
    ],
)
def test_device_that_is_not_there_is_refused_by_name(sim, name, message):
    with pytest.raises(ConfigError) as caught:
        find_device(name)
    assert str(caught.value).startswith(message)


# ----------------------------------------------------------------- who sees the copies


@pytest.mark.parametrize(("home", "seen"), [("torch.cuda._sanitizer", 1), (None, 0)])
def test_sanitizer_alone_sees_what_is_kept_from_dispatch_modes(home, seen):
    class Mode(torch_private.DispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    Mode.__module__ = home or __name__
    mode = Mode()
    with torch_private.dispatching(mode):
        with torch_private.without_modes():
            torch.ones(1)
        assert mode.calls == 0
        with torch_private.without_modes(but_sanitizer=True):
            torch.ones(1)
        assert mode.calls == seen
        torch.ones(1)
    assert mode.calls == seen + 1
    assert torch_private.dispatch_modes() == 0
