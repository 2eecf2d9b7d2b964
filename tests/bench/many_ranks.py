"""What many ranks need to save and load, and to form an elastic world: seconds, memory, messages and bytes.

The state is that of a Llama with 70 billion parameters and its AdamW, cut by FSDP. One process plays one of 8
to 10,000 ranks, and is told what the others would say. The files of tensors aren't written, and a shard has
the memory of one number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import accelfn as af
from accelfn.checkpoint import Keep
from accelfn.checkpoint.by_rank import differences
from accelfn.checkpoint.collect import parse_boxes
from accelfn.checkpoint.manifest import Manifest, format_manifest, parse_manifest
from accelfn.checkpoint.objects import find_names
from accelfn.checkpoint.overlaps import Known, Overlap, find_overlaps
from accelfn.checkpoint.restore import Request, plan_read
from accelfn.checkpoint.write import Job
from accelfn.comm.agreement import HEADER_BYTES
from accelfn.context import Collectives, Context, MessageBoard, Threads
from accelfn.context.collectives import chunk_bytes
from accelfn.context.world import World
from accelfn.elastic.membership import Member, Waiting, finish, join_generation, meet
from accelfn.elastic.memory import Key, Share
from accelfn.storage.disk import REAL_DISK
from accelfn.testing import run_ranks
from tests.bench.timing import plain, rounds_of, show_table
from tests.exchanges import Exchanges

# What isn't for callers of the library: the two halves of a save, and what ranks say of a snapshot.
SAVE: Any = importlib.import_module("accelfn.checkpoint.save")
WRITE: Any = importlib.import_module("accelfn.checkpoint.write")
ASSEMBLE: Any = importlib.import_module("accelfn.elastic.assemble")
FAKE: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg")

SIZES = (8, 64, 1024, 10_000)
_LAYERS, _WIDTH, _INNER, _KEYS, _VOCABULARY = 80, 8192, 28_672, 1024, 128_256
_RANKS_OF_A_MACHINE = 8

T = TypeVar("T")
Shape = tuple[int, ...]


def shapes() -> dict[str, Shape]:
    """Return the parameters of a Llama with 70 billion parameters."""
    width = _WIDTH
    found: dict[str, Shape] = {"model.embed_tokens.weight": (_VOCABULARY, width)}
    for number in range(_LAYERS):
        layer = f"model.layers.{number}"
        found |= {f"{layer}.self_attn.{name}_proj.weight": (width, width) for name in "qo"}
        found |= {f"{layer}.self_attn.{name}_proj.weight": (_KEYS, width) for name in "kv"}
        found |= {f"{layer}.mlp.{name}_proj.weight": (_INNER, width) for name in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (width, _INNER)
        found |= {f"{layer}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return {**found, "model.norm.weight": (width,), "lm_head.weight": (_VOCABULARY, width)}


def rows_of(shape: Shape, size: int, rank: int) -> tuple[int, int]:
    """Return the first row of a rank's shard, and their number: as ``torch.chunk`` cuts."""
    count = -(-shape[0] // size)
    first = min(rank * count, shape[0])
    return first, min(count, shape[0] - first)


def shard_of(shape: Shape, mesh: DeviceMesh, rank: int) -> DTensor:
    _, count = rows_of(shape, mesh.size(), rank)
    local = torch.empty(1).expand(count, *shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def make_state(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """Return a model and its optimizer as a rank has them."""
    model = nn.Module()
    for name, shape in shapes().items():
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(shard_of(shape, mesh, rank)))
    optimizer = torch.optim.AdamW(model.parameters())
    for one in model.parameters():
        moments = {name: shard_of(tuple(one.shape), mesh, rank) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[one] = {"step": torch.tensor(1.0), **moments}
    return {"model": model, "optimizer": optimizer, "step": 7}


# --- one of many ranks -----------------------------------------------------------------------------


class Told(NamedTuple):
    """Phases of a save whose texts of other ranks are made up from that of this rank.

    Attributes:
        ctx: Of this rank.
        others: Returns the texts of all ranks for that of this rank, by phase; a phase that isn't in it has
            equal texts.
        lengths: Of what this rank has sent, by phase; is written to, as is the next one.
        got: Of what the others have sent.
    """

    ctx: Context
    others: Mapping[str, Callable[[str], list[str]]]
    lengths: dict[str, int]
    got: dict[str, int]

    def gather(self, phase: str, text: str, error: Exception | None = None) -> list[str]:
        if error is not None:
            raise error
        name = phase.partition(" {")[0]
        texts = self.others[name](text) if name in self.others else [text] * self.ctx.num_processes
        self.lengths[name] = len(text)
        self.got[name] = sum(map(len, texts)) - len(text)
        return texts


class Cost(NamedTuple):
    """Of an action: seconds, and bytes of Python's objects at the peak."""

    seconds: float
    peak: int

    def cells(self) -> tuple[str, str]:
        return f"{self.seconds:.3f}", f"{self.peak / 1e6:.1f}"


def cost_of(action: Callable[[], T]) -> tuple[T, Cost]:
    seconds: list[float] = []
    for _ in range(rounds_of(5)):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    result = action()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, Cost(statistics.median(seconds), peak)


class Planned(NamedTuple):
    """What a rank of a world needs to plan.

    Attributes:
        save: From what this rank holds to what it writes.
        commit: Making the manifest, on rank 0.
        load: From the bytes of the manifest to what it reads.
        manifest: Bytes of it.
        sent: Bytes that the rank sends so that a save can be planned.
        restore: From what the ranks say of a snapshot to what it fetches, when another rank was lost.
        offered: Bytes that it sends for that.
        told: Bytes that it gets.
    """

    save: Cost
    commit: Cost
    load: Cost
    manifest: int
    sent: int
    restore: Cost
    offered: int
    told: int


def plan(size: int) -> Planned:
    """Plan a save and a load as one of so many ranks."""
    rank = size // 2
    plain.init_process_group("fake", store=FAKE.FakeStore(), rank=rank, world_size=size)
    try:
        return _plan(size, rank, make_state(init_device_mesh("cpu", (size,)), rank))
    finally:
        plain.destroy_process_group()


def _plan(size: int, rank: int, state: dict[str, Any]) -> Planned:
    world = World(rank=rank, size=size, local_rank=rank % _RANKS_OF_A_MACHINE, local_size=_RANKS_OF_A_MACHINE)
    ctx = Context(world=world, collectives=Collectives(chunk=chunk_bytes(size)))
    own = SAVE._collect(ctx, REAL_DISK, Path("at"), state, is_copied=False)
    cut = {one.layout: one.shape for one in own.held.values() if one.layout is not None}

    def boxes_of(rank: int) -> list[Any]:
        boxes: list[Any] = []
        for layout in sorted(cut):
            (first, count), shape = rows_of(cut[layout], size, rank), cut[layout]
            box = [[first, *[0] * len(shape[1:])], [count, *shape[1:]]]
            boxes.append([box] if count else [])
        return boxes

    assert boxes_of(rank) == json.loads(json.dumps(own.boxes))

    def all_of(text: str) -> list[str]:
        """Return what all ranks say: each has other parts, and other random numbers."""
        said = json.loads(text)
        randoms = said["random_held"]

        def of(rank: int) -> str:
            held = {name: [*one[:4], f"{one[4]}{rank}"] for name, one in randoms.items()}
            return json.dumps({**said, "boxes": boxes_of(rank), "random_held": held})

        return [of(rank) for rank in range(size)]

    told = Told(ctx, {"begin": once(all_of)}, {}, {})
    options = SAVE._Options(7, None, None, False, False)
    agree: Callable[[], Job] = partial(SAVE._agree_on, told.ctx, told, Path("at"), own, None, options, None)
    agree()
    job, save = cost_of(agree)

    def commit() -> bytes:
        files = [
            [f"tensors-{rank:05d}-0a1b2c3d.safetensors", rank, *[4_000_000_000] * 3] for rank in range(size)
        ]
        return format_manifest(WRITE._manifest(job, [json.dumps([[file], {}]) for file in files]))

    content, committed = cost_of(commit)
    names, is_optional = find_names(state), frozenset[str]().__contains__
    request = Request("load_state", "at", REAL_DISK, names, True, is_optional)

    def load() -> tuple[Manifest, dict[str, list[Overlap]]]:
        manifest = parse_manifest(content)
        wanted = plan_read(ctx, state, request, manifest, "at").wanted
        known: Known = {}
        return manifest, {
            name: find_overlaps(manifest.tensors[name], one, known) for name, one in wanted.items()
        }

    (manifest, overlaps), loaded = cost_of(load)
    assert len(overlaps) == len(own.tensors)
    assert manifest.world_size == size
    restored, offers = plan_restore(ctx, state, own, boxes_of)
    sizes = (sum(of.values()) for of in (offers.lengths, offers.got))
    return Planned(save, committed, loaded, len(content), told.lengths["begin"], restored, *sizes)


def once(answer: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Return a function that makes the texts of all ranks at its first call, which isn't to be measured."""
    made: list[list[str]] = []

    def found(text: str) -> list[str]:
        if not made:
            made.append(answer(text))
        return made[0]

    return found


# Its process was replaced, and a neighbour has its share.
_LOST = 1


def plan_restore(
    ctx: Context, state: dict[str, Any], own: Any, boxes_of: Callable[[int], list[Any]]
) -> tuple[Cost, Told]:
    """Plan to restore a snapshot when a rank was lost, and return what was exchanged for that."""
    size, rank = ctx.num_processes, ctx.rank
    held = {name: one._replace(content="") for name, one in {**own.held, **own.random_held}.items()}

    def share_of(key: Key, owner: int, is_copy: bool) -> Share:
        """Return a share; a copy has no tensors of which its owner has nothing."""
        boxes = parse_boxes(boxes_of(owner))
        some = {
            name: one for name, one in held.items() if not is_copy or one.layout is None or boxes[one.layout]
        }
        tensors = {name: own.tensors[name] for name in some}
        return Share(key, owner, size, is_copy, False, (owner,), own.tree, own.random, some, boxes, tensors)

    def places_of(holder: int) -> list[tuple[Key, int, bool]]:
        places = [] if holder == _LOST else [(holder, False), ((holder - 1) % size, True)]
        return [(key, *place) for place in places for key in (Key(10, 0), Key(20, 0))]

    # What holds the same: an offer, the first rank that makes it, and the tensors.
    kinds: dict[tuple[bool, ...], tuple[Any, int, Any]] = {}

    def offers(text: str) -> list[str]:
        texts: list[str] = []
        for holder in range(size):
            rows: list[Any] = []
            for key, owner, is_copy in places_of(holder):
                boxes = boxes_of(owner)
                kind = tuple(is_copy and not some for some in boxes)
                if kind not in kinds:
                    share = share_of(key, owner, is_copy)
                    kinds[kind] = ASSEMBLE._offer(share), holder, share.held
                offer = kinds[kind][0]._replace(key=key, owner=owner, is_copy=is_copy, boxes=boxes)
                rows.append(offer)
            texts.append(json.dumps(rows))
        assert texts[rank] == text
        return texts

    def by_first(document: Any) -> Callable[[str], list[str]]:
        return lambda text: [json.dumps(document), *[text] * (size - 1)]

    def base(text: str) -> list[str]:
        return by_first(next(iter(kinds.values()))[2])(text)

    def differing(text: str) -> list[str]:
        [first, *others] = kinds.values()
        texts: list[dict[str, Any]] = [{} for _ in range(size)]
        like = json.loads(json.dumps(first[2]))
        for offer, holder, document in others:
            texts[holder][offer.held] = differences(like, json.loads(json.dumps(document)))
        return [json.dumps(one) if one else "" for one in texts]

    def summaries(text: str) -> list[str]:
        [said] = json.loads(text)

        def of(owner: int) -> Any:
            randoms = {name: [*one[:4], f"{one[4]}{owner}"] for name, one in said[4].items()}
            return [*said[:2], [owner], said[3], randoms]

        owners = [[] if one == _LOST else [_LOST, one] if one == _LOST + 1 else [one] for one in range(size)]
        return [json.dumps([of(owner) for owner in some]) for some in owners]

    names, is_optional = find_names(state), frozenset[str]().__contains__
    request = Request("run_elastic", ".", REAL_DISK, names, True, is_optional)
    mine = [share_of(*place) for place in places_of(rank)]
    answers = {
        "offers": offers,
        "held": base,
        "held differences": differing,
        "shares": summaries,
        "details": by_first(ASSEMBLE._describe(mine[0])[1]),
        "tree": by_first(own.tree),
    }
    told = Told(ctx, {phase: once(answer) for phase, answer in answers.items()}, {}, {})

    def restore() -> Any:
        snapshot = ASSEMBLE._find_snapshot(told, mine)
        return snapshot, ASSEMBLE._plan(ctx, state, request, snapshot)

    restore()
    (snapshot, found), cost = cost_of(restore)
    assert len(snapshot.ranks) == size
    assert snapshot.ranks[_LOST] == _LOST + 1
    assert {snapshot.ranks[lap.part.rank] for laps in found.overlaps.values() for lap in laps} <= {rank}
    return cost, told


# --- what ranks exchange -----------------------------------------------------------------------------


class Sent(NamedTuple):
    """What a rank that isn't the first sends: messages, and bytes."""

    messages: int
    num_bytes: int

    def cells(self, size: int) -> tuple[str, str, str]:
        """Return them, and what the rank gets: in a gather, as much from each other rank."""
        got = self.num_bytes * (size - 1)
        return f"{self.messages}", f"{self.num_bytes:,}", f"{got / 1e3:,.0f}"


def exchanged(work: Callable[[Context, Path], object]) -> Sent:
    """Return what a rank sends in a save or load of a small state, whose tensors and ranks don't matter."""

    def run(ctx: Context) -> Sent:
        counted = Exchanges()
        for step in (1, 2):
            af.save_state(ctx, Path(folder, f"{step}"), {"x": torch.ones(8)}, step=step)
        work(counted.context(ctx), Path(folder))
        return Sent(counted.calls, counted.sent)

    with TemporaryDirectory() as folder:
        return run_ranks(run, 4)[1]


def save_some(ctx: Context, folder: Path, keep: Keep | None = None) -> None:
    af.save_state(ctx, folder / "3", {"x": torch.ones(8)}, step=3, keep=keep)


def load_some(ctx: Context, folder: Path) -> None:
    af.load_state(ctx, folder, {"x": torch.ones(8)})


class WaitsError(Exception):
    """Ends what a process does on the board where it would wait."""


def waiting_for(others: Callable[[], object] | None) -> Threads:
    """Return the waiting of a process: others go on, and then what it waits for is there."""

    def wait(poll: Callable[[float], bool], timeout_s: float | None, what: str) -> bool:
        if not poll(0.0):
            if others is None:
                raise WaitsError(what)
            others()
            assert poll(0.0), what
        return True

    return dataclasses.replace(Threads(), wait=wait)


class Joined(NamedTuple):
    """Requests of a process to join a world, and bytes: of the texts that it posts and reads."""

    requests: int
    num_bytes: int

    def cells(self) -> tuple[str, str]:
        return f"{self.requests:,}", f"{self.num_bytes / 1e3:,.1f}"


def join(size: int) -> tuple[Joined, Joined]:
    """Form a world of so many processes, and end it; return what the first one asks, and the last."""
    texts: dict[str, str] = {}
    shared = MessageBoard(post=texts.__setitem__, post_once=texts.setdefault, read=texts.get)
    counts = {0: [0, 0], size - 1: [0, 0]}

    def board_of(slot: int) -> MessageBoard:
        if slot not in counts:
            return shared
        count = counts[slot]

        def noted(text: str | None) -> None:
            count[0] += 1
            count[1] += len(text or "")

        def post(key: str, text: str) -> None:
            noted(text)
            shared.post(key, text)

        def post_once(key: str, text: str) -> str:
            noted(text)
            return shared.post_once(key, text)

        def read(key: str) -> str | None:
            text = shared.read(key)
            noted(text)
            return text

        return dataclasses.replace(shared, post=post, post_once=post_once, read=read)

    def member(slot: int) -> Member:
        return Member(slot // _RANKS_OF_A_MACHINE, slot, 0)

    def form(slot: int, threads: Threads) -> Any:
        return join_generation(board_of(slot), threads, member(slot), None, size, Waiting())

    def until_it_waits(act: Callable[[int, Threads], object]) -> object:
        """Let all but the last begin, and the last one go through; the first goes on when it waits."""
        for slot in range(size - 1):
            with contextlib.suppress(WaitsError):
                act(slot, waiting_for(None))
        return act(size - 1, waiting_for(lambda: act(0, waiting_for(None))))

    roster = cast("Any", until_it_waits(form))
    assert len(roster.members) == size
    until_it_waits(lambda slot, threads: meet(board_of(slot), threads, member(slot), roster))
    until_it_waits(lambda slot, threads: finish(board_of(slot), threads, member(slot), roster, lambda: None))
    first, last = (Joined(*counts[slot]) for slot in (0, size - 1))
    return first, last


# --- the tables ----------------------------------------------------------------------------------------


def sent_to_plan(num_bytes: int, size: int) -> Sent:
    """Return what the exchange of summaries takes: what doesn't fit into one message goes into another."""
    header = HEADER_BYTES + 8
    return Sent(1 + (num_bytes > chunk_bytes(size) - header), num_bytes + header)


def main() -> None:
    planned = {size: plan(size) for size in SIZES}
    columns = (
        *(">ranks", ">save, s", ">MB", ">manifest on rank 0, s", ">MB", ">its size, MB"),
        *(">load, s", ">MB"),
    )
    rows: list[Sequence[str]] = [
        (
            *(f"{size:,}", *one.save.cells(), *one.commit.cells()),
            *(f"{one.manifest / 1e6:.1f}", *one.load.cells()),
        )
        for size, one in planned.items()
    ]
    show_table("many-ranks-plans", columns, rows)

    save, retain = exchanged(save_some), exchanged(partial(save_some, keep=Keep(last=1)))
    load, small = exchanged(load_some), Told(Context(), {}, {}, {})
    own = SAVE._collect(Context(), REAL_DISK, Path("at"), {"x": torch.ones(8)}, is_copied=False)
    options = SAVE._Options(3, None, None, False, False)
    SAVE._agree_on(small.ctx, small, Path("at"), own, None, options, None)
    rows = []
    for size, one in planned.items():
        sent, without = sent_to_plan(one.sent, size), sent_to_plan(small.lengths["begin"], 4)
        num_bytes = save.num_bytes - without.num_bytes + sent.num_bytes
        saved = Sent(save.messages - without.messages + sent.messages, num_bytes)
        kept = Sent(retain.messages - save.messages, retain.num_bytes - save.num_bytes)
        cells = (cell for what in (saved, kept, load) for cell in what.cells(size))
        rows.append((f"{size:,}", *cells))
    columns = (
        *(">ranks", ">save: messages", ">bytes", ">kB got"),
        *(">removing older ones: messages", ">bytes", ">kB got", ">load: messages", ">bytes", ">kB got"),
    )
    show_table("many-ranks-exchanges", columns, rows)

    rows = []
    for size, one in planned.items():
        first, last = join(size)
        offered = f"{one.offered / 1e3:,.1f}", f"{one.told / 1e6:,.1f}"
        rows.append((f"{size:,}", *last.cells(), *first.cells(), *offered, *one.restore.cells()))
    columns = (
        *(">ranks", ">a process: requests", ">kB", ">the first: requests", ">kB"),
        *(">a snapshot: kB sent", ">MB got", ">planned, s", ">MB"),
    )
    show_table("many-ranks-joins", columns, rows)


if __name__ == "__main__":
    main()
