"""Checkpoints turned into others."""

__all__: tuple[str, ...] = ()  # accelfn.checkpoint has what is public
