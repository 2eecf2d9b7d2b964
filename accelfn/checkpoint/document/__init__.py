"""A tree as a document of JSON and named tensors."""

__all__: tuple[str, ...] = ()  # accelfn.checkpoint has what is public
