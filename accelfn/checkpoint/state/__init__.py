"""The state of a run: who brings what, who writes what, and how it is taken up."""

__all__: tuple[str, ...] = ()  # accelfn.checkpoint has what is public
