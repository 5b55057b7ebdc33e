"""The exception tree keeps its promises to code that catches plain errors."""

import pickle

import pytest

from stagehand import errors

RAISED = [
    getattr(errors, name) for name in errors.__all__ if not name.endswith("Warning")
]


def test_all_names_every_class_of_the_module():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert set(errors.__all__) == defined


@pytest.mark.parametrize("error", RAISED)
def test_every_error_is_caught_as_a_stagehand_error(error):
    assert issubclass(error, errors.StagehandError)


@pytest.mark.parametrize("error", [e for e in RAISED if e is not errors.StagehandError])
def test_every_error_is_caught_as_a_value_or_runtime_error(error):
    assert issubclass(error, ValueError | RuntimeError)


def test_oom_error_crosses_a_process_with_its_numbers():
    error = errors.StagehandOOMError("too small", needed_bytes=20, limit_bytes=10)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.needed_bytes, copy.limit_bytes) == ("too small", 20, 10)
