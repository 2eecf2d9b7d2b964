"""The project's own grammar: models of blocks and of transformers, their losses, and habits around them."""

from __future__ import annotations

from typing import Any

from accelfn.testing.programs import (
    Draft,
    Grammar,
    Program,
    Rule,
    feature,
    habits,
    layouts,
    loops,
    together,
)
from tests.programs import models

# Kinds of blocks whose output for a row depends on the other rows of its rank.
_SEE_OTHER_ROWS = {"batchnorm", "branch", "buffers"}
_ATTENTION = {"attention", "grouped", "full"}
_KINDS = tuple(models.KINDS)
_WHOLE = {"tensor": "", "tuple": "[0]", "dict": '["logits"]', "dataclass": ".logits"}
_RETURNED = {
    "tensor": "self.head(x)",
    "tuple": "self.head(x), x",
    "dict": '{"logits": self.head(x), "hidden": x}',
    "dataclass": "Output(self.head(x), x)",
}
_NET = """
class Net(nn.Module):
    _no_split_modules = ["Block"]
    def __init__(self, seed=0):
        super().__init__()
        self.embed, self.features = nn.Embedding(WORDS, WIDTH), nn.Linear(3, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList([Block({{block}}()), Block({{other}}())])
        <<constructed>>
        initialise(self, seed)
    def forward(self, ids, x, task):
        x = self.embed(ids) + self.features(x)
        for block in self.blocks:
            x = {{block_call}}
        <<forwarded>>
        return {{returned}}
    <<methods>>

build_model = Net

"""
_LLAMA_PLAN = {
    "model.embed_tokens": "embedding",
    "lm_head": "gather",
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    **{f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": "rowwise",
}


# --- the model ----------------------------------------------------------------------------------------------


@feature("model", ("blocks", *models.TRANSFORMERS))
def _model(p: Program, draft: Draft) -> None:
    """Blocks of two kinds, or a model of transformers."""
    if p["model"] == "blocks":
        draft.add("definitions", _NET)
        draft.words |= {
            "part": "model.blocks[0]",
            "block_call": "block(x, task)",
            "returned": _RETURNED[p["output"]],
        }
        draft.words["call"] = f'model(batch["ids"], batch["x"], batch["task"]){_WHOLE[p["output"]]}'
        return
    draft.add(
        "definitions", f'def build_model(seed=0):\n    return build_transformer("{p["model"]}", seed)\n\n'
    )
    draft.words["part"] = {"bert": "model.bert.encoder.layer[0]", "t5": "model.encoder.block[0]"}.get(
        p["model"], "model.model.layers[0]"
    )
    # Ranks that share a sequence have positions of their own; those of T5 are distances.
    more = 'decoder_input_ids=batch["ids"]' if p["model"] == "t5" else 'position_ids=batch["position"]'
    draft.words["call"] = f'model(input_ids=batch["ids"], {more}).logits'
    draft.words["tensor_plan"] = repr(_LLAMA_PLAN)


@feature("block", _KINDS)
def _block(p: Program, draft: Draft) -> None:
    """The kind of the first block."""
    plan = {"embed": "embedding", "head": "gather"}
    for number, kind in enumerate((p["block"], p["other"])):
        plan |= {f"blocks.{number}.inner.{name}": style for name, style in models.SPLIT.get(kind, {}).items()}
    if p["model"] == "blocks":
        draft.words["tensor_plan"] = repr(plan)
    draft.words["block"] = models.KINDS[p["block"]].__name__


@feature("other", _KINDS, counts_as="block")
def _other(p: Program, draft: Draft) -> None:
    """The kind of the second block."""
    draft.words["other"] = models.KINDS[p["other"]].__name__


@feature("tied", (False, True))
def _tied(p: Program, draft: Draft) -> None:
    if p["tied"]:
        draft.add("constructed", "self.head.weight = self.embed.weight")


@feature("shared", (False, True))
def _shared(p: Program, draft: Draft) -> None:
    """A block is called twice."""
    if p["shared"]:
        draft.add("forwarded", "x = self.blocks[0](x, task)")


@feature("recompute", (False, True))
def _recompute(p: Program, draft: Draft) -> None:
    """The model recomputes activations by itself."""
    if p["recompute"]:
        draft.words["block_call"] = "checkpoint(block, x, task, use_reentrant=False)"


@feature("output", tuple(_RETURNED))
def _output(p: Program, draft: Draft) -> None:
    """What the model returns, which ``model`` writes."""
    if p["output"] == "dataclass":
        draft.add(
            "definitions",
            """
            @dataclasses.dataclass
            class Output:
                logits: torch.Tensor
                hidden: torch.Tensor

            """,
        )


# --- the loss -----------------------------------------------------------------------------------------------


@feature("loss", ("mean", "aux", "twice", "method", "l2", "penalty", "backwards"))
def _loss(p: Program, draft: Draft) -> None:
    """The loss; with "backwards" two losses of one forward pass."""
    cross_entropy = 'F.cross_entropy({{logits}}.flatten(0, 1), batch["labels"].flatten(){{reduction}})'
    labelled = '[batch["labels"] != -100].sum()' if p["weighted"] else ".mean()"
    draft.words |= {"logits": "logits", "reduction": ', reduction="sum"' if p["weighted"] else ""}
    returned = {"backwards": "loss, 0.1 * logits.logsumexp(-1).square().mean()"}.get(p["loss"], "loss")
    if p["weighted"]:
        returned = 'af.Loss(loss, (batch["labels"] != -100).sum())'
    draft.add(
        "definitions",
        "def loss_of(model, batch):\n    <<inputs>>\n    <<losses>>\n    return {{loss_returned}}\n\n",
    )
    draft.words["loss_returned"] = returned
    if p["loss"] == "method":
        draft.add(
            "methods",
            "def loss(self, batch):\n    model = self\n    return "
            + cross_entropy.replace("{{logits}}", "{{call}}"),
        )
        draft.add("losses", "loss = model.loss(batch)")
        draft.add("prepared", 'af.parallel.register_forward_method(model, "loss")')
        return
    draft.add("losses", f"logits = {{{{call}}}}\nloss = {cross_entropy}")
    if p["loss"] == "aux":
        draft.add("losses", f"loss = loss + 0.1 * logits.logsumexp(-1).square(){labelled}")
    elif p["loss"] == "twice":
        draft.add(
            "losses",
            "again = {{call}}".replace("{{call}}", draft.words["call"].replace('batch["x"]', '-batch["x"]')),
        )
        draft.add("losses", f"loss = loss + 0.1 * (again - logits).square(){labelled}")
    elif p["loss"] == "l2":
        draft.add("losses", "loss = loss + 0.01 * sum(one.square().sum() for one in model.parameters())")
    elif p["loss"] == "penalty":
        draft.add("inputs", 'batch["x"].requires_grad_()')
        draft.add(
            "losses", '(slope,) = torch.autograd.grad(logits.square().sum(), batch["x"], create_graph=True)'
        )
        draft.add("losses", f"loss = loss + 0.1 * slope.square(){labelled}")
    elif p["loss"] == "backwards":
        draft.add(
            "scored",
            "loss, more = loss\nscaler = af.backward(ctx, more, scaler, micro, retain_graph=True)",
        )


# --- habits around the model --------------------------------------------------------------------------------


@feature("rows", (16, 18, 15))
def _rows(p: Program, draft: Draft) -> None:
    """How many rows there are."""
    number = loops.num_rows(p)
    draft.words |= {"rows": f"make_rows({number}, {p['batch']}, {p['weighted']})", "number": str(number)}
    draft.add("batch", 'log("seen", batch["index"])')


@feature("zipped", (False, True))
def _zipped(p: Program, draft: Draft) -> None:
    """Two loaders side by side."""
    if not p["zipped"]:
        return
    draft.add(
        "data",
        "others = DataLoader({{rows}}[::-1], batch_size={{size}}" + ", drop_last=True" * p["drop_last"] + ")",
    )
    draft.names["loaders"].append("others")
    draft.words["batches"] = "(batch, micro), other in zip(af.microbatches(ctx, loader), others)"
    draft.add("batch", 'batch["x"] = batch["x"] + other["x"]')


@feature("meta", (False, True), is_neutral=True)
def _meta(p: Program, draft: Draft) -> None:
    """The model is built without memory, and its weights come from a file."""
    if not p["meta"]:
        return
    draft.add(
        "begin",
        """
        weights = FOLDER + ".safetensors"
        if ctx.is_main_process:
            save_model(build_model(), weights)
        af.wait_for_everyone(ctx)
        """,
    )
    draft.wrap("created", 'with torch.device("meta"):')
    draft.add("prepared", "af.load_model(model, weights)")


@feature("forward_hook", (False, True))
def _forward_hook(p: Program, draft: Draft) -> None:
    """A hook that changes what a block returns."""
    if p["forward_hook"]:
        draft.add("model", "{{part}}.register_forward_hook(lambda module, inputs, output: 0.5 * output)")


@feature("critic", (False, True))
def _critic(p: Program, draft: Draft) -> None:
    """A second model with an optimizer of its own, which learns what the first one tries to hide."""
    if not p["critic"]:
        return
    draft.add(
        "model",
        """
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(WORDS, 8), nn.Tanh(), nn.Linear(8, 1))
        critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        """,
    )
    draft.names["models"] += ["critic", "critic_optimizer"]
    draft.add("states", "critic_scaler = af.init_scaler(ctx)")
    draft.add("batch", "critic.requires_grad_(False)")
    draft.add("scored", "loss = loss - 0.1 * critic({{call}}).mean()")
    draft.add(
        "passed",
        """
        critic.requires_grad_(True)
        with af.accumulate(ctx, micro, critic):
            fake, real = critic({{call}}.detach()), critic(F.one_hot(batch["ids"], WORDS).to(batch["x"]))
            doubts = F.softplus(fake).mean() + F.softplus(-real).mean()
            critic_scaler = af.backward(ctx, doubts, critic_scaler, micro)
        """,
    )
    draft.add("stepped", "critic_scaler = af.optimizer_step(ctx, critic_optimizer, critic_scaler)")
    draft.add("end", 'log("critic", critic)')


# --- what nobody could mean ---------------------------------------------------------------------------------


def _kinds(p: Program) -> set[str]:
    """Return the kinds of blocks of a model."""
    return {p["block"], p["other"]} if p["model"] == "blocks" else set()


def _sees_other_rows(p: Program) -> bool:
    return bool(_kinds(p) & _SEE_OTHER_ROWS)


def _computes_again(p: Program) -> bool:
    """Return whether a step computes a row more than once."""
    return p["loss"] in ("twice", "penalty") or p["recompute"]


def _attends(p: Program) -> bool:
    """Return whether ranks that share sequences exchange anything in the model."""
    return p["model"] != "blocks" or bool(_kinds(p) & _ATTENTION)


_RULES = (
    Rule(
        "features of blocks are for blocks",
        together(
            "model",
            "block other tied shared recompute output forward_hook meta zipped critic "
            "loss=twice|method|penalty|backwards",
        ),
    ),
    Rule("a tensor plan is written for blocks and Llama", together("tp model=bert|t5|mixtral|hybrid")),
    Rule(
        "ranks share sequences in attention",
        lambda p: p["cp"] * p["sp"] > 1 and not _attends(p),
        mend="block=attention|grouped",
    ),
    Rule(
        "each stage has attention where ranks share sequences",
        lambda p: (
            p["pp"] > 1 and p["cp"] * p["sp"] > 1 and p["model"] == "blocks" and not _kinds(p) <= _ATTENTION
        ),
        mend="other=attention|grouped",
    ),
    Rule(
        "rounding sends no row to another expert",
        lambda p: p["precision"] != "no" and ("experts" in _kinds(p) or p["model"] == "mixtral"),
    ),
    Rule("a sum is of the labels", together("weighted", "loss=l2|method")),
    Rule("a method returns the loss of a tensor", together("loss=method output")),
    Rule(
        "attention has no second derivative",
        lambda p: p["loss"] == "penalty" and bool(_kinds(p) & _ATTENTION),
    ),
    Rule("a second derivative is of one pass", together("loss=penalty", "recompute precision peek evaluate")),
    Rule(
        "rows that matter to each other are computed once",
        lambda p: _sees_other_rows(p) and _computes_again(p),
    ),
    Rule(
        "a static graph uses the same parameters in each pass, as torch checks",
        lambda p: p["ddp"] == "static" and "branch" in _kinds(p),
    ),
    Rule(
        "gradients aren't saved, so what has none is not what has zeros",
        lambda p: (
            p["zero"] == "zeros" and bool(p["save"]) and p["optimizer"] != "sgd" and "branch" in _kinds(p)
        ),
    ),
    Rule("rows of one task are looked at together", lambda p: bool(p["evaluate"]) and "branch" in _kinds(p)),
    Rule(
        "microbatches of a batch are of one task",
        lambda p: (
            p["pp"] > 1
            and "branch" in _kinds(p)
            and loops.num_rows(p) % p["batch"] > 0
            and (p["dp"] * p["shard"] > 1 or p["source"] == "sampler")
        ),
    ),
    Rule(
        "a stage returns what the loss needs", together("pp", "critic loss=twice|l2|penalty|method|backwards")
    ),
    Rule("parameters of two stages aren't changed by hand", together("pp clamp tied")),
    Rule(
        "two losses are differentiated by hand",
        together("loss=backwards", "api weighted critic sync=trigger exact peek evaluate"),
    ),
    Rule(
        "two loaders are read by hand",
        together(
            "zipped",
            "api=train_step|shim|pure|gradients source=list workers save=middle evaluate=epoch leave",
        ),
    ),
    Rule(
        "a critic learns in a loop by hand",
        together("critic", "api weighted zero skip sync save evaluate leave optimizer=turns"),
    ),
    Rule(
        "weights from a file are the same on all ranks", together("meta", "ema exact seed api=pure|gradients")
    ),
    Rule(
        "a pure function has no state",
        together("api=pure|gradients", "model recompute forward_hook tied loss=l2|method|penalty"),
    ),
    Rule(
        "a tree has the parameters that are trained",
        lambda p: (
            p["api"] in ("pure", "gradients")
            and bool(_kinds(p) & {"batchnorm", "buffers", "frozen", "unused", "branch"})
        ),
    ),
)


def make_grammar() -> Grammar:
    """Return the grammar of all programs."""
    plan = {"embed": "embedding", "head": "gather"}
    axes = layouts.layouts(tensor_plan=plan, sequence={"ids": 1, "x": 1, "labels": 1, "position": 1})
    return Grammar(
        skeleton=loops.SKELETON,
        features=(
            *axes,
            *(_model, _block, _other, _tied, _shared, _recompute, _output, _loss),
            *loops.LOOP,
            *habits.HABITS,
            *(_rows, loops.SOURCE, _zipped, _meta, _forward_hook, _critic),
            *habits.ENDS,
        ),
        rules=(*layouts.RULES, *loops.RULES, *habits.RULES, *_RULES),
        scope=_names_of_models(),
        imports="from safetensors.torch import save_model\nfrom torch.utils.checkpoint import checkpoint\n",
        sees_other_rows=_sees_other_rows,
    )


def _names_of_models() -> dict[str, Any]:
    named = {name: value for name, value in vars(models).items() if not name.startswith("_")}
    own = {
        name: value for name, value in named.items() if getattr(value, "__module__", "") == models.__name__
    }
    return {
        **own,
        **{name: value for name, value in named.items() if name.isupper() and isinstance(value, int)},
    }


GRAMMAR = make_grammar()
