"""The built-in trackers: thin adapters, each to a package that is imported when the tracker starts."""

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
    """What ``log_table`` was called with.

    Attributes:
        columns: Their names; empty where none were given.
        rows: The cells.
        frame: A dataframe in place of both, or None.
    """

    columns: list[str]
    rows: list[list[Any]]
    frame: Any

    def spread(self) -> tuple[list[str], list[list[Any]]]:
        """Return columns and rows, of a dataframe too."""
        if self.frame is None:
            return self.columns, self.rows
        return [str(one) for one in self.frame.columns], self.frame.values.tolist()

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Return the arguments of ``Table`` of wandb and trackio; columns without names are numbered."""
        if self.frame is not None:
            return {"dataframe": self.frame}
        width = max(map(len, self.rows), default=0)
        return {"columns": self.columns or [str(one) for one in range(width)], "data": self.rows, **more}


class BuiltInTracker(GeneralTracker):
    """Base of the built-in trackers.

    Attributes:
        modules: What is imported, any of them; by default that of its name.
        install: What pip installs; by default the first of them.
        default_directory: Where it writes when no directory is given; None if one must be given, or it
            writes nowhere.
    """

    requires_logging_directory = False
    modules: ClassVar[tuple[str, ...]]
    install: ClassVar[str]
    default_directory: ClassVar[str | None] = None
    #: Name of the attribute that is the object behind it.
    handle: ClassVar[str] = "run"

    def __init_subclass__(cls) -> None:
        """Name the package, where it isn't called otherwise."""
        if "modules" not in vars(cls) and "name" in vars(cls):
            cls.modules = (cls.name,)
        if "install" not in vars(cls) and vars(cls).get("modules"):
            cls.install = cls.modules[0]

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        """Keep the name and the arguments; nothing is started before ``start``."""
        super().__init__()
        self.run_name = run_name
        self._options = kwargs
        self._left_out: set[str] = set()

    @property
    def tracker(self) -> Any:
        """The run, or what the package calls it."""
        return getattr(self, self.handle)

    @classmethod
    def is_installed(cls) -> bool:
        """Return whether the package is installed, without importing it."""
        return not cls.modules or any(map(_is_there, cls.modules))

    def load(self) -> Any:
        """Import the package.

        Raises:
            MissingExtraError: It isn't installed.
        """
        for name in self.modules:
            if _is_there(name):
                return importlib.import_module(name)
        raise MissingExtraError(
            f"the tracker {self.name!r} needs {' or '.join(self.modules)}, which isn't installed: "
            f"pip install {self.install}"
        )

    def leave_out(self, name: str, value: object) -> None:
        """Warn that a value can't be logged, once for each name. None is left out without a word."""
        if value is not None and name not in self._left_out:
            self._left_out.add(name)
            kind = type(value).__name__
            warn_caller(f"{self.name} can't log a value of type {kind}; skipping {name!r} (warned once).")

    def keep(self, values: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
        """Return the values of some types with flat names, and leave out the rest."""
        kept: dict[str, Any] = {}
        for name, value in flatten_names(values):
            if isinstance(value, kinds):
                kept[name] = value
            else:
                self.leave_out(name, value)
        return kept

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images; ``kwargs`` are for the package's call or class for an image."""
        if type(self)._images is BuiltInTracker._images:
            super().log_images(values, step, **kwargs)
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
        """Keep a table; ``kwargs`` are for the package's call."""
        if type(self)._table is BuiltInTracker._table:
            super().log_table(table_name, columns, data, dataframe, step, **kwargs)
        table = Table(list(columns or ()), [list(row) for row in data or ()], dataframe)
        self._table(table_name, table, step, kwargs)

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        """Keep the images of one name."""

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        """Keep a table."""


def _is_there(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that was put in place by hand
        return True
    # A folder that a run of wandb has left in the working directory passes for a package without code.
    return spec is not None and spec.origin is not None


class _ProjectTracker(BuiltInTracker):
    """Base of those whose package begins the run of a project by ``init(project=...)``, as wandb does."""

    def start(self) -> None:
        """Begin the run."""
        self._package = self.load()
        self.run: Any = self._package.init(**{"project": self.run_name, **self._options})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration."""
        self.run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values: what JSON can hold, and objects of the package; ``kwargs`` are for ``run.log``."""
        shown: dict[str, Any] = {}
        for name, value in values.items():
            if self._is_shown(value):
                shown[name] = value
            else:
                self.leave_out(name, value)
        self.run.log(shown, step=step, **kwargs)

    def _is_shown(self, value: Any) -> bool:
        if type(value).__module__.partition(".")[0] in self.modules:
            return True
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return False
        return True

    def finish(self) -> None:
        """End the run."""
        self.run.finish()


class WandBTracker(_ProjectTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: The project.
        **kwargs: For ``wandb.init``.
    """

    name = "wandb"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration."""
        self.run.config.update(values, allow_val_change=True)

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        self.run.log({name: [self._package.Image(one.numpy(), **options) for one in images]}, step=step)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        cells = table.arguments(allow_mixed_types=True)
        self.run.log({name: self._package.Table(**cells)}, step=step, **options)


class TrackioTracker(_ProjectTracker):
    """Logs to Trackio.

    Args:
        run_name: The project.
        **kwargs: For ``trackio.init``.
    """

    name = "trackio"

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        drawn = _numbered(name, [self._package.Image(one.numpy(), **options) for one in images], "/")
        self.run.log(drawn, step=step)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        self.run.log({name: self._package.Table(**table.arguments())}, step=step, **options)


class SwanLabTracker(_ProjectTracker):
    """Logs to SwanLab.

    Args:
        run_name: The project.
        **kwargs: For ``swanlab.init``.
    """

    name = "swanlab"

    def start(self) -> None:
        """Begin the run, and tell SwanLab which framework it is of."""
        super().start()
        self._package.config.update({"FRAMEWORK": "accelfn"})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration."""
        self._package.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers, and texts as ``swanlab.Text``; ``kwargs`` are for ``run.log``."""
        kept = self.keep(values, int, float, str)
        texts = {name: self._package.Text(one) for name, one in kept.items() if isinstance(one, str)}
        self.run.log({**kept, **texts}, step=step, **kwargs)

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        self.run.log({name: [self._package.Image(as_array(one), **options) for one in images]}, step=step)


class TensorBoardTracker(BuiltInTracker):
    """Writes event files for TensorBoard, by ``torch.utils.tensorboard``, or by tensorboardX.

    Numbers are scalars, texts are texts, a mapping of numbers is a group of scalars in one chart. None and
    lists are left out.

    Args:
        run_name: Folder of the run.
        logging_dir: What it is made in.
        **kwargs: For ``SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True
    modules: ClassVar[tuple[str, ...]] = ("tensorboard", "tensorboardX")
    handle = "writer"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        """Choose the folder; nothing is written before ``start``."""
        super().__init__(run_name, **kwargs)
        self.logging_dir: str = os.path.join(logging_dir, run_name)

    def start(self) -> None:
        """Open the event file."""
        package = self.load()
        if package.__name__ == "tensorboard":
            package = importlib.import_module("torch.utils.tensorboard")
        self.writer: Any = package.SummaryWriter(self.logging_dir, **self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as hyperparameters, and in ``<time>/hparams.yml``."""
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for name, value in flatten_names(values)
        }
        self.writer.add_hparams(plain, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        # JSON is YAML too, and needs no package.
        (folder / "hparams.yml").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values; ``kwargs`` are for each ``add_scalar``, ``add_text`` or ``add_scalars``."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                group = self.keep({name: value}, int, float)
                parts = {path.removeprefix(f"{name}/"): number for path, number in group.items()}
                if parts:
                    self.writer.add_scalars(name, parts, global_step=step, **kwargs)
            else:
                self.leave_out(name, value)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images; with ``dataformats`` a value goes to ``add_images`` as it is."""
        if "dataformats" in kwargs:
            for name, images in values.items():
                self.writer.add_images(name, images, global_step=step, **kwargs)
        else:
            super().log_images(values, step, **kwargs)
        self.writer.flush()

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        for tag, one in _numbered(name, images, "/").items():
            self.writer.add_image(tag, one, global_step=step, dataformats="HWC", **options)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        # As Markdown, which TensorBoard draws.
        columns, rows = table.spread()
        lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in (columns, *rows)]
        lines.insert(1, " | ".join(["---"] * len(columns)))
        text = "\n".join(f"| {line} |" for line in lines)
        self.writer.add_text(name, text, global_step=step, **options)
        self.writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()


class AimTracker(BuiltInTracker):
    """Logs to Aim, version 3.

    Args:
        run_name: Name of the run.
        logging_dir: Its repository.
        **kwargs: For ``aim.Run``.
    """

    name = "aim"
    install = "'aim<4'"
    requires_logging_directory = True
    handle = "writer"

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        """Keep the name; nothing is started before ``start``."""
        repo = None if logging_dir is None else os.fspath(logging_dir)
        super().__init__(run_name, **{"repo": repo, **kwargs})

    def start(self) -> None:
        """Begin the run."""
        self._package = self.load()
        self.writer: Any = self._package.Run(**self._options)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as ``run["hparams"]``."""
        self.writer["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values; ``kwargs`` are for each ``track``."""
        for name, value in values.items():
            if isinstance(value, (int, float, str)):
                shown = self._package.Text(value) if isinstance(value, str) else value
                self.writer.track(shown, name=name, step=step, **kwargs)
            else:
                self.leave_out(name, value)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images, each with a caption where a value is a pair of the two.

        ``kwargs`` may have two mappings: ``aim_image`` for each ``aim.Image``, and ``track`` for each
        ``track``.
        """
        for name, value in values.items():
            images, options = value, dict(kwargs.get("aim_image") or {})
            pair = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()
            if len(pair) == 2 and isinstance(pair[1], str):
                images, options["caption"] = pair
            for pixels in read_pixels(images, name):
                picture = self._package.Image(as_pillow(pixels), **options)
                self.writer.track(picture, name=name, step=step, **(kwargs.get("track") or {}))

    def finish(self) -> None:
        """End the run."""
        self.writer.close()


class CometMLTracker(BuiltInTracker):
    """Logs to Comet.

    Args:
        run_name: The project.
        **kwargs: For ``comet_ml.start``, or before version 3.41 for ``comet_ml.Experiment``.
    """

    name = "comet_ml"
    handle = "writer"

    def start(self) -> None:
        """Begin the experiment."""
        package = self.load()
        begin = package.start if hasattr(package, "start") else package.Experiment
        self.writer: Any = begin(**{"project_name": self.run_name, **self._options})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as parameters."""
        self.writer.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers as metrics, texts as other values, mappings as groups of metrics.

        ``kwargs`` are for each of these.
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
                self.leave_out(name, value)

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        for one in images:
            self.writer.log_image(as_pillow(one), name=name, step=step, **options)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        file = name if name.endswith((".csv", ".tsv", ".json", ".md")) else f"{name}.csv"
        cells: dict[str, Any] = {"tabular_data": table.frame}
        if table.frame is None:
            cells = {"tabular_data": table.rows, "headers": table.columns or False}
        self.writer.log_table(file, **cells, **options)

    def finish(self) -> None:
        """End the experiment."""
        self.writer.end()


class ClearMLTracker(BuiltInTracker):
    """Logs to ClearML.

    A task that is at work already is used, and left open at the end. The variables ``CLEARML_PROJECT`` and
    ``CLEARML_TASK`` name a new one.

    Args:
        run_name: The project and the task, where no variable names them.
        **kwargs: For ``Task.init``.
    """

    name = "clearml"
    handle = "task"

    def start(self) -> None:
        """Take the task that is at work, or begin one."""
        package = self.load()
        self.task: Any = package.Task.current_task()
        self._is_ours = self.task is None
        if self.task is None:
            named = {
                "project_name": os.environ.get("CLEARML_PROJECT") or self.run_name,
                "task_name": os.environ.get("CLEARML_TASK") or self.run_name,
            }
            self.task = package.Task.init(**{**named, **self._options})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration."""
        self.task.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers: without a step as single values, else as scalars.

        ``eval_loss`` is the series ``eval`` of the chart ``loss``; the same of ``test_`` and ``train_``, and
        a name with none of them is of the series ``train``. ``kwargs`` are for each call.
        """
        logger = self.task.get_logger()
        for name, value in self.keep(values, int, float).items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _split(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        title, series = _split(name)
        logger = self.task.get_logger()
        for part, one in _numbered(series, images, " ").items():
            logger.report_image(title=title, series=part, iteration=step, image=one.numpy(), **options)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        cells = [table.columns, *table.rows] if table.columns else table.rows
        plot = cells if table.frame is None else table.frame
        title, series = _split(name)
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=plot, iteration=step, **options
        )

    def finish(self) -> None:
        """Close the task, unless somebody else has begun it."""
        if self._is_ours:
            self.task.close()


def _split(name: str) -> tuple[str, str]:
    """Return chart and series of a name.

    >>> _split("eval_loss"), _split("loss")
    (('loss', 'eval'), ('loss', 'train'))
    """
    series, _, title = name.partition("_")
    return (title, series) if title and series in ("eval", "test", "train") else (name, "train")


def _numbered(name: str, values: Sequence[Any], between: str) -> dict[str, Any]:
    """Return values by name, and by name and number where there are several."""
    if len(values) == 1:
        return {name: values[0]}
    return {f"{name}{between}{number}": one for number, one in enumerate(values)}


class DVCLiveTracker(BuiltInTracker):
    """Logs by DVCLive.

    Args:
        run_name: Not used: DVCLive names its runs itself.
        live: A ``dvclive.Live`` that is there already; None makes one.
        **kwargs: For ``dvclive.Live``.
    """

    name = "dvclive"
    handle = "live"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        """Keep the options; nothing is started before ``start``."""
        super().__init__(run_name, **kwargs)
        self.live: Any = live

    def start(self) -> None:
        """Begin the run."""
        if self.live is None:
            self.live = self.load().Live(**self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as parameters."""
        self.live.log_params(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers and texts as metrics, and end the step; ``kwargs`` are for each ``log_metric``."""
        if step is not None:
            self.live.step = step
        for name, value in self.keep(values, int, float, str).items():
            self.live.log_metric(name, value, **kwargs)
        self.live.next_step()

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        if step is not None:
            self.live.step = step
        for file, one in _numbered(name, images, "-").items():
            self.live.log_image(f"{file}.png", as_array(one), **options)

    def finish(self) -> None:
        """End the run."""
        self.live.end()


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
        """Keep the names; nothing is started before ``start``."""
        super().__init__(run_name)
        self.experiment_name: str | None = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir: str | None = None if logging_dir is None else os.fspath(logging_dir)
        self.run_id: str | None = os.environ.get("MLFLOW_RUN_ID") or run_id
        self.tags: dict[str, Any] | None = _read_tags(os.environ.get("MLFLOW_TAGS") or tags)
        nested = os.environ.get("MLFLOW_NESTED_RUN", "").lower()
        self.nested_run: bool = nested in ("1", "y", "yes", "t", "true", "on") if nested else nested_run
        self.description = description

    def start(self) -> None:
        """Find or make the experiment, and begin the run."""
        self._package = self.load()
        experiment = None
        if self.experiment_name is not None:
            found = self._package.get_experiment_by_name(self.experiment_name)
            experiment = found.experiment_id if found is not None else self._new_experiment()
        self.active_run: Any = self._package.start_run(
            run_id=self.run_id,
            experiment_id=experiment,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _new_experiment(self) -> Any:
        return self._package.create_experiment(
            self.experiment_name, artifact_location=self.logging_dir, tags=self.tags
        )

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as parameters, without texts that are too long for MLflow."""
        longest = importlib.import_module("mlflow.utils.validation").MAX_PARAM_VAL_LENGTH
        pairs: list[tuple[str, Any]] = []
        for name, value in flatten_names(values):
            if len(str(value)) <= longest:
                pairs.append((_name(name), value))
            else:
                self.leave_out(name, value)
        for begin in range(0, len(pairs), 100):  # what servers take at once, of old and new versions
            self._package.log_params(dict(pairs[begin : begin + 100]))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers as metrics; ``kwargs`` are for ``mlflow.log_metrics``."""
        numbers = {_name(name): value for name, value in self.keep(values, int, float).items()}
        self._package.log_metrics(numbers, step=step, **kwargs)

    def _images(self, name: str, images: list[torch.Tensor], step: int | None, options: Any) -> None:
        at = "" if step is None else f"{step}-"
        for number, one in enumerate(images):
            file = f"images/{_name(name)}-{at}{number}.png"
            self._package.log_image(one.numpy(), artifact_file=file, **options)

    def _table(self, name: str, table: Table, step: int | None, options: Any) -> None:
        # A JSON file of the run; tables of one name grow.
        cells = table.frame
        if cells is None:
            cells = {name: [row[place] for row in table.rows] for place, name in enumerate(table.columns)}
        self._package.log_table(cells, artifact_file=f"{_name(name)}.json", **options)

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
        return dict(json.loads(tags))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"mlflow: tags must be a JSON object: got {tags!r} ({error}).") from error


#: Those that need a package.
ADAPTERS: tuple[type[BuiltInTracker], ...] = (
    *(AimTracker, TensorBoardTracker, WandBTracker, TrackioTracker, CometMLTracker, MLflowTracker),
    *(ClearMLTracker, DVCLiveTracker, SwanLabTracker),
)
