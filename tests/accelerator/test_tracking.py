"""The Accelerator's trackers: Accelerate's names over the functions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelfn import Accelerator, Context
from accelfn.config import ProjectConfiguration
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from accelfn.tracking import BlankTracker, GeneralTracker


class Counter(GeneralTracker):
    name = "counter"
    requires_logging_directory = False

    def __init__(self, project_name: str = "") -> None:
        super().__init__()
        self.project, self.logged, self.ended = project_name, list[Any](), 0

    @property
    def tracker(self) -> list[Any]:
        return self.logged

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append((values, step, kwargs))

    def finish(self) -> None:
        self.ended += 1


def test_a_program_of_accelerate_logs_as_it_did(tmp_path: Path) -> None:
    def run(ctx: Context) -> tuple[int, bool, bool]:
        accelerator = Accelerator(context=ctx)
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"loss": torch.tensor(0.5)}, step=1)
        found = accelerator.get_tracker("jsonl"), accelerator.get_tracker("jsonl", unwrap=True)
        number = len(accelerator.trackers)
        accelerator.end_training()
        return number, isinstance(found[0], BlankTracker), isinstance(found[1], Path)

    project = ProjectConfiguration(project_dir="elsewhere", logging_dir=str(tmp_path))
    found = run_ranks(run, 2, log_with="jsonl", project_config=project)
    assert found == [(1, False, True), (0, True, False)]
    (file,) = tmp_path.glob("digits/*/events.jsonl")
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == ["start", "config", "log", "finish"]


def test_trackers_are_those_at_work() -> None:
    counter = Counter()
    accelerator = Accelerator(cpu=True, log_with=counter)
    assert accelerator.log_with == (counter,)
    assert accelerator.trackers == []
    accelerator.init_trackers("project")
    assert accelerator.trackers == [counter]
    accelerator.log({"a": 1}, step=0, log_kwargs={"counter": {"commit": True}})
    assert accelerator.get_tracker("counter", unwrap=True) == [({"a": 1}, 0, {"commit": True})]
    with pytest.raises(ConfigurationError, match="get_tracker: this run has no tracker 'wandb'"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    assert (counter.ended, accelerator.trackers) == (1, [])
    accelerator.end_training()
    assert counter.ended == 1


def test_starting_twice_ends_the_first_run_and_doubles_nothing() -> None:
    accelerator = Accelerator(context=Context().replace(log_with=Counter))
    accelerator.init_trackers("one")
    first = accelerator.get_tracker("counter")
    accelerator.init_trackers("two")
    second = accelerator.get_tracker("counter")
    accelerator.log({"a": 1})
    assert (first.project, first.ended, first.logged) == ("one", 1, [])
    assert (second.project, second.ended, len(second.logged)) == ("two", 0, 1)
    assert accelerator.trackers == [second]


def test_values_that_go_nowhere_are_said_once_on_the_main_process() -> None:
    def run(ctx: Context) -> None:
        accelerator = Accelerator(context=ctx)
        for _ in range(2):
            accelerator.log({"a": 1})
            accelerator.get_tracker("counter")

    with pytest.warns(
        UserWarning, match=r"Accelerator.log: log_with names trackers.*init_trackers first"
    ) as all_:
        run_ranks(run, 2, log_with=Counter)
    assert len(all_) == 1
