"""Training that survives the loss of ranks: snapshots in memory, and worlds formed by those who are left."""

from accelfn.elastic.run import run_elastic
from accelfn.elastic.snapshot import remember

__all__ = ("remember", "run_elastic")
