"""Training that survives the loss of ranks."""

from accelfn.elastic.run import run_elastic as run_elastic
from accelfn.elastic.snapshot import remember as remember
