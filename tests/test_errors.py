"""The tree of exceptions: as it is drawn, as it can be caught, and across process boundaries."""

import builtins
import pickle
import re
import traceback

import pytest

from accelfn import errors
from accelfn.errors import (
    AccelfnError,
    Caller,
    CheckpointMismatchError,
    Disagreement,
    Drift,
    Misfit,
    MismatchError,
    RemoteRankError,
    RemoteTraceback,
    ReplicaDriftError,
    UnevenDataError,
)

Tree = dict[str, tuple[str, ...]]


def drawn_tree(doc: str) -> Tree:
    """Read the drawing: bases by name, the parent in the tree first, then the builtin in brackets."""
    bases: Tree = {}
    above: list[str] = []
    for line in doc.splitlines():
        match = re.fullmatch(r"    ((?:[| ]   |[|`]-- )*)(\w+)(?: +\((\w+)\))?(?: .*)?", line)
        if match is None or match[2] not in errors.__all__:
            continue
        depth = len(match[1]) // 4
        del above[depth:]
        parent = above[-1:] or ["Exception"]
        bases[match[2]] = (*parent, match[3]) if match[3] else tuple(parent)
        above.append(match[2])
    return bases


def real_tree() -> Tree:
    classes = {name: getattr(errors, name) for name in errors.__all__}
    return {
        name: tuple(base.__name__ for base in cls.__bases__)
        for name, cls in classes.items()
        if issubclass(cls, BaseException) and cls is not RemoteTraceback  # never raised by itself
    }


def test_the_tree_is_as_it_is_drawn() -> None:
    assert drawn_tree(errors.__doc__ or "") == real_tree()


def test_the_drawing_is_read_at_all() -> None:
    doc = errors.__doc__ or ""
    assert len(drawn_tree(doc)) == 18
    assert drawn_tree(doc.replace("(ValueError)", "(TypeError)")) != real_tree()
    assert drawn_tree(doc.replace("    |   `-- Env", "    |-- Env")) != real_tree()


KINDS: list[type[AccelfnError]] = [
    kind
    for kind in (getattr(errors, name) for name in errors.__all__)
    if kind not in (Caller, Disagreement, Drift, Misfit, RemoteTraceback)
]


def test_every_error_is_ours_and_of_the_kind_that_except_exception_catches() -> None:
    for kind in KINDS:
        assert issubclass(kind, AccelfnError)
        assert not hasattr(builtins, kind.__name__)
    assert RemoteTraceback.__bases__ == (Exception,)


ROWS = (Disagreement(1, "tree['x']", "(2,)", "(3,)"), Disagreement(3, "", "gather", "reduce"))
DRIFTS = (Drift(1, "tree['x']", 0), Drift(2, "tree['y']", 1))
CALLERS = (Caller(1, "gather", "a.py:7 in main"), Caller(3, "reduce", "b.py:8 in main"))
# Those of a message alone, and the others.
PLAIN = [kind for kind in KINDS if "__init__" not in vars(kind)]
EXAMPLES: tuple[AccelfnError, ...] = (
    *(kind("a") for kind in PLAIN),
    errors.NonFiniteGradientError(((), ("parameters['w']", "parameters['b']"), ("parameters['w']",))),
    errors.DamagedCheckpointError("a", "tensors-00000.safetensors"),
    CheckpointMismatchError("a", (Misfit("model.w", "float32 (2,)", "nothing"),)),
    MismatchError("gather", ROWS),
    MismatchError("gather", ROWS, "Look at rank 1.", CALLERS),
    ReplicaDriftError("check_replicas", DRIFTS),
    UnevenDataError("gather", ROWS),
    UnevenDataError("gather", ROWS, "Look at rank 1.", CALLERS, (3, 2)),
    RemoteRankError(2, "ValueError", "bad batch"),
    RemoteRankError(2, "ValueError", "bad batch", "gather", "Traceback: line 7"),
)


def test_there_is_an_example_of_every_error() -> None:
    assert {type(error).__name__ for error in EXAMPLES} == set(real_tree())


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_cross_process_boundaries(error: AccelfnError, protocol: int) -> None:
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert repr(back.__cause__) == repr(error.__cause__)
    assert pickle.loads(pickle.dumps(back, protocol)).args == error.args


def test_a_mismatch_prints_a_row_for_each_rank_and_who_called_what_from_where() -> None:
    plain = MismatchError("gather", ROWS, "Look at rank 1.")
    assert str(plain).splitlines() == [
        "gather: the ranks disagree.",
        "  rank  leaf       found   expected",
        "  1     tree['x']  (3,)    (2,)",
        "  3                reduce  gather",
        "Look at rank 1.",
    ]
    assert str(MismatchError("gather", ROWS, "Look at rank 1.", CALLERS)).splitlines() == [
        "gather: the ranks disagree.",
        "  rank  operation  call site       leaf       found   expected",
        "  1     gather     a.py:7 in main  tree['x']  (3,)    (2,)",
        "  3     reduce     b.py:8 in main             reduce  gather",
        "  rank 1 called gather at a.py:7 in main",
        "  rank 3 called reduce at b.py:8 in main",
        "Look at rank 1.",
    ]
    first, *rest = str(UnevenDataError("gather", ROWS, "Look at rank 1.", counts=(4, 3, 4))).splitlines()
    assert first == "gather: the ranks have different numbers of batches: 4, 3, 4 by rank."
    assert rest == str(plain).splitlines()[1:]


def test_a_drift_prints_a_row_for_each_leaf_and_rank_up_to_twenty() -> None:
    assert str(ReplicaDriftError("check_replicas", DRIFTS)).splitlines() == [
        "check_replicas: 2 leaves differ between ranks.",
        "  rank 1  tree['x']  differs from rank 0",
        "  rank 2  tree['y']  differs from rank 1",
    ]
    lines = str(ReplicaDriftError("check_replicas", DRIFTS[1:] * 21)).splitlines()
    assert lines[0] == "check_replicas: 1 leaf differs between ranks."
    assert lines[20:] == ["  rank 2  tree['y']  differs from rank 1", "  ... and 1 more"]


def test_ranks_that_called_the_same_stand_on_one_line() -> None:
    callers = [Caller(rank, "gather", f"a.py:{1 + (rank == 2)}") for rank in range(5)]
    assert str(MismatchError("gather", (), callers=callers)).splitlines()[1:] == [
        "  ranks 0-1, 3-4 called gather at a.py:1",
        "  rank 2 called gather at a.py:2",
    ]
    # All alike, and below rows that say it already: nothing to add.
    alike = [Caller(rank, "gather", "a.py:1") for rank in range(5)]
    assert len(str(MismatchError("gather", ROWS, callers=alike)).splitlines()) == 4


def test_a_remote_error_names_the_rank_and_shows_the_traceback_of_it_as_its_cause() -> None:
    error = RemoteRankError(2, "ValueError", "bad batch", "gather", "Traceback: line 7")
    assert str(error) == "rank 2 failed in gather: ValueError: bad batch"
    assert (error.rank, error.cause, error.message, error.operation) == (
        2,
        "ValueError",
        "bad batch",
        "gather",
    )
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "Traceback: line 7" in "".join(traceback.format_exception(error))
    bare = RemoteRankError(2, "ValueError", "bad batch")
    assert (str(bare), bare.__cause__) == ("rank 2 failed: ValueError: bad batch", None)


def test_a_checkpoint_that_does_not_fit_prints_a_row_for_each_leaf_up_to_twenty() -> None:
    rows = (Misfit("model.w", "float32 (2,)", "nothing"), Misfit("model.long", "nothing", "int64 ()"))
    assert str(CheckpointMismatchError("load_state: it differs.", rows)).splitlines() == [
        "load_state: it differs.",
        "  leaf        checkpoint    wanted",
        "  model.w     float32 (2,)  nothing",
        "  model.long  nothing       int64 ()",
    ]
    lines = str(CheckpointMismatchError("load_state: it differs.", rows * 11)).splitlines()
    assert (len(lines), lines[-1]) == (23, "  ... and 2 more")
