"""The loop of a program: how it is written, how data is read, and what belongs to a window."""

from __future__ import annotations

from collections.abc import Sequence

from accelfn.testing.programs.draft import Draft
from accelfn.testing.programs.grammar import Feature, Program, Rule, feature, together

# ``loss_of(model, batch)`` returns the loss: a mean, or with weights a record of a sum and its weight.
SKELETON = """
<<definitions>>

def train(ctx, log):
    <<begin>>
    <<build
    <<model>>
    <<data>>
    <<model_first>>
    <<optimizer>>
    <<prepare>>
    <<prepared>>
    <<states>>
    build>>
    <<built>>
    <<loop
    for {{epochs}}:
        <<epoch>>
        for {{batches}}:
            <<batch>>
            <<pass
            <<work>>
            pass>>
            <<passed>>
            <<closing
            <<close>>
            <<stepped>>
            closing>>
            <<batch_end>>
        <<epoch_end>>
    loop>>
    <<end>>
    {{result}}
"""
# Ways to write the loop. "shim" is the Accelerator; "pure" and "gradients" have the parameters in a tree.
WAYS = ("loop", "forward_backward", "train_step", "shim", "pure", "gradients")
_IN_ONE_STEP = ("train_step", "pure", "gradients")
OF_TREES = ("pure", "gradients")


@feature("api", WAYS, same={"shim": "loop", "pure": "train_step", "gradients": "train_step"})
def _api(p: Program, draft: Draft) -> None:
    """Which functions the loop calls."""
    words, names = draft.words, draft.names
    words |= {"epochs": "epoch in range(2)", "batches": "batch, micro in af.microbatches(ctx, loader)"}
    words |= {
        "prepare": "af.prepare(ctx, ",
        "forward": "loss_of(model, batch)",
        "result": 'log("model", model)',
    }
    words |= {"window": "af.accumulate(ctx, micro, model)", "max_norm": "1e9", "kept": "", "scheduled": ""}
    words |= {
        "value": "loss",
        "weight": "",
        "stepped": "{{stepping}}",
        "stepping": "optimizer",
        "closes": "micro.sync",
    }
    words["scaler"] = "scaler"
    names |= {"models": ["model"], "optimizers": ["optimizer"], "loaders": ["loader"], "unprepared": []}
    names |= {"states": ["scaler"]}
    draft.add("model", "<<created\nmodel = build_model({{seed}})\ncreated>>")
    if p["api"] in ("loop", "forward_backward"):
        draft.add("states", "scaler = af.init_scaler(ctx)")
        draft.add(
            "close",
            """
            scaler = af.unscale_gradients(ctx, {{stepping}}, scaler)
            log("norm", af.clip_grad_norm_(ctx, model.parameters(), {{max_norm}}, scaler_state=scaler))
            <<clip>>
            scaler = af.optimizer_step(ctx, {{stepped}}, scaler{{scheduled}}{{kept}})
            """,
        )
        draft.wrap("closing", "if micro.sync:")
    if p["api"] == "loop":
        draft.add(
            "work",
            """
            with {{window}}:
                <<forward
                loss = {{forward}}
                forward>>
                <<scored>>
                <<backward
                scaler = af.backward(ctx, {{value}}, scaler, micro{{weight}})
                backward>>
            log("loss", loss)
            """,
        )
    elif p["api"] == "forward_backward":
        line = "scaler, loss = af.forward_backward(ctx, model, loss_of, batch, scaler, micro)"
        draft.add("work", line + '\nlog("{{logged}}", loss)')
        words["logged"] = "loss"
    elif p["api"] == "shim":
        words |= {"prepare": "accelerator.prepare(", "batches": "batch in loader"}
        words |= {"window": "accelerator.accumulate(model)", "closes": "accelerator.sync_gradients"}
        names["states"] = []
        draft.add("begin", "accelerator = af.Accelerator(context=ctx)")
        draft.add(
            "work",
            """
            with {{window}}:
                <<forward
                loss = {{forward}}
                forward>>
                accelerator.backward({{value}}{{weight}})
                if accelerator.sync_gradients:
                    log("norm", accelerator.clip_grad_norm_(model.parameters(), {{max_norm}}))
                    <<clip>>
                optimizer.step()
                <<scheduler>>
                optimizer.zero_grad()
            log("loss", loss)
            """,
        )
        draft.wrap("closing", "if accelerator.sync_gradients:")
    else:
        _write_steps(p, draft)


def _write_steps(p: Program, draft: Draft) -> None:
    """Write a loop in which a batch is a step."""
    draft.words |= {"batches": "batch in loader"}
    if p["api"] == "train_step":
        draft.names["states"] = ["step", "state"]
        options = "model=model{{scheduled}}, max_norm={{max_norm}}"
        draft.add("states", f"step = af.make_train_step(ctx, loss_of, {{{{stepping}}}}, {options})")
        draft.add("states", "state = af.init_train_state(ctx, {{stepping}})")
    else:
        draft.names |= {"models": [], "optimizers": []}
        draft.words["result"] = 'log("model", params)'
        draft.add("prepared", "params = {name: one.detach() for name, one in model.named_parameters()}")
        draft.add("definitions", _OF_A_TREE)
    if p["api"] == "pure":
        draft.names["states"] = ["step", "state"]
        draft.add("definitions", _DESCENT)
        step = "step = af.make_train_step(ctx, loss_of_tree(model), Descent, max_norm={{max_norm}})"
        draft.add("states", step + "\nstate = af.init_train_state(ctx, Descent, params)")
        draft.words["result"] = 'log("model", state.params)'
    elif p["api"] == "gradients":
        draft.names["states"] = ["gradients", "params"]
        draft.add("states", "gradients = af.value_and_grad(ctx, loss_of_tree(model))")
        draft.add(
            "work",
            """
            loss, grads = gradients(params, batch)
            norm = torch.stack([one.norm() for one in grads.values()]).norm()
            log("loss", loss)
            log("norm", norm)
            share = 0.1 * ({{max_norm}} / norm).clamp(max=1.0)
            params = {name: one - share * grads[name] for name, one in params.items()}
            """,
        )
    if p["api"] != "gradients":
        draft.add("work", 'state, metrics = step(state, batch)\nlog("loss", metrics.loss)')
        draft.add("work", 'log("norm", metrics.grad_norm)')


_OF_A_TREE = """
def loss_of_tree(model):
    def loss_fn(params, batch):
        return loss_of(lambda *args, **kwargs: torch.func.functional_call(model, params, args, kwargs), batch)
    return loss_fn

"""
_DESCENT = """
class Descent:  # an optimizer that is a pair of functions
    def init(params):
        return ()
    def update(grads, state, params=None):
        return {name: -0.1 * grad for name, grad in grads.items()}, state

"""


def is_step(p: Program) -> bool:
    """Return whether one call makes a step, from a batch that is a window."""
    return p["api"] in _IN_ONE_STEP


@feature("seed", ("same", "rank"), is_neutral=True)
def _seed(p: Program, draft: Draft) -> None:
    """Whether ranks begin with weights of their own, which preparing makes equal."""
    draft.words["seed"] = "ctx.rank" if p["seed"] == "rank" else ""


@feature("weighted", (False, True))
def _weighted(p: Program, draft: Draft) -> None:
    """Whether a loss is a sum with its weight."""
    if p["weighted"]:
        draft.words |= {"value": "loss.value", "weight": ", weight=loss.weight", "logged": "total"}


# --- data ---------------------------------------------------------------------------------------------------


@feature("source", ("map", "sampler", "stream", "list"))
def _source(p: Program, draft: Draft) -> None:
    """What the loader is."""
    options = ", drop_last=True" * p["drop_last"] + f", num_workers={p['workers']}" * (p["workers"] > 0)
    loader = {
        "map": "DataLoader({{rows}}, batch_size={{size}}",
        "sampler": "DataLoader({{rows}}, batch_size={{size}}, sampler=list(reversed(range({{number}})))",
        "stream": "DataLoader(Stream({{rows}}), batch_size={{size}}",
        "list": "batches_of({{rows}}, ctx, {{size}}",
    }[p["source"]]
    draft.add("data", f"loader = {loader}{options})")
    if p["source"] == "list" and p["api"] == "shim":
        draft.names["loaders"] = []


@feature("batch", (2, 1, 3))
def _batch(p: Program, draft: Draft) -> None:
    """Rows of a rank's batch; where a batch is a window, of each of its parts."""
    rows = p["batch"] * p["dp"] * p["shard"] * (p["accumulation"] if is_step(p) else 1)
    draft.words["size"] = f'{rows} // ctx.axis_size("dp")'


def rows_feature(numbers: Sequence[int]) -> Feature:
    """Return the feature of how many rows there are."""

    @feature("rows", numbers)
    def rows(p: Program, draft: Draft) -> None:
        number = num_rows(p)
        draft.words |= {"rows": f"make_rows()[:{number}]", "number": str(number)}

    return rows


def num_rows(p: Program) -> int:
    """Return how many rows there are: half as many where each rank reads all of them."""
    return p["rows"] if p["dp"] * p["shard"] > 1 else p["rows"] // 2


@feature("drop_last", (False, True))
def _drop_last(p: Program, draft: Draft) -> None:
    """An option of the loader, which ``source`` writes."""


@feature("workers", (0, 1), is_neutral=True)
def _workers(p: Program, draft: Draft) -> None:
    """Processes of the loader, which ``source`` writes."""


def is_uneven(p: Program) -> bool:
    """Return whether the last step of an epoch has fewer rows."""
    window = p["accumulation"] if is_step(p) else 1
    return bool(num_rows(p) % (p["batch"] * p["dp"] * p["shard"] * window))


# --- the window ---------------------------------------------------------------------------------------------


@feature("accumulation", (1, 2, 3), is_size=True)
def _accumulation(p: Program, draft: Draft) -> None:
    """Batches of a window."""
    if p["exact"]:  # it follows from the number of microbatches
        return
    if p["sync"] == "each":
        plugin = f"af.GradientAccumulationPlugin(num_steps={p['accumulation']}, sync_each_batch=True)"
        draft.options["gradient_accumulation_plugin"] = plugin
    elif p["accumulation"] > 1:
        draft.options["gradient_accumulation_steps"] = str(p["accumulation"])


@feature("sync", ("", "no_sync", "each", "trigger"), is_neutral=True)
def _sync(p: Program, draft: Draft) -> None:
    """How it is said that only the last batch of a window averages gradients."""
    if p["sync"] == "no_sync":
        open_window = "contextlib.nullcontext() if micro.sync else af.no_sync(ctx, model)"
        draft.words["window"] = open_window
    elif p["sync"] == "trigger":
        draft.words["window"] = "af.no_sync(ctx, model)"
        draft.wrap(
            "backward",
            "with af.training.trigger_sync_in_backward(ctx, model)"
            " if micro.sync else contextlib.nullcontext():",
        )


@feature("skip", ("", "open", "closing", "all"))
def _skip(p: Program, draft: Draft) -> None:
    """Which batches are left out: the first of a window, its last one, or the second of an epoch."""
    if p["skip"] == "open":
        draft.wrap("pass", "if micro.place:")
    elif p["skip"] == "closing":
        draft.wrap("pass", "if not micro.sync or micro.window == 1:")
    elif p["skip"] == "all":
        draft.add("batch", "if micro.index == 1:\n    continue")


@feature("zero", ("", "model", "zeros", "first", "drop"))
def _zero(p: Program, draft: Draft) -> None:
    """Where gradients are cleared; with "drop" half of a window, or less, is lost on purpose."""
    if p["zero"] in ("model", "zeros", "first"):
        draft.words["kept"] = ", clear_gradients=False"
    if p["zero"] == "model":
        draft.add("stepped", "model.zero_grad()")
    elif p["zero"] == "zeros":
        draft.add("stepped", "optimizer.zero_grad(set_to_none=False)")
    elif p["zero"] == "first":
        draft.add("batch", "if micro.place == 0:\n    model.zero_grad()")
    elif p["zero"] == "drop":
        last = p["accumulation"] // 2 - 1
        draft.add("batch_end", f"if micro.place == {last} and not micro.sync:\n    optimizer.zero_grad()")


@feature("leave", (False, True))
def _leave(p: Program, draft: Draft) -> None:
    """Leave the first epoch early, which may be inside of a window."""
    if p["leave"]:
        draft.add("batch_end", "if epoch == 0 and micro.index == 2:\n    break")
        draft.add("epoch_end", "model.zero_grad()\nscaler = af.init_scaler(ctx)")


# How the loop is written, and how its batches are read.
LOOP: tuple[Feature, ...] = (
    *(_api, _seed, _weighted, _batch, _drop_last, _workers, _accumulation, _sync, _skip, _zero, _leave),
)
# What makes the loader.
SOURCE = _source

_HAND_MADE = "zero skip leave sync=no_sync|trigger autocast=inner"  # what only a loop by hand can do

RULES: tuple[Rule, ...] = (
    Rule(
        "the shim sees where a prepared loader ends, and not a list",
        together("api=shim source=list accumulation"),
    ),
    Rule(
        "no rank of a pipeline has the loss",
        together("pp", "api=loop|shim|pure|gradients"),
        mend="api=forward_backward|train_step",
    ),
    Rule("no rank of a pipeline can call the model", together("pp", "evaluate peek")),
    Rule("a tree of parameters is whole", together("api=pure|gradients", "shard tp cp sp pp ddp")),
    Rule(
        "a tree is trained by gradient descent alone",
        together("api=pure|gradients", "optimizer schedule rate ema hook freeze clamp order seed evaluate"),
    ),
    Rule(
        "value_and_grad takes a mean of one window", together("api=gradients", "weighted accumulation exact")
    ),
    Rule(
        "a step as one call has nothing inside",
        together(
            "api=train_step|pure|gradients",
            f"sync peek norm clip=value evaluate=window save=middle|memory optimizer=turns {_HAND_MADE}",
        ),
    ),
    Rule(
        "a batch that is a step has all its rows",
        lambda p: is_step(p) and is_uneven(p) and not p["drop_last"],
    ),
    Rule("a step takes batches of a loader", together("source=list api=train_step|pure|gradients")),
    Rule(
        "the Accelerator decides about the window",
        together("api=shim", f"norm optimizer=two|turns save=epoch|middle {_HAND_MADE}"),
    ),
    Rule(
        "forward_backward has nothing inside",
        together("api=forward_backward", "autocast=inner sync=no_sync|trigger optimizer=turns"),
    ),
    Rule("each rank has two batches", lambda p: num_rows(p) < 2 * p["batch"] * p["dp"] * p["shard"]),
    Rule("a list has no options of a loader", together("source=list", "drop_last workers save")),
    Rule("a list has full batches", lambda p: p["source"] == "list" and is_uneven(p)),
    Rule("exact mode has all microbatches", together("exact", "skip leave")),
    Rule(
        "exact mode loses the same half of a window on one rank, with longer ones",
        lambda p: p["exact"] and p["zero"] == "drop" and p["accumulation"] % 2 == 1,
    ),
    Rule(
        "exact mode has equal microbatches",
        lambda p: p["exact"] and num_rows(p) % (p["batch"] * p["dp"] * p["accumulation"]) > 0,
    ),
    Rule(
        "a window has several batches",
        together("!accumulation", "zero=drop skip=open|closing sync"),
        mend="accumulation=2|3",
    ),
    Rule("a batch that is left out has no weight", together("weighted", "skip zero=drop")),
    Rule("a window that is left is thrown away", together("leave", "save skip evaluate=epoch")),
)
