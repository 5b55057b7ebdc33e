"""`stagehand run`: its options, its progress bar and its tables."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

import stagehand
from stagehand.cli.models import FoundModel, ModelKind, find_model, open_tokenizer
from stagehand.cli.outcome import Outcome, Streaming, run_resident, run_streamed
from stagehand.cli.tasks import Embedding, Generation, Task, bitwise_equal
from stagehand.errors import ConfigError, StagehandError, StagehandInternalError
from stagehand.stores.converting import (
    EXCLUDED,
    SHARD_SIZE,
    convert_to_packed,
    convert_to_squareq,
)
from stagehand.units import format_bytes

__all__ = ["app"]

_DEMO_TEXTS = (
    "A man is playing a guitar on the street.",
    "The central bank raised interest rates again this month.",
    "The cat sleeps on the warm windowsill.",
    "Someone performs music with a guitar outdoors.",
    "Borrowing became more expensive after the latest decision on rates.",
    "A kitten is napping by the window in the sun.",
)
_NOT_EQUAL = 1
_UNUSABLE = 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


class _Dtype(str, Enum):
    """Element types that weights can be loaded as."""

    AUTO = "auto"
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    def for_torch(self) -> torch.dtype | None:
        """Return PyTorch's object, or None for the checkpoint's own type."""
        dtype: torch.dtype | None = getattr(torch, self.value, None)
        return dtype


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"stagehand {stagehand.__version__}")
        raise typer.Exit


@app.callback()
def _stagehand(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Tell the version."
        ),
    ] = False,
) -> None:
    """Run models that do not fit the accelerator's memory, at full precision."""


@app.command()
def run(
    model: Annotated[
        str, typer.Argument(help="A directory in Hugging Face layout, or 'demo'.")
    ],
    *,
    vram_budget: Annotated[
        str | None,
        typer.Option(
            help="Most device bytes for weights, such as 8GB, 512MiB or 80%. "
            "Default: 80% of what is free."
        ),
    ] = None,
    ram_budget: Annotated[
        str | None, typer.Option(help="Most pinned host bytes, such as 16GB.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            "--prompt",
            help="A text to embed, or a prompt to continue. Can be repeated.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens to generate for a prompt.")
    ] = 32,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Also run it resident, and compare every bit."),
    ] = False,
    device: Annotated[
        str, typer.Option(help="auto, cpu, or a device as PyTorch names it.")
    ] = "auto",
    dtype: Annotated[
        _Dtype, typer.Option(help="Element type to load as; auto keeps the stored one.")
    ] = _Dtype.AUTO,
    file_backed: Annotated[
        bool,
        typer.Option(
            "--file-backed",
            help="Stream from the model's files. What `stagehand convert` wrote "
            "always is.",
        ),
    ] = False,
    telemetry: Annotated[
        Path | None, typer.Option(help="Write a JSON line per pass to this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace of the run to this file.")
    ] = None,
) -> None:
    """Run MODEL with its weights streamed to the device within a budget.

    A causal language model continues each prompt, greedily; a text encoder prints the
    similarities of the texts. The exit code is 1 if --verify finds a difference, and 2
    if the model or the options cannot be used, or the trace cannot be written.
    """
    if trace is not None:
        _check_trace(trace)
    how = Streaming(
        vram_budget=vram_budget,
        ram_budget=ram_budget,
        device=_device_name(device),
        dtype=dtype.for_torch(),
        file_backed=file_backed,
        telemetry=telemetry,
        trace=trace,
    )
    # What transformers logs about checkpoints would break the progress bar.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with _errors_told():
        found = find_model(model)
        texts = tuple(text or (_DEMO_TEXTS if model == "demo" else ()))
        task = _choose_task(found, texts, max_new_tokens)
        streamed, resident = _run_with_progress(found, task, how, verify)
    equal = None if resident is None else bitwise_equal(streamed.results, resident)
    console = Console()
    console.print(task.show(streamed.results))
    console.print(_account(streamed, equal))
    if streamed.trace_error is not None:
        typer.echo(
            f"stagehand: the trace could not be written: {streamed.trace_error}",
            err=True,
        )
    if equal is False:
        raise typer.Exit(_NOT_EQUAL)
    if streamed.trace_error is not None:
        raise typer.Exit(_UNUSABLE)


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="Safetensors, or what torch.save wrote: a file or folder."),
    ],
    target: Annotated[Path, typer.Argument(help="A folder; made if it is not there.")],
    *,
    packed: Annotated[
        bool,
        typer.Option("--packed", help="Pack bfloat16 losslessly; quantize nothing."),
    ] = False,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            help="With --packed: the most bytes of tensors in one file, as they are"
            f" before they are packed; beyond it there are several, and an index."
            f" Default: {SHARD_SIZE}."
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Quantize only weights in whose names this is found."),
    ] = None,
    exclude: Annotated[
        str,
        typer.Option(help="Do not quantize weights in whose names this is found."),
    ] = EXCLUDED,
) -> None:
    """Write SOURCE in a smaller form to TARGET: less to read, and less on the link.

    By default the weights of linear layers are quantized to INT8 (SquareQ v2): half of
    bfloat16, and other values. With --packed they are packed: about three quarters, and
    every bit as before. `stagehand run TARGET` and `stagehand.load(TARGET)` stream
    either. What fails leaves nothing behind; the exit code is 2 then.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with _errors_told():
        if packed and (only is not None or exclude != EXCLUDED):
            raise ConfigError(
                "--only and --exclude choose what is quantized, and --packed quantizes"
                " nothing; leave out either"
            )
        if max_shard_size is not None and not packed:
            raise ConfigError(
                "--max-shard-size is for --packed: SquareQ v2 is one file and its"
                " manifest; leave it out"
            )
        with Progress(
            *columns, console=Console(stderr=True), transient=True
        ) as progress:
            bar = progress.add_task("packed" if packed else "quantized", total=None)

            def tell(done: int, total: int) -> None:
                progress.update(bar, completed=done, total=total)

            if packed:
                size = max_shard_size or SHARD_SIZE
                written = convert_to_packed(
                    source, target, max_shard_size=size, progress=tell
                )
            else:
                written = convert_to_squareq(
                    source, target, only=only, exclude=exclude, progress=tell
                )
    typer.echo(
        f"{written.path}: {written.smaller} tensors"
        f" {'packed' if packed else 'quantized'}, {written.plain} as they were;"
        f" {format_bytes(written.nbytes)} of {format_bytes(written.source_bytes)}"
    )
    if not written.smaller:
        typer.echo(
            "stagehand: the copy is no smaller: --packed packs weights of bfloat16"
            " that shrink, and found none",
            err=True,
        )


@contextmanager
def _errors_told() -> Iterator[None]:
    """Tell what a user can mend in one line, and exit; what only we can is raised."""
    try:
        yield
    except StagehandInternalError:
        raise
    except StagehandError as error:
        typer.echo(f"stagehand: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error


def _check_trace(path: Path) -> None:
    # Unlike Path.is_dir, this never raises.
    if not os.path.isdir(path.parent):
        raise typer.BadParameter(f"--trace: there is no directory '{path.parent}'")
    if os.path.isdir(path):
        raise typer.BadParameter(f"--trace: '{path}' is a directory, no file's path")


def _device_name(value: str) -> str | None:
    """Return what `stagehand.layer` takes for a device."""
    if value == "auto":
        return None
    try:
        return str(torch.device(value))
    except RuntimeError as error:
        raise typer.BadParameter(
            f"{value!r} is no device that PyTorch knows; use auto, cpu or such a name"
        ) from error


def _choose_task(
    found: FoundModel, texts: tuple[str, ...], max_new_tokens: int
) -> Task:
    if not texts:
        raise ConfigError(
            f"the model in '{found.path}' is run for {found.kind.value} and was given "
            "nothing to do it on; pass --text (or --prompt) at least once"
        )
    for text in texts:
        if any(map(_is_no_letter, text)):
            raise ConfigError(
                f"--text is {text!r}: expected letters, found bytes that are none in"
                " the encoding of the terminal"
            )
    tokenizer = open_tokenizer(found)
    if found.kind is ModelKind.ENCODER:
        return Embedding(tokenizer=tokenizer, texts=texts)
    return Generation(tokenizer=tokenizer, prompts=texts, max_new_tokens=max_new_tokens)


def _is_no_letter(character: str) -> bool:
    """Whether it stands for a byte of an argument that could not be decoded."""
    return "\udc80" <= character <= "\udcff"


def _run_with_progress(
    found: FoundModel, task: Task, how: Streaming, verify: bool
) -> tuple[Outcome, tuple[torch.Tensor, ...] | None]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("streamed", total=task.steps)
        streamed = run_streamed(found, task, how, advance=lambda: progress.advance(bar))
        if not verify:
            return streamed, None
        progress.reset(bar, description="resident")
        resident = run_resident(found, task, how, advance=lambda: progress.advance(bar))
        return streamed, resident


def _account(streamed: Outcome, equal: bool | None) -> Table:
    """Return what the run took, against what it was allowed."""
    report = streamed.report
    share = report.peak_device_bytes / report.budget_bytes
    table = Table(title="Weights", show_header=False)
    rows = [
        ("budget on the device", format_bytes(report.budget_bytes)),
        (
            "peak on the device",
            f"{format_bytes(report.peak_device_bytes)} ({share:.1%} of the budget)",
        ),
        ("of the whole model", format_bytes(report.weight_bytes)),
        ("pinned on the host", format_bytes(report.pinned_bytes)),
        ("read from files", format_bytes(report.disk_bytes)),
        ("streamed", f"{format_bytes(report.streamed_bytes)}, {report.passes} passes"),
        ("time per pass", _duration(report.seconds_per_pass)),
        ("time for all", _duration(streamed.seconds)),
        ("limited by", report.limit),
        ("advice", report.advice),
    ]
    if equal is not None:
        verdict = "every bit equal" if equal else "DIFFERENT from the resident model"
        rows.append(("verified", verdict))
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "not measured"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
