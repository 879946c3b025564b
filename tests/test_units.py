"""Amounts of bytes: units are said, and what is no positive whole amount is refused."""

from decimal import Decimal

import pytest

from jaxckpt.units import parse_bytes

# As users call it, without the suite's own check of annotations.
unchecked = parse_bytes.__wrapped__


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("70GiB", 70 * 2**30),
        ("70GB", 70 * 10**9),
        ("1.5KiB", 1536),
        ("1KB", 1000),
        ("2MiB", 2**21),
        ("3MB", 3_000_000),
        ("1TiB", 2**40),
        ("1TB", 10**12),
        (" 12 B ", 12),
        ("12bytes", 12),
        ("1e3GB", 10**12),
        (1, 1),
        (2**60 + 1, 2**60 + 1),
    ],
)
def test_an_amount_with_its_unit_is_read(amount, expected):
    assert parse_bytes(amount) == expected


@pytest.mark.parametrize("unit", ["KB", "MB", "GB", "TB"])
def test_a_decimal_amount_that_is_whole_is_read_exactly(unit):
    power = {"KB": 3, "MB": 6, "GB": 9, "TB": 12}[unit]
    wrong = {}
    for thousandths in range(1, 3000):
        number = f"{thousandths / 1000:.3f}"
        expected = Decimal(number) * 10**power
        try:
            given = parse_bytes(number + unit)
        except ValueError as error:
            given = str(error)
        if given != expected:
            wrong[number] = given
    assert not wrong


@pytest.mark.parametrize(
    ("amount", "said"),
    [
        ("70", "has no unit"),
        ("0", "has no unit"),
        ("nan", "has no unit"),
        ("70gib", "no known unit: `gib`"),
        ("70G", "no known unit: `G`"),
        ("70GiB/s", "not an amount of bytes"),
        ("GiB", "not an amount of bytes"),
        ("", "not an amount of bytes"),
        ("1.2.3GiB", "not an amount of bytes"),
        ("0GiB", "not positive and finite"),
        ("-1GiB", "not positive and finite"),
        ("nanGiB", "not positive and finite"),
        ("infGiB", "not positive and finite"),
        ("1e999GB", "more than any memory"),
        ("1.5B", "not a whole number of bytes"),
        ("0.0001KiB", "not a whole number of bytes"),
        (0, "not positive and finite"),
        (-1, "not positive and finite"),
        (1.5, "not an amount of bytes"),
        (float("nan"), "not an amount of bytes"),
        (True, "not an amount of bytes"),
        (None, "not an amount of bytes"),
    ],
)
def test_a_bad_amount_is_refused_with_what_was_given(amount, said):
    with pytest.raises(ValueError, match=said) as caught:
        unchecked(amount, argument="budget")
    assert f"`budget={amount}`" in str(caught.value)
    assert "70GiB" in str(caught.value)  # how to write one
