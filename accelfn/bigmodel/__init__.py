"""Models that don't fit: a plan of where every tensor lies, loading, offloading, and running."""

from accelfn.bigmodel.places import Place, PlaceLike

__all__ = ("Place", "PlaceLike")
