"""`LayerStreamer`: runs a stack of layers whose weights come from files."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from stagehand.core.device import find_device
from stagehand.core.telemetry import Telemetry
from stagehand.errors import ConfigError, MissingTensorError, StagehandWarning
from stagehand.names import nearest
from stagehand.settings import check_value
from stagehand.stores.checkpoint import Checkpoint
from stagehand.stores.files import FileSet
from stagehand.stores.packed_files import unpacked
from stagehand.stores.safetensors import read_tensor
from stagehand.streamer.depths import Depths
from stagehand.streamer.images import LayerImage, wanted_dtype
from stagehand.streamer.layers import describe, open_stack
from stagehand.streamer.pipeline import Pipeline
from stagehand.streamer.progress import Progress
from stagehand.streamer.rates import measure_rates
from stagehand.units import format_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from stagehand.streamer.layers import BlockKeys, BlockSizes, TensorInfo
    from stagehand.streamer.rates import Rates

__all__ = ["LayerStreamer", "described"]

_X = TypeVar("_X")


class LayerStreamer:
    """Streams the layers of a model from safetensors files to the device, in order.

    For code that has the layers' computation as a function, and no module whose
    weights could stream (`stagehand.layer()` and `stagehand.load()` are for those).
    Three stages work at once: files to memory, memory to device, compute. They go on
    across passes: when one ends, the first layers of the next are loading.

    Weights are exact, and valid until `layer_fn` returns. Whoever keeps one longer, as
    autograd does for a backward pass, keeps its layer's device memory: it is not
    overwritten, the streamer takes new memory, and warns once.

    After any failure, `KeyboardInterrupt` included, the streamer can be used again.

    Memory, with `B` the bytes of the largest layer: `(n_gpu + 1) * B` on the device, as
    its allocator rounds `B` up, and what `dtype` casts of one layer; `(n_cpu_pinned +
    1) * B` pinned, `(n_cpu + 1) * B` in ordinary memory; where files are read past the
    page cache, a page more (4096 bytes) for each layer. Of a checkpoint that `stagehand
    convert --packed` wrote, layers wait on the host and cross the link packed: three
    quarters of `B`. The device has two of those more, to decode them from.

    Args:
        model_dir: The directory of the files.
        tensor_info: For each tensor its file, its first byte in the file's data, and
            its shape.
        shard_offsets: For each file, the byte at which its data begins.
        block_keys: The names of a layer's tensors, as they follow the layer's number;
            one list for all layers, or one for each.
        block_sizes: For each of these names the number of elements; one mapping for all
            layers, or one for each. None believes the files.
        dtype: Floating-point weights are handed out as this type; they are cast on the
            device where the file has another. None leaves them as they are.
        num_layers: Number of layers.
        n_gpu: Layers that wait on the device, ahead of the one that computes.
        n_cpu_pinned: Layers that wait in pinned memory; with memory for all, files are
            read once. None or 0 skips the stage: then copies to the device are made
            from ordinary memory, which is slow.
        n_cpu: Layers that wait in ordinary memory, before they go to pinned memory;
            with memory for all, files are read once. None or 0 skips the stage: files
            are read straight into pinned memory, the fastest way.
        batch_gpu: Layers that compute takes at a time, when all are on the device. None
            takes each as it comes.
        batch_cpu_pinned: Layers that go to the device at a time, when all are pinned.
        batch_cpu: Layers that leave ordinary memory at a time, when all are read.
        track_progress: Draw a line for each pass, where a terminal shows it.
        layer_prefix: What a layer's number follows in the tensors' names, such as
            `"model.layers."`. None finds it.
        device: Where to compute: the accelerator by default, the host without one.
            There, device memory is host memory, and nothing is pinned.
        past_cache: Whether what is not in the system's page cache is read past it. None
            does so if the files would not fit there.

    Raises:
        ConfigError: If arguments contradict each other, such as a batch that is larger
            than its stage; it says what would work.
        CheckpointError: If a file is not sound or not what the arguments say.

    Example:
        >>> with LayerStreamer.from_pretrained("path/to/model") as streamer:
        ...     embed = streamer.load_static("model.embed_tokens.weight")
        ...     hidden = streamer.run_pass(embed[tokens], layer_fn)
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        tensor_info: TensorInfo,
        shard_offsets: Mapping[str, int],
        block_keys: BlockKeys,
        block_sizes: BlockSizes | None,
        dtype: torch.dtype | None,
        num_layers: int,
        n_gpu: int = 2,
        n_cpu_pinned: int | None = 4,
        n_cpu: int | None = None,
        batch_gpu: int | None = None,
        batch_cpu_pinned: int | None = None,
        batch_cpu: int | None = None,
        track_progress: bool = True,
        *,
        layer_prefix: str | None = None,
        device: torch.device | str | int | None = None,
        past_cache: bool | None = None,
    ) -> None:
        self.depths = Depths(
            n_gpu=n_gpu,
            n_cpu_pinned=n_cpu_pinned,
            n_cpu=n_cpu,
            batch_gpu=batch_gpu,
            batch_cpu_pinned=batch_cpu_pinned,
            batch_cpu=batch_cpu,
        )
        """How many layers each stage buffers and hands on."""
        check_value("past_cache", past_cache, bool | None)
        check_value("track_progress", track_progress, bool)
        if not isinstance(dtype, torch.dtype | None):
            raise ConfigError(
                f"dtype is {dtype!r}: expected a type of torch, such as"
                " torch.bfloat16, or None for what the files have"
            )
        stack = open_stack(
            model_dir,
            tensor_info=tensor_info,
            shard_offsets=shard_offsets,
            block_keys=block_keys,
            block_sizes=block_sizes,
            num_layers=num_layers,
            layer_prefix=layer_prefix,
        )
        self.model_dir = Path(model_dir).expanduser()
        """The directory of the files."""
        self.num_layers = num_layers
        """Number of layers."""
        self.layer_prefix = stack.prefix
        """What a layer's number follows in the tensors' names."""
        self.dtype = dtype
        """What floating-point weights are handed out as; None leaves them."""
        self.track_progress = track_progress
        """Whether a line is drawn for each pass."""
        self.telemetry = Telemetry(times_uses=False)
        """One record for each of the last passes: bytes, and time on the host."""
        self._device = find_device(device)
        self._checkpoint = stack.checkpoint
        self._packed = stack.packed
        self._files = FileSet(stack.checkpoint.files, past_cache=past_cache)
        self._images = images = [
            LayerImage(f"{stack.prefix}{number}", extents, dtype)
            for number, extents in enumerate(stack.layers)
        ]
        self.layer_bytes = tuple(image.nbytes for image in images)
        """Bytes of each layer, on the device as on the host."""
        self.read_bytes = sum(image.read_bytes for image in images)
        """Bytes of all layers, in their files."""
        self._pipeline = Pipeline(
            self._device, images, self._files, self.depths, self.telemetry.counters
        )
        self._busy = threading.Lock()
        self.passes = 0
        """Passes that have come to their end."""
        self._warned = False
        self._finalizer = weakref.finalize(self, self._pipeline.close)

    @classmethod
    def from_pretrained(
        cls,
        model_dir: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        layer_prefix: str | None = None,
        **options: Any,
    ) -> LayerStreamer:
        """Return a streamer for a checkpoint, with all else found in its files.

        Layers may differ in their tensors, sizes and types.

        Args:
            model_dir: A directory with safetensors files, its index, or one file.
            dtype: See the class.
            layer_prefix: See the class. None takes the stack of numbered layers that
                has most of the bytes in such stacks.
            **options: The other options of the class, such as `n_gpu`.

        Raises:
            ConfigError: If it is not plain which layers are meant; it lists them.
            CheckpointError: If the files are not sound.
        """
        arguments = described(model_dir, layer_prefix)
        return cls(dtype=dtype, **{**arguments, **options})

    def __repr__(self) -> str:
        return (
            f"LayerStreamer({self.num_layers} layers {self.layer_prefix!r},"
            f" {format_bytes(sum(self.layer_bytes))}, {self.passes} passes,"
            f" {format_bytes(self._pipeline.device_account.held_bytes)} on"
            f" {self._device.torch_device})"
        )

    def load_static(self, name: str) -> torch.Tensor:
        """Return one tensor of the files on the device, such as an embedding.

        It belongs to the caller: the streamer keeps no reference to it.

        Args:
            name: Its full name.

        Raises:
            ConfigError: If the name is no text.
            MissingTensorError: If there is no such tensor; it names those that are
                near.
            CheckpointError: If it cannot be read.
        """
        check_value("name", name, str)
        packed, extent = self._packed.get(name), self._checkpoint.get(name)
        if packed is not None:
            weight = packed.decoded(self._files).to(self._device.torch_device)
            return weight.to(wanted_dtype(name, weight.dtype, self.dtype))
        if extent is None:
            names = [unpacked(key)[0] for key in self._checkpoint]
            raise MissingTensorError(
                f"tensor {name!r} is not in {self._checkpoint}{nearest(name, names)}"
            )
        dtype = wanted_dtype(name, extent.dtype, self.dtype)
        tensor = read_tensor(self._files, extent)
        return tensor.to(self._device.torch_device).to(dtype)

    def run_pass(
        self,
        x: _X,
        layer_fn: Callable[[_X, dict[str, torch.Tensor], int], _X],
    ) -> _X:
        """Run all layers, each on what the one before it returned.

        Args:
            x: What the first layer gets.
            layer_fn: Called as `layer_fn(x, weights, layer)`, with the layer's weights
                on the device by the names in `block_keys`. Returns the new `x`. It
                must not change weights in place: that would last until the layer is
                loaded again, and when that is depends on the depths.

        Returns:
            What the last layer returned.

        Raises:
            ConfigError: If a pass is under way, `layer_fn` is no function or returns
                None, or a CUDA graph is captured.
            CheckpointError: If a layer cannot be read; it names layer and file.
            ClosedError: After `close()`.
        """
        if not callable(layer_fn):
            raise ConfigError(
                f"layer_fn is {layer_fn!r}: expected a function that takes what the"
                " layer before it returned, its weights and its number"
            )
        self._refuse_if_busy("run_pass()")
        self._device.refuse_capture("a pass of a streamer")
        with self._busy:
            progress = Progress("layers", self.num_layers, on=self.track_progress)
            try:
                began = time.perf_counter()
                result = self._run(x, layer_fn, progress)
                self._record(time.perf_counter() - began)
            except BaseException as error:
                self._pipeline.reset(orderly=isinstance(error, Exception))
                self.telemetry.counters.reset()  # a pass that failed is no step
                raise
            finally:
                progress.close()
        return result

    def _refuse_if_busy(self, what: str) -> None:
        if self._busy.locked():
            raise ConfigError(
                f"{what} was called while a pass of this streamer is under way: wait"
                " for its end, or use another streamer"
            )

    def _run(
        self,
        x: _X,
        layer_fn: Callable[[_X, dict[str, torch.Tensor], int], _X],
        progress: Progress,
    ) -> _X:
        pipeline = self._pipeline
        pipeline.begin_pass()
        first = 0
        while first < self.num_layers:
            batch = pipeline.batch_at(first)
            pipeline.before(batch)
            for layer in batch:
                # No reference is kept: memory that nobody holds is used again.
                x = layer_fn(x, pipeline.tensors(layer), layer)
                if x is None:
                    raise ConfigError(
                        f"layer_fn returned None for layer {layer}: expected what the"
                        " next layer gets"
                    )
                pipeline.after(layer)
                progress.advance()
            first = batch.stop
        pipeline.end_pass()
        return x

    def _record(self, seconds: float) -> None:
        self.passes += 1
        counters, account = self.telemetry.counters, self._pipeline.device_account
        if counters.abandoned_slots and not self._warned:
            self._warned = True
            warnings.warn(
                f"weights of {counters.abandoned_slots} layers are kept after layer_fn"
                " returned, by autograd or by the caller: their device memory stays"
                " with them, beyond what the streamer holds; run under"
                " torch.no_grad(), or copy what is to be kept",
                StagehandWarning,
                stacklevel=3,
            )
        self.telemetry.end_step(
            step=self.passes,
            duration_ms=seconds * 1e3,
            device_used_bytes=account.held_bytes,
            device_peak_bytes=account.peak_bytes,
            device_allocated_bytes=self._device.allocated_bytes(),
        )

    def settle(self) -> None:
        """Wait until the device is done, and all is there that is loaded ahead.

        Passes between two calls take the time that they take in the long run: as much
        is read as is used, however much the stages hold.

        Raises:
            ConfigError: If a pass is under way.
            CheckpointError: If what comes next cannot be read.
        """
        self._refuse_if_busy("settle()")
        with self._busy:
            self._pipeline.settle()

    def measure_rates(self) -> Rates:
        """Measure what disk, memory and link give at most, to compare passes with.

        Raises:
            CheckpointError: If a layer cannot be read.
        """
        return measure_rates(self._images, self._files, self._device)

    def close(self) -> None:
        """Stop the threads and give all memory back. Idempotent.

        Raises:
            ConfigError: If a pass is under way.
        """
        self._refuse_if_busy("close()")
        with self._busy:
            self._pipeline.close()
            self._finalizer.detach()
            self.telemetry.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def described(
    model_dir: str | os.PathLike[str], layer_prefix: str | None
) -> dict[str, Any]:
    """Return the arguments of the class for a checkpoint, all but the dtype."""
    check_value("model_dir", model_dir, str | Path)
    check_value("layer_prefix", layer_prefix, str | None)
    path = Path(model_dir).expanduser().absolute()
    checkpoint = Checkpoint.open(path)
    root = path if path.is_dir() else path.parent
    return {"model_dir": root, **describe(checkpoint, root, layer_prefix)}
