"""A model's weights, in the layout that the ecosystem reads."""

__all__: tuple[str, ...] = ()  # accelfn.checkpoint has what is public
