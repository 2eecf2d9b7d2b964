"""Folders that Hugging Face Accelerate writes and reads."""

__all__: tuple[str, ...] = ()  # accelfn.checkpoint has what is public
