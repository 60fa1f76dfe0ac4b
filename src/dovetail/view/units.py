"""Numbers for people: three significant digits and a unit."""

from __future__ import annotations

import math


def seconds(value: float) -> str:
    """A time: "412 us", "1.23 ms", "4.50 s"."""
    if value == 0:
        return "0 s"
    # Compare what will be printed, so that 999.7 us becomes "1.00 ms" and not "1000 us".
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(value) * factor >= 0.9995:
            return f"{_digits(value * factor)} {unit}"
    return f"{_digits(value * 1e9)} ns"


def size(nbytes: float) -> str:
    """A size in powers of 1024, as torch's bucket caps are: "512 B", "1.50 MiB"."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{_digits(value)} {units[0]}"


def rate(seconds_per_byte: float) -> str:
    """The inverse of a time per byte, as networks are named: "1.35 GB/s"."""
    if seconds_per_byte <= 0:
        return "unlimited"
    value = 1 / seconds_per_byte
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if value >= 0.9995 * factor:
            return f"{_digits(value / factor)} {unit}"
    return f"{_digits(value)} B/s"


def percent(fraction: float, *, sign: bool = False) -> str:
    """ "4.2 %"; with `sign`, "+4.2 %" and "-4.2 %" for differences."""
    value = fraction * 100
    digits = 0 if abs(value) >= 99.95 else 1
    text = f"{value:+.{digits}f} %" if sign else f"{value:.{digits}f} %"
    return text.replace("-0.0", "0.0").replace("+0.0", "0.0")


def count(number: int, what: str) -> str:
    """ "1 bucket", "3 buckets"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value)) + 1e-4))}f}"
