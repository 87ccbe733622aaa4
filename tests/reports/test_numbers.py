"""Numbers as a reader sees them."""

from __future__ import annotations

import math

import pytest

from reports.numbers import fixed, interval, mebibytes, percent, significant


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1.0, "1.00"), (0.0001234, "1.23e−4"), (0.00999999, "0.0100"), (12345.0, "12345"),
        (123456.0, "1.23e5"), (-0.5, "−0.500"), (2e-6, "2.00e−6"), (None, "none"), (math.nan, "not finite"),
        (99.96, "100"), (0.001, "0.00100"),
    ],
)  # fmt: skip
def test_significant(value, text):
    assert significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (1.2345, "1.234"),
        (0.00012, "1.2e−4"),
        (-2.0, "−2.000"),
        (None, "none"),
        (0.0006, "0.001"),
    ],
)
def test_fixed_never_shows_a_false_zero(value, text):
    assert fixed(value) == text


def test_percent_is_100_only_when_it_is():
    assert percent(1.0) == "100.0 %" and percent(0.9999) == "> 99.9 %" and percent(0.9994) == "99.9 %"
    assert percent(-0.0123) == "−1.2 %" and percent(0.05, 0) == "5 %" and percent(None) == "none"


def test_interval_and_bytes():
    assert interval((-0.1, 0.25), 2) == "[−0.10, 0.25]" and interval(None) == "none"
    assert mebibytes(1658 * 2**20) == "1,658 MiB" and mebibytes(None) == "none"
