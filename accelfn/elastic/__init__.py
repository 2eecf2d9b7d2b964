"""Training that survives the loss of ranks: snapshots in memory, and worlds formed by those who are left."""

from accelfn.elastic.memory import snapshot
from accelfn.elastic.run import run_elastic

__all__ = ("run_elastic", "snapshot")
