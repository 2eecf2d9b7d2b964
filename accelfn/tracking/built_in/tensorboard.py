"""TensorBoard."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from accelfn.tracking.built_in.base import BuiltInTracker
from accelfn.tracking.pictures import read_pixels
from accelfn.tracking.values import flatten_names

__all__ = ("TensorBoardTracker",)


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
    install: ClassVar[str] = "tensorboard"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        """Choose the folder; nothing is written before ``start``."""
        super().__init__()
        self.run_name = run_name
        self.logging_dir: str = os.path.join(logging_dir, run_name)
        self._options = kwargs

    def start(self) -> None:
        """Open the event file."""
        package = self.load()
        if package.__name__ == "tensorboard":
            package = importlib.import_module("torch.utils.tensorboard")
        self.writer: Any = package.SummaryWriter(self.logging_dir, **self._options)

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self.writer

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
                group = dict(flatten_names(cast("Mapping[str, Any]", value)))
                numbers = {part: one for part, one in group.items() if isinstance(one, (int, float))}
                for part in group.keys() - numbers.keys():
                    self.leave_out(f"{name}/{part}", group[part])
                if numbers:
                    self.writer.add_scalars(name, numbers, global_step=step, **kwargs)
            else:
                self.leave_out(name, value)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images; with ``dataformats`` a value goes to ``add_images`` as it is."""
        for name, images in values.items():
            if "dataformats" in kwargs:
                self.writer.add_images(name, images, global_step=step, **kwargs)
                continue
            all_pixels = read_pixels(images, name)
            for number, pixels in enumerate(all_pixels):
                tag = name if len(all_pixels) == 1 else f"{name}/{number}"
                self.writer.add_image(tag, pixels, global_step=step, dataformats="HWC", **kwargs)
        self.writer.flush()

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table as a text in Markdown, which TensorBoard draws."""
        if dataframe is not None:
            columns, data = [str(one) for one in dataframe.columns], dataframe.values.tolist()
        heads = [str(one) for one in columns or ()]
        cells = [heads, ["---"] * len(heads), *([str(one) for one in row] for row in data or ())]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells]
        text = "\n".join(f"| {line} |" for line in lines)
        self.writer.add_text(table_name, text, global_step=step, **kwargs)
        self.writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()
