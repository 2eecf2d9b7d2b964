"""Move a program from Accelerate to accelfn: a plan of edits of its source."""

from accelfn.launch.migrate.plan import Level, Migration, plan_migration
from accelfn.launch.migrate.program import Edit, Remark

__all__ = ("Edit", "Level", "Migration", "Remark", "plan_migration")
