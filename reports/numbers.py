"""Numbers as a reader should see them: significant digits, true zero only for zero, units spelled out."""

from __future__ import annotations

import math

MINUS = "−"


def significant(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, scientific outside [1e-3, 1e5); '0' only for zero; 'none' for None."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    text = f"{abs(value):.{digits - 1}e}"
    mantissa, exponent = text.split("e")
    power = int(exponent)
    if -4 < power < 5:
        body = f"{abs(value):.{max(0, digits - 1 - power)}f}"
    else:
        body = f"{mantissa}e{MINUS if power < 0 else ''}{abs(power)}"
    return (MINUS if value < 0 else "") + body


def fixed(value: float | None, decimals: int = 3) -> str:
    """`decimals` decimals; a value that would round to a false zero is shown by its significant digits."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "not finite"
    if value != 0 and abs(value) < 0.5 * 10**-decimals:
        return significant(value, 2)
    return f"{MINUS if value < 0 else ''}{abs(value):.{decimals}f}"


def percent(value: float | None, decimals: int = 1) -> str:
    """A ratio as per cent. What is not 100 % is never rounded up to it."""
    if value is None or not math.isfinite(value):
        return fixed(value)
    text = f"{abs(value) * 100:.{decimals}f}"
    if abs(value) < 1 and float(text) == 100:
        text = f"> {100 - 10**-decimals:.{decimals}f}"
    return f"{MINUS if value < 0 else ''}{text} %"


def interval(bounds: tuple[float, float] | None, decimals: int = 3, *, scale: float = 1.0) -> str:
    """'[0.123, 0.456]', or 'none'."""
    if bounds is None:
        return "none"
    return f"[{fixed(bounds[0] * scale, decimals)}, {fixed(bounds[1] * scale, decimals)}]"


def mebibytes(value: float | None) -> str:
    return "none" if value is None else f"{value / 2**20:,.0f} MiB"
