"""Lets a model's streamed weights come from safetensors files."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from stagehand.assembly import Parts
from stagehand.errors import MissingTensorError
from stagehand.names import nearest
from stagehand.residency.blocks import Block
from stagehand.stores.checkpoint import Checkpoint, Extent, KeyMap, key_of
from stagehand.stores.files import FileSet
from stagehand.stores.safetensors import SafetensorsStore, read_tensor
from stagehand.stores.wired import origin_of
from stagehand.torch_private import give_value

__all__ = ["WeightFiles", "back_by_files", "check_key_map", "make_real", "names_in"]


class WeightFiles:
    """The open files of one runtime's weights.

    Attributes:
        plain: Those that hold the weights as they are; None as long as there are none.
    """

    def __init__(self) -> None:
        self.plain: FileSet | None = None
        self._former: list[FileSet] = []
        self._compact: list[FileSet] = []

    def replace_plain(self, files: FileSet, blocks: Iterable[Block]) -> None:
        """Let go of the plain files for others, and of former ones that none needs.

        Args:
            files: The others.
            blocks: All blocks. What is in none of those that stream stays in the files
                where it was.
        """
        stores = [origin_of(block.store) for block in blocks]
        read = {id(s.files) for s in stores if isinstance(s, SafetensorsStore)}
        former = [*self._former, *([] if self.plain is None else [self.plain])]
        self.plain = files
        self._former = [each for each in former if id(each) in read]
        for each in former:
            if id(each) not in read:
                each.close()

    def add_compact(self, *sets: FileSet) -> None:
        """Have more files, which hold weights in a smaller form."""
        self._compact += sets

    def _all(self) -> list[FileSet]:
        plain = [] if self.plain is None else [self.plain]
        return [*self._compact, *self._former, *plain]

    def check(self) -> None:
        """Do nothing if every file is what it was.

        Raises:
            ShardChangedError: Otherwise.
        """
        for files in self._all():
            files.check()

    def close(self) -> None:
        """Let go of the files; host tensors stay valid. Idempotent."""
        with ExitStack() as rest:  # all of them, whatever fails
            for files in self._all():
                rest.callback(files.close)


def back_by_files(
    parts: Parts, model: nn.Module, path: str | Path | Checkpoint, key_map: KeyMap
) -> tuple[FileSet, int]:
    """Give every streamed block, and every tensor without values, a store in files.

    All or nothing: every tensor is matched before anything changes. A parameter that
    the model knows under several names may be in the files under any of them.

    Returns:
        The open files, and the number of streamed blocks that they back now.

    Raises:
        CheckpointError: If a tensor is missing or does not fit, or a file is unsound.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    names = names_in(model, checkpoint, key_map)
    streamed = set(map(id, parts.streamed))
    chosen = [
        block
        for block in parts.blocks
        if block.tensors and (id(block) in streamed or _is_empty(block))
    ]
    wanted = {
        names[id(tensor)]: (tensor.dtype, tuple(tensor.shape))
        for block in chosen
        for tensor in _needed(block, id(block) in streamed)
    }
    found = checkpoint.match(wanted, key_map)
    files = FileSet(checkpoint.files)
    try:
        made = [_Backing.of(block, names, found, files) for block in chosen]
    except BaseException:
        files.close()
        raise
    for backing in made:
        backing.back(parts)
    return files, len(streamed & set(map(id, chosen)))


def _needed(block: Block, is_streamed: bool) -> list[torch.Tensor]:
    return [tensor for tensor in block.tensors if is_streamed or tensor.is_meta]


def _is_empty(block: Block) -> bool:
    return any(tensor.is_meta for tensor in block.tensors)


def names_in(
    model: nn.Module, checkpoint: Checkpoint, key_map: KeyMap
) -> dict[int, str]:
    """The name under which to look for each tensor: of several, one that is there."""
    names: dict[int, str] = {}
    for listing in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in listing:
            known = names.get(id(tensor))
            if known is None or key_of(known, key_map) not in checkpoint:
                names[id(tensor)] = name
    return names


def check_key_map(model: nn.Module, key_map: KeyMap) -> None:
    """Refuse a mapping that translates names which the model does not have.

    Raises:
        MissingTensorError: Naming them, and what is near.
    """
    if not isinstance(key_map, Mapping):
        return
    listings = (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    names = [name for listing in listings for name, _ in listing]
    unknown = sorted(set(key_map) - set(names))
    if unknown:
        near = nearest(unknown[0], names)
        raise MissingTensorError(
            f"key_map has {len(unknown)} of {len(key_map)} names that"
            f" {type(model).__name__} does not have: {unknown[0]!r} first{near};"
            " its keys are the model's names, its values the files'"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backing:
    """What a block gets from files. All that may fail has been done."""

    block: Block
    values: Sequence[torch.Tensor | None]
    """For each tensor what gives it values, if it has none."""
    store: SafetensorsStore | None
    """None if the files do not have all of the block."""

    @classmethod
    def of(
        cls,
        block: Block,
        names: Mapping[int, str],
        found: Mapping[str, Extent],
        files: FileSet,
    ) -> "_Backing":
        extents = [found.get(names[id(tensor)]) for tensor in block.tensors]
        whole = [extent for extent in extents if extent is not None]
        if len(whole) == len(extents):
            store = SafetensorsStore(block.layout, whole, files)
            return cls(block=block, values=store.hosts, store=store)
        # No views of files: whoever reads these tensors does not ask whether they hold.
        values = [
            read_tensor(files, extent) if extent and tensor.is_meta else None
            for tensor, extent in zip(block.tensors, extents, strict=True)
        ]
        return cls(block=block, values=values, store=None)

    def back(self, parts: Parts) -> None:
        make_real(self.block.tensors, self.values)
        if self.store is None:
            parts.masters.adopt(self.block)
        else:
            parts.masters.hand_over(self.block, self.store)


def make_real(
    tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]
) -> None:
    """Give values to those tensors that are on `meta`; they stay the same objects."""
    for tensor, value in zip(tensors, values, strict=True):
        if tensor.is_meta and value is not None:
            give_value(tensor, value)
