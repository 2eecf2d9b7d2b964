import json
from pathlib import Path
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn import Context
from accelfn.config import ProfileKwargs
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks


def work() -> torch.Tensor:
    return torch.ones(4, 4).relu()


def operators(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event]


def test_each_rank_writes_a_trace_and_all_of_them_are_there_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "for it"

    def run(ctx: Context) -> list[str]:
        with af.profile(ctx) as profiler:
            work()
        averages: Any = profiler.key_averages()
        assert any(event.key == "aten::relu" for event in averages)
        return sorted(path.name for path in folder.iterdir())

    options = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=str(folder))
    found = run_ranks(run, 2, "processes", kwargs_handlers=[options])
    assert found == [["profile_0.json", "profile_1.json"]] * 2
    assert all("aten::relu" in operators(folder / name) for name in found[0])


def test_a_block_that_raises_leaves_its_trace_and_waits_for_nobody(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        if ctx.rank == 1:
            with pytest.raises(KeyError, match="mine"), af.profile(ctx):  # noqa: PT012
                work()
                raise KeyError("mine")

    run_ranks(run, 2, "processes", kwargs_handlers=[ProfileKwargs(output_trace_dir=str(tmp_path))])
    assert [path.name for path in tmp_path.iterdir()] == ["profile_1.json"]
    assert "aten::relu" in operators(tmp_path / "profile_1.json")


# As an error it would stop torch's profiler half-way, which crashes the process.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_with_a_schedule_the_latest_complete_cycle_is_kept(tmp_path: Path) -> None:
    seen: list[int] = []
    schedule = {"wait": 1, "warmup": 1, "active": 1}

    def ready(profiler: Any) -> None:
        seen.append(profiler.step_num)

    options = ProfileKwargs(schedule_option=schedule, on_trace_ready=ready, output_trace_dir=str(tmp_path))
    with af.profile(Context(), options) as profiler:
        for number in range(7):  # the third cycle never gets to what it records
            torch.ones(2).relu() if number < 3 else torch.ones(2).sigmoid()
            profiler.step()
    assert seen == [3, 6]
    assert "aten::sigmoid" in operators(tmp_path / "profile_0.json")
    assert "aten::relu" not in operators(tmp_path / "profile_0.json")


def test_a_schedule_that_records_nothing_says_so(tmp_path: Path) -> None:
    options = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path)
    )
    with pytest.warns(UserWarning, match=r"nothing was recorded.*call profiler.step\(\)"):
        with af.profile(Context(), options):
            work()
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_was_already_exported_is_an_error_after_the_block(tmp_path: Path) -> None:
    def ready(profiler: Any) -> None:
        profiler.export_chrome_trace(str(tmp_path / "mine.json"))

    ended = False
    with pytest.raises(ConfigurationError, match="has already exported the trace"):  # noqa: PT012
        with af.profile(Context(), ProfileKwargs(on_trace_ready=ready, output_trace_dir=str(tmp_path))):
            work()
            ended = True
    assert ended
    with af.profile(Context(), ProfileKwargs(on_trace_ready=ready)):
        work()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


def test_a_folder_that_cannot_be_had_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    handler = ProfileKwargs(output_trace_dir=str(tmp_path / "file"))

    def run(ctx: Context) -> str:
        mine = handler if ctx.rank == 0 else ProfileKwargs(output_trace_dir=str(tmp_path))
        with pytest.raises(Exception, match="file") as caught, af.profile(ctx, mine):
            work()
        return type(caught.value).__name__

    assert run_ranks(run, 2, "processes") == ["FileExistsError", "RemoteRankError"]


def test_what_cannot_be_watched_is_refused() -> None:
    absent = next(
        name
        for name in ("mtia", "hpu", "xpu")
        if not any(str(item.name).lower() == name for item in torch.profiler.supported_activities())
    )
    with pytest.raises(NotAvailableError, match=f"activities asks for {absent}, which can't be watched here"):
        with af.profile(Context(), ProfileKwargs(activities=["cpu", absent])):
            raise AssertionError

    def run(ctx: Context) -> None:
        with pytest.raises(NotAvailableError, match="ranks are threads"), af.profile(ctx):
            raise AssertionError

    run_ranks(run, 2)
