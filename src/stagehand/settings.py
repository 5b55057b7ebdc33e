"""Do the values of a settings object have the types that its fields name?"""

import types
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from enum import Enum
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stagehand.errors import ConfigError

__all__ = ["check_member", "check_types", "check_value"]

_WORDS: dict[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an int"),
    float: (Real, "a number"),
    str: (str, "a text"),
    Path: (PathLike, "a path"),
    Mapping: (Mapping, "a mapping"),
    type: (type, "a class"),
    types.NoneType: (types.NoneType, "None"),
}
# An array is a collection, too, and one of no dimensions cannot be gone through.
_MANY: dict[Any, tuple[Any, str]] = {
    tuple: (tuple, "a tuple"),
    Collection: ((Sequence, AbstractSet), "a list or a tuple"),
}


def check_types(settings: Any) -> None:
    """Refuse values of other types than a dataclass names for its fields.

    An int is a number, too; True and False are neither. What a number may be is for
    the caller to check.

    Raises:
        ConfigError: With the field, the value and what was expected.
    """
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        check_value(field.name, getattr(settings, field.name), hints[field.name])


def check_value(name: str, value: Any, hint: Any) -> None:
    """Refuse a value of another type than `hint`, or that is none of a `Literal`'s.

    Raises:
        ConfigError: With the name, the value and what was expected.
    """
    if not _is_a(value, hint):
        shown = repr(value)
        if "\n" in shown:  # a model, say, which takes pages
            shown = f"of type {type(value).__name__}"
        raise ConfigError(f"{name} is {shown}: expected {' or '.join(_words(hint))}")


def check_member(name: str, value: object, kind: type[Enum]) -> None:
    """Refuse a value that is no member of an enum.

    Raises:
        ConfigError: With the name, the value and the members.
    """
    if not isinstance(value, kind):
        known = ", ".join(f"{kind.__name__}.{each.name}" for each in kind)
        raise ConfigError(f"{name} is {value!r}: expected one of {known}")


def _is_a(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is types.UnionType:
        return any(_is_a(value, each) for each in get_args(hint))
    if origin in _MANY:
        each = get_args(hint)[0]
        is_text = isinstance(value, str | bytes)  # a sequence of texts, too
        return (
            isinstance(value, _MANY[origin][0])
            and not is_text
            and all(_is_a(item, each) for item in value)
        )
    if origin is Literal:
        # Not `in`: an array compares element by element.
        return any(isinstance(value, type(e)) and value == e for e in get_args(hint))
    return isinstance(value, _WORDS[hint][0]) and (
        hint is bool or not isinstance(value, bool)
    )


def _words(hint: Any) -> list[str]:
    origin = get_origin(hint)
    if origin is types.UnionType:
        return [word for each in get_args(hint) for word in _words(each)]
    if origin in _MANY:
        return [f"{_MANY[origin][1]}, each {_words(get_args(hint)[0])[0]}"]
    if origin is Literal:
        return list(map(repr, get_args(hint)))
    return [_WORDS[hint][1]]
