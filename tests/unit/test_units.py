"""Bytes as people write them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stagehand.errors import ConfigError
from stagehand.units import (
    MIB,
    format_at_least,
    format_bytes,
    format_limit,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GB", 8 * 10**9),
        ("8g", 8 * 10**9),
        ("7.5GiB", 15 * 2**29),
        (" 512 MB ", 512 * 10**6),
        ("512mib", 512 * MIB),
        (".5kB", 500),
        ("2.TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("100B", 100),
        (12_345, 12_345),
    ],
)
def test_size_is_read_with_decimal_and_binary_units(text, nbytes):
    assert parse_bytes(text, name="vram_budget") == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80%", 800), ("12.5 %", 125), ("100%", 1000)]
)
def test_percentage_is_a_part_of_what_is_given(text, nbytes):
    assert parse_bytes(text, name="vram_budget", of=1000) == nbytes


@given(st.integers(1, 10**7))
@example(1001)  # 1.001 * 1000 is less than 1001 in floating point
def test_decimal_fraction_loses_no_byte(nbytes):
    text = f"{nbytes // 1000}.{nbytes % 1000:03d}KB"
    assert parse_bytes(text, name="vram_budget") == nbytes


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("8", "a text needs a unit, such as '8GB'"),
        ("eight GB", "expected a number and a unit"),
        ("8 potatoes", "expected a number and a unit"),
        ("-1GB", "expected a number and a unit"),
        ("1e3MB", "expected a number and a unit"),
        ("", "expected a number and a unit"),
        ("0GB", "expected more than zero bytes"),
        ("0", "expected more than zero bytes"),
        ("0.1B", "expected more than zero bytes"),
        (0, "expected more than zero bytes"),
        (-5, "expected more than zero bytes"),
        (True, "expected bytes as an int or a text"),
        (8.0, "expected bytes as an int or a text"),
        (None, "expected bytes as an int or a text"),
        ("101%", "expected at most 100%"),
    ],
)
def test_impossible_size_is_refused_with_name_value_and_reason(value, reason):
    with pytest.raises(ConfigError) as caught:
        parse_bytes(value, name="ram_budget", of=1000)
    assert str(caught.value).startswith(f"ram_budget is {value!r}: ")
    assert reason in str(caught.value)


def test_percentage_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="a percentage is not possible here"):
        parse_bytes("80%", name="pinned_pool")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (1_614_000_000, "1.61 GB"),
        (999_994, "999.99 KB"),
        (999_996, "1.00 MB"),
        (2 * 10**12, "2.00 TB"),
        (-1500, "-1.50 KB"),
        (12.7, "12 B"),
    ],
)
def test_size_is_printed_with_two_decimals(nbytes, text):
    assert format_bytes(nbytes) == text


@given(st.integers(1, 10**15))
def test_size_printed_as_needed_is_enough_when_typed_in(nbytes):
    typed = parse_bytes(format_at_least(nbytes), name="vram_budget")
    assert nbytes <= typed <= nbytes * 1.01


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_limit_never_reads_like_what_needs_more(limit, more):
    needed = limit + more
    text = format_limit(limit, needed)
    assert text != format_at_least(needed)
    assert text in (format_bytes(limit), f"{limit} B")
