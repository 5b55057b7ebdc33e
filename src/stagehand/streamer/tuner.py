"""`LayerStreamerTuner`: finds the depths with which a streamer is fastest here."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagehand.errors import ConfigError, StagehandWarning
from stagehand.settings import check_value
from stagehand.stores.headers import FileStamp
from stagehand.streamer.depths import Depths
from stagehand.streamer.grid import Sizes, candidates, floors, too_large, worth_it
from stagehand.streamer.layers import check_sources
from stagehand.streamer.outcomes import Outcome, OutcomeFile, write_whole
from stagehand.streamer.progress import Progress
from stagehand.streamer.streamer import LayerStreamer, described
from stagehand.streamer.trial import Job, TrialProcess, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from stagehand.streamer.layers import BlockKeys, BlockSizes, TensorInfo
    from stagehand.streamer.rates import Rates

    Run = Callable[[], object]

__all__ = ["LayerStreamerTuner"]


class LayerStreamerTuner:
    """Searches a grid of depths and batches for the fastest on this machine.

    Each configuration runs in a process of its own, so a crash there is one result
    among others. Of its runs the first does not count, and it is stopped as soon as it
    cannot win any more.

    First the disk, the memory and the link are measured. What does not fit the free
    memory, or could not beat the best even at those rates, is not run at all, nor are
    two configurations that do the same.

    The time of a run ends when all stages are as full as before it, so that a pause
    between runs gains nothing: it is what a pass takes among many.

    Args:
        setup_fn: Called once in each process with the streamer; returns a function
            without arguments that makes one run, each like the others. It is pickled:
            a function at the top level of a module. The processes import that module:
            a script calls `tune()` under `if __name__ == "__main__":`.
        model_dir: See `LayerStreamer`, as the next six.
        tensor_info: See above.
        shard_offsets: See above.
        block_keys: See above.
        block_sizes: See above.
        dtype: See above.
        num_layers: See above.
        n_gpu_values: What to try for `n_gpu`; the others likewise.
        n_cpu_pinned_values: See above.
        n_cpu_values: See above.
        batch_gpu_values: See above.
        batch_cpu_pinned_values: See above.
        batch_cpu_values: See above.
        n_runs: Runs of each configuration, with the one that does not count: 2 or more.
        sleep_seconds: Pause between runs, so that device and memory come to rest.
        timeout_seconds: A setup or a run that takes longer is given up.
        results_file: Keeps each result: a search that was interrupted goes on from
            there. Configurations that were not run, because they did not fit the memory
            or could not win, are judged again.
        config_file: Where to write the best configuration, as JSON:
            `LayerStreamer.from_pretrained(model_dir, **json.load(file))`.
        track_progress: Draw a line for the search, where a terminal shows it.
        layer_prefix: See `LayerStreamer`.
        device: See `LayerStreamer`.

    Raises:
        ConfigError: If an argument cannot work.
        CheckpointError: If the files are not what the arguments say.

    Example:
        >>> tuner = LayerStreamerTuner.from_pretrained(setup, "path/to/model")
        >>> best = tuner.tune()
        >>> print(tuner.summary())
    """

    def __init__(
        self,
        setup_fn: Callable[[LayerStreamer], Run],
        model_dir: str | os.PathLike[str],
        tensor_info: TensorInfo,
        shard_offsets: Mapping[str, int],
        block_keys: BlockKeys,
        block_sizes: BlockSizes | None,
        dtype: torch.dtype | None,
        num_layers: int,
        n_gpu_values: Sequence[int] = (1, 2, 4),
        n_cpu_pinned_values: Sequence[int | None] = (None, 2, 4),
        n_cpu_values: Sequence[int | None] = (None, 2, 4),
        batch_gpu_values: Sequence[int | None] = (None, 1, 2),
        batch_cpu_pinned_values: Sequence[int | None] = (None, 1, 2),
        batch_cpu_values: Sequence[int | None] = (None, 1, 2),
        n_runs: int = 5,
        sleep_seconds: float = 3.0,
        *,
        timeout_seconds: float = 600.0,
        results_file: str | os.PathLike[str] | None = None,
        config_file: str | os.PathLike[str] | None = None,
        track_progress: bool = True,
        layer_prefix: str | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        self._check(setup_fn, n_runs, sleep_seconds, timeout_seconds)
        check_sources(model_dir, tensor_info, shard_offsets)
        check_value("results_file", results_file, str | Path | None)
        check_value("config_file", config_file, str | Path | None)
        check_value("track_progress", track_progress, bool)
        if config_file is not None:
            file = Path(config_file)
            if os.path.isdir(file) or not os.path.isdir(file.parent):
                raise ConfigError(
                    f"config_file is {str(config_file)!r}: expected a file in a"
                    " directory that exists"
                )
        self._setup_fn = setup_fn
        self._arguments: dict[str, Any] = {
            "model_dir": Path(model_dir).expanduser(),
            "tensor_info": dict(tensor_info),
            "shard_offsets": dict(shard_offsets),
            "block_keys": block_keys,
            "block_sizes": block_sizes,
            "dtype": dtype,
            "num_layers": num_layers,
            "layer_prefix": layer_prefix,
            "device": device,
        }
        self._values: dict[str, Sequence[int | None]] = {
            "n_gpu": n_gpu_values,
            "n_cpu_pinned": n_cpu_pinned_values,
            "n_cpu": n_cpu_values,
            "batch_gpu": batch_gpu_values,
            "batch_cpu_pinned": batch_cpu_pinned_values,
            "batch_cpu": batch_cpu_values,
        }
        self._n_runs = n_runs
        self._sleep_seconds = sleep_seconds
        self._timeout_seconds = timeout_seconds
        self._config_file = None if config_file is None else Path(config_file)
        self._track_progress = track_progress
        self._sizes = self._weigh()
        self._file = None
        if results_file is not None:
            self._file = OutcomeFile(Path(results_file), self._search())
        self.rates: Rates | None = None
        """What disk, memory and link give; None before the search, or if measuring
        failed."""
        self.outcomes: list[Outcome] = []
        """What came of each configuration."""

    @classmethod
    def from_pretrained(
        cls,
        setup_fn: Callable[[LayerStreamer], Run],
        model_dir: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        layer_prefix: str | None = None,
        **options: Any,
    ) -> LayerStreamerTuner:
        """Return a tuner for a checkpoint, with all else found in its files.

        Args:
            setup_fn: See the class.
            model_dir: See `LayerStreamer.from_pretrained`.
            dtype: See the class.
            layer_prefix: See `LayerStreamer.from_pretrained`.
            **options: The other options of the class.

        Raises:
            ConfigError: If it is not plain which layers are meant; it lists them.
            CheckpointError: If the files are not sound.
        """
        arguments = described(model_dir, layer_prefix)
        return cls(setup_fn, dtype=dtype, **{**arguments, **options})

    @staticmethod
    def _check(
        setup_fn: object, n_runs: int, sleep_seconds: float, timeout_seconds: float
    ) -> None:
        try:
            pickle.dumps(setup_fn)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"setup_fn is {setup_fn!r}, which another process cannot get ({error}):"
                " expected a function at the top level of a module"
            ) from error
        check_value("n_runs", n_runs, int)
        check_value("sleep_seconds", sleep_seconds, float)
        check_value("timeout_seconds", timeout_seconds, float)
        if n_runs < 2:
            raise ConfigError(
                f"n_runs is {n_runs}: expected at least 2, for the first does not count"
            )
        if not (sleep_seconds >= 0 and timeout_seconds > 0):  # also if one is NaN
            raise ConfigError(
                f"sleep_seconds is {sleep_seconds} and timeout_seconds"
                f" {timeout_seconds}: expected 0 or more, and more than 0"
            )

    def _weigh(self) -> Sizes:
        """Open the files once, so that what is wrong with them is told at once."""
        arguments = {**self._arguments, "device": "cpu"}  # this process takes no other
        with LayerStreamer(**arguments) as streamer:
            return Sizes(
                layers=streamer.num_layers,
                read_bytes=streamer.read_bytes,
            )

    def _search(self) -> dict[str, Any]:
        """Return what tells this search from others, whose results are of no use."""
        root = self._arguments["model_dir"]
        stamps = {s: FileStamp.of(root / s) for s in self._arguments["shard_offsets"]}
        return {
            "files": {s: [t.size, t.mtime_ns] for s, t in sorted(stamps.items())},
            "setup_fn": f"{self._setup_fn.__module__}.{self._setup_fn.__qualname__}",
            "dtype": str(self._arguments["dtype"]),
            "device": str(self._arguments["device"]),
            "layers": self._sizes.layers,
            "n_runs": self._n_runs,
        }

    # The search

    def tune(
        self, on_outcome: Callable[[Outcome], object] | None = None
    ) -> dict[str, int | None]:
        """Measure the grid; return the best settings, as the constructor takes them.

        Args:
            on_outcome: Called with each configuration's outcome, as it is known.

        Raises:
            ConfigError: If no configuration ran, or a result cannot be written; it
                tells why.
        """
        found = [] if self._file is None else self._file.read()
        self.outcomes = [o for o in found if o.status != "pruned"]
        known = [outcome.config for outcome in self.outcomes]
        if self.rates is None:
            self.rates = self._measure()
        on_host = self.rates is not None and self.rates.on_host
        grid, impossible = candidates(self._values, self._sizes.layers, on_host=on_host)
        coming = [depths for depths in grid if depths.as_dict() not in known]
        coming.sort(key=self._floor)  # stable: those that can be fast come first
        progress = Progress("configurations", len(coming), on=self._track_progress)
        try:
            for depths in coming:
                outcome = self._outcome(depths)
                self.outcomes.append(outcome)
                if self._file is not None:
                    self._file.add(outcome)
                progress.advance()
                if on_outcome is not None:
                    on_outcome(outcome)
        finally:
            progress.close()
        best = self.best
        if best is None:
            raise ConfigError(self._nothing_ran(impossible))
        if self._config_file is not None:
            text = f"{json.dumps(best.config, indent=2)}\n"
            write_whole(self._config_file, text, "config_file")
        return dict(best.config)

    @property
    def best(self) -> Outcome | None:
        """The fastest configuration so far."""
        measured = [o for o in self.outcomes if o.status == "measured"]
        return min(measured, key=_seconds, default=None)

    def _nothing_ran(self, impossible: Sequence[tuple[dict[str, Any], str]]) -> str:
        reasons = [f"{o.config}: {o.reason}" for o in self.outcomes if o.reason]
        reasons += [f"{config}: {reason}" for config, reason in impossible]
        return (
            f"none of {len(reasons)} configurations ran; the first of the reasons:"
            f" {'; '.join(reasons[:3]) or 'the grid is empty'}"
        )

    def _measure(self) -> Rates | None:
        """Measure the machine, in a process of its own: None if that failed."""
        smallest = {"n_gpu": 0, "n_cpu_pinned": None, "n_cpu": None}
        process = TrialProcess(
            Job(arguments={**self._arguments, **smallest}, setup_fn=None)
        )
        try:
            message = process.receive(self._timeout_seconds)
        finally:
            process.close()
        if message is not None and message.kind == "rates":
            rates: Rates = message.value
            return rates
        warnings.warn(
            "disk, memory and link could not be measured, so every configuration is"
            f" run: {'it took too long' if message is None else message.value}",
            StagehandWarning,
            stacklevel=3,
        )
        return None

    def _floor(self, depths: Depths) -> float:
        if self.rates is None:
            return 0.0
        return max(floors(depths, self._sizes, self.rates).values())

    def _outcome(self, depths: Depths) -> Outcome:
        best, rates = self.best, self.rates
        reason = None if rates is None else too_large(depths, self._sizes, rates)
        pace = None if best is None else best.seconds_per_pass
        if reason is None and pace is not None and rates is not None:
            parts = floors(depths, self._sizes, rates)
            name = max(parts, key=parts.__getitem__)
            if not worth_it(parts[name], pace):
                reason = (
                    f"the {name} alone needs {parts[name]:.4g} s for a pass, the best"
                    f" takes {pace:.4g} s"
                )
        if reason is not None:
            return Outcome(config=depths.as_dict(), status="pruned", reason=reason)
        return self._try(depths, None if best is None else best.seconds)

    def _try(self, depths: Depths, best_seconds: float | None) -> Outcome:
        """Run one configuration, as long as it can win."""
        process = TrialProcess(
            Job(
                arguments={**self._arguments, **depths.as_dict()},
                setup_fn=self._setup_fn,
                n_runs=self._n_runs,
                sleep_seconds=self._sleep_seconds,
            )
        )
        try:
            return watch(
                process.receive,
                depths,
                n_runs=self._n_runs,
                best_seconds=best_seconds,
                timeout_seconds=self._timeout_seconds + self._sleep_seconds,
            )
        finally:
            process.close()

    def summary(self) -> str:
        """Return a few lines: the best, and how close it is to what limits it."""
        best = self.best
        if best is None:
            return "nothing was measured"
        counts = ", ".join(
            f"{sum(o.status == status for o in self.outcomes)} {status}"
            for status in ("measured", "slower", "pruned", "failed")
        )
        pace = best.seconds_per_pass or 0.0
        lines = [
            f"best      {best.config}",
            f"pass      {pace:.4g} s, {self._sizes.read_bytes / pace / 1e9:.3g} GB/s"
            if pace
            else "pass      the runs made no pass",
            f"tried     {counts}",
        ]
        if self.rates is not None and pace:
            chosen = Depths(**best.config)  # type: ignore[arg-type]
            for name, seconds in floors(chosen, self._sizes, self.rates).items():
                lines.append(
                    f"{name:<9} {seconds:.4g} s at its measured rate:"
                    f" {seconds / pace:.0%} of the pass"
                )
        failed = [o for o in self.outcomes if o.status == "failed"]
        lines += [f"failed    {o.config}: {o.reason}" for o in failed]
        return "\n".join(lines)


def _seconds(outcome: Outcome) -> float:
    return outcome.seconds or 0.0
