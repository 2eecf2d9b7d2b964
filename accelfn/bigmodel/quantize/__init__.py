"""Models loaded in 8 and 4 bits, through bitsandbytes or torchao."""

__all__: tuple[str, ...] = ()
