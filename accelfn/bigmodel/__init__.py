"""Models that don't fit: a plan of where every tensor lies, loading, offloading, and running."""

from accelfn.bigmodel.offload.dispatch import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    read_offload,
    undispatch,
)
from accelfn.bigmodel.offload.stream import StreamFacts
from accelfn.bigmodel.places import Place, PlaceLike

__all__ = (
    "Place",
    "PlaceLike",
    "StreamFacts",
    "cpu_offload",
    "disk_offload",
    "dispatch_model",
    "read_offload",
    "undispatch",
)
