"""Where a run writes its files."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from accelfn.context.config.checks import check_bools, check_ints, settle, settle_path

__all__ = ("ProjectConfiguration",)


@dataclass(frozen=True, slots=True)
class ProjectConfiguration:
    """Directories and naming of checkpoints.

    Attributes:
        project_dir: Root of what the run writes, as text once built; ``None`` for no root. Default None.
        logging_dir: Directory of the trackers; ``None`` becomes ``project_dir``. A record made with
            ``dataclasses.replace`` keeps the directory that was found so. Default None.
        automatic_checkpoint_naming: Whether checkpoints are named ``checkpoints/checkpoint_<iteration>``.
            Default False.
        total_limit: Checkpoints that are kept under automatic naming, at least 1; ``None`` keeps all. Default
            None.
        iteration: Number of the next automatically named checkpoint. Default 0.
        save_on_each_node: Whether one rank per node writes, for disks that nodes do not share. Default False.
    """

    project_dir: str | PathLike[str] | None = None
    logging_dir: str | PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_path(self, "project_dir", "logging_dir")
        check_bools(self, "automatic_checkpoint_naming", "save_on_each_node")
        check_ints(self, "total_limit", minimum=1, optional=True)
        check_ints(self, "iteration", minimum=0)
        if self.logging_dir is None:
            settle(self, logging_dir=self.project_dir)
