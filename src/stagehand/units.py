"""Bytes as people write them, the only place that converts; whole steps."""

import re
from decimal import Decimal

from stagehand.errors import ConfigError

__all__ = [
    "MIB",
    "PAGE_BYTES",
    "format_at_least",
    "format_bytes",
    "format_limit",
    "parse_bytes",
    "rounded_up",
]

MIB = 1 << 20
"""Bytes in one `_mb` of the public options, which count in binary."""
PAGE_BYTES = 4096
"""Bytes in a page of memory, or of a file in the page cache."""

_FACTORS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_PRINTED = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*|%)\s*")


def rounded_up(number: int, step: int) -> int:
    """Return the next multiple of a step, or the number itself."""
    return -(-number // step) * step


def parse_bytes(value: int | str, *, name: str, of: int | None = None) -> int:
    """Return a number of bytes from `"8GB"`, `"7.5GiB"`, `"80%"` or an int.

    Decimal units (`GB`) are powers of 1000 and binary units (`GiB`) powers of 1024, as
    in the IEC standard and in `accelerate`. Upper and lower case are the same. A part
    of a byte is dropped. A bare string number is refused: `"8"` is more often eight
    gigabytes than eight bytes.

    Args:
        value: What the user wrote. An int is a number of bytes.
        name: The option's name, for the error.
        of: What a percentage is a part of, in bytes. Without it percentages are
            refused.

    Raises:
        ConfigError: If the text has another form, or the result is not positive.

    Example:
        >>> parse_bytes("1.5GiB", name="vram_budget")
        1610612736
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(
            f"{name} is {value!r}: expected bytes as an int or a text such as '8GB' "
            "or '80%'"
        )
    result = value if isinstance(value, int) else _parse_text(value, name=name, of=of)
    if result <= 0:
        raise ConfigError(f"{name} is {value!r}: expected more than zero bytes")
    return result


def _parse_text(value: str, *, name: str, of: int | None) -> int:
    match = _PATTERN.fullmatch(value)
    unit = match[2].upper() if match else None
    if match is None or unit is None or (unit != "%" and unit not in _FACTORS):
        raise ConfigError(
            f"{name} is {value!r}: expected a number and a unit, such as '8GB', "
            "'7.5GiB', '512MB' or '80%'"
        )
    # Decimal: in binary floating point "1.001KB" is 1000.9999 and would lose a byte.
    number = Decimal(match[1])
    if unit == "" and number:
        raise ConfigError(
            f"{name} is {value!r}: a text needs a unit, such as "
            f"'{value.strip()}GB'; an int is bytes"
        )
    if unit != "%":
        return int(number * _FACTORS[unit])
    if of is None:
        raise ConfigError(
            f"{name} is {value!r}: a percentage is not possible here; give bytes, "
            "such as '8GB'"
        )
    if number > 100:
        raise ConfigError(f"{name} is {value!r}: expected at most 100%")
    return int(number * of / 100)


def format_bytes(nbytes: float) -> str:
    """Return a short text with a decimal unit, such as `"1.61 GB"`, for reading.

    It is rounded to the nearest; where a user is told what to type, use
    `format_at_least`.
    """
    for factor, unit in _PRINTED:
        # What would be printed as 1000.00 of the smaller unit takes the larger one.
        if abs(nbytes) >= factor * 0.999995:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{int(nbytes)} B"


def format_at_least(nbytes: int) -> str:
    """Return a short text that `parse_bytes` reads as `nbytes` or slightly more.

    For errors that name the smallest number that would work: rounded to the nearest,
    half of them would be refused again when the user follows the advice.

    Args:
        nbytes: Zero or more.

    Example:
        >>> format_at_least(13_421_000)
        '13.43 MB'
    """
    for factor, unit in _PRINTED:
        if nbytes >= factor:
            hundredths = -(-nbytes * 100 // factor)
            return f"{hundredths // 100}.{hundredths % 100:02d} {unit}"
    return f"{nbytes} B"


def format_limit(limit_bytes: int, needed_bytes: int) -> str:
    """Return a short text for a limit, beside what needs more of it.

    For errors that name both: in bytes where they would read the same.

    Args:
        limit_bytes: What there may be.
        needed_bytes: What is printed by `format_at_least`.

    Example:
        >>> format_limit(16_639, 16_640)
        '16639 B'
    """
    text = format_bytes(limit_bytes)
    return f"{limit_bytes} B" if text == format_at_least(needed_bytes) else text
