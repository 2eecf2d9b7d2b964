"""MLflow."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar

from accelfn.errors import ConfigurationError
from accelfn.tracking.built_in.base import BuiltInTracker
from accelfn.tracking.pictures import read_pixels
from accelfn.tracking.values import flatten_names

__all__ = ("MLflowTracker",)

# What servers take at once, of old and new versions.
_BATCH = 100


class MLflowTracker(BuiltInTracker):
    """Logs to MLflow, where its tracking address says.

    Names keep letters, digits, and ``_ - . /`` and blanks, which is what MLflow takes; all else in them
    becomes ``_``.

    The variables ``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_RUN_ID``, ``MLFLOW_TAGS`` (JSON) and
    ``MLFLOW_NESTED_RUN`` win over the arguments, as for other programs that log to MLflow.

    Args:
        experiment_name: The experiment; one of this name is used, or made.
        logging_dir: Where a new experiment keeps its files; None leaves that to MLflow.
        run_id: Of a run to go on with.
        tags: Of the run, and of a new experiment.
        nested_run: Whether the run is part of one that is at work.
        run_name: Of a new run.
        description: Of a new run.
    """

    name = "mlflow"
    requires_logging_directory = False
    modules: ClassVar[tuple[str, ...]] = ("mlflow",)
    install: ClassVar[str] = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        """Keep the names; nothing is started before ``start``."""
        super().__init__()
        self.experiment_name: str | None = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir: str | None = None if logging_dir is None else os.fspath(logging_dir)
        self.run_id: str | None = os.environ.get("MLFLOW_RUN_ID") or run_id
        self.tags: dict[str, Any] | None = _read_tags(os.environ.get("MLFLOW_TAGS") or tags)
        said = os.environ.get("MLFLOW_NESTED_RUN", "").lower()
        self.nested_run: bool = said in ("1", "y", "yes", "t", "true", "on") if said else nested_run
        self.run_name = run_name
        self.description = description

    def start(self) -> None:
        """Find or make the experiment, and begin the run."""
        self._package = self.load()
        found = None
        if self.experiment_name is not None:
            found = self._package.get_experiment_by_name(self.experiment_name)
        if found is not None:
            experiment = found.experiment_id
        elif self.experiment_name is None:
            experiment = None
        else:
            experiment = self._package.create_experiment(
                self.experiment_name, artifact_location=self.logging_dir, tags=self.tags
            )
        self.active_run: Any = self._package.start_run(
            run_id=self.run_id,
            experiment_id=experiment,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @property
    def tracker(self) -> Any:
        """The active run."""
        return self.active_run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as parameters, without texts that are too long for MLflow."""
        longest = importlib.import_module("mlflow.utils.validation").MAX_PARAM_VAL_LENGTH
        pairs: list[tuple[str, Any]] = []
        for name, value in flatten_names(values):
            if len(str(value)) <= longest:
                pairs.append((_name(name), value))
            else:
                self.leave_out(name, value)
        for begin in range(0, len(pairs), _BATCH):
            self._package.log_params(dict(pairs[begin : begin + _BATCH]))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers as metrics; ``kwargs`` are for ``mlflow.log_metrics``."""
        numbers: dict[str, float] = {}
        for name, value in flatten_names(values):
            if isinstance(value, (int, float)):
                numbers[_name(name)] = value
            else:
                self.leave_out(name, value)
        if numbers:
            self._package.log_metrics(numbers, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images as files of the run."""
        at = "" if step is None else f"{step}-"
        for name, images in values.items():
            for number, pixels in enumerate(read_pixels(images, name)):
                file = PurePosixPath("images", f"{_name(name)}-{at}{number}.png")
                self._package.log_image(pixels.numpy(), artifact_file=str(file), **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table as a JSON file of the run; tables of one name grow."""
        if dataframe is None:
            rows = list(data or ())
            dataframe = {name: [row[place] for row in rows] for place, name in enumerate(columns or ())}
        self._package.log_table(dataframe, artifact_file=f"{_name(table_name)}.json", **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Keep a figure of matplotlib or plotly as a file of the run."""
        self._package.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file with the run."""
        self._package.log_artifact(local_path=local_path, artifact_path=artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Keep a folder with the run."""
        self._package.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def finish(self) -> None:
        """End the run."""
        self._package.end_run()


def _name(name: str) -> str:
    """Return a name as MLflow takes it: one odd name would lose all that is sent with it.

    >>> _name("acc@5"), _name("../top//1")
    ('acc_5', 'top/1')
    """
    parts = [part for part in re.sub(r"[^/\w.\- ]", "_", name).split("/") if part.strip(". ")]
    return "/".join(parts) or "_"


def _read_tags(tags: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(tags, str):
        return None if tags is None else dict(tags)
    try:
        read = json.loads(tags)
    except ValueError as error:
        raise ConfigurationError(f"mlflow: tags must be a JSON object: got {tags!r} ({error}).") from error
    if not isinstance(read, dict):
        raise ConfigurationError(f"mlflow: tags must be a JSON object: got {tags!r}.")
    return read  # pyright: ignore[reportUnknownVariableType] -- of JSON
