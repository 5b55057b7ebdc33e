"""Where each tensor of a block lies in the block's flat byte image.

A block crosses the link as one copy, so its tensors are packed into one image:
`layout_of` decides where, `BlockLayout.views` gives the tensors back, on whatever
memory holds an image, and `BlockLayout.pack` fills one. The plan is data; nothing here
owns memory.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeAlias

import torch

from stagehand.core.copies import copy_all, copy_values
from stagehand.errors import StagehandInternalError
from stagehand.torch_private import dispatch_modes, inference_mode, without_modes
from stagehand.units import rounded_up

__all__ = [
    "ALIGNMENT",
    "BlockLayout",
    "Place",
    "Runs",
    "can_cast",
    "contiguous_stride",
    "copy_rows",
    "layout_of",
    "moved",
    "overlapping",
    "own_storage",
    "placed",
    "placed_like",
    "plain_tensors",
    "relocate",
    "same_bits",
    "spanned_bytes",
]

ALIGNMENT = 256
"""Bytes. What device allocators promise and what vectorized kernels rely on."""

Runs: TypeAlias = "Sequence[tuple[int, int]]"
"""Rows: those from the first number of a pair to before the second."""

_WIDEST_ITEM = 16
"""Bytes of the widest element (complex128): a multiple of every element's size."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor's place in an image."""

    name: str
    """The tensor's name, for errors."""
    dtype: torch.dtype
    """Its own element type: an image never converts."""
    shape: tuple[int, ...]
    """Its sizes."""
    stride: tuple[int, ...]
    """Its strides in the image, in elements."""
    offset: int
    """Bytes from the start of the image to the first element."""
    nbytes: int
    """Bytes from the first element to the end of the last."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return self.nbytes == 0 or all(
            size == 1 or mine == rowmajor
            for size, mine, rowmajor in zip(
                self.shape, self.stride, contiguous_stride(self.shape), strict=True
            )
        )

    def parts_of(self, runs: Runs) -> list[tuple[int, int]]:
        """Return where in the image some rows lie, from byte to byte."""
        row = self.nbytes // self.shape[0]
        start = self.offset
        return [(start + first * row, start + end * row) for first, end in runs if row]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The places of all tensors of a block in its image."""

    entries: tuple[Place, ...]
    """One for each tensor, in the order they were given."""
    nbytes: int
    """Size of the image, a multiple of the alignment."""

    def views(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Return one tensor per entry that reads and writes the image's memory.

        They are ordinary tensors even when this is called inside
        `torch.inference_mode()`, require no gradient, and have a version counter of
        their own: a write to one does not look like a write to its neighbours.

        Args:
            image: 1-D contiguous uint8, at least `nbytes` long, on any device. It must
                start at a multiple of 16 bytes in its storage.

        Raises:
            StagehandInternalError: If `image` is something else.
        """
        self.check_image(image)
        start = image.storage_offset()
        with inference_mode(False), without_modes():  # as in `placed`
            storage = image.untyped_storage()
            return [
                torch.empty(0, dtype=entry.dtype, device=image.device).set_(
                    storage,
                    (start + entry.offset) // entry.dtype.itemsize,
                    entry.shape,
                    entry.stride,
                )
                for entry in self.entries
            ]

    def host_views(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Like `views`, of an image in host memory, but each with a storage of its own.

        So `torch.save` of one writes that one, not all its neighbours, and refuses
        none. If entries overlap, all have the image's storage in common.
        """
        views = self.views(image)
        if self.overlaps:
            return views
        return [
            own_storage(view, entry.nbytes)
            for view, entry in zip(views, self.entries, strict=True)
        ]

    @property
    def overlaps(self) -> bool:
        """Whether two entries share bytes."""
        ends = sorted((e.offset, e.offset + e.nbytes) for e in self.entries if e.nbytes)
        return any(end > start for (_, end), (start, _) in pairwise(ends))

    @property
    def rows(self) -> int:
        """How many rows all entries have, each behind the one before; 0 if they differ.

        A row is what one value of a tensor's first index selects.
        """
        counts = {
            entry.shape[0] if entry.shape and entry.is_contiguous else 0
            for entry in self.entries
        }
        return counts.pop() if len(counts) == 1 and not self.overlaps else 0

    def parts_of(self, runs: Runs) -> list[tuple[int, int]]:
        """Return where in the image some rows of each entry lie, from byte to byte."""
        return [part for entry in self.entries for part in entry.parts_of(runs)]

    def pack(self, tensors: Sequence[torch.Tensor], image: torch.Tensor) -> None:
        """Copy the values of one tensor per entry into the image.

        Raises:
            StagehandInternalError: If there are more or fewer tensors than entries, one
                has another shape or dtype, or `image` cannot hold the layout.
        """
        if len(tensors) != len(self.entries):
            raise StagehandInternalError(
                f"{len(tensors)} tensors for a layout of {len(self.entries)} entries"
            )
        for entry, tensor in zip(self.entries, tensors, strict=True):
            if tensor.shape != entry.shape or tensor.dtype != entry.dtype:
                raise StagehandInternalError(
                    f"tensor {entry.name!r} has {tensor.dtype} {list(tensor.shape)}: "
                    f"the layout was made for {entry.dtype} {list(entry.shape)}"
                )
        copy_all(self.views(image), tensors)

    @property
    def _widest(self) -> int:
        """Bytes of the widest element."""
        return max((entry.dtype.itemsize for entry in self.entries), default=1)

    def pack_rows(
        self, tensors: Sequence[torch.Tensor], image: torch.Tensor, runs: Runs
    ) -> None:
        """Copy some rows of one tensor per entry into the image."""
        for view, tensor in zip(self.views(image), tensors, strict=True):
            copy_rows(view, tensor, runs)

    def matches(self, image: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether an image holds the bits of one tensor per entry."""
        return all(map(same_bits, self.views(image), tensors))

    def check_image(self, image: torch.Tensor) -> None:
        """Do nothing if `image` can hold this layout.

        Raises:
            StagehandInternalError: Otherwise.
        """
        fits = (
            image.dtype == torch.uint8
            and image.dim() == 1
            and image.is_contiguous()
            and image.numel() >= self.nbytes
            and image.storage_offset() % self._widest == 0
        )
        if not fits:
            raise StagehandInternalError(
                f"an image is {image.dtype} {list(image.shape)} at byte "
                f"{image.storage_offset()} of its storage: expected one dimension of "
                f"at least {self.nbytes} contiguous uint8 at a multiple of "
                f"{self._widest}"
            )


def own_storage(view: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the same host memory under a storage of exactly `nbytes` bytes.

    The new tensor keeps the memory of `view` alive.
    """
    if not nbytes:  # where it lies, its neighbour begins
        nothing = torch.UntypedStorage()  # type: ignore[no-untyped-call]
        return placed(nothing, view.dtype, 0, view.shape, view.stride())
    memory = (ctypes.c_ubyte * nbytes).from_address(view.data_ptr())
    memory.tensor = view  # type: ignore[attr-defined]
    with plain_tensors():
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return placed(storage, view.dtype, 0, view.shape, view.stride())


def placed(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    start: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Return an ordinary tensor on a storage; `start` and `stride` in elements.

    No dispatch mode sees it: the sanitizer would take `set_` for a write to the memory.
    """
    if dispatch_modes() or torch.is_inference_mode_enabled():
        with inference_mode(False), without_modes():  # not where it does nothing
            return placed(storage, dtype, start, shape, stride)
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, start, shape, stride)


def placed_like(tensor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return bytes as a tensor of the type, shape and strides of another one."""
    start = int(buffer.storage_offset()) // tensor.element_size()
    storage = buffer.untyped_storage()
    return placed(storage, tensor.dtype, start, tensor.shape, tensor.stride())


def layout_of(
    named: Sequence[tuple[str, torch.Tensor]], *, alignment: int = ALIGNMENT
) -> BlockLayout:
    """Return where the tensors lie in an image, each at an aligned offset.

    Strides survive where a tensor fills its memory (any permutation of contiguous, such
    as channels_last or a transpose). A tensor with gaps, an expanded one and one with a
    conjugate or negative bit get those that a copy of it on another device has.
    Tensors that overlap in memory (tied, or slices of each other) overlap in the image
    just as they do now: an in-place change of one stays visible in the other. Their
    common span is aligned as a whole.

    Cost: `sum(round_up(bytes, alignment))` over the tensors, overlapping ones once.

    Args:
        named: Names and tensors, on any device, `meta` included.
        alignment: Bytes; a multiple of 16.
    """
    placed: dict[int, Place] = {}
    nbytes = 0
    for span in _spans([tensor for _, tensor in named]):
        for index in span.members:
            placed[index] = _place(*named[index], span, nbytes)
        nbytes += rounded_up(span.nbytes, alignment)
    return BlockLayout(
        entries=tuple(placed[index] for index in range(len(named))), nbytes=nbytes
    )


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, as torch counts them."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def copy_rows(target: torch.Tensor, source: torch.Tensor, runs: Runs) -> None:
    """Like `copy_values`, of some rows."""
    for first, end in runs:
        copy_values(target[first:end], source[first:end])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and shape hold the same bits.

    Not `torch.equal`: by value a NaN differs from itself, and -0.0 equals 0.0.
    """
    pair = [_as_integers(tensor) for tensor in (one, other)]
    if all(map(_is_in_words, pair)):
        # Compares three times as fast as 16-bit elements do.
        pair = [tensor.view(-1).view(torch.int64) for tensor in pair]
    return torch.equal(*pair)


@cache
def can_cast(one: torch.dtype, other: torch.dtype) -> bool:
    """Return whether torch casts a type to another: none that holds two numbers."""
    try:
        torch.empty(1, dtype=one, device="cpu").to(other)
    except NotImplementedError:
        return False
    return True


def moved(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Return a tensor as it is on another device: an inference tensor if it is one."""
    with inference_mode(tensor.is_inference()):
        return tensor.to(place)


def relocate(tensor: torch.Tensor, place: torch.device) -> None:
    """Move a tensor to a device in place, with all tensors that a subclass wraps."""
    _follow(tensor, moved(tensor.data, place))


def _follow(tensor: torch.Tensor, there: torch.Tensor) -> None:
    """Point a tensor, and those that it wraps, to where a copy of it lies."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            _follow(getattr(tensor, name), getattr(there, name))
    tensor.data = there


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Make tensors that any later code may use, whichever mode the caller is in.

    A tensor born in inference mode could never take part in autograd again.
    """
    with inference_mode(False):
        torch.set_grad_enabled(False)  # until it is left
        yield


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def _is_in_words(tensor: torch.Tensor) -> bool:
    start, end = _byte_range(tensor)
    return tensor.is_contiguous() and start % 8 == 0 and end % 8 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Bytes that must lie together: one tensor, or several that overlap."""

    members: list[int]
    """Indices of the tensors."""
    start: int
    """First byte, counted in the tensors' storage."""
    nbytes: int


def _place(name: str, tensor: torch.Tensor, span: _Span, offset: int) -> Place:
    shape = tuple(tensor.shape)
    stride = tuple(tensor.stride())
    nbytes = span.nbytes
    if len(span.members) > 1:
        start, end = _byte_range(tensor)
        offset += start - span.start
        nbytes = end - start
    elif not _is_dense(tensor):
        stride = torch.empty_like(tensor, device="meta").stride()  # as `to()` does
    return Place(
        name=name,
        dtype=tensor.dtype,
        shape=shape,
        stride=stride,
        offset=offset,
        nbytes=nbytes,
    )


def _spans(tensors: Sequence[torch.Tensor]) -> list[_Span]:
    """Return the spans of the tensors, ordered by their first member."""
    # The storages are kept alive here: their ids are the keys.
    storages = [tensor.untyped_storage() for tensor in tensors]
    by_storage: dict[int, list[int]] = {}
    spans: list[_Span] = []
    for index, (tensor, storage) in enumerate(zip(tensors, storages, strict=True)):
        if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
            spans.append(_span([index], tensors))
        else:
            by_storage.setdefault(id(storage), []).append(index)
    for indices in by_storage.values():
        ranges = [_byte_range(tensors[index]) for index in indices]
        spans += [
            _span([indices[number] for number in group], tensors)
            for group in overlapping(ranges)
        ]
    return sorted(spans, key=lambda span: min(span.members))


def _span(members: list[int], tensors: Sequence[torch.Tensor]) -> _Span:
    ranges = [_byte_range(tensors[index]) for index in members]
    start = min(start for start, _ in ranges)
    if len(members) == 1:
        tensor = tensors[members[0]]
        nbytes = tensor.numel() * tensor.dtype.itemsize
        return _Span(members=members, start=start, nbytes=nbytes)
    if any(
        (first - start) % tensors[index].dtype.itemsize
        for index, (first, _) in zip(members, ranges, strict=True)
    ):
        # Slices of different element types: begin where all of them can be viewed.
        start -= start % _WIDEST_ITEM
    nbytes = max(end for _, end in ranges) - start
    return _Span(members=members, start=start, nbytes=nbytes)


def overlapping(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the numbers of byte ranges, grouped by overlap, direct or through others.

    Args:
        ranges: First byte and end of each, counted in the same memory; none is empty.
    """
    groups: list[list[int]] = []
    reach = 0
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, end = ranges[number]
        if groups and start < reach:
            groups[-1].append(number)
            reach = max(reach, end)
        else:
            groups.append([number])
            reach = end
    return groups


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first to the end of its last, gaps included."""
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.dtype.itemsize


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte and the end of a tensor within its storage."""
    start = int(tensor.storage_offset()) * tensor.dtype.itemsize
    return start, start + spanned_bytes(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its memory: a permutation of contiguous."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    step = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    ):
        if stride != step:
            return False
        step *= size
    return True
