"""Models cut into stages, whose forward passes are run one after another in one process."""

# transformers is untyped, and torch leaves backward partly so.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from accelfn.errors import ConfigurationError
from accelfn.parallel import PipelinePlan, plan_stages, read_facts
from accelfn.parallel.facts import modules_of
from accelfn.parallel.stages import Outline, StageRun, apply_stages, run_stage
from tests.parallel.tensor_models import GPT, make_batch

WIDTH = 8
T: Any = transformers


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + torch.tanh(self.linear(x) + bias), None


class Net(nn.Module):
    """With a parameter of its own, operations between its layers, layers in a tuple, and a tied head."""

    def __init__(self, depth: int, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(depth)
        self.positions = nn.Parameter(torch.randn(5, WIDTH))
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        bias = torch.where(ids > 5, factor, 0.0).unsqueeze(-1).to(x) + torch.zeros_like(x)
        for layer in self.layers[:]:
            x = F.gelu(x)
            x = layer(x, bias)[0]
        return self.head(self.norm(x))


IDS = torch.arange(10).reshape(2, 5)


def cut(whole: nn.Module, plan: PipelinePlan, ranks: Sequence[Sequence[int]]) -> list[nn.Module]:
    """Return a model for each rank, which has the stages ``ranks`` of it."""
    parts = [copy.deepcopy(whole) for _ in ranks]
    for part, own in zip(parts, ranks, strict=True):
        apply_stages(part, plan, own)
    return parts


def outline_all(
    plan: PipelinePlan, parts: Mapping[int, nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Outline]:
    outlines: list[Outline] = []
    with torch.no_grad():
        for index in range(len(plan.stages)):
            run = StageRun(plan, index, outlines, (), "cpu")
            run_stage(parts[index], run, args, kwargs)
            outlines.append(run.outline)
    return outlines


def run_all(
    plan: PipelinePlan,
    parts: Mapping[int, nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_of: Callable[[Any], torch.Tensor],
) -> torch.Tensor:
    """Return the loss, after forward and backward through all stages."""
    outlines = outline_all(plan, parts, args, kwargs)
    chain: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = []
    received: tuple[torch.Tensor, ...] = ()
    output: Any = None
    for index in range(len(plan.stages)):
        output = run_stage(parts[index], StageRun(plan, index, outlines, received, "cpu"), args, kwargs)
        if index + 1 < len(plan.stages):
            # The next stage doesn't know which of them have a gradient.
            received = tuple(one.detach().requires_grad_(one.is_floating_point()) for one in output)
            chain.append((output, received))
    loss = loss_of(output)
    if loss.requires_grad:
        loss.backward()
        for sent, got in reversed(chain):
            assert all(one.grad is not None for one in got if one.requires_grad)
            used = [index for index, one in enumerate(sent) if one.requires_grad]
            if used:
                torch.autograd.backward([sent[one] for one in used], [got[one].grad for one in used])
    return loss.detach()


def gradients(whole: nn.Module, parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the sum over ranks of each gradient, by the first name of its parameter."""
    first = {name: group[0] for group in read_facts(whole).ties for name in group}
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                name = first.get(name, name)
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


def squares(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output.square().sum()
    return squares(output["logits"] if "logits" in output else output["last_hidden_state"])


def check_equal(
    whole: nn.Module,
    plan: PipelinePlan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    ranks: Sequence[Sequence[int]] | None = None,
) -> list[nn.Module]:
    kwargs = kwargs or {}
    ranks = ranks or [[index] for index in range(len(plan.stages))]
    parts = cut(whole, plan, ranks)
    by_stage = {index: part for part, own in zip(parts, ranks, strict=True) for index in own}
    expected = squares(whole(*args, **kwargs))
    if expected.requires_grad:
        expected.backward()
    torch.testing.assert_close(run_all(plan, by_stage, args, kwargs, squares), expected.detach())
    found = gradients(whole, parts)
    for name, parameter in whole.named_parameters():
        if parameter.grad is None:
            assert name not in found
        else:
            torch.testing.assert_close(found[name], parameter.grad, msg=name, rtol=1e-5, atol=1e-6)
    return parts


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, list[str], list[list[int]]]:
    """Layers, stages, where they begin (or nothing), and which rank has which."""
    depth = draw(st.integers(1, 6))
    num_stages = draw(st.integers(1, depth))
    starts = draw(
        st.sets(st.integers(1, max(depth - 1, 1)), min_size=num_stages - 1, max_size=num_stages - 1)
    )
    split = [f"layers.{start}" for start in sorted(starts)] if draw(st.booleans()) else []
    owners = [draw(st.integers(0, 2)) for _ in range(num_stages)]
    ranks = [[stage for stage, owner in enumerate(owners) if owner == rank] for rank in range(3)]
    return depth, num_stages, split, [own for own in ranks if own]


@given(cut=cuts(), tied=st.booleans())
def test_any_cut_gives_what_the_whole_model_gives(
    cut: tuple[int, int, list[str], list[list[int]]], tied: bool
) -> None:
    depth, num_stages, split, ranks = cut
    whole = Net(depth, tied)
    plan = plan_stages(read_facts(whole), num_stages, split=split)
    parts = check_equal(whole, plan, (IDS,), {"factor": 0.5}, ranks)
    everything = dict(whole.named_parameters(remove_duplicate=False))
    for part, own in zip(parts, ranks, strict=True):
        held = dict(part.named_parameters(remove_duplicate=False))
        assert set(held) == {name for index in own for name in plan.stages[index].parameters}
        assert set(part.state_dict()) == set(held)
        assert all(everything[name].shape == one.shape for name, one in held.items())
        local, now = plan.local(read_facts(whole), own), read_facts(part)
        assert (local.shapes, local.ties, local.trainable) == (now.shapes, now.ties, now.trainable)
    for name in everything:
        assert plan.of(name) == tuple(
            index
            for index, stage in enumerate(plan.stages)
            if any(everything[one] is everything[name] for one in stage.parameters)
        )


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 16, **SIZES}
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(num_key_value_heads=2, **SIZES)),
    "llama tied": lambda: T.LlamaForCausalLM(T.LlamaConfig(tie_word_embeddings=True, **SIZES)),
    "gpt2": lambda: T.GPT2LMHeadModel(
        T.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    ),
    "bert": lambda: T.BertForMaskedLM(T.BertConfig(**SIZES)),
    "mixtral": lambda: T.MixtralForCausalLM(
        T.MixtralConfig(num_local_experts=4, num_key_value_heads=2, **SIZES)
    ),
    "gemma2": lambda: T.Gemma2ForCausalLM(T.Gemma2Config(num_key_value_heads=2, head_dim=8, **SIZES)),
    "bloom": lambda: T.BloomForCausalLM(T.BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=4)),
    "opt": lambda: T.OPTForCausalLM(T.OPTConfig(**OPT)),
}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_models_of_transformers_need_no_stages_of_the_users(name: str, num_stages: int) -> None:
    torch.manual_seed(0)
    whole = MAKERS[name]().eval()
    ids = torch.randint(0, 64, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    plan = plan_stages(read_facts(whole), num_stages)
    check_equal(whole, plan, (), {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("name", ["t5", "t5 of one embedding", "bart"])
def test_a_decoder_receives_what_its_encoder_gives_it(name: str, num_stages: int) -> None:
    torch.manual_seed(0)
    kind, config = ("Bart", BART) if name == "bart" else ("T5", T5)
    whole = getattr(T, f"{kind}ForConditionalGeneration")(getattr(T, f"{kind}Config")(**config))
    whole = whole.eval().double()
    if name == "t5 of one embedding":  # one module with three names
        whole.set_input_embeddings(whole.shared)
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    inputs = {"input_ids": IDS, "attention_mask": mask, "decoder_input_ids": torch.arange(14).reshape(2, 7)}
    check_equal(whole, plan_stages(read_facts(whole), num_stages), (), inputs)


def test_a_module_of_two_names_is_in_each_stage_that_calls_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.head = nn.ModuleDict({"embed": self.embed, "out": nn.Linear(WIDTH, 3)})

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x, _ = layer(x, torch.zeros(()))
            return self.head["out"](x + self.head["embed"](ids.flip(0)))

    whole = Twice()
    plan = plan_stages(read_facts(whole), 3)
    assert [stage.modules for stage in plan.stages] == [("embed",), (), ("embed", "head")]
    assert plan.shared == {"embed.weight": (0, 2)}
    parts = check_equal(whole, plan, (IDS,))
    for part, stage in zip(parts, plan.stages, strict=True):
        assert set(dict(part.named_parameters(remove_duplicate=False))) == set(stage.parameters)


def test_modules_are_in_the_order_of_their_calls() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.out = nn.Linear(WIDTH, 3)
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.embed = nn.Embedding(11, WIDTH)
            self.unseen = nn.Linear(1, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x, torch.zeros(()))[0]
            return self.out(self.norm(x))

    whole = Shuffled()
    plan = plan_stages(read_facts(whole), 2)
    assert [stage.modules for stage in plan.stages] == [("embed", "unseen"), ("norm", "out")]
    check_equal(whole, plan, (IDS,))
    assert plan_stages(read_facts(whole), 2, last=["embed"]).stages[0].modules == ("unseen",)


def test_a_vision_model_looks_at_the_dtype_of_a_weight_of_another_stage() -> None:
    config = {"image_size": 16, "patch_size": 4, **SIZES}
    del config["vocab_size"]
    whole = T.ViTForImageClassification(T.ViTConfig(**config)).eval()
    check_equal(whole, plan_stages(read_facts(whole), 2), (torch.randn(2, 3, 16, 16),))


def test_a_sequence_is_cut_between_any_of_its_items() -> None:
    whole = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    check_equal(whole, plan_stages(read_facts(whole), 4), (torch.randn(3, 4),))
    inner = nn.Sequential(nn.Flatten(), whole)
    plan = plan_stages(read_facts(nn.ModuleDict({"all": inner})), 2)
    assert [stage.blocks for stage in plan.stages] == [("all.0",), ("all.1",)]


def test_a_stage_begins_with_another_module_than_a_block() -> None:
    whole = Net(2)
    plan = plan_stages(read_facts(whole), 3, split=["layers.1", "head"])
    assert [stage.blocks for stage in plan.stages] == [("layers.0",), ("layers.1",), ("head",)]
    assert plan.stages[1].modules == ("norm",)
    check_equal(whole, plan, (IDS,))
    with pytest.raises(ConfigurationError, match=r"split names layers\.1\.linear, but it can name"):
        plan_stages(read_facts(whole), 2, split=["layers.1.linear"])


def test_gradients_or_none_and_frozen_parameters() -> None:
    whole = GPT()
    ids, _ = make_batch(0)
    plan = plan_stages(read_facts(whole), 2)
    with torch.no_grad():
        check_equal(whole, plan, (ids,))
    for parameter in (
        *whole.embed.parameters(),
        *whole.positions.parameters(),
        *whole.blocks[0].parameters(),
    ):
        parameter.requires_grad_(False)
    check_equal(whole, plan, (ids,))


def test_hooks_run_where_a_block_runs_and_see_what_was_received() -> None:
    whole = Net(4)
    plan = plan_stages(read_facts(whole), 4)
    parts = cut(whole, plan, [[0, 2], [1, 3]])
    called: Counter[str] = Counter()
    for rank, part in enumerate(parts):
        for name, module in modules_of(part).items():

            def hook(_: nn.Module, args: Any, *, name: str = f"{rank} {name}") -> None:
                assert all(type(one) is torch.Tensor for one in args)
                called[name] += 1

            if name.count(".") == 1 or name == "embed":
                module.register_forward_pre_hook(hook)
    run_all(plan, {0: parts[0], 1: parts[1], 2: parts[0], 3: parts[1]}, (IDS,), {}, squares)
    # Twice: outlined before.
    assert called == Counter(2 * ["0 embed", "0 layers.0", "1 layers.1", "0 layers.2", "1 layers.3"])
    assert not any("_compiled_call_impl" in vars(module) for part in parts for module in part.modules())


def test_blocks_are_compiled_and_the_model_is_wrapped_after_the_cut() -> None:
    whole = Net(2)
    plan = plan_stages(read_facts(whole), 2)
    parts = cut(whole, plan, [[0], [1]])
    for part in parts:
        for layer in modules_of(part)["layers"].children():
            layer.compile(backend="eager")

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any) -> Any:
            return tuple(one.double() for one in self.module(*args))

    first, second = (copy.deepcopy(Wrapper(part)) for part in parts)
    outlines = outline_all(plan, {0: first, 1: second}, (IDS,), {})
    (sent,) = run_stage(first, StageRun(plan, 0, outlines, (), "cpu"), (IDS,), {})
    assert sent.dtype == torch.float32  # what the next stage gets is the model's
    output = torch.stack(run_stage(second, StageRun(plan, 1, outlines, (sent,), "cpu"), (IDS,), {}))
    torch.testing.assert_close(output, whole(IDS).double())


# --- what can't be cut ---------------------------------------------------------------------------


class Changed(Net):
    """A net whose forward does something else, by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__(2)
        self.how = how
        if how == "unused":
            self.layers[1].register_forward_pre_hook(lambda module, args: (args[0], torch.zeros(())))
        if how == "object":
            self.layers[0].register_forward_hook(lambda module, args, output: (output[0], {"no tensor"}))

    def forward(self, ids: torch.Tensor, *, factor: float = 1.0) -> Any:
        x = self.embed(ids)
        first, second = self.layers
        bias = torch.zeros(())
        if self.how in ("condition", "unused"):
            bias = self.embed(ids.flip(0))
        if self.how == "weight":
            bias = self.embed.weight[0]
        if self.how == "value" and x.sum() > 0:
            bias = bias + 1
        if self.how == "write":
            buffer = torch.zeros(2, 5, WIDTH)
            buffer[:, :] = x
            bias = buffer
        if self.how == "object":
            return second(x, first(x, bias)[1])[0]
        if self.how == "reverse":
            return first(second(x, bias)[0], bias)[0]
        y = first(x, bias)[0]
        if self.how == "ends":
            return y
        z = second(torch.ones(2, 5, WIDTH) if self.how == "fresh" else y, bias)[0]
        if self.how == "twice":
            z = second(first(z, bias)[0], bias)[0]
        if self.how == "skip":
            return {"z": z, "x": [x]}
        if self.how == "late":
            return z + self.embed(ids)
        return self.norm(z + x) if self.how == "beside" else z


@pytest.mark.parametrize("how", ["condition", "weight", "unused"])
def test_what_a_later_block_gets_of_earlier_stages_is_sent(how: str) -> None:
    whole = Changed(how)
    check_equal(whole, plan_stages(read_facts(whole), 2), (IDS,))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "beside",
            r"norm is called on stage 1, and args\[0\] of its call depends on modules of other",
        ),
        (
            "object",
            r"layers\.1 is the first block of stage 1, and args\[1\] of its call comes from",
        ),
        ("value", r"__bool__\(\) was called on a tensor whose values are on another stage"),
        ("write", r"__setitem__\(\) wrote values"),
        ("reverse", r"layers\.0 is on stage 0, but the model calls it after the first block of"),
        ("ends", r"forward ended without a call of layers\.1, the first block of stage 1"),
        (
            "fresh",
            r"layers\.1 is the first block of stage 1, but nothing in its call comes from earlier blocks",
        ),
        (
            "twice",
            r"layers\.0 is on stage 0, but the model calls it after the first block of stage 1",
        ),
        ("skip", r"output\['x'\]\[0\] of the model depends on modules of other stages \(embed, "),
        ("late", r"embed is on stage 0, but the model calls it after the first block of stage 1"),
    ],
)
def test_what_depends_on_another_stage_is_refused_by_name(how: str, says: str) -> None:
    whole = Changed(how)
    plan = plan_stages(read_facts(whole), 2)
    parts = cut(whole, plan, [[0], [1]])
    with pytest.raises(ConfigurationError, match=says):
        run_all(plan, dict(enumerate(parts)), (IDS,), {}, squares)


def test_a_weight_of_a_later_stage_that_all_blocks_use_is_refused_by_name() -> None:
    config = T.DebertaV2Config(relative_attention=True, pos_att_type=["p2c", "c2p"], **SIZES)
    whole = T.DebertaV2ForMaskedLM(config).eval()
    plan = plan_stages(read_facts(whole), 2)
    parts = cut(whole, plan, [[0], [1]])
    with pytest.raises(ConfigurationError, match=r"kwargs\['rel_embeddings'\] of its call depends on"):
        outline_all(plan, dict(enumerate(parts)), (IDS,), {})


def test_what_all_blocks_have_together_is_refused() -> None:
    whole = MAKERS["llama"]()
    plan = plan_stages(read_facts(whole), 2)
    (part,) = cut(whole, plan, [[0]])
    for name in ("use_cache", "output_hidden_states", "output_attentions"):
        with pytest.raises(ConfigurationError, match=f"{name} collects from all blocks.* pass {name}=False"):
            run_stage(part, StageRun(plan, 0, [], (), "cpu"), (IDS,), {name: True})
    cast("Any", part).config.output_hidden_states = True
    with pytest.raises(ConfigurationError, match="output_hidden_states collects from all blocks"):
        run_stage(part, StageRun(plan, 0, [], (), "cpu"), (IDS,), {})


def test_a_stage_is_called_as_a_stage() -> None:
    whole = Net(2)
    plan = plan_stages(read_facts(whole), 2)
    first, second = cut(whole, plan, [[0], [1]])
    outlines = outline_all(plan, {0: first, 1: second}, (IDS,), {})
    with pytest.raises(
        ConfigurationError, match=r"Net is split into 2 pipeline stages.*accelfn\.forward_backward"
    ):
        first(IDS)
    shapes = r"args\[0\] in the call of layers\.1, .* is \(1, 5, 8\) of torch\.float32; .* \(2, 5, 8\) of"
    with pytest.raises(ConfigurationError, match=shapes):
        run_stage(first, StageRun(plan, 0, outlines, (), "cpu"), (IDS[:1],), {})
    (sent,) = run_stage(first, StageRun(plan, 0, outlines, (), "cpu"), (IDS,), {})
    more = outlines[1]._replace(receives=("args[0]", "args[1]"))
    with pytest.raises(ConfigurationError, match=r"would receive args\[0\] of the call of layers\.1"):
        run_stage(second, StageRun(plan, 1, [outlines[0], more], (sent, sent), "cpu"), (IDS,), {})
    with pytest.raises(
        ConfigurationError, match=r"item\(\) was called on a tensor whose values are on another stage"
    ):
        cast("Any", first).head(torch.zeros(1, WIDTH)).sum().item()


def test_an_error_leaves_the_model_as_it_was() -> None:
    whole = Net(2)
    other = plan_stages(read_facts(Net(4)), 2)
    before = dict(whole.named_parameters())
    with pytest.raises(ConfigurationError, match=r"Net has no layers\.2, layers\.3"):
        apply_stages(whole, other, [0])
    with pytest.raises(ConfigurationError, match=r"own must be some of the stages 0 to 1, got \[2\]"):
        apply_stages(whole, other, [2])
    assert dict(whole.named_parameters()) == before
    assert whole(IDS).shape == (2, 5, 11)


# --- plans ---------------------------------------------------------------------------------------


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=7), data=st.data())
def test_costs_are_spread_so_that_the_largest_stage_is_minimal(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    facts = read_facts(nn.Sequential(*(nn.Linear(1, 1) for _ in costs)))
    by_name = {str(index): float(cost) for index, cost in enumerate(costs)}
    plan = plan_stages(facts, num_stages, costs=by_name)
    assert [name for stage in plan.stages for name in stage.blocks] == list(by_name)
    assert all(stage.blocks for stage in plan.stages)

    def largest(starts: Sequence[int]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *starts, len(costs))))

    every = itertools.combinations(range(1, len(costs)), num_stages - 1)
    found = max(sum(by_name[name] for name in stage.blocks) for stage in plan.stages)
    assert found == min(map(largest, every))


def test_costs_of_modules_at_the_ends_count() -> None:
    facts = read_facts(Net(4))
    costs = {"embed": 2.0, **{f"layers.{index}": 1.0 for index in range(4)}}
    assert [len(stage.blocks) for stage in plan_stages(facts, 2, costs=costs).stages] == [1, 3]
    assert [len(stage.blocks) for stage in plan_stages(facts, 3).stages] == [2, 1, 1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_stages": 4}, r"Net has 3 blocks, but 4 stages need at least one each: layers\.0, layers\.1"),
        ({"num_stages": 0}, "num_stages must be at least 1, got 0"),
        ({"num_stages": 3, "split": ["layers.1"]}, r"3 stages need 2 different ones, got layers\.1"),
        ({"num_stages": 3, "split": ["layers.2", "layers.1"]}, "in the model's order"),
        ({"num_stages": 2, "split": ["layers.0"]}, r"split names layers\.0, but it can name layers\.1, "),
        ({"num_stages": 2, "last": ["nowhere"]}, "last names nowhere, but it can name embed, norm, head"),
        ({"num_stages": 2, "costs": {"layers.7": 1.0}}, r"costs names layers\.7"),
    ],
)
def test_plans_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        plan_stages(read_facts(Net(3)), **options)


def test_of_many_blocks_some_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r": layers\.0, layers\.1, \.\.\., layers\.29 \(30\)\. Use"):
        plan_stages(read_facts(Net(30)), 31)


def test_a_plan_prints_as_a_table() -> None:
    plan = plan_stages(read_facts(Net(3)), 2)
    assert str(plan).splitlines() == [
        "stage  blocks                     other modules  parameters  size",
        "0      layers.0 ... layers.1 (2)  embed          272         1.1 kB",
        "1      layers.2                   norm, head     216         864 B",
        "positions is held by stages 0 and 1",
        "embed.weight is held by stages 0 and 1",
    ]
    assert plan.shared == {"positions": (0, 1), "embed.weight": (0, 1)}
    with pytest.raises(KeyError):
        plan.of("nowhere")
