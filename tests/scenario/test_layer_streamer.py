"""`LayerStreamer` gives what resident weights give, in order, within its depths."""

import copy
import ctypes
import gc
import random
import threading
from concurrent.futures import Future
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file

import stagehand
from architectures.trees import assert_bitwise_equal
from layered import (
    EMBED,
    KEYS,
    LAYER_BYTES,
    LAYERS,
    PREFIX,
    WIDTH,
    arguments,
    inputs,
    layer_fn,
    make_weights,
    passes,
    resident,
    save,
)
from scenario.small import round_up
from stagehand import LayerStreamer
from stagehand.compat import layer_streamer as compat
from stagehand.core.arena import live_leases
from stagehand.core.device import AcceleratorDevice
from stagehand.core.transfer import Ticket
from stagehand.errors import ClosedError, ConfigError, StagehandWarning
from stagehand.stores import reading
from stagehand.stores.converting import convert_to_packed
from stagehand.streamer import pipeline, rates
from stagehand.streamer.depths import READERS
from stagehand.streamer.streamer import described

DEPTHS = {
    "default": {},
    "nothing ahead": {"n_gpu": 0, "n_cpu_pinned": 1},
    "one ahead": {"n_gpu": 1, "n_cpu_pinned": 1},
    "slots do not divide the layers": {"n_gpu": 3, "n_cpu_pinned": 2},
    "all stages": {"n_gpu": 2, "n_cpu_pinned": 2, "n_cpu": 2},
    "ordinary memory only": {"n_cpu_pinned": None, "n_cpu": 3},
    "no stage": {"n_cpu_pinned": None, "n_cpu": 0, "n_gpu": 1},
    "batches": {
        "n_gpu": 3,
        "n_cpu_pinned": 3,
        "n_cpu": 2,
        "batch_gpu": 2,
        "batch_cpu_pinned": 3,
        "batch_cpu": 3,
    },
    "batches as large as can be": {
        "n_gpu": 2,
        "n_cpu_pinned": 1,
        "n_cpu": 4,
        "batch_gpu": 3,
        "batch_cpu_pinned": 2,
        "batch_cpu": 5,
    },
    "batches of ordinary memory": {
        "n_gpu": 1,
        "n_cpu_pinned": None,
        "n_cpu": 3,
        "batch_gpu": 2,
        "batch_cpu": 4,
    },
    "batch of all": {"n_gpu": 9, "batch_gpu": 10, "n_cpu_pinned": 9, "n_cpu": 9},
    "room for all": {"n_gpu": 99, "n_cpu_pinned": 99, "n_cpu": 99},
    "room for all, pinned": {"n_gpu": 1, "n_cpu_pinned": 6, "batch_cpu_pinned": 3},
    "room for all, in memory": {"n_gpu": 1, "n_cpu_pinned": 1, "n_cpu": 6},
}
WIDE = 128
depths = pytest.mark.parametrize("depths", DEPTHS.values(), ids=DEPTHS.keys())
places = pytest.mark.parametrize("place", ["hpu", "cpu"], ids=["simulated", "host"])


@pytest.fixture(scope="module")
def weights():
    return make_weights()


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), weights)


@pytest.fixture
def stream(folder):
    """Makes streamers, and closes them."""
    made = []

    def stream(place, source=folder, **options):
        streamer = LayerStreamer.from_pretrained(source, device=place, **options)
        made.append(streamer)
        return streamer

    yield stream
    for streamer in made:
        streamer.close()


class AtOnce:
    """Workers that do each job when it is given, so that tests know when."""

    def __init__(self, name, count, begin=None):
        self.closed = False

    def hand(self, note, job, *args):
        note(future := Future())
        try:
            future.set_result(job(*args))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)

    def drop(self, future):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(pipeline, "WorkerGroup", AtOnce)


# Values


@places
@depths
def test_passes_are_bitwise_those_of_resident_weights(
    sim, stream, weights, place, depths
):
    expected = resident(weights, inputs(place)).cpu()
    streamer = stream(place, **depths)
    for number, found in enumerate(passes(streamer, place, 4)):
        assert_bitwise_equal(found, expected, f"pass {number}")
    assert sim.races() == []


@places
def test_bfloat16_is_exact_in_inference_mode_and_under_autocast(
    sim, stream, tmp_path, place
):
    tensors = make_weights(dtype=torch.bfloat16)
    streamer = stream(place, save(tmp_path, tensors))
    x = inputs(place)
    for mode in (torch.inference_mode(), torch.autocast(place, torch.bfloat16)):
        with mode, torch.no_grad():
            x = x.to(torch.bfloat16)
            expected = resident(tensors, x).cpu()
            assert torch.equal(streamer.run_pass(x, layer_fn).cpu(), expected)


def any_depths(choose: random.Random) -> dict[str, int | None]:
    """Depths and batches that can work."""
    depths = {"n_gpu": choose.randint(0, 4)}
    for stage in ("cpu_pinned", "cpu"):
        depths[f"n_{stage}"] = choose.choice([None, 0, 1, 2, 3, 5, 9])
    for stage in ("gpu", "cpu_pinned", "cpu"):
        most = 1 + (depths[f"n_{stage}"] or 0)
        depths[f"batch_{stage}"] = choose.choice([None, choose.randint(1, most)])
    return depths


@places
@pytest.mark.parametrize("seed", range(20))
def test_any_depths_work_for_any_number_of_layers(sim, stream, tmp_path, place, seed):
    choose = random.Random(seed)
    layers = choose.randint(1, 9)
    tensors = make_weights(layers=layers)
    streamer = stream(place, save(tmp_path, tensors), **any_depths(choose))
    expected = resident(tensors, inputs(place), layers=layers).cpu()
    for number in range(5):
        if choose.random() < 0.3:
            fails_at = choose.randrange(layers)
            with pytest.raises(ZeroDivisionError):
                streamer.run_pass(
                    1, lambda x, w, layer, at=fails_at: abs(1 // (at - layer)) + 1
                )
        [found] = passes(streamer, place, 1)
        assert_bitwise_equal(found, expected, f"pass {number}")


@places
@depths
def test_layers_come_in_order_with_their_own_weights_under_their_names(
    sim, stream, weights, place, depths
):
    streamer = stream(place, **depths)
    for _ in range(3):
        seen = []

        def look(x, found, layer, seen=seen):
            seen.append(layer)
            assert list(found) == KEYS
            for key, weight in found.items():
                assert str(weight.device).startswith(place)
                assert torch.equal(weight.cpu(), weights[f"{PREFIX}{layer}.{key}"])
            return x

        streamer.run_pass(0, look)
        assert seen == list(range(LAYERS))


@places
def test_whatever_layer_fn_returns_goes_to_the_next_layer(sim, stream, place):
    streamer = stream(place)
    result = streamer.run_pass((), lambda x, weights, layer: (*x, layer))
    assert result == tuple(range(LAYERS))


def test_layer_fn_that_forgets_to_return_is_told(stream):
    with pytest.raises(ConfigError, match="layer_fn returned None for layer 0: "):
        stream("cpu").run_pass(1, lambda x, weights, layer: None)


# Memory


@depths
def test_device_and_pinned_bytes_stay_within_the_depths(
    sim, stream, weights, folder, depths
):
    before = sim.pinned_bytes()
    sim.reset_peak()
    held = sim.peak_bytes()
    streamer = stream("hpu", **depths)
    for _ in range(3):
        streamer.run_pass(0, lambda x, weights, layer: x)
    slots = min(depths.get("n_gpu", 2) + 1, LAYERS)
    pinned = depths.get("n_cpu_pinned", 4)
    slabs = min(pinned + 1, LAYERS) if pinned else 0
    assert sim.peak_bytes() - held <= slots * LAYER_BYTES
    assert sim.peak_pinned_bytes() - before <= slabs * LAYER_BYTES
    record = streamer.telemetry.records[-1]
    assert record.device_peak_bytes <= slots * LAYER_BYTES
    streamer.close()
    assert sim.allocated_bytes() == held
    assert sim.pinned_bytes() == before


@places
@pytest.mark.parametrize(
    "depths", [{"n_gpu": 6}, {"n_gpu": 0, "n_cpu_pinned": 6}, {"n_gpu": 0, "n_cpu": 6}]
)
def test_files_are_read_once_if_there_is_memory_for_all_layers(
    sim, stream, place, depths
):
    if place == "cpu" and "n_cpu_pinned" in depths:
        pytest.skip("nothing is pinned there")
    streamer = stream(place, **depths)
    for _ in range(3):
        streamer.run_pass(0, lambda x, weights, layer: x)
    read = streamer.telemetry.totals()["disk_bytes"]
    assert read == streamer.read_bytes


@pytest.fixture(scope="module")
def large():
    """Weights of bfloat16, large enough to be packed."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"attn.weight": (WIDE, WIDE), "mlp.weight": (WIDE, WIDE)}
    shapes["norm.weight"] = (WIDE,)
    made = {
        f"{PREFIX}{n}.{key}": torch.randn(shape, generator=generator) / WIDE**0.5
        for n in range(LAYERS)
        for key, shape in shapes.items()
    }
    made[EMBED] = torch.randn(WIDE, WIDE, generator=generator)
    return {name: weight.bfloat16() for name, weight in made.items()}


@pytest.fixture(scope="module")
def packed(large, tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    convert_to_packed(save(root / "plain", large), root / "packed")
    return root / "packed"


@places
@depths
def test_packed_layers_are_decoded_to_the_bits_they_were_packed_from(
    sim, stream, large, packed, place, depths
):
    x = torch.ones(3, WIDE).bfloat16()
    expected = resident(large, x.to(place)).cpu()
    streamer = stream(place, packed, **depths)
    assert_bitwise_equal(streamer.load_static(EMBED).cpu(), large[EMBED], "static")
    for number in range(3):
        with torch.no_grad():
            found = streamer.run_pass(x.to(place), layer_fn).cpu()
        assert_bitwise_equal(found, expected, f"pass {number}")
    with pytest.raises(ValueError, match="boom"):
        streamer.run_pass(0, raising(ValueError("boom")))
    with torch.no_grad():
        found = streamer.run_pass(x.to(place), layer_fn).cpu()
    assert_bitwise_equal(found, expected, "after a failure")


@places
def test_layers_of_which_some_are_packed_are_what_they_were(
    sim, stream, large, tmp_path, place
):
    tensors = dict(large)
    for key in ("attn.weight", "mlp.weight"):
        tensors[f"{PREFIX}2.{key}"] = large[f"{PREFIX}2.{key}"].float()
    convert_to_packed(save(tmp_path / "plain", tensors), tmp_path / "packed")
    streamer = stream(place, tmp_path / "packed", n_gpu=1, n_cpu_pinned=1)
    for number in range(2):
        seen = []
        streamer.run_pass(0, lambda x, w, n, seen=seen: seen.append(on_host(w)) or x)
        for layer, found in enumerate(seen):
            for key, weight in found.items():
                name = f"{PREFIX}{layer}.{key}"
                assert_bitwise_equal(weight, tensors[name], f"pass {number}: {name}")


def test_sizes_that_are_not_those_of_packed_weights_are_refused(packed):
    found = described(packed, None)
    sizes = {**found["block_sizes"], "mlp.weight": 5}
    with pytest.raises(
        stagehand.CheckpointError,
        match=rf"mlp.weight has 5 elements: found {WIDE * WIDE}, .* in .*safetensors$",
    ):
        LayerStreamer(**{**found, "block_sizes": sizes, "dtype": None}, device="cpu")


def on_host(weights):
    return {key: weight.cpu().clone() for key, weight in weights.items()}


def test_packed_layers_cross_the_link_packed_in_what_memory_they_are_said_to_need(
    sim, stream, large, packed
):
    held, moved = sim.allocated_bytes(), sim.h2d_bytes()
    sim.reset_peak()
    streamer = stream("hpu", packed, n_gpu=1, n_cpu_pinned=2)
    for _ in range(2):
        streamer.run_pass(0, lambda x, weights, layer: x)
    streamer.settle()
    layer = streamer.layer_bytes[0]
    wire = max(image.link_nbytes for image in streamer._images)
    assert wire < 0.8 * layer
    copies = streamer.telemetry.counters.h2d_copies
    copies += streamer.telemetry.totals()["h2d_copies"]
    assert 0.9 * wire * copies < sim.h2d_bytes() - moved <= wire * copies
    pipeline = streamer._pipeline
    assert pipeline.pinned_account.limit_bytes == 3 * wire
    scratch = pipeline._bytes.scratch
    assert pipeline.device_account.limit_bytes == 2 * layer + 2 * wire + scratch
    scalars = 256  # of the decoder's operators
    assert sim.peak_bytes() - held <= 2 * layer + 2 * wire + scratch + scalars


@places
@depths
@pytest.mark.parametrize("form", ["plain", "packed"])
def test_a_streamer_takes_what_a_search_says_that_it_needs(
    sim, stream, folder, packed, place, depths, form, monkeypatch
):
    """The device's memory to the byte, whatever its allocator rounds up; of the host's
    a little less, where layers that wait for good are not all as large.
    """
    round_up(monkeypatch, 3000)
    streamer = stream(place, packed if form == "packed" else folder, **depths)
    for _ in range(2):
        streamer.run_pass(0, lambda x, weights, layer: x)
    streamer.settle()
    on_host = place == "cpu"
    pieces = streamer.depths.pieces(LAYERS, on_host=on_host)
    needed = streamer.measure_rates().footprint
    parts = streamer._pipeline
    host = parts.pinned_account.peak_bytes + parts.host_account.peak_bytes
    assert parts.device_account.peak_bytes == needed.device_bytes(pieces)
    threads = READERS * needed.unpacked_from
    waiting = needed.host_bytes(pieces) - threads
    assert 0.99 * waiting <= host <= waiting
    assert (threads > 0) is (on_host and form == "packed")


def test_threads_that_wait_for_the_device_have_made_it_theirs(sim, stream, monkeypatch):
    """Each begins on the first device, where CUDA would claim memory for it."""
    claimed = []
    monkeypatch.setattr(
        AcceleratorDevice,
        "claim_thread",
        lambda _: claimed.append(threading.current_thread().name),
    )
    streamer = stream("hpu")
    streamer.run_pass(inputs("hpu"), layer_fn)
    running = [t.name for t in threading.enumerate() if "stagehand-reader" in t.name]
    streamer.close()  # and they have ended
    assert sorted(claimed) == sorted(running) != []


def test_interrupt_leaves_nothing_of_the_memory_for_packed_layers(sim, stream, packed):
    held = sim.allocated_bytes()
    streamer = stream("hpu", packed)
    with pytest.raises(KeyboardInterrupt):
        streamer.run_pass(0, raising(KeyboardInterrupt()))
    assert sim.allocated_bytes() == held
    streamer.run_pass(0, lambda x, weights, layer: x)


@pytest.mark.parametrize("wires", [0.5, 1.5])
def test_device_without_room_to_decode_says_so_and_nothing_is_left(
    sim, stream, packed, wires
):
    held, leases = sim.allocated_bytes(), live_leases()
    streamer = stream("hpu", packed)
    room = int(wires * streamer._images[0].link_nbytes)
    sim.configure(capacity_bytes=held + room)
    with pytest.raises(torch.OutOfMemoryError):
        streamer.run_pass(0, lambda x, weights, layer: x)
    assert live_leases() == leases
    sim.configure()
    streamer.run_pass(0, lambda x, weights, layer: x)
    streamer.close()
    assert (sim.allocated_bytes(), live_leases()) == (held, leases)


def raising(error):
    def fail(x, weights, layer):
        if layer == 3:
            weights.clear()  # the traceback keeps what is in it
            raise error
        return x

    return fail


def past_the_cache(stream, place, path, monkeypatch, **options):
    """A streamer of a file that no page of is in the cache, as far as it knows."""
    monkeypatch.setattr(reading.OpenFile, "_is_cached", lambda self, chunk: False)
    streamer = stream(place, path.parent, past_cache=True, **options)
    if not streamer._files._descriptor(path).is_direct:
        pytest.skip("the file system of the tests has no O_DIRECT")
    return streamer


def save_behind(path, tensors, past, of=512):
    """Save tensors of one type, the first of them `past` bytes after a sector."""
    for count in range(0, of + 8, 8):
        save_file(tensors, path, metadata={"note": "x" * count})
        if (8 + int.from_bytes(path.read_bytes()[:8], "little")) % of == past:
            return path
    raise AssertionError("no header is as long")


def count_copied(monkeypatch):
    """A list to which the bytes of each copy behind a read are added."""
    copied, real = [], ctypes.memmove

    def memmove(target, source, nbytes):
        copied.append(nbytes)
        real(target, source, nbytes)

    monkeypatch.setattr(ctypes, "memmove", memmove)
    return copied


@pytest.mark.parametrize(
    ("place", "depths", "dtype"),
    [
        ("hpu", {}, torch.float32),
        ("hpu", {"n_cpu": 1}, torch.float32),
        ("cpu", {"n_cpu": 1}, torch.float32),
        ("cpu", {}, torch.bfloat16),
        ("cpu", {"n_gpu": 0}, torch.bfloat16),
    ],
    ids=["pinned", "pinned and ordinary", "ordinary", "where used", "nothing ahead"],
)
def test_layers_past_the_page_cache_are_read_where_they_wait_without_a_copy(
    sim, stream, tmp_path, monkeypatch, place, depths, dtype
):
    """A memory copy of each byte would cost what the disk has to wait for."""
    layers = {
        f"layers.{n}.w": torch.full((1 << 19,), float(n), dtype=dtype)
        for n in range(LAYERS)
    }
    path = save_behind(tmp_path / "model.safetensors", layers, past=216)
    streamer = past_the_cache(stream, place, path, monkeypatch, **depths)
    copied = count_copied(monkeypatch)

    def check(x, found, layer):
        assert found["w"].unique().tolist() == [layer]
        return x

    for _ in range(2):
        streamer.run_pass(0, check)
    streamer.settle()
    read = streamer.telemetry.counters.disk_bytes
    read += streamer.telemetry.totals()["disk_bytes"]
    assert read >= 2 * streamer.read_bytes
    assert 0 < sum(copied) < 0.01 * read, "only the ends that share pages"
    pieces, page = streamer._pipeline._pieces, 4096
    for account, count in (
        (streamer._pipeline.device_account, pieces.slots),
        (streamer._pipeline.pinned_account, pieces.slabs),
        (streamer._pipeline.host_account, pieces.buffers),
    ):
        assert account.peak_bytes <= count * (streamer.layer_bytes[0] + page)


def test_disk_is_measured_as_it_is_read_and_no_copy_with_it(
    stream, tmp_path, monkeypatch
):
    """A search would give up what is faster than it takes the disk to be."""
    layers = {f"layers.{n}.w": torch.ones(1 << 18) for n in range(LAYERS)}
    path = save_behind(tmp_path / "model.safetensors", layers, past=216)
    streamer = past_the_cache(stream, "cpu", path, monkeypatch)
    copied = count_copied(monkeypatch)
    assert streamer.measure_rates().disk > 0
    assert 0 < sum(copied) < 0.01 * 2 * streamer.read_bytes


@pytest.mark.parametrize("past", [0, 8, 64])
def test_host_computes_the_same_bits_wherever_in_its_file_a_layer_begins(
    stream, tmp_path, monkeypatch, past
):
    """A product with one row, of float32, depends on where the weights begin."""
    layers = {f"layers.{n}.w": torch.randn(512, 512) / 16 for n in range(LAYERS)}
    path = save_behind(tmp_path / "model.safetensors", layers, past)
    streamer = past_the_cache(stream, "cpu", path, monkeypatch)
    x = expected = torch.randn(1, 512)
    for weight in layers.values():
        expected = expected @ weight.clone().T

    def layer_fn(x, found, layer):
        assert found["w"].data_ptr() % 64 == 0
        return x @ found["w"].T

    with torch.no_grad():
        for _ in range(2):
            assert_bitwise_equal(streamer.run_pass(x, layer_fn), expected, "output")


@places
def test_weights_that_are_kept_stay_what_they_are(sim, stream, weights, place):
    streamer = stream(place, n_gpu=1, n_cpu_pinned=1)
    kept = {}

    def keep(x, found, layer):
        kept[layer] = found["attn.weight"]
        return x

    with pytest.warns(StagehandWarning, match="weights of [0-9]+ layers are kept"):
        streamer.run_pass(0, keep)
    for _ in range(2):
        streamer.run_pass(0, lambda x, weights, layer: x)
    for layer, weight in kept.items():
        assert torch.equal(weight.cpu(), weights[f"{PREFIX}{layer}.attn.weight"])


@places
def test_gradients_of_the_input_are_those_of_resident_weights(
    sim, stream, weights, place
):
    def gradient(run):
        x = inputs(place).requires_grad_()
        run(x).square().sum().backward()
        return x.grad.cpu()

    expected = gradient(lambda x: resident(weights, x))
    streamer = stream(place, n_gpu=1, n_cpu_pinned=2)
    with pytest.warns(StagehandWarning, match="are kept after layer_fn returned"):
        found = gradient(lambda x: streamer.run_pass(x, layer_fn))
    assert_bitwise_equal(found, expected, "gradient")


@places
def test_dropped_streamer_gives_back_threads_and_memory(sim, folder, place):
    gc.collect()  # what earlier tests left
    held = sim.allocated_bytes(), sim.pinned_bytes()
    streamer = LayerStreamer.from_pretrained(folder, device=place, n_cpu=2)
    streamer.run_pass(0, lambda x, weights, layer: x)
    del streamer
    gc.collect()
    assert (sim.allocated_bytes(), sim.pinned_bytes()) == held
    assert not [t for t in threading.enumerate() if t.name.startswith("stagehand")]


# Overlap


@places
def test_pass_ends_with_the_first_layers_of_the_next_one_loading(
    sim, at_once, stream, place
):
    streamer = stream(place, n_gpu=2, n_cpu_pinned=2)
    for _ in range(2):
        streamer.run_pass(0, lambda x, weights, layer: x)
    records = streamer.telemetry.records
    # On the host a load is counted when it is needed.
    ahead = 3 if place == "hpu" else 0
    assert [r.h2d_copies for r in records] == [LAYERS + ahead, LAYERS]


@pytest.mark.parametrize(
    ("place", "depths", "ahead"),
    [
        ("hpu", {"n_gpu": 1, "n_cpu_pinned": 1}, 4),
        ("hpu", {"n_gpu": 1, "n_cpu_pinned": 1, "n_cpu": 1}, 6),
        ("hpu", {"n_gpu": 0, "n_cpu_pinned": None, "n_cpu": 2}, 4),
        ("cpu", {"n_gpu": 1}, 2),
        ("cpu", {"n_gpu": 1, "n_cpu": 2}, 5),
    ],
)
def test_settled_streamer_has_all_stages_full_and_reads_as_much_as_it_uses(
    sim, monkeypatch, stream, place, depths, ahead
):
    taken = []
    take = pipeline.FileSource.take

    def noted(self, layer, image):
        taken.append(layer)
        return take(self, layer, image)

    monkeypatch.setattr(pipeline.FileSource, "take", noted)
    streamer = stream(place, **depths)
    streamer.settle()  # nothing was begun
    for count in range(4):
        assert len(taken) == count * LAYERS + (ahead if count else 0)
        streamer.run_pass(0, lambda x, weights, layer: x)
        streamer.settle()


def test_settled_streamer_has_sent_what_was_read_too_late_for_its_pass(
    sim, monkeypatch, stream
):
    pass_is_over = threading.Event()
    take, wait_idle = pipeline.FileSource.take, pipeline.WorkerGroup.wait_idle
    taken = []

    def slow(self, layer, image):
        taken.append(layer)
        if layer == 1 and len(taken) > LAYERS:
            assert pass_is_over.wait(120)
        return take(self, layer, image)

    def waited(group):
        pass_is_over.set()
        wait_idle(group)

    monkeypatch.setattr(pipeline.FileSource, "take", slow)
    monkeypatch.setattr(pipeline.WorkerGroup, "wait_idle", waited)
    streamer = stream("hpu", n_gpu=1, n_cpu_pinned=1)
    streamer.run_pass(0, lambda x, weights, layer: x)
    streamer.settle()
    assert len(taken) == LAYERS + 4
    assert streamer.telemetry.counters.h2d_copies == 1
    with pytest.raises(ConfigError, match=r"settle\(\) was called while a pass"):
        streamer.run_pass(0, lambda x, weights, layer: streamer.settle())


@pytest.mark.parametrize("batch", [None, 2, 3])
def test_layers_ahead_are_queued_before_a_layer_is_computed(
    sim, at_once, stream, batch
):
    streamer = stream("hpu", n_gpu=2, n_cpu_pinned=2, batch_gpu=batch)
    streamer.run_pass(0, lambda x, weights, layer: x)
    copies = []

    def count(x, weights, layer):
        copies.append(3 + sim.h2d_copies() - start)  # three were under way by then
        return x

    start = sim.h2d_copies()
    streamer.run_pass(0, count)
    assert copies == [3, 4, 5, 6, 7, 8, 9]


def test_thread_that_runs_the_pass_never_waits_for_the_device(sim, monkeypatch, stream):
    waiting = []
    wait = Ticket.wait_host

    def noted(ticket):
        waiting.append(threading.current_thread())
        wait(ticket)

    monkeypatch.setattr(Ticket, "wait_host", noted)
    streamer = stream("hpu", n_gpu=2, n_cpu_pinned=2)
    x = inputs("hpu")
    waited = sim.syncs()
    with torch.no_grad():
        for _ in range(4):
            streamer.run_pass(x, layer_fn)
    assert waiting
    assert sim.syncs() - waited <= len(waiting)
    assert threading.main_thread() not in waiting


# Batches


def test_compute_takes_a_batch_when_all_of_it_is_under_way(sim, at_once, stream):
    streamer = stream("hpu", n_gpu=2, n_cpu_pinned=2, batch_gpu=3)
    stream_of = torch.accelerator.current_stream()
    waits = []

    def count(x, weights, layer):
        waits.append(streamer._pipeline._running().blocks[min(layer + 1, 6)].uses)
        return x

    streamer.run_pass(0, count)
    assert stream_of == torch.accelerator.current_stream()
    # While the first two of a batch compute, the one behind them is in use already.
    assert waits == [1, 1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("stage", ["cpu_pinned", "cpu"])
def test_layers_go_to_the_device_when_their_whole_batch_is_staged(
    sim, monkeypatch, stream, stage, batch
):
    events = []
    copy, read = AcceleratorDevice.copy, pipeline.FileSource.take

    def copied(self, target, source, *args):
        events.append("copy")
        return copy(self, target, source, *args)

    def was_read(self, layer, image):
        events.append(layer)
        return read(self, layer, image)

    monkeypatch.setattr(AcceleratorDevice, "copy", copied)
    monkeypatch.setattr(pipeline.FileSource, "take", was_read)
    chosen = {
        "n_gpu": 0,
        "n_cpu_pinned": None,
        f"n_{stage}": 2,
        f"batch_{stage}": batch,
    }
    streamer = stream("hpu", **chosen)
    streamer.run_pass(0, lambda x, weights, layer: x)
    first = events.index("copy")
    assert set(range(batch)) <= set(events[:first])
    for before, after in pairwise([i for i, e in enumerate(events) if e == "copy"][:6]):
        sent = events[:after].count("copy")  # the next copy is of this layer
        assert set(range(sent // batch * batch + batch)) & set(range(LAYERS)) <= set(
            events[:after]
        )
        assert before < after


# Constructors


def test_seed_constructor_takes_what_a_script_found_out(sim, tmp_path, weights):
    folder = save(tmp_path, weights, shards=3)
    said = arguments(folder)
    streamer = compat.LayerStreamer(
        *said.values(), 2, 4, 4, 1, 1, 2, True, device="hpu"
    )
    assert streamer.layer_prefix == PREFIX
    with streamer:
        expected = resident(weights, inputs("hpu")).cpu()
        for found in passes(streamer, "hpu", 2):
            assert torch.equal(found, expected)
    assert compat.LayerStreamer is stagehand.LayerStreamer
    assert compat.LayerStreamerTuner is stagehand.LayerStreamerTuner


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["h.", "encoder.block.", "a.b.c.layers.", ""])
def test_everything_is_found_in_the_files_for_any_prefix(
    sim, stream, tmp_path, prefix, shards
):
    tensors = make_weights(prefix=prefix)
    streamer = stream("hpu", save(tmp_path, tensors, shards))
    assert streamer.layer_prefix == prefix
    assert streamer.num_layers == LAYERS
    expected = resident(tensors, inputs("hpu"), prefix=prefix).cpu()
    for found in passes(streamer, "hpu", 2):
        assert torch.equal(found, expected)


@places
def test_layers_may_differ_in_names_sizes_and_types(sim, stream, tmp_path, place):
    tensors = {
        "m.layers.0.dense.weight": torch.randn(40, 8),
        "m.layers.1.experts.0.weight": torch.randn(3, 8).bfloat16(),
        "m.layers.1.experts.1.weight": torch.randn(3, 8).bfloat16(),
        "m.layers.2.scale": torch.randn(1, dtype=torch.float64),
        "m.layers.2.codes": torch.arange(100, dtype=torch.uint8).view(10, 10),
        "m.layers.2.empty": torch.empty(0, 4),
        "m.layers.10.dense.weight": torch.randn(8, 8),
    }
    for number in range(3, 10):
        tensors[f"m.layers.{number}.dense.weight"] = torch.randn(number, 8)
    streamer = stream(place, save(tmp_path, tensors), n_gpu=1, n_cpu_pinned=1)
    assert streamer.num_layers == 11
    for _ in range(2):
        seen = {}

        def look(x, weights, layer, seen=seen):
            for key, weight in weights.items():
                seen[f"m.layers.{layer}.{key}"] = weight.cpu().clone()
            return x

        streamer.run_pass(0, look)
        assert seen.keys() == tensors.keys()
        for name, found in seen.items():
            assert_bitwise_equal(found, tensors[name], name)


def test_two_stacks_ask_which_one_is_meant(stream, tmp_path):
    tensors = make_weights(prefix="encoder.block.")
    tensors |= make_weights(prefix="decoder.block.", seed=1)
    folder = save(tmp_path, tensors)
    with pytest.raises(
        ConfigError,
        match=r"layer_prefix is not given.*2 stacks.*'decoder.block.' \(7 layers, .*"
        r"'encoder.block.'",
    ):
        stream("cpu", folder)
    with pytest.raises(ConfigError, match="layer_prefix is "):
        stream("cpu", folder, layer_prefix="coder.block.")
    streamer = stream("cpu", folder, layer_prefix="decoder.block.")
    expected = resident(tensors, inputs("cpu"), prefix="decoder.block.")
    assert torch.equal(next(passes(streamer, "cpu", 1)), expected)


def test_number_that_is_written_in_another_way_counts_no_layers(stream, tmp_path):
    tensors = make_weights()
    tensors |= {f"blocks.0{n}.weight": torch.randn(99, 99) for n in range(3)}
    assert stream("cpu", save(tmp_path, tensors)).layer_prefix == PREFIX


def test_tensor_of_a_type_that_torch_lacks_beside_the_layers_is_left_alone(
    stream, tmp_path
):
    """Numbers of four bits in threes: torch has bytes of two."""
    folder = save(tmp_path, make_weights() | {"scales": torch.zeros(3, 1).byte()})
    path = folder / "model.safetensors"
    was, is_now = b'"U8","shape":[3,1]', b'"F4","shape":[2,3]'
    path.write_bytes(path.read_bytes().replace(was, is_now))
    streamer = stream("cpu", folder)
    assert streamer.num_layers == LAYERS
    with pytest.raises(stagehand.CheckpointError, match=r"'scales' .* F4"):
        streamer.load_static("scales")


def test_small_stack_beside_the_layers_is_not_taken_for_them(stream, tmp_path):
    tensors = make_weights()
    tensors["features.conv.0.weight"] = torch.randn(4, 4)
    tensors["features.conv.1.weight"] = torch.randn(4, 4)
    assert stream("cpu", save(tmp_path, tensors)).layer_prefix == PREFIX


# Types, and tensors that stay


@places
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_are_cast_on_the_device_where_files_have_another_type(
    sim, stream, weights, place, dtype
):
    streamer = stream(place, dtype=dtype, n_gpu=1, n_cpu_pinned=1)
    sim.reset_peak()
    held = sim.peak_bytes()

    def look(x, found, layer):
        for key, weight in found.items():
            assert_bitwise_equal(
                weight.cpu(), weights[f"{PREFIX}{layer}.{key}"].to(dtype), key
            )
        return x

    for _ in range(2):
        streamer.run_pass(0, look)
    cast = (2 * WIDTH * WIDTH + WIDTH) * dtype.itemsize
    assert sim.peak_bytes() - held <= 2 * LAYER_BYTES + cast + 3 * 512
    if place == "hpu":
        peak = streamer.telemetry.records[-1].device_peak_bytes
        assert peak == 2 * LAYER_BYTES + cast


def test_integers_stay_integers_and_floats_do_not_become_them(stream, tmp_path):
    tensors = {"l.0.a": torch.arange(9), "l.0.b": torch.randn(3)}
    folder = save(tmp_path, tensors)

    def look(x, weights, layer):
        assert weights["a"].dtype == torch.int64
        assert weights["b"].dtype == torch.bfloat16
        return x

    stream("cpu", folder, dtype=torch.bfloat16).run_pass(0, look)
    with pytest.raises(
        stagehand.CheckpointError,
        match=r"'l.0.b' is torch.float32.*dtype is torch.int8",
    ):
        stream("cpu", folder, dtype=torch.int8)


@places
def test_static_tensor_is_on_the_device_in_the_streamers_type(
    sim, stream, weights, place
):
    streamer = stream(place, dtype=torch.bfloat16)
    embed = streamer.load_static(EMBED)
    assert str(embed.device).startswith(place)
    assert_bitwise_equal(embed.cpu(), weights[EMBED].bfloat16(), EMBED)
    streamer.close()
    assert_bitwise_equal(embed.cpu(), weights[EMBED].bfloat16(), EMBED)


@places
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_packed_static_tensor_is_decoded_on_the_device_in_the_streamers_type(
    sim, stream, large, packed, place, dtype
):
    embed = stream(place, packed, dtype=dtype).load_static(EMBED)
    assert str(embed.device).startswith(place)
    expected = large[EMBED] if dtype is None else large[EMBED].to(dtype)
    assert_bitwise_equal(embed.cpu(), expected, EMBED)


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_static_tensor_that_is_missing_names_what_is_near(stream, folder, packed, form):
    """By its own name: that of its packed bytes gives these."""
    with pytest.raises(
        stagehand.CheckpointError,
        match=rf"'model.embd.weight' is not in .*nearest '{EMBED}'",
    ):
        stream("cpu", packed if form == "packed" else folder).load_static(
            "model.embd.weight"
        )


@pytest.mark.parametrize("given", [None, 3, ["x"]])
def test_name_that_is_no_text_and_layer_fn_that_is_no_function_are_refused(
    stream, given
):
    streamer = stream("cpu")
    with pytest.raises(ConfigError, match=r"name is .*: expected a text"):
        streamer.load_static(given)
    with pytest.raises(ConfigError, match=r"layer_fn is .*: expected a function"):
        streamer.run_pass(torch.ones(1), given)


# Its end


@places
def test_close_ends_it_for_good_and_may_be_called_again(sim, folder, place):
    with LayerStreamer.from_pretrained(folder, device=place) as streamer:
        streamer.run_pass(0, lambda x, weights, layer: x)
    streamer.close()
    with pytest.raises(ClosedError, match="the streamer is closed"):
        streamer.run_pass(0, lambda x, weights, layer: x)
    with pytest.raises(ClosedError):
        streamer.load_static(EMBED)
    streamer.close()


def test_pass_within_a_pass_is_refused_and_the_outer_one_goes_on(stream, weights):
    streamer = stream("cpu")

    def meddle(x, found, layer):
        with pytest.raises(ConfigError, match=r"run_pass\(\) was called while a pass"):
            streamer.run_pass(x, layer_fn)
        with pytest.raises(ConfigError, match=r"close\(\) was called while a pass"):
            streamer.close()
        return layer_fn(x, found, layer)

    found = streamer.run_pass(inputs("cpu"), meddle)
    assert torch.equal(found, resident(weights, inputs("cpu")))


@places
def test_two_streamers_of_one_model_take_turns_within_a_pass(
    sim, stream, weights, place
):
    one, other = stream(place), stream(place, n_gpu=1, n_cpu=1)
    x = inputs(place)
    expected = resident(weights, x, function=lambda x, w, i: resident(weights, x))

    def both(x, found, layer):
        return other.run_pass(x, layer_fn)

    with torch.no_grad():
        assert torch.equal(one.run_pass(x, both).cpu(), expected.cpu())


def test_streamer_and_streamed_model_take_turns_in_the_same_lanes(sim, stream, weights):
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    x = inputs("hpu")
    with torch.no_grad():
        step = copy.deepcopy(model).to("hpu")
        expected = resident(
            weights, x, function=lambda x, w, i: step(layer_fn(x, w, i))
        ).cpu()
        stagehand.layer(model, vram_budget=3 * 4 * WIDTH * (WIDTH + 8))
        streamer = stream("hpu", n_gpu=1, n_cpu_pinned=1)
        for _ in range(3):
            found = streamer.run_pass(x, lambda x, w, i: model(layer_fn(x, w, i)))
            assert_bitwise_equal(found.cpu(), expected, "output")
    runtime = model._stagehand_layer_runtime
    mine, theirs = streamer._pipeline._engine, runtime._parts.engine
    runtime.shutdown()
    assert mine.h2d.stream == theirs.h2d.stream
    assert mine.d2h.stream == theirs.d2h.stream


@places
@pytest.mark.parametrize("depths", [{}, {"n_cpu": 2}, {"n_cpu_pinned": None}])
def test_default_device_of_the_caller_makes_no_difference(
    sim, stream, weights, place, depths
):
    x = inputs(place)
    expected = resident(weights, x).cpu()
    with torch.device("meta"), torch.no_grad():
        streamer = stream(place, **depths)
        for _ in range(2):
            assert torch.equal(streamer.run_pass(x, layer_fn).cpu(), expected)
        assert torch.equal(streamer.load_static(EMBED).cpu(), weights[EMBED])
        assert streamer.measure_rates().disk > 0


def test_one_layer_is_enough(sim, stream, tmp_path):
    tensors = {"blocks.0.w": torch.randn(4, 4)}
    save_file(tensors, tmp_path / "one.safetensors")
    streamer = stream("hpu", tmp_path / "one.safetensors")
    for _ in range(3):
        found = streamer.run_pass(torch.ones(4), lambda x, w, i: w["w"].clone())
        assert torch.equal(found.cpu(), tensors["blocks.0.w"])


def test_disk_is_measured_with_as_many_layers_as_it_takes(stream, monkeypatch):
    streamer = stream("cpu")
    read = []
    monkeypatch.setattr(rates, "_READ_BYTES", 2 * LAYER_BYTES)
    for image in streamer._images:
        monkeypatch.setattr(image, "read", lambda *_, n=image.name: read.append(n))
    assert streamer.measure_rates().disk > 0
    assert len(read) == 2 * 2


@places
def test_rates_of_the_machine_are_measured_and_nothing_is_left(sim, stream, place):
    streamer = stream(place)
    held = sim.allocated_bytes(), sim.pinned_bytes()
    found = streamer.measure_rates()
    assert (sim.allocated_bytes(), sim.pinned_bytes()) == held
    assert found.disk > 0
    assert found.memory > 0
    assert found.on_host == (place == "cpu")
    assert found.host_free_bytes > 0
    assert found.device_free_bytes > 0
