"""What a program does besides: optimizers, clipping, copies of the model, evaluation, saving."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accelfn.testing.programs.draft import Draft
from accelfn.testing.programs.grammar import Feature, Program, Rule, feature, together
from accelfn.testing.programs.loops import OF_TREES, is_step, is_uneven

# A world that takes up what another one saved in the middle of an epoch: the axis that has two ranks.
RESUMED: Mapping[str, str] = MappingProxyType(
    {"one": "", "dp2": "dp", "shard2": "shard", "tp2": "tp", "cp2": "cp", "pp2": "pp"}
)


# --- the step -----------------------------------------------------------------------------------------------


@feature("clip", ("", "norm", "value"))
def _clip(p: Program, draft: Draft) -> None:
    """What bounds the gradients."""
    if p["clip"] == "norm":
        draft.words["max_norm"] = "0.1"
    elif p["clip"] == "value" and p["api"] == "shim":
        draft.add("clip", "accelerator.clip_grad_value_(model.parameters(), 0.01)")
    elif p["clip"] == "value":
        draft.add("clip", "af.clip_grad_value_(ctx, model.parameters(), 0.01, scaler_state=scaler)")


@feature("norm", (False, True))
def _norm(p: Program, draft: Draft) -> None:
    """Compute the norm by hand besides."""
    if p["norm"]:
        norms = "[one.grad.norm() for one in model.parameters() if one.grad is not None]"
        draft.add("clip", f'log("norm", torch.stack({norms}).norm())')


@feature("optimizer", ("sgd", "momentum", "adamw", "groups", "two", "turns"))
def _optimizer(p: Program, draft: Draft) -> None:
    """Which optimizer steps; "two" step together, "turns" one after the other."""
    if p["api"] in OF_TREES:
        return
    several = p["optimizer"] in ("two", "turns")
    made = {
        "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
        "momentum": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)",
        "adamw": "torch.optim.AdamW(model.parameters(), lr=0.02, eps=0.01)",
        "groups": 'torch.optim.SGD([{"params": inside, "lr": 0.05}, {"params": outside}], lr=0.1)',
    }
    if several or p["optimizer"] == "groups":
        draft.add(
            "optimizer",
            """
            inside = [*{{part}}.parameters()]
            outside = [one for one in model.parameters() if all(one is not other for other in inside)]
            """,
        )
    if not several:
        draft.add("optimizer", f"optimizer = {made[p['optimizer']]}")
        return
    draft.add(
        "optimizer", "first = torch.optim.SGD(inside, lr=0.05)\nsecond = torch.optim.SGD(outside, lr=0.1)"
    )
    draft.names["optimizers"] = ["first", "second"]
    draft.words["stepping"] = "[first, second]"
    if p["optimizer"] == "turns":
        draft.words |= {"stepped": "(first, second)[steps % 2]", "kept": ", clear_gradients=False"}
        draft.add("built", "steps = 0")
        draft.add("stepped", "model.zero_grad()\nsteps += 1")


@feature("schedule", (False, True))
def _schedule(p: Program, draft: Draft) -> None:
    """A schedule of the learning rate."""
    if not p["schedule"]:
        return
    draft.add("optimizer", "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)")
    draft.words["scheduled"] = ", scheduler=schedule"
    draft.names["optimizers" if p["api"] == "shim" else "unprepared"].append("schedule")
    draft.add("scheduler", "schedule.step()")


@feature("rate", (False, True))
def _rate(p: Program, draft: Draft) -> None:
    """Set the learning rate by hand, once an epoch."""
    if p["rate"]:
        draft.add("epoch", 'optimizer.param_groups[0]["lr"] *= 0.5')


@feature("clamp", (False, True))
def _clamp(p: Program, draft: Draft) -> None:
    """Clamp the weights after a step."""
    if p["clamp"]:
        draft.add(
            "stepped",
            "with torch.no_grad():\n    for one in model.parameters():\n        one.clamp_(-0.2, 0.2)",
        )


# --- the model and its copies -------------------------------------------------------------------------------


@feature("hook", (False, True))
def _hook(p: Program, draft: Draft) -> None:
    """A hook on the gradient of a parameter."""
    if p["hook"]:
        draft.add("model", "[*model.parameters()][-1].register_hook(lambda grad: 2 * grad)")


@feature("freeze", ("", "freeze", "unfreeze"))
def _freeze(p: Program, draft: Draft) -> None:
    """A part of the model is trained in one of the two epochs alone."""
    if p["freeze"]:
        draft.add("epoch", f"{{{{part}}}}.requires_grad_(epoch {'==' if p['freeze'] == 'freeze' else '>'} 0)")


@feature("ema", ("", "before", "after"), same={"after": "before"})
def _ema(p: Program, draft: Draft) -> None:
    """An average of the weights: a copy of the model from before or after it is prepared."""
    if not p["ema"]:
        return
    draft.add(
        "model" if p["ema"] == "before" else "prepared",
        "average = copy.deepcopy(model).requires_grad_(False)",
    )
    draft.names["models" if p["ema"] == "before" else "unprepared"].append("average")
    draft.add(
        "stepped",
        """
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters()):
                slow.lerp_(fast, 0.3)
        """,
    )
    draft.add("end", 'log("average", average)')


@feature("peek", ("", "grad", "no_grad"))
def _peek(p: Program, draft: Draft) -> None:
    """A forward pass between backward and step, whose result nobody uses."""
    if p["peek"] == "grad":
        draft.add("passed", "{{forward}}  # to look at it")
    elif p["peek"] == "no_grad":
        draft.add("passed", "with torch.no_grad():\n    {{forward}}  # to look at it")


@feature("evaluate", ("", "epoch", "window"))
def _evaluate(p: Program, draft: Draft) -> None:
    """Losses in evaluation mode: of all data after an epoch, or of the batch after a step."""
    logged = 'with torch.no_grad():\n    log("eval", {{forward}})'
    if p["evaluate"] == "epoch":
        logged = 'with torch.no_grad():\n    for {{batches}}:\n        log("eval", {{forward}})'
    if p["evaluate"]:
        slot = "epoch_end" if p["evaluate"] == "epoch" else "stepped"
        draft.add(slot, f"model.eval()\n{logged}\nmodel.train()")


@feature("autocast", ("", "outer", "inner"), is_neutral=True)
def _autocast(p: Program, draft: Draft) -> None:
    """Autocast by the program, around the loop or around the loss."""
    if p["autocast"]:
        draft.wrap("loop" if p["autocast"] == "outer" else "forward", "with af.autocast(ctx):")


# --- preparing and saving -----------------------------------------------------------------------------------


@feature("order", ("", "optimizer_first", "model_first", "late"), is_neutral=True)
def _order(p: Program, draft: Draft) -> None:
    """In which order objects are prepared; "late": the optimizer is made from the prepared model."""
    models, optimizers, loaders = (
        (", ".join(draft.names[kind])) for kind in ("models", "optimizers", "loaders")
    )

    def prepare(objects: str) -> str:
        return f"{objects} = {{{{prepare}}}}{objects})" if objects else ""

    calls = {
        "": [", ".join(filter(None, (models, optimizers, loaders)))],
        "optimizer_first": [optimizers, models, loaders],
        "model_first": [models, optimizers, loaders],
        "late": [optimizers, loaders],
    }[p["order"]]
    if p["order"] == "late":
        draft.add("model_first", prepare(models))
    for objects in calls:
        draft.add("prepare", prepare(objects))


@feature("save", ("", "epoch", "middle", "memory"), same={"epoch": "", "middle": ""})
def _save(p: Program, draft: Draft) -> None:
    """Save, build everything anew and load: after an epoch, in its middle, or as state dicts in memory."""
    if p["save"] == "memory":
        copies = "copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())"
        draft.add("epoch_end", f"if epoch == 0:\n    best, moments = {copies}")
        draft.add("end", "model.load_state_dict(best)\noptimizer.load_state_dict(moments)")
    if p["save"] not in ("epoch", "middle"):
        return
    state = draft.names["states"][-1]
    parts = [
        *draft.names["models"],
        *draft.names["optimizers"],
        *draft.names["unprepared"],
        *draft.names["loaders"],
    ]
    built = ", ".join([*parts, *draft.names["states"]])
    saved = "{" + ", ".join(f'"{name}": {name}' for name in [*parts, state]) + "}"
    draft.words |= {"built": built, "saved": saved, "part": draft.words.get("part", "")}
    draft.wrap("build", "def build():")
    draft.add("states", "return {{built}}")
    draft.add("built", "{{built}} = build()")
    load = f'{state} = af.load_state(ctx, FOLDER, {{{{saved}}}})["{state}"]'
    part = "epoch"
    if p["save"] == "middle":
        part = "part"
        draft.words["epochs"] = "part, epoch in ((0, 0), (1, 0), (1, 1))"
        draft.add("batch_end", "if part == 0 and {{closes}}:\n    break")
    if p["resume"]:
        draft.words["epochs"] = "part, epoch in (((0, 0),), ((1, 0), (1, 1)))[PART]"
        draft.add("built", f"if PART == 1:\n    {load}")
        draft.add("epoch_end", "if part == 0:\n    af.save_state(ctx, FOLDER, {{saved}})")
        return
    save = "af.save_state(ctx, FOLDER, {{saved}})\n    {{built}} = build()"
    draft.add("epoch_end", f"if {part} == 0:\n    {save}\n    {load}")


@feature("resume", ("", *RESUMED), is_neutral=True)
def _resume(p: Program, draft: Draft) -> None:
    """In which world the rest runs after the save; ``save`` writes it."""


HABITS: tuple[Feature, ...] = (
    *(_clip, _norm, _optimizer, _schedule, _rate, _clamp, _hook, _freeze, _ema, _peek, _evaluate, _autocast),
)
# What needs the lists of all objects.
ENDS: tuple[Feature, ...] = (_order, _save, _resume)


def _is_dealt(p: Program) -> bool:
    rest = resumed(p)
    return p["batch"] * p["dp"] * p["shard"] % (rest["dp"] * rest["shard"]) == 0


def resumed(p: Program) -> Program:
    """Return a program of the world that takes a run up."""
    chosen = RESUMED[p["resume"]]
    axes = {one.name: 1 + (one.name == chosen) for one in p.grammar.features if one.is_axis}
    return p.but(**axes, resume="")


def _is_there(p: Program) -> bool:
    chosen = RESUMED[p["resume"]]
    return not chosen or 2 in p.grammar.by_name[chosen].values


RULES: tuple[Rule, ...] = (
    Rule("a run is taken up in a layout that there is", lambda p: bool(p["resume"]) and not _is_there(p)),
    Rule("several optimizers have no schedule", together("optimizer=two|turns", "schedule rate zero save")),
    Rule(
        "optimizers that take turns end with the last window",
        together("optimizer=turns", "leave accumulation=3"),
    ),
    Rule(
        "a stage has some of each optimizer's parameters",
        together("pp order=late optimizer=groups|two|turns"),
    ),
    Rule("a rate set by hand stays", together("rate", "schedule save=middle")),
    Rule("a norm by hand is of complete gradients", together("norm", "skip pp")),
    Rule("autocast is of a lower precision", together("autocast !precision"), mend="precision=bf16"),
    Rule("what is saved is what was prepared", together("save", "ema=after freeze")),
    Rule("a save inside of an epoch ends a complete window", together("save=middle", "skip evaluate=epoch")),
    Rule(
        "what resumes was saved inside of an epoch",
        together("resume", "!save save=epoch|memory"),
        mend="save=middle",
    ),
    Rule("a pipeline resumes in a loop by hand", together("resume=pp2 !api"), mend="api=forward_backward"),
    Rule("shared sequences resume with weights", together("resume=cp2 !weighted"), mend="weighted=True"),
    Rule(
        "the last batch is as large for the ranks that take it up",
        lambda p: bool(p["resume"]) and is_uneven(p),
    ),
    Rule(
        "a batch can be dealt to the ranks that take it up", lambda p: bool(p["resume"]) and not _is_dealt(p)
    ),
    Rule("a run resumes on processes", together("resume", "world exact ddp fsdp")),
    Rule(
        "rows that matter to each other are of one number of ranks, and computed once",
        lambda p: (
            p.grammar.sees_other_rows(p)
            and bool(p["peek"] or p["resume"] or (is_step(p) and p["accumulation"] > 1))
        ),
    ),
    Rule(
        "the rest of a run can be in its world",
        lambda p: bool(p["resume"]) and p.grammar.broken_rule(resumed(p)) is not None,
    ),
)
