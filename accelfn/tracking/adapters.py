"""The built-in trackers: thin adapters to packages, which are imported when a tracker starts."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.tracking.tracker import GeneralTracker, warn_caller
from accelfn.tracking.values import as_array, as_pillow, flatten_names, read_pixels


class Table(NamedTuple):
    """A table: names of the columns, which may have none, and the cells of each row."""

    columns: list[str]
    rows: list[list[Any]]

    def names(self) -> list[str]:
        """Return the names of the columns, or their numbers."""
        return self.columns or [str(index) for index in range(max(map(len, self.rows), default=0))]


class BuiltInTracker(GeneralTracker):
    """Base of the built-in trackers.

    A subclass defines ``_begin``, and what it supports of ``log``, ``_images`` and ``_table``.

    Attributes:
        modules: Modules to import, one of which is needed; by default the one with the tracker's name.
        install: Package to install with pip; by default the first module.
        default_directory: Directory to write to if none is given; None if one is required or none is used.
    """

    requires_logging_directory = False
    modules: ClassVar[tuple[str, ...]]
    install: ClassVar[str] = ""
    default_directory: ClassVar[str | None] = None
    #: Name of the attribute with the package's object, and of its method that ends the run.
    handle: ClassVar[str] = "run"
    end: ClassVar[str] = "finish"

    def __init_subclass__(cls) -> None:
        """Set ``modules`` to its default."""
        if "modules" not in vars(cls) and "name" in vars(cls):
            cls.modules = (cls.name,)

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        """Store the name and the arguments; ``start`` starts the run."""
        super().__init__()
        self.run_name = run_name
        self._options = kwargs
        self._skipped: set[str] = set()

    def start(self) -> None:
        """Import the package, and start the run."""
        self._package: Any = self.load()
        setattr(self, self.handle, self._begin(self._package))

    def _begin(self, package: Any) -> object:
        """Start the run, and return the package's object for it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Finish the run."""
        getattr(self.tracker, self.end)()

    @property
    def tracker(self) -> Any:
        """The package's object for the run."""
        return getattr(self, self.handle)

    @classmethod
    def is_installed(cls) -> bool:
        """Return whether the package is installed, without importing it."""
        return not cls.modules or any(map(_can_import, cls.modules))

    def load(self) -> Any:
        """Import the package.

        Raises:
            MissingExtraError: The package isn't installed.
        """
        for name in self.modules:
            if _can_import(name):
                return importlib.import_module(name)
        raise self.missing()

    @classmethod
    def missing(cls) -> MissingExtraError:
        """Return the error for a package that isn't installed."""
        return MissingExtraError(
            f"the tracker {cls.name!r} needs {' or '.join(cls.modules)}, which isn't installed. "
            f"Run: pip install {cls.install or cls.modules[0]}"
        )

    def skip(self, name: str, value: object) -> None:
        """Warn that a value can't be logged, once per name. None is skipped silently."""
        if value is not None and name not in self._skipped:
            self._skipped.add(name)
            kind = type(value).__name__
            warn_caller(f"{self.name} can't log a value of type {kind}; skipping {name!r} (warned once).")

    def select(self, values: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
        """Return the values of some types by flat names, and skip the others."""
        selected: dict[str, Any] = {}
        for name, value in flatten_names(values):
            if isinstance(value, kinds):
                selected[name] = value
            else:
                self.skip(name, value)
        return selected

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; ``kwargs`` are passed to the package's function or class for images."""
        for name, images in values.items():
            self._images(name, read_pixels(images, name), step, kwargs)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table; ``kwargs`` are passed to the package's function."""
        if dataframe is not None:
            columns, data = [*map(str, dataframe.columns)], [*dataframe.itertuples(index=False)]
        table = Table([*(columns or ())], [list(row) for row in data or ()])
        self._table(table_name, table, step, kwargs)

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        """Log the images of one name."""
        super().log_images({}, step)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        """Log a table, whose columns may have no names."""
        super().log_table(name)


def _can_import(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, put into sys.modules
        return True
    # A namespace package may be the folder of a wandb run in the working directory.
    return spec is not None and spec.origin is not None


class _ProjectTracker(BuiltInTracker):
    """Base of trackers whose package has ``init(project=...)``, like wandb."""

    run: Any

    def _begin(self, package: Any) -> object:
        return package.init(**{"project": self.run_name, **self._options})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration."""
        self.run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log JSON values and objects of the package; ``kwargs`` are passed to ``run.log``."""
        selected = {name: value for name, value in values.items() if self._can_log(name, value)}
        self.run.log(selected, step=step, **kwargs)

    def _can_log(self, name: str, value: Any) -> bool:
        if type(value).__module__.partition(".")[0] not in self.modules:
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                self.skip(name, value)
                return False
        return True

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        self.run.log({name: [self._package.Image(as_array(image), **options) for image in images]}, step=step)


class WandBTracker(_ProjectTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: The project.
        **kwargs: Arguments of ``wandb.init``.
    """

    name = "wandb"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration."""
        self.run.config.update(values, allow_val_change=True)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        cells = self._package.Table(columns=table.names(), data=table.rows, allow_mixed_types=True)
        self.run.log({name: cells}, step=step, **options)


class TrackioTracker(_ProjectTracker):
    """Logs to Trackio.

    Args:
        run_name: The project.
        **kwargs: Arguments of ``trackio.init``.
    """

    name = "trackio"

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        numbered = _numbered(name, [self._package.Image(image.numpy(), **options) for image in images], "/")
        self.run.log(numbered, step=step)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        cells = self._package.Table(columns=table.names(), data=table.rows)
        self.run.log({name: cells}, step=step, **options)


class SwanLabTracker(_ProjectTracker):
    """Logs to SwanLab.

    Args:
        run_name: The project.
        **kwargs: Arguments of ``swanlab.init``.
    """

    name = "swanlab"

    def _begin(self, package: Any) -> object:
        run = super()._begin(package)
        package.config.update({"FRAMEWORK": "accelfn"})
        return run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration."""
        self._package.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, and texts as ``swanlab.Text``; ``kwargs`` are passed to ``run.log``."""
        selected = self.select(values, int, float, str)
        text = self._package.Text
        wrapped = {name: text(value) if isinstance(value, str) else value for name, value in selected.items()}
        self.run.log(wrapped, step=step, **kwargs)


class TensorBoardTracker(BuiltInTracker):
    """Writes TensorBoard event files with ``torch.utils.tensorboard`` or tensorboardX.

    A mapping of numbers becomes a group of scalars in one chart. None and lists are skipped.

    Args:
        run_name: Directory of the run.
        logging_dir: Parent directory.
        **kwargs: Arguments of ``SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True
    modules: ClassVar[tuple[str, ...]] = ("tensorboard", "tensorboardX")
    handle = "writer"
    end = "close"
    writer: Any

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        """Set the directory; ``start`` creates the event file."""
        super().__init__(run_name, **kwargs)
        self.logging_dir: str = os.path.join(logging_dir, run_name)

    def _begin(self, package: Any) -> object:
        if package.__name__ == "tensorboard":
            package = importlib.import_module("torch.utils.tensorboard")
        return package.SummaryWriter(self.logging_dir, **self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as hyperparameters, and write it to ``<time>/hparams.yml``."""
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for name, value in flatten_names(values)
        }
        self.writer.add_hparams(plain, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        # JSON is valid YAML.
        (folder / "hparams.yml").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; ``kwargs`` are passed to ``add_scalar``, ``add_text`` and ``add_scalars``."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                group = self.select({name: value}, int, float)
                parts = {path.removeprefix(f"{name}/"): number for path, number in group.items()}
                if parts:
                    self.writer.add_scalars(name, parts, global_step=step, **kwargs)
            else:
                self.skip(name, value)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; with ``dataformats``, a value is passed to ``add_images`` unchanged."""
        if "dataformats" in kwargs:
            for name, images in values.items():
                self.writer.add_images(name, images, global_step=step, **kwargs)
        else:
            super().log_images(values, step, **kwargs)
        self.writer.flush()

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        for tag, image in _numbered(name, images, "/").items():
            self.writer.add_image(tag, image, global_step=step, dataformats="HWC", **options)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        # As Markdown, which TensorBoard renders.
        lines = [
            " | ".join(str(cell).replace("|", "\\|") for cell in row) for row in (table.columns, *table.rows)
        ]
        lines.insert(1, " | ".join(["---"] * len(table.columns)))
        text = "\n".join(f"| {line} |" for line in lines)
        self.writer.add_text(name, text, global_step=step, **options)
        self.writer.flush()


class AimTracker(BuiltInTracker):
    """Logs to Aim, version 3.

    Args:
        run_name: Name of the run.
        logging_dir: Aim repository.
        **kwargs: Arguments of ``aim.Run``.
    """

    name = "aim"
    install = "'aim<4'"
    requires_logging_directory = True
    handle = "writer"
    end = "close"
    writer: Any

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        """Store the name and the arguments; ``start`` starts the run."""
        repo = None if logging_dir is None else os.fspath(logging_dir)
        super().__init__(run_name, **{"repo": repo, **kwargs})

    def _begin(self, package: Any) -> object:
        run = package.Run(**self._options)
        run.name = self.run_name
        return run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as ``run["hparams"]``."""
        self.writer["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; ``kwargs`` are passed to ``track``."""
        for name, value in self.select(values, int, float, str).items():
            tracked = self._package.Text(value) if isinstance(value, str) else value
            self.writer.track(tracked, name=name, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; a value may be a pair of images and a caption.

        ``kwargs`` may contain two mappings: ``aim_image`` for ``aim.Image``, and ``track`` for ``track``.
        """
        for name, value in values.items():
            images, options = value, dict(kwargs.get("aim_image") or {})
            pair = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()
            if len(pair) == 2 and isinstance(pair[1], str):
                images, options["caption"] = pair
            for pixels in read_pixels(images, name):
                image = self._package.Image(as_pillow(pixels), **options)
                self.writer.track(image, name=name, step=step, **(kwargs.get("track") or {}))


class CometMLTracker(BuiltInTracker):
    """Logs to Comet.

    Args:
        run_name: The project.
        **kwargs: Arguments of ``comet_ml.start``, or of ``comet_ml.Experiment`` before version 3.41.
    """

    name = "comet_ml"
    handle = "writer"
    end = "end"
    writer: Any

    def _begin(self, package: Any) -> object:
        begin = package.start if hasattr(package, "start") else package.Experiment
        return begin(**{"project_name": self.run_name, **self._options})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as parameters."""
        self.writer.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, texts as other values, and mappings as groups of metrics.

        ``kwargs`` are passed to each call.
        """
        if step is not None:
            self.writer.set_step(step)
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, Mapping):
                group = dict(cast("Mapping[str, Any]", value))
                self.writer.log_metrics(group, prefix=name, step=step, **kwargs)
            else:
                self.skip(name, value)

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        for image in images:
            self.writer.log_image(as_pillow(image), name=name, step=step, **options)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        file = name if name.endswith((".csv", ".tsv", ".json", ".md")) else f"{name}.csv"
        self.writer.log_table(file, tabular_data=table.rows, headers=table.columns or False, **options)


class ClearMLTracker(BuiltInTracker):
    """Logs to ClearML.

    The current task is used if there is one, and stays open at the end. The variables ``CLEARML_PROJECT`` and
    ``CLEARML_TASK`` set the names of a new task.

    Args:
        run_name: Default name of project and task.
        **kwargs: Arguments of ``Task.init``.
    """

    name = "clearml"
    handle = "task"
    end = "close"
    task: Any

    def _begin(self, package: Any) -> object:
        task = package.Task.current_task()
        self._is_owner = task is None
        names = {
            "project_name": os.environ.get("CLEARML_PROJECT") or self.run_name,
            "task_name": os.environ.get("CLEARML_TASK") or self.run_name,
        }
        return package.Task.init(**{**names, **self._options}) if task is None else task

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration."""
        self.task.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers: as scalars, or as single values without a step.

        ``eval_loss`` becomes the series ``eval`` of the chart ``loss``, likewise with ``test_`` and
        ``train_``. Other names belong to the series ``train``. ``kwargs`` are passed to each call.
        """
        logger = self.task.get_logger()
        for name, value in self.select(values, int, float).items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _split(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        title, series = _split(name)
        logger = self.task.get_logger()
        for part, image in _numbered(series, images, " ").items():
            logger.report_image(title=title, series=part, iteration=step, image=image.numpy(), **options)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        cells = [table.columns, *table.rows] if table.columns else table.rows
        title, series = _split(name)
        logger = self.task.get_logger()
        logger.report_table(title=title, series=series, table_plot=cells, iteration=step, **options)

    def finish(self) -> None:
        """Close the task if this tracker started it."""
        if self._is_owner:
            super().finish()


def _split(name: str) -> tuple[str, str]:
    """Split a name into chart and series.

    >>> _split("eval_loss"), _split("loss")
    (('loss', 'eval'), ('loss', 'train'))
    """
    series, _, title = name.partition("_")
    return (title, series) if title and series in ("eval", "test", "train") else (name, "train")


def _numbered(name: str, values: Sequence[Any], separator: str) -> dict[str, Any]:
    """Return a single value by name, or several by name and number."""
    if len(values) == 1:
        return {name: values[0]}
    return {f"{name}{separator}{number}": value for number, value in enumerate(values)}


class DVCLiveTracker(BuiltInTracker):
    """Logs with DVCLive.

    Args:
        run_name: Ignored; DVCLive names its runs itself.
        live: An existing ``dvclive.Live``; None to create one.
        **kwargs: Arguments of ``dvclive.Live``.
    """

    name = "dvclive"
    handle = "live"
    end = "end"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        """Store the arguments; ``start`` starts the run."""
        super().__init__(run_name, **kwargs)
        self.live: Any = live

    def start(self) -> None:
        """Start the run, unless there is one."""
        if self.live is None:
            super().start()

    def _begin(self, package: Any) -> object:
        return package.Live(**self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as parameters."""
        self.live.log_params(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and texts as metrics, and end the step; ``kwargs`` are passed to ``log_metric``."""
        if step is not None:
            self.live.step = step
        for name, value in self.select(values, int, float, str).items():
            self.live.log_metric(name, value, **kwargs)
        self.live.next_step()

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        if step is not None:
            self.live.step = step
        for file, image in _numbered(name, images, "-").items():
            self.live.log_image(f"{file}.png", as_array(image), **options)


class MLflowTracker(BuiltInTracker):
    """Logs to MLflow.

    Characters that MLflow doesn't allow in names are replaced by ``_``. The variables
    ``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_RUN_ID``, ``MLFLOW_TAGS`` (JSON) and ``MLFLOW_NESTED_RUN`` take
    precedence over the arguments.

    Args:
        experiment_name: Name of the experiment, which is created if it doesn't exist.
        logging_dir: Artifact location of a new experiment; None for MLflow's default.
        run_id: ID of a run to resume.
        tags: Tags of the run and of a new experiment.
        nested_run: Whether to nest the run in the active one.
        run_name: Name of a new run.
        description: Description of a new run.
    """

    name = "mlflow"
    handle = "active_run"

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
        """Store the arguments; ``start`` starts the run."""
        super().__init__(run_name)
        self.experiment_name: str | None = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir: str | None = None if logging_dir is None else os.fspath(logging_dir)
        self.run_id: str | None = os.environ.get("MLFLOW_RUN_ID") or run_id
        self.tags: dict[str, Any] | None = _read_tags(os.environ.get("MLFLOW_TAGS") or tags)
        nested = os.environ.get("MLFLOW_NESTED_RUN", "").lower()
        self.nested_run: bool = nested in ("1", "y", "yes", "t", "true", "on") if nested else nested_run
        self.description = description

    def _begin(self, package: Any) -> object:
        """Find or create the experiment, and start the run."""
        name, experiment = self.experiment_name, None
        if name is not None:
            existing = package.get_experiment_by_name(name)
            made = {"artifact_location": self.logging_dir, "tags": self.tags}
            experiment = existing.experiment_id if existing else package.create_experiment(name, **made)
        options = {"nested": self.nested_run, "tags": self.tags, "description": self.description}
        return package.start_run(
            run_id=self.run_id, experiment_id=experiment, run_name=self.run_name, **options
        )

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as parameters, without texts that are too long for MLflow."""
        max_length = importlib.import_module("mlflow.utils.validation").MAX_PARAM_VAL_LENGTH
        pairs: list[tuple[str, Any]] = []
        for name, value in flatten_names(values):
            if len(str(value)) <= max_length:
                pairs.append((_clean_name(name), value))
            else:
                self.skip(name, value)
        for begin in range(0, len(pairs), 100):  # the maximum of old servers
            self._package.log_params(dict(pairs[begin : begin + 100]))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics; ``kwargs`` are passed to ``mlflow.log_metrics``."""
        numbers = {_clean_name(name): value for name, value in self.select(values, int, float).items()}
        self._package.log_metrics(numbers, step=step, **kwargs)

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        prefix = "" if step is None else f"{step}-"
        for number, image in enumerate(images):
            file = f"images/{_clean_name(name)}-{prefix}{number}.png"
            self._package.log_image(image.numpy(), artifact_file=file, **options)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        # A JSON file; tables of the same name are appended to it.
        cells = {column: [row[at] for row in table.rows] for at, column in enumerate(table.columns)}
        self._package.log_table(cells, artifact_file=f"{_clean_name(name)}.json", **options)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a matplotlib or plotly figure as an artifact."""
        self._package.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file as an artifact."""
        self._package.log_artifact(local_path=local_path, artifact_path=artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log a directory as an artifact."""
        self._package.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def finish(self) -> None:
        """Finish the run."""
        self._package.end_run()


def _clean_name(name: str) -> str:
    """Replace what MLflow doesn't allow in a name; an invalid name would lose all values sent with it.

    >>> _clean_name("acc@5"), _clean_name("../top//1")
    ('acc_5', 'top/1')
    """
    parts = [part for part in re.sub(r"[^/\w.\- ]", "_", name).split("/") if part.strip(". ")]
    return "/".join(parts) or "_"


def _read_tags(tags: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(tags, str):
        return None if tags is None else dict(tags)
    try:
        return dict(json.loads(tags))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"mlflow: tags must be a JSON object, got {tags!r} ({error}).") from error


#: Trackers that need a package.
ADAPTERS: tuple[type[BuiltInTracker], ...] = (
    *(AimTracker, TensorBoardTracker, WandBTracker, TrackioTracker, CometMLTracker, MLflowTracker),
    *(ClearMLTracker, DVCLiveTracker, SwanLabTracker),
)
