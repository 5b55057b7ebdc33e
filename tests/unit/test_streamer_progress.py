"""The line that shows how far a pass has come."""

import io
from types import SimpleNamespace

import pytest

from stagehand.streamer import progress
from stagehand.streamer.progress import Progress


class Screen(io.StringIO):
    """Standard error that is a terminal, or is not."""

    def __init__(self, *, is_terminal=True):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def show_to(monkeypatch, stream):
    # Not sys.stderr itself: pytest puts its own there when the test begins.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    return stream


@pytest.fixture
def screen(monkeypatch):
    return show_to(monkeypatch, Screen())


def test_line_ends_full(screen):
    line = Progress("layers", 3, on=True)
    for _ in range(3):
        line.advance()
    line.close()
    line.close()
    assert screen.getvalue().startswith("\rlayers ########................ 1/3")
    assert "\rlayers ######################## 3/3 " in screen.getvalue()
    assert screen.getvalue().count("\n") == 1


def test_nothing_is_drawn_where_it_is_off(screen):
    line = Progress("layers", 3, on=False)
    line.advance()
    line.close()
    assert screen.getvalue() == ""


@pytest.mark.parametrize("stream", [Screen(is_terminal=False), None])
def test_nothing_is_drawn_where_nobody_looks(monkeypatch, stream):
    show_to(monkeypatch, stream)
    line = Progress("layers", 3, on=True)
    line.advance()
    line.close()
    assert stream is None or stream.getvalue() == ""


def test_many_layers_a_second_draw_few_lines(screen):
    line = Progress("layers", 10_000, on=True)
    for _ in range(10_000):
        line.advance()
    assert screen.getvalue().count("\r") < 1000
