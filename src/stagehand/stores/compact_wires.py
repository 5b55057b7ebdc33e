"""Builds the wire of one block from weights that files hold in a smaller form."""

from collections.abc import Sequence

import torch

from stagehand.core.layout import BlockLayout
from stagehand.stores import dequantizing, unpacking
from stagehand.stores.base import Store
from stagehand.stores.file_wire import FileWire, Piece
from stagehand.stores.files import FileSet
from stagehand.stores.packed_files import PackedWeight
from stagehand.stores.packed_layout import packable, packed_layout_of, stands_alone
from stagehand.stores.squareq import QuantizedWeight
from stagehand.stores.squareq_layout import quantized_layout_of

__all__ = ["packed_wire", "quantized_wire"]

_DECODED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def packed_wire(
    layout: BlockLayout,
    hosts: Sequence[torch.Tensor],
    weights: Sequence[PackedWeight | None],
    files: FileSet,
    device_type: str,
    *,
    before: Store | None,
) -> FileWire | None:
    """Return the wire of a block of which some weights are packed; None without any.

    Args:
        layout: The block's.
        hosts: Its host tensors.
        weights: For each entry what a file holds of it, if it is packed there.
        files: The open files.
        device_type: What decodes them.
        before: The store that some host tensors come from, if there was one.
    """
    headers = [
        weight.header if weight and may and entry.is_contiguous else None
        for entry, weight, may in zip(
            layout.entries, weights, packable(layout), strict=True
        )
    ]
    form = packed_layout_of(layout, headers)
    if not form.packed:
        return None
    extents = [w.extent for w, h in zip(weights, headers, strict=True) if w and h]
    pieces = [
        Piece(source=extent, target=place.source)
        for place, extent in zip(form.packed, extents, strict=True)
    ]
    pieces.append(Piece(source=form.directory(), target=form.directory_offset))
    return FileWire(
        layout,
        hosts,
        form,
        pieces,
        before=before,
        streams=_entries_at(layout, {place.offset for place in form.packed}),
        files=files,
        decode=unpacking.unpack_image,
        scratch_nbytes=unpacking.scratch_nbytes(form, device_type),
    )


def quantized_wire(
    layout: BlockLayout,
    hosts: Sequence[torch.Tensor],
    weights: Sequence[QuantizedWeight | None],
    files: FileSet,
    device_type: str,
    *,
    before: Store | None,
) -> FileWire | None:
    """Return the wire of a block of which some weights are quantized.

    None if none can be decoded in place: they cross as they are.

    Args:
        layout: The block's.
        hosts: Its host tensors.
        weights: For each entry what a file holds of it, if it is quantized.
        files: The open files.
        device_type: What decodes them.
        before: The store that some host tensors come from, if there was one.
    """
    chosen = [
        weight
        if weight and may and entry.is_contiguous and entry.dtype in _DECODED
        else None
        for entry, weight, may in zip(
            layout.entries, weights, stands_alone(layout), strict=True
        )
    ]
    form = quantized_layout_of(layout, [w.rows if w else None for w in chosen])
    if not form.quantized:
        return None
    pieces = []
    for place, weight in zip(form.quantized, filter(None, chosen), strict=True):
        pieces += [
            Piece(source=weight.scales, target=place.source),
            Piece(source=weight.zeros, target=place.zeros_at),
            Piece(source=weight.codes, target=place.codes_at),
        ]
    return FileWire(
        layout,
        hosts,
        form,
        pieces,
        before=before,
        streams=_entries_at(layout, {place.offset for place in form.quantized}),
        files=files,
        decode=dequantizing.dequantize_image,
        scratch_nbytes=dequantizing.scratch_nbytes(form, device_type),
    )


def _entries_at(layout: BlockLayout, offsets: set[int]) -> list[int]:
    """Return the numbers of the entries at these offsets: tied ones have the same."""
    return [i for i, entry in enumerate(layout.entries) if entry.offset in offsets]
