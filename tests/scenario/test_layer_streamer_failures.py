"""A failure in a streamed pass reaches the caller, and leaves the streamer usable."""

import errno
import gc
import linecache
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import stagehand
from layered import (
    EMBED,
    KEYS,
    LAYERS,
    PREFIX,
    arguments,
    inputs,
    layer_fn,
    make_weights,
    passes,
    resident,
    save,
)
from stagehand import LayerStreamer
from stagehand.core.arena import live_leases
from stagehand.errors import (
    CheckpointError,
    ConfigError,
    MissingTensorError,
    OffsetError,
    ReadError,
    ShardChangedError,
    TensorMismatchError,
    TruncatedShardError,
)
from stagehand.streamer import pipeline
from stagehand.streamer.images import LayerImage

DEPTHS = {
    "straight": {"n_gpu": 2, "n_cpu_pinned": 2},
    "all stages, batches": {
        "n_gpu": 1,
        "n_cpu_pinned": 2,
        "n_cpu": 2,
        "batch_gpu": 2,
        "batch_cpu_pinned": 3,
        "batch_cpu": 2,
    },
    "ordinary memory": {"n_gpu": 1, "n_cpu_pinned": None, "n_cpu": 2},
}
depths = pytest.mark.parametrize("depths", DEPTHS.values(), ids=DEPTHS.keys())
places = pytest.mark.parametrize("place", ["hpu", "cpu"], ids=["simulated", "host"])

WEIGHTS = make_weights()


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model", WEIGHTS)


@pytest.fixture
def stream(folder):
    made = []

    def stream(place, **options):
        made.append(LayerStreamer.from_pretrained(folder, device=place, **options))
        return made[-1]

    yield stream
    for streamer in made:
        streamer.close()


def library_threads() -> int:
    return sum(t.name.startswith("stagehand") for t in threading.enumerate())


def assert_whole(streamer: LayerStreamer, place: str, count: int = 2) -> None:
    """Pass after pass is what resident weights give."""
    expected = resident(WEIGHTS, inputs(place)).cpu()
    for number, found in enumerate(passes(streamer, place, count)):
        assert torch.equal(found, expected), f"pass {number}"


# In layer_fn


@places
@depths
def test_weights_that_are_kept_from_a_pass_that_failed_stay_what_they_are(
    sim, stream, place, depths
):
    streamer = stream(place, **depths)
    kept = {}

    def fails(x, weights, layer):
        if layer == 3:
            kept.update(weights)
            raise KeyError(layer)
        return layer_fn(x, weights, layer)

    with pytest.raises(KeyError):
        streamer.run_pass(inputs(place), fails)
    for _ in passes(streamer, place, 2):
        for key in KEYS:
            assert torch.equal(kept[key].cpu(), WEIGHTS[f"{PREFIX}3.{key}"])


@places
@depths
@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_in_layer_fn_reaches_the_caller_as_it_is(
    sim, stream, place, depths, layer, error
):
    leases = live_leases()
    streamer = stream(place, **depths)
    assert_whole(streamer, place)
    raised = error("boom")

    def fail(x, weights, number):
        if number == layer:
            raise raised
        return layer_fn(x, weights, number)

    for _ in range(6):
        with pytest.raises(error) as caught, torch.no_grad():
            streamer.run_pass(inputs(place), fail)
        assert caught.value is raised
        raised.__traceback__ = None  # it holds the weights of the layer
        del caught
        assert_whole(streamer, place)
    assert library_threads() <= 8  # two for each stage, four that read files
    streamer.close()
    gc.collect()  # what an interrupt tore is left to the collector
    assert live_leases() == leases
    assert sim.races() == []


class Interrupt:
    """Raises KeyboardInterrupt at the so many-th line of the library, once.

    Not where a `with` ends: no signal comes between a block and its `__exit__`.
    """

    def __init__(self, line: int) -> None:
        self.line = line
        self.seen = 0
        self.root = str(Path(stagehand.__file__).parent)

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *_) -> None:
        sys.settrace(self.before)

    def trace(self, frame, event, arg):
        file = frame.f_code.co_filename
        if not file.startswith(self.root):
            return None
        text = linecache.getline(file, frame.f_lineno).lstrip()
        if event == "line" and not text.startswith("with "):
            self.seen += 1
            if self.seen == self.line:
                raise KeyboardInterrupt
        return self.trace


@places
@depths
@pytest.mark.parametrize("first", [False, True], ids=["settled", "first"])
def test_interrupt_anywhere_leaves_the_streamer_usable(
    sim, stream, place, depths, first
):
    streamer = stream(place, **depths)
    x = inputs(place)
    interrupt = Interrupt(1)
    interrupted = 0
    while True:
        if first:  # as a new one
            streamer._pipeline.reset(orderly=True)
        try:
            with torch.no_grad(), interrupt:
                streamer.run_pass(x, layer_fn)
                streamer.settle()
        except KeyboardInterrupt:
            interrupted += 1
        if interrupt.seen < interrupt.line:
            break
        assert_whole(streamer, place, 1)
        interrupt = Interrupt(interrupt.line + 53)
    assert interrupted > 10
    assert library_threads() <= 8
    assert sim.races() == []


# In files


def cut(path: Path, size: int) -> bytes:
    """Make a file shorter, and return what was there."""
    whole = path.read_bytes()
    os.truncate(path, size)
    return whole


def put_back(path: Path, whole: bytes, stamp: os.stat_result) -> None:
    """Let a file be what it was, to whoever compares."""
    with path.open("r+b") as file:
        file.write(whole)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


@places
@depths
def test_file_that_shrinks_between_passes_is_told_and_can_be_put_back(
    sim, stream, folder, place, depths
):
    streamer = stream(place, **depths)
    assert_whole(streamer, place)
    path = folder / "model.safetensors"
    stamp = path.stat()
    whole = cut(path, stamp.st_size // 2)
    for _ in range(2):
        with pytest.raises(ShardChangedError, match=str(path)):
            streamer.run_pass(inputs(place), layer_fn)
    put_back(path, whole, stamp)
    assert_whole(streamer, place)


@places
@pytest.mark.parametrize(  # none holds all layers while the first one computes
    "depths",
    [
        {"n_gpu": 2, "n_cpu_pinned": 2},
        {"n_gpu": 1, "n_cpu_pinned": 1, "n_cpu": 1, "batch_cpu": 2},
        {"n_gpu": 1, "n_cpu_pinned": None, "n_cpu": 2, "batch_gpu": 2},
    ],
    ids=DEPTHS,
)
def test_file_that_shrinks_within_a_pass_names_layer_and_file(
    sim, stream, folder, place, depths
):
    streamer = stream(place, **depths)
    path = folder / "model.safetensors"
    stamp = path.stat()
    kept = {}

    def shrink(x, weights, layer):
        if layer == 0:
            kept["whole"] = cut(path, stamp.st_size - 200)
        return layer_fn(x, weights, layer)

    message = rf"^layer '{PREFIX}\d'(, tensor 'norm.weight')?: {path}"
    with (
        pytest.raises(
            (TruncatedShardError, ShardChangedError), match=message
        ) as caught,
        torch.no_grad(),
    ):
        streamer.run_pass(inputs(place), shrink)
    assert isinstance(caught.value.__cause__, CheckpointError)
    del caught
    put_back(path, kept["whole"], stamp)
    assert_whole(streamer, place)


@places
@depths
def test_read_that_the_system_refuses_keeps_its_cause(
    sim, stream, monkeypatch, place, depths
):
    streamer = stream(place, **depths)

    def refuse(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        with pytest.raises(
            ReadError, match=rf"^layer '{PREFIX}0': .*Input/output"
        ) as e:
            streamer.run_pass(inputs(place), layer_fn)
        causes = [e.value.__cause__, e.value.__cause__.__cause__]
        assert [type(cause) for cause in causes] == [ReadError, OSError]
        del e, causes
    assert_whole(streamer, place)


@places
@depths
def test_read_that_fails_once_ahead_of_time_is_tried_again(
    sim, stream, monkeypatch, place, depths
):
    streamer = stream(place, **depths)
    read, failures = LayerImage.read, []

    def fail_once(image, *args):
        if image.name == f"{PREFIX}3" and not failures:
            failures.append(1)
            raise ReadError("for once")
        return read(image, *args)

    monkeypatch.setattr(LayerImage, "read", fail_once)
    assert_whole(streamer, place)
    assert failures


@places
def test_file_that_is_replaced_is_told(sim, stream, folder, place):
    streamer = stream(place)
    assert_whole(streamer, place)
    save(folder, make_weights(seed=5))
    with pytest.raises(ShardChangedError, match="changed since its header was read"):
        streamer.run_pass(inputs(place), layer_fn)


# In what the constructor is told


@pytest.fixture
def said(folder):
    return arguments(folder)


def without(said, name):
    return {k: v for k, v in said["tensor_info"].items() if k != name}


def moved(said, name, *, offset=0, shape=None):
    shard, start, size = said["tensor_info"][name]
    return {**said["tensor_info"], name: (shard, start + offset, shape or size)}


FIRST = f"{PREFIX}0.attn.weight"
LAST = f"{PREFIX}6.mlp.weight"
WRONG = {
    "missing tensor": (
        lambda said: {"tensor_info": without(said, LAST)},
        MissingTensorError,
        f"tensor_info lacks 1 tensors of 7 layers: '{LAST}'",
    ),
    "tensor that is not in its file": (
        lambda said: {
            "tensor_info": {
                **said["tensor_info"],
                "other": said["tensor_info"][LAST],
            }
        },
        MissingTensorError,
        r"places 'other' in .*model.safetensors, which has no such tensor",
    ),
    "more layers": (
        lambda said: {"num_layers": 9},
        MissingTensorError,
        f"lacks 6 tensors of 9 layers: '{PREFIX}7.attn.weight'",
    ),
    "other offset": (
        lambda said: {"tensor_info": moved(said, FIRST, offset=2)},
        OffsetError,
        rf"'{FIRST}' at byte \d+ of the data of .*: expected \d+",
    ),
    "other shape": (
        lambda said: {"tensor_info": moved(said, FIRST, shape=(32, 16))},
        TensorMismatchError,
        rf"'{FIRST}' in .* the shape \[32, 16\]: expected \[32, 32\]",
    ),
    "other data offset": (
        lambda said: {"shard_offsets": {"model.safetensors": 8}},
        OffsetError,
        r"the data of .*model.safetensors begins at byte 8: expected \d+",
    ),
    "file without offset": (
        lambda said: {"shard_offsets": {}},
        ConfigError,
        "shard_offsets lacks 'model.safetensors'",
    ),
    "file that is not there": (
        lambda said: {"model_dir": "/nowhere"},
        ReadError,
        "/nowhere/model.safetensors cannot be read",
    ),
    "other sizes": (
        lambda said: {"block_sizes": {**said["block_sizes"], "norm.weight": 33}},
        TensorMismatchError,
        rf"block_sizes says that {PREFIX}0.norm.weight has 33 elements: found 32",
    ),
    "sizes without a key": (
        lambda said: {"block_sizes": {"norm.weight": 32}},
        TensorMismatchError,
        "0.attn.weight has None elements: found 1024",
    ),
    "sizes of too few layers": (
        lambda said: {"block_sizes": [said["block_sizes"]] * 6},
        ConfigError,
        "block_sizes has the sizes of 6 layers, num_layers is 7",
    ),
    "keys of too few layers": (
        lambda said: {"block_keys": [KEYS] * 6},
        ConfigError,
        "block_keys has the names for 6 layers, num_layers is 7",
    ),
    "other keys": (
        lambda said: {"block_keys": ["q.weight"]},
        MissingTensorError,
        "no tensor in tensor_info is called '<prefix>0.q.weight'",
    ),
    "one key as a text": (
        lambda said: {"block_keys": "attn.weight"},
        ConfigError,
        "block_keys has 'attn.weight': expected the names",
    ),
    "no keys": (
        lambda said: {"block_keys": []},
        ConfigError,
        r"block_keys has \[\]: expected the names",
    ),
    "keys that are no list": (
        lambda said: {"block_keys": 3},
        ConfigError,
        "block_keys has 3: expected the names",
    ),
    "a number among lists of keys": (
        lambda said: {"block_keys": [3, *[KEYS] * 6]},
        ConfigError,
        "block_keys has 3: expected the names",
    ),
    "sizes that are no mapping": (
        lambda said: {"block_sizes": 3},
        ConfigError,
        "block_sizes is 3: expected a mapping or a list or a tuple, each a mapping",
    ),
    "sizes of a layer that are no mapping": (
        lambda said: {"block_sizes": [3] * 7},
        ConfigError,
        "block_sizes is .*: expected a mapping or a list",
    ),
    "no keys for the first layer": (
        lambda said: {"block_keys": [[], *[KEYS] * 6]},
        ConfigError,
        r"block_keys has \[\[\], .*: expected the names",
    ),
    "a key among lists of keys": (
        lambda said: {"block_keys": ["attn.weight", *[KEYS] * 6]},
        ConfigError,
        "block_keys has 'attn.weight': expected the names",
    ),
    "a key twice": (
        lambda said: {"block_keys": ["attn.weight", "attn.weight"]},
        ConfigError,
        "block_keys has .*'attn.weight'.*, each once",
    ),
    "dtype by name": (
        lambda said: {"dtype": "bfloat16"},
        ConfigError,
        "dtype is 'bfloat16': expected a type of torch",
    ),
    "no folder": (
        lambda said: {"model_dir": None},
        ConfigError,
        "model_dir is None: expected a text or a path",
    ),
    "a folder that no system takes": (
        lambda said: {"model_dir": "a\0b"},
        ReadError,
        "cannot be read: ",
    ),
    "tensors that are none": (
        lambda said: {"tensor_info": True},
        ConfigError,
        "tensor_info is True: expected a mapping",
    ),
    "no offsets": (
        lambda said: {"shard_offsets": None},
        ConfigError,
        "shard_offsets is None: expected a mapping",
    ),
    "a prefix that is no text": (
        lambda said: {"layer_prefix": 3},
        ConfigError,
        "layer_prefix is 3: expected a text or None",
    ),
    "past the cache by word": (
        lambda said: {"past_cache": "no"},
        ConfigError,
        "past_cache is 'no': expected True or False or None",
    ),
    "no tensors": (
        lambda said: {"tensor_info": {}},
        ConfigError,
        "tensor_info is empty",
    ),
    "no layers": (lambda said: {"num_layers": 0}, ConfigError, "num_layers is 0"),
    "half a layer": (
        lambda said: {"num_layers": 0.5},
        ConfigError,
        "num_layers is 0.5",
    ),
    "other prefix": (
        lambda said: {"layer_prefix": "model.blocks."},
        MissingTensorError,
        "lacks 21 tensors of 7 layers: 'model.blocks.0.attn.weight'.* and 16 more",
    ),
    "impossible pair": (
        lambda said: {"n_gpu": 1, "batch_gpu": 4},
        ConfigError,
        "set batch_gpu to at most 2, or n_gpu to at least 3",
    ),
    "other device": (
        lambda said: {"device": "cuda:7"},
        ConfigError,
        "device is 'cuda:7', but this machine",
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_argument_that_is_not_so_is_refused_at_once(said, case):
    change, error, message = case
    with pytest.raises(error, match=message):
        LayerStreamer(**{"device": "cpu", **said, **change(said)})


def test_two_stacks_with_the_same_keys_ask_for_a_prefix(tmp_path):
    both = make_weights(prefix="encoder.") | make_weights(prefix="decoder.")
    said = arguments(save(tmp_path, both))
    with pytest.raises(
        ConfigError, match=r"2 stacks of layers: 'decoder.', 'encoder.'"
    ):
        LayerStreamer(**said, device="cpu")
    with LayerStreamer(**said, device="cpu", layer_prefix="encoder.") as streamer:
        assert streamer.layer_prefix == "encoder."


# In a checkpoint


def test_layer_that_is_missing_between_others_is_named(tmp_path):
    tensors = {k: v for k, v in WEIGHTS.items() if not k.startswith(f"{PREFIX}4.")}
    folder = save(tmp_path, tensors)
    with pytest.raises(
        MissingTensorError, match="not complete: number 4 has no tensor"
    ):
        LayerStreamer.from_pretrained(folder)


def test_layer_far_beyond_the_others_does_not_take_forever(tmp_path):
    tensors = {**WEIGHTS, f"{PREFIX}999999999.norm.weight": torch.ones(4)}
    folder = save(tmp_path, tensors)
    with pytest.raises(MissingTensorError, match="number 7, 8, 9, 10, 11 has no"):
        LayerStreamer.from_pretrained(folder)


def test_truncated_file_is_refused_when_it_is_opened(folder):
    path = folder / "model.safetensors"
    cut(path, path.stat().st_size - 1)
    with pytest.raises(TruncatedShardError, match="is truncated: expected"):
        LayerStreamer.from_pretrained(folder)


def test_checkpoint_without_layers_is_refused(tmp_path):
    folder = save(tmp_path, {EMBED: WEIGHTS[EMBED]})
    with pytest.raises(ConfigError, match="has 0 stacks of numbered layers: none"):
        LayerStreamer.from_pretrained(folder)


def test_device_without_room_says_so_and_the_streamer_works_when_there_is(sim, stream):
    streamer = stream("hpu", n_gpu=4)
    sim.configure(capacity_bytes=sim.allocated_bytes() + 20_000)
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        streamer.run_pass(0, lambda x, weights, layer: x)
    sim.configure()
    assert_whole(streamer, "hpu")


@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_host_without_memory_to_read_ahead_says_so_and_works_when_there_is(
    stream, place, monkeypatch
):
    """What had been made by then stayed taken: the next pass waited for it for ever."""
    left = 2

    def scarce(nbytes):
        nonlocal left
        if not left:
            raise MemoryError(f"{nbytes} bytes")
        left -= 1
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(pipeline, "host_memory", scarce)
    streamer = stream(place, n_gpu=1, n_cpu_pinned=2, n_cpu=3)
    for _ in range(2):
        with pytest.raises(MemoryError), torch.no_grad():
            streamer.run_pass(0, lambda x, weights, layer: x)
        assert live_leases() == 0
        left = 1
    left = 100
    assert_whole(streamer, place)
