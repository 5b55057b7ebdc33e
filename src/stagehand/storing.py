"""How a runtime's weights come to be in files; a part of `Runtime`."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stagehand.compact import Compact, expand, refuse_quantized, wire_blocks
from stagehand.decoding import removal_of, scratch_folder
from stagehand.files import back_by_files, check_key_map
from stagehand.quantized_layers import quantized_model
from stagehand.settings import check_value
from stagehand.stores.checkpoint import Checkpoint, KeyMap, key_of
from stagehand.stores.squareq import SquareQ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from stagehand.assembly import Parts
    from stagehand.files import WeightFiles
    from stagehand.placing import Placing
    from stagehand.weak_refs import ModelRef
    from stagehand.wires import Wires

__all__ = ["Storing"]


class Storing:
    """Lets weights come from safetensors, packed or quantized files."""

    _parts: Parts
    _wires: Wires
    _files: WeightFiles
    _placing: Placing
    _model: ModelRef

    def at_shutdown(self, call: Callable[[nn.Module], None]) -> None:
        """Call something at the end."""
        raise NotImplementedError

    def convert_registry_to_file_backed_sharded(
        self,
        directory: str | Path | Checkpoint | Compact,
        *,
        key_map: KeyMap = None,
        scratch_dir: str | Path | None = None,
    ) -> int:
        """Let streamed weights come from safetensors files instead of host memory.

        The host memory that they took is given up; what is on the `meta` device gets
        its values here. Names must be the model's own. What `stagehand convert` wrote
        crosses the link as it is stored.

        Args:
            directory: A folder of `*.safetensors`, with or without index, or one file;
                or what such were opened as.
            key_map: From the model's names to the files', as a mapping or a function.
            scratch_dir: Where weights that are stored packed or quantized are decoded
                to once, for who reads parameters; the system's directory for temporary
                files by default.

        Returns:
            How many blocks are backed by files now.

        Raises:
            CheckpointError: If a tensor is missing or has another shape or element
                type, or a file is not sound; nothing has changed then.
            StagehandOOMError: If the budget has no room to decode a block; the weights
                come from files then, decoded.
        """
        model = self._model.check()
        check_value("scratch_dir", scratch_dir, str | Path | None)
        if not isinstance(directory, Checkpoint | Compact):
            check_value("directory", directory, str | Path)
        with self._placing.at_rest():  # nobody moves a block meanwhile
            self._placing.park()
            if not isinstance(directory, Checkpoint | Compact):
                check_key_map(model, key_map)
                directory = Checkpoint.open(directory)
            opened = directory
            if isinstance(opened, Checkpoint):
                refuse_quantized(opened)
            with self._scratch(scratch_dir) as folder_for:
                if isinstance(opened, Checkpoint):
                    opened = expand(opened, folder_for) or opened
                compact = opened if isinstance(opened, Compact) else None
                plain = opened.plain if isinstance(opened, Compact) else opened
                try:
                    files, count = back_by_files(self._parts, model, plain, key_map)
                except BaseException:
                    if compact is not None:
                        compact.files.close()
                    raise
            if compact is not None:
                self._files.add_compact(compact.files)
            self._files.replace_plain(files, self._parts.blocks)
            if compact is not None:
                wire_blocks(self._parts, self._wires, compact, model, key_map)
            self._placing.place_between_passes()
            return count

    def convert_registry_to_squareq_backed(
        self,
        path: str | Path,
        *,
        manifest: str | Path | None = None,
        key_map: KeyMap = None,
        scratch_dir: str | Path | None = None,
    ) -> int:
        """Let quantized weights be the truth of the linear layers that they are for.

        INT8 crosses the link and is dequantized on the device. The other weights stay
        what they are. Layers with quantized weights cannot be trained; adapters on them
        can.

        Args:
            path: A `.fpk` or `.slab` file of SquareQ v1; or a `.safetensors` file of v2
                with its manifest, or the folder of both.
            manifest: The manifest, if it is not beside the file under its name.
            key_map: From the model's names to the files', as a mapping or a function.
            scratch_dir: Where weights are dequantized to once, for who reads
                parameters; the system's directory for temporary files by default.

        Returns:
            How many blocks have quantized weights now.

        Raises:
            ManifestError: If the manifest does not fit its file, this library or the
                model; nothing has changed then.
            CheckpointError: If a file is not sound or cannot be written.
            StagehandOOMError: If the budget has no room to decode a block.
        """
        model = self._model.check()
        check_value("path", path, str | Path)
        check_value("manifest", manifest, str | Path | None)
        check_value("scratch_dir", scratch_dir, str | Path | None)
        with self._placing.at_rest():
            self._placing.park()
            slab = SquareQ.open(path, manifest)
            try:
                with self._scratch(scratch_dir) as folder_for:
                    files, count = quantized_model(
                        self._parts,
                        self._wires,
                        model,
                        slab,
                        lambda name: key_of(name, key_map),
                        folder_for,
                    )
            except BaseException:
                slab.files.close()
                raise
            self._files.add_compact(slab.files, files)
            self._placing.place_between_passes()
            return count

    @contextmanager
    def _scratch(
        self, scratch_dir: str | Path | None
    ) -> Iterator[Callable[[int], Path]]:
        """Lend what makes folders for so many bytes.

        They go at the shutdown, or with the model; at once if what they are for fails.
        """
        folders: list[Path] = []
        remove = weakref.finalize(self._model.check(), removal_of(folders))

        def folder_for(nbytes: int) -> Path:
            folders.append(scratch_folder(nbytes, scratch_dir))
            return folders[-1]

        try:
            yield folder_for
        except BaseException:
            remove()
            raise
        self.at_shutdown(lambda _: remove())
