"""The entry point: says what is missing before importing what may be missing."""

import importlib.util
import os
import sys
from contextlib import suppress
from io import TextIOWrapper

__all__ = ["main"]

_EXTRAS = ("typer", "rich", "transformers")


def main() -> None:
    """Run the command line on the process's arguments."""
    missing = [name for name in _EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"stagehand: the command line needs {', '.join(missing)}; install with: "
            "pip install 'stagehand-torch[cli]'\n"
        )
        raise SystemExit(2)
    # Models are directories on this machine. Read when transformers is imported, so
    # that nothing in it asks the network about them.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    try:
        from stagehand.cli.command import app
    except KeyboardInterrupt:  # it takes seconds; from then on the app ends as here
        raise SystemExit(130) from None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # show what it has no letter for
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # Python would do it when no error can be told
    except OSError as error:
        if error.filename is not None:
            raise
        sys.stdout = None  # so Python does not try again at its end
        with suppress(OSError):
            sys.stderr.write(f"stagehand: the output could not be written: {error}\n")
        raise SystemExit(2) from error
