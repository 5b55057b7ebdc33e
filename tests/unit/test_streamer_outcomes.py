"""The file of results, from which a search goes on."""

import contextlib
import json
import resource
from dataclasses import asdict
from pathlib import Path

import pytest

from stagehand.errors import ConfigError
from stagehand.streamer.outcomes import Outcome, OutcomeFile, write_whole

SEARCH = {"layers": 3, "files": {"a": [1, 2]}, "values": (1, 2)}
ONE = Outcome(
    config={"n_gpu": 1}, status="measured", seconds=0.5, passes=2, runs=(0.25, 0.75)
)
OTHER = Outcome(config={"n_gpu": 2}, status="failed", reason="it broke")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def filled(path):
    file = OutcomeFile(path, SEARCH)
    assert file.read() == []
    file.add(ONE)
    file.add(OTHER)
    return path


def test_results_are_read_as_they_were_added(path):
    filled(path)
    assert OutcomeFile(path, SEARCH).read() == [ONE, OTHER]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_line_that_was_cut_off_is_dropped_and_the_file_made_whole(path, cut):
    whole = filled(path).read_bytes()
    path.write_bytes(whole[:-cut])
    file = OutcomeFile(path, SEARCH)
    assert file.read() == [ONE]
    file.add(OTHER)
    assert path.read_bytes() == whole
    assert list(path.parent.iterdir()) == [path]


def test_results_of_another_search_are_refused(path):
    filled(path)
    with pytest.raises(ConfigError, match=r"another search: expected .*'layers': 4"):
        OutcomeFile(path, {**SEARCH, "layers": 4}).read()


@pytest.mark.parametrize("text", ["[1]\n", '{"a": 1}\n'])
def test_another_file_is_refused(path, text):
    path.write_text(json.dumps({"search": 0}) + "\n" + text)
    with pytest.raises(ConfigError, match=r"another search|not one of ours"):
        OutcomeFile(path, SEARCH).read()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seconds", "0.5"), ("passes", "x"), ("passes", True), ("status", 5)),
        *(("config", None), ("runs", ["a"]), ("runs", "ab"), ("reason", [])),
    ],
)
def test_value_of_another_type_is_refused(path, field, value):
    filled(path)
    with path.open("a") as file:
        file.write(json.dumps({**asdict(ONE), field: value}))
        file.write("\n")
    with pytest.raises(ConfigError, match=f"is not one of ours .{field} is"):
        OutcomeFile(path, SEARCH).read()


def test_line_that_is_nested_too_deeply_is_no_line(path):
    filled(path)
    with path.open("a") as file:
        file.write(f'{{"config": {"[" * 100_000}\n')
    assert OutcomeFile(path, SEARCH).read() == [ONE, OTHER]


def test_line_of_another_kind_is_refused(path):
    filled(path)
    with path.open("a") as file:
        file.write('{"a": 1}\n')
    with pytest.raises(ConfigError, match="is not one of ours"):
        OutcomeFile(path, SEARCH).read()


def test_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        OutcomeFile(tmp_path / "nowhere" / "file", SEARCH).read()
    with pytest.raises(ConfigError, match="cannot be read"):
        OutcomeFile(tmp_path, SEARCH).read()


@contextlib.contextmanager
def disk_of(nbytes):
    """Let no file grow beyond so many bytes, as on a disk that is full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_told_and_no_result_before_it_is_lost(path):
    file = OutcomeFile(path, SEARCH)
    file.read()
    file.add(ONE)
    whole = path.read_bytes()
    with (
        disk_of(len(whole) + 9),
        pytest.raises(ConfigError, match=r"jsonl' cannot be written: .*search again"),
    ):
        file.add(OTHER)
    assert path.read_bytes()[: len(whole)] == whole
    again = OutcomeFile(path, SEARCH)
    assert again.read() == [ONE]
    again.add(OTHER)
    assert again.read() == [ONE, OTHER]


def test_file_that_is_written_whole_is_left_as_it_was_by_a_full_disk(path):
    write_whole(path, "first", "config_file")
    with (
        disk_of(3),
        pytest.raises(ConfigError, match=r"config_file .*cannot be written") as caught,
    ):
        write_whole(path, "second", "config_file")
    assert isinstance(caught.value.__cause__, OSError)
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["a\0b", "x" * 240, "x" * 5000])
def test_file_whose_name_no_system_takes_is_an_error_of_ours(tmp_path, name):
    with pytest.raises(ConfigError, match=r"config_file .*cannot be written"):
        write_whole(tmp_path / name, "text", "config_file")
    with pytest.raises(ConfigError, match=r"results_file .*cannot be (read|written)"):
        OutcomeFile(tmp_path / name, SEARCH).read()
    assert list(tmp_path.iterdir()) == []


def test_two_who_write_one_file_at_once_write_it_whole(path, monkeypatch):
    """They may be threads, or processes of one number in two containers."""
    write = Path.write_text

    def overtaken(self, text):
        write(self, text)
        if text == "first":
            write_whole(path, "second", "config_file")

    monkeypatch.setattr(Path, "write_text", overtaken)
    write_whole(path, "first", "config_file")
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_seconds_of_a_pass():
    assert ONE.seconds_per_pass == 0.25
    assert OTHER.seconds_per_pass is None
