"""Byte amounts as people write them."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_UNITS = {"B": 1, "bytes": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}iB"] = 2 ** (10 * _power)
    _UNITS[f"{_letter}B"] = 10 ** (3 * _power)
_VALID = "Write an amount with its unit, as in `70GiB` (2**30 bytes) or `75GB` (10**9)."


def parse_bytes(amount: str | int, *, argument: str = "bytes") -> int:
    """Return an amount of bytes given as an int, or as text with its unit.

    A fraction of a larger unit is rounded down to bytes.

    Args:
        amount: A positive whole number of bytes, or text such as `"70GiB"`, `"75 GB"`.
        argument: What to call it in the error.

    Raises:
        ValueError: For no unit, an unknown one, or an amount that is not positive and
            finite, or not a whole number of bytes.

    Example:
        >>> parse_bytes("1.5KiB")
        1536
        >>> parse_bytes("70")
        Traceback (most recent call last):
        ...
        ValueError: `bytes=70` has no unit. Write an amount with its unit, as in \
`70GiB` \
(2**30 bytes) or `75GB` (10**9).
    """
    given = f"`{argument}={amount}`"
    if isinstance(amount, bool) or not isinstance(amount, (str, int)):
        raise ValueError(f"{given} is not an amount of bytes. {_VALID}")
    number, unit = (
        (Decimal(amount), 1) if isinstance(amount, int) else _split(amount, given)
    )
    if not number.is_finite() or number <= 0:
        raise ValueError(f"{given} is not positive and finite. {_VALID}")
    total = number * unit
    if total >= 2**63:
        raise ValueError(f"{given} is more than any memory. {_VALID}")
    if (unit == 1 and total != int(total)) or total < 1:
        raise ValueError(f"{given} is not a whole number of bytes. {_VALID}")
    return int(total)


def _split(text: str, given: str) -> tuple[Decimal, int]:
    match = re.fullmatch(r"\s*([+-]?[0-9.eE]+|nan|inf)\s*([A-Za-z]*)\s*", text)
    try:
        number = Decimal(match.group(1)) if match else None
    except InvalidOperation:
        number = None
    if match is None or number is None:
        raise ValueError(f"{given} is not an amount of bytes. {_VALID}")
    unit = match.group(2)
    if not unit:
        raise ValueError(f"{given} has no unit. {_VALID}")
    if unit not in _UNITS:
        raise ValueError(f"{given} has no known unit: `{unit}`. {_VALID}")
    return number, _UNITS[unit]
