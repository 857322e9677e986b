"""The only home of scale factors.

Everything inside bimetal is in base units (seconds, bytes, FLOP, watts, USD); names carry the unit.
Data files and people use larger ones, and these constants are how they are converted.
"""

KILO = 1e3
MEGA = 1e6
GIGA = 1e9
TERA = 1e12

KIB = 2**10
MIB = 2**20
GIB = 2**30

MS_PER_S = 1e3
US_PER_S = 1e6
MINUTES_PER_HOUR = 60
S_PER_HOUR = 3600
HOURS_PER_YEAR = 8760
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
DAYS_PER_YEAR = 365
MONTHS_PER_YEAR = 12
WEEKS_PER_YEAR = 365 / 7

DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "float4": 0.5,
}


def format_bytes(num_bytes: float) -> str:
    """Decimal, as vendors count memory.

    >>> format_bytes(92_100_000_000)
    '92.1 GB'
    """
    for limit, unit in ((TERA, "TB"), (GIGA, "GB"), (MEGA, "MB"), (KILO, "kB")):
        if abs(num_bytes) >= limit:
            return f"{num_bytes / limit:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_s(seconds: float) -> str:
    """A duration in the unit that leaves one to three digits before the point.

    >>> format_s(0.0042), format_s(3.7e-5), format_s(2.5)
    ('4.20 ms', '37.0 us', '2.50 s')
    """
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * MS_PER_S:.2f} ms"
    return f"{seconds * US_PER_S:.1f} us"
