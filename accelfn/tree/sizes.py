"""Sizes as people read them."""

__all__ = ("size_text",)

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(num_bytes: int) -> str:
    """Write a size in powers of 1000.

    >>> size_text(999), size_text(1234), size_text(56_700_000), size_text(999_960)
    ('999 B', '1.2 kB', '56.7 MB', '1.0 MB')
    """
    size, unit = float(num_bytes), 0
    while unit + 1 < len(_UNITS) and round(size, 1) >= 1000:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"
