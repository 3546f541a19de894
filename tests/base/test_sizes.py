"""Sizes as people write them, and as they are printed."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.sizes import UNITS, format_size, parse_size
from penstock.errors import ConfigError

patient = settings(deadline=None)  # a busy machine is no failure

WRITTEN = [
    (1, 1),
    (123_456_789, 123_456_789),
    (2**70, 2**70),
    ("1", 1),
    ("17", 17),
    ("17B", 17),
    ("17 b", 17),
    ("1kB", 1_000),
    ("1KB", 1_000),
    ("1KiB", 1_024),
    ("1kib", 1_024),
    ("768MiB", 768 * 2**20),
    ("768 MiB", 768 * 2**20),
    ("  768  MiB  ", 768 * 2**20),
    ("2GB", 2 * 10**9),
    ("2GiB", 2 * 2**30),
    ("2gib", 2 * 2**30),
    ("2GIB", 2 * 2**30),
    ("1.5GB", 1_500_000_000),
    ("1.5GiB", 3 * 2**29),
    ("0.5kB", 500),
    ("3TB", 3 * 10**12),
    ("3TiB", 3 * 2**40),
    ("007MB", 7_000_000),
    ("1.9B", 1),
]

# Amounts that binary floating point would take a byte short.
EXACT = [
    ("4.1MB", 4_100_000),
    ("4.1GB", 4_100_000_000),
    ("8.2GB", 8_200_000_000),
    ("2.01kB", 2_010),
    ("16.9GB", 16_900_000_000),
    ("9007199254740993", 9_007_199_254_740_993),
]

REFUSED = [
    "2 gigs", "", " ", "-1GB", "+1GB", "GB", "1e9", "1,5GB", "1 000", "1_000", "2G", "2Gi", "2GBs", "2GB 3MB",
    ".5GB", "5.GB",
    "inf", "nan", "0", "0GB", "0.0001B", "0x10", 0, -1, True, False, 1.5, 2e9, float("inf"), float("nan"), None, b"2GB",
    [2], ("2GB",), {"memory": 2},
]  # fmt: skip


@pytest.mark.parametrize(("written", "bytes_"), WRITTEN)
def test_understood(written, bytes_):
    assert parse_size(written, argument="memory") == bytes_


@pytest.mark.parametrize(("written", "bytes_"), EXACT)
def test_understood_to_the_byte(written, bytes_):
    assert parse_size(written, argument="memory") == bytes_


@patient
@given(st.integers(1, 10**6), st.integers(0, 4), st.sampled_from(sorted(UNITS)))
def test_decimal_fractions_are_exact(digits, places, unit):
    number = Fraction(digits, 10**places)
    expected = int(number * UNITS[unit])
    if expected:
        text = f"{digits // 10**places}.{digits % 10**places:0{places}d}" if places else str(digits)
        assert parse_size(text + unit, argument="memory") == expected


@pytest.mark.parametrize("written", REFUSED, ids=repr)
def test_refused_naming_argument_value_and_way_out(written):
    with pytest.raises(ConfigError) as refused:
        parse_size(written, argument="memory")
    assert f"memory={written!r}" in str(refused.value)
    assert '"2GiB"' in str(refused.value)


def test_a_number_too_long_for_a_float_is_still_a_number():
    assert parse_size("9" * 400, argument="memory") == int("9" * 400)


PRINTED = [
    (0, "0 B"),
    (1, "1 B"),
    (1023, "1023 B"),
    (1024, "1.00 KiB"),
    (1536, "1.50 KiB"),
    (10 * 1024, "10.0 KiB"),
    (100 * 1024, "100 KiB"),
    (2**20, "1.00 MiB"),
    (305_000_000, "291 MiB"),
    (2**30, "1.00 GiB"),
    (2**40, "1.00 TiB"),
    (2**50, "1.00 PiB"),
    (2**60, "1024 PiB"),
    (-3 * 2**20, "-3.00 MiB"),
    (0.5, "0 B"),
    (2.5e6, "2.38 MiB"),
]


@pytest.mark.parametrize(("bytes_", "text"), PRINTED)
def test_printed(bytes_, text):
    assert format_size(bytes_) == text


@patient
@given(st.integers(1, 2**49))
def test_what_is_printed_can_be_read_back_within_a_percent(bytes_):
    assert abs(parse_size(format_size(bytes_), argument="memory") - bytes_) <= bytes_ / 100
