"""Names in errors: the first of many, and those that are much like a wrong one."""

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["listing", "nearest"]

_COMPARED = 5000


def listing(names: Sequence[str], most: int = 5) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nearest(name: str, names: Iterable[str]) -> str:
    """Return what to say of names that are much like one that is not there.

    Of many names only those of equal numbers are looked at: comparing texts costs about
    50 us each, and models of experts have 100,000.

    Args:
        name: The one that is not there.
        names: Which there are.

    Returns:
        Such as `, nearest 'a' and 'b'`; nothing if there are none.
    """
    among = list(names)
    if len(among) > _COMPARED:
        numbers = _numbers(name)
        among = [each for each in among if _numbers(each) == numbers][:_COMPARED]
    near = difflib.get_close_matches(name, among, n=2)
    return f", nearest {' and '.join(map(repr, near))}" if near else ""


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdigit()]
