"""Sizes, durations and fractions are read and written in one way."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_fraction,
    format_seconds,
    parse_bytes,
)

UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "kB": 10**3, "MB": 10**6}
UNITS |= {"GB": 10**9, "TB": 10**12, "": 1}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("39GiB", 39 * GIB),
        ("8GB", 8 * 10**9),
        ("512 MiB", 512 * MIB),
        (" 1.5gib ", GIB + GIB // 2),
        (".5KiB", 512),
        ("12G", 12 * GIB),
        ("8 g", 8 * GIB),
        ("2.TB", 2 * 10**12),
        ("1048576", MIB),
        ("0", 0),
        (12345, 12345),
    ],
)
def test_a_size_is_read_as_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "8 X", "8GiBs", "-1GiB", "1,5GiB", "1e9", "eight", "8 8GiB", "nan"]
)
def test_what_is_no_size_is_refused_with_how_to_write_one(text):
    with pytest.raises(ValueError, match="is not a size; write it as 39GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(MIB, 2**50))
def test_a_number_of_bytes_reads_as_itself(num_bytes):
    assert parse_bytes(str(num_bytes)) == parse_bytes(num_bytes) == num_bytes


@pytest.mark.parametrize("text", ["12", " 24 ", "8192", "1048575", "1.5"])
def test_a_small_number_without_a_unit_is_refused_with_what_it_may_mean(text):
    number = text.strip()
    with pytest.raises(ValueError, match=f"has no unit.*write it as {number}GiB"):
        parse_bytes(text)
    assert parse_bytes(f"{number}B") == parse_bytes(int(float(number))) == int(float(number))


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS.keys() - {""})), st.booleans())
def test_a_whole_number_of_units_is_exact_in_any_case(number, unit, is_upper):
    written = unit.upper() if is_upper else unit
    assert parse_bytes(f"{number} {written}") == number * UNITS[unit]


@pytest.mark.slow
@given(st.integers(0, 2**60))
def test_what_is_shown_reads_back_within_what_was_rounded(num_bytes):
    shown = format_bytes(num_bytes)
    number, unit = shown.replace(",", "").split()
    # One decimal below a GiB, two from there on.
    rounding = UNITS[unit] * (0.005 if unit == "GiB" else 0.05 if unit != "B" else 0.5)
    assert abs(parse_bytes(f"{number}{unit}") - num_bytes) <= rounding + 1


@given(st.integers(-(2**60), 2**60))
def test_bytes_below_zero_are_shown_like_those_above(num_bytes):
    assert format_bytes(-abs(num_bytes)).lstrip("-") == format_bytes(abs(num_bytes)).lstrip("-")


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (100 * KIB, "100.0 KiB"),
        (MIB - KIB, "1,023.0 KiB"),
        (MIB, "1.0 MiB"),
        (GIB - 1, "1,024.0 MiB"),
        (GIB, "1.00 GiB"),
        (3 * TIB, "3,072.00 GiB"),
        (-2 * MIB, "-2.0 MiB"),
    ],
)
def test_bytes_are_shown_in_units_of_1024(num_bytes, shown):
    assert format_bytes(num_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 us"),
        (4.2e-6, "4.2 us"),
        (0.0123, "12.3 ms"),
        (1.0, "1 s"),
        (4.561, "4.56 s"),
        (60.0, "1 min 00 s"),
        (200.4, "3 min 20 s"),
        (7325.0, "122 min 05 s"),
    ],
)
def test_durations_are_shown_with_their_unit(seconds, shown):
    assert format_seconds(seconds) == shown


@given(st.floats(1e-6, 1e6))
def test_every_duration_is_shown_without_exponents_and_below_its_next_unit(seconds):
    shown = format_seconds(seconds)
    if " min " in shown:
        assert int(shown.split()[2]) < 60
    else:
        assert re.fullmatch(r"\d{1,3}(\.\d{1,3})? (us|ms|s)", shown), shown
        number, unit = shown.split()
        in_seconds = {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
        assert abs(float(number) * in_seconds - seconds) <= 0.006 * seconds


@pytest.mark.parametrize(
    ("fraction", "shown"), [(0.0012, "+0.12 %"), (-0.25, "-25.00 %"), (0.0, "+0.00 %")]
)
def test_fractions_are_shown_as_percentages_with_their_sign(fraction, shown):
    assert format_fraction(fraction) == shown
