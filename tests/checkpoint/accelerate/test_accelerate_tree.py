import itertools
import random
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.checkpoint import AccelerateState, from_accelerate, to_accelerate
from accelfn.errors import CheckpointError, CheckpointMismatchError
from accelfn.training import ScalerState


def text(value: Any) -> str:
    """Print a value with every bit of its tensors."""
    kind = cast("Any", type(value))
    if issubclass(kind, torch.Tensor):
        return f"{value.dtype} {value.tolist()}"
    if issubclass(kind, dict):
        return str([(key, text(part)) for key, part in value.items()])
    if issubclass(kind, list | tuple):
        return f"{kind.__name__}{[text(part) for part in value]}"
    return f"{kind.__name__} {value!r}"


class Net(nn.Module):
    """Has a buffer between weights, a tied weight, a frozen one, and weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.first.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.norm(self.first(x))))


def trained(model: nn.Module, groups: Any, kind: Any = torch.optim.Adam) -> torch.optim.Optimizer:
    """Give an optimizer with a state for each parameter that is trained."""
    optimizer = kind(groups, lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return optimizer


def stored(*models: nn.Module) -> tuple[dict[str, torch.Tensor], ...]:
    """Give state dicts as safetensors has them: by name, and tied weights once."""
    return tuple(
        {name: value for name, value in sorted(model.state_dict().items()) if name != "head.weight"}
        for model in models
    )


def check(tree: dict[str, Any], optimizer: torch.optim.Optimizer, **models: nn.Module) -> None:
    """Check the tree's state of an optimizer against its own, by parameter."""
    names = {
        id(parameter): f"{model}/{name}" if len(models) > 1 else name
        for model, module in models.items()
        for name, parameter in module.named_parameters()
    }
    own = {names[id(parameter)]: state for parameter, state in optimizer.state.items()}
    assert set(tree["state"]) == set(own)
    assert all(text(tree["state"][name]) == text(own[name]) for name in own)
    for group, own_group in zip(tree["groups"], optimizer.param_groups, strict=True):
        assert group["params"] == [names[id(parameter)] for parameter in own_group["params"]]
        assert {key: group[key] for key in group if key != "params"} == {
            key: own_group[key] for key in own_group if key not in ("params", "param_names")
        }


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_an_optimizer_tells_its_order_whatever_it_is(seed: int, num_groups: int) -> None:
    model = Net()
    parameters = list(model.parameters())
    random.Random(seed).shuffle(parameters)
    groups = [
        {"params": parameters[number::num_groups], "weight_decay": number / 8} for number in range(num_groups)
    ]
    optimizer = trained(model, groups)
    state = AccelerateState(models=stored(model), optimizers=(optimizer.state_dict(),))
    tree = from_accelerate(state, like={"model": model, "optimizer": optimizer})
    check(tree["optimizer"], optimizer, model=model)
    assert text(to_accelerate(tree).optimizers[0]["state"]) == text(state.optimizers[0]["state"])
    assert to_accelerate(tree).optimizers[0]["param_groups"] == [
        {**{key: value for key, value in group.items() if key != "params"}, "params": group["params"]}
        for group in state.optimizers[0]["param_groups"]
    ]


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD]
)
@pytest.mark.parametrize("frozen", [True, False], ids=["all parameters", "those that train"])
def test_a_module_tells_the_order_of_one_group(kind: Any, frozen: bool) -> None:
    model = Net()
    optimizer = trained(model, [p for p in model.parameters() if frozen or p.requires_grad], kind)
    state = AccelerateState(models=stored(model), optimizers=(optimizer.state_dict(),))
    check(from_accelerate(state, like={"model": model})["optimizer"], optimizer, model=model)
    compiler: Any = torch
    prepared = compiler.compile(model, backend="eager")
    check(from_accelerate(state, like={"model": prepared})["optimizer"], optimizer, model=model)
    names = [name for name, p in model.named_parameters() if frozen or p.requires_grad]
    check(from_accelerate(state, like={"model": names})["optimizer"], optimizer, model=model)
    check(from_accelerate(state, like={"optimizer": names})["optimizer"], optimizer, model=model)


def test_names_in_the_file_are_taken() -> None:
    model = Net()
    optimizer = trained(model, list(reversed(list(model.named_parameters()))))
    state = AccelerateState(models=stored(model), optimizers=(optimizer.state_dict(),))
    check(from_accelerate(state)["optimizer"], optimizer, model=model)


def test_shapes_that_fit_one_weight_only_are_enough() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 2))
    optimizer = trained(model, reversed(list(model.parameters())))
    state = AccelerateState(models=stored(model), optimizers=(optimizer.state_dict(),))
    check(from_accelerate(state)["optimizer"], optimizer, model=model)


def test_several_models_and_optimizers() -> None:
    first, second = Net(), nn.Linear(3, 2)
    one = trained(first, first.parameters())
    two = trained(second, second.parameters(), torch.optim.Adagrad)
    state = AccelerateState(models=stored(first, second), optimizers=(two.state_dict(), one.state_dict()))
    names = {"model": "net", "model_1": "critic", "optimizer": "of critic", "optimizer_1": "of net"}
    tree = from_accelerate(state, names=names, like={"net": first, "critic": second})
    assert list(tree) == ["net", "critic", "of critic", "of net"]
    check(tree["of critic"], two, net=first, critic=second)
    check(tree["of net"], one, net=first, critic=second)
    assert text(to_accelerate(tree, names=names).models) == text(state.models)

    both: Any = torch.optim.SGD(
        [{"params": first.parameters()}, {"params": second.parameters()}], momentum=0.9, lr=0.1
    )
    flat: Any = torch.optim.SGD([*first.parameters(), *second.parameters()], momentum=0.9, lr=0.1)
    second(first(torch.randn(4, 3))[:, :3]).sum().backward()
    both.step()
    flat.step()
    for optimizer in (both, flat):
        joint = AccelerateState(models=stored(first, second), optimizers=(optimizer.state_dict(),))
        tree = from_accelerate(joint, like={"model": first, "model_1": second})
        check(tree["optimizer"], optimizer, model=first, model_1=second)
        with pytest.raises(CheckpointError, match=r"it isn't certain .*'model_1': module"):
            from_accelerate(joint)


def test_what_is_not_certain_is_refused() -> None:
    model, twin = Net(), Net()
    optimizer = trained(model, model.parameters())
    state = AccelerateState(models=stored(model), optimizers=(optimizer.state_dict(),))
    with pytest.raises(CheckpointError, match=r"Pass like=\{'model': module\} with the modules"):
        from_accelerate(state)
    halves = [{"params": list(model.parameters())[::2]}, {"params": list(model.parameters())[1::2]}]
    grouped = AccelerateState(models=stored(model), optimizers=(trained(model, halves).state_dict(),))
    with pytest.raises(CheckpointError, match=r"in 2 groups .*'optimizer': optimizer\}"):
        from_accelerate(grouped, like={"model": model})
    with pytest.raises(
        CheckpointError, match=r"groups of \[4, 3\] parameters, and like\['optimizer'\] has \[7\]"
    ):
        from_accelerate(grouped, like={"model": model, "optimizer": optimizer})
    alike = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    turned = trained(alike, [{"params": [alike[1].weight]}, {"params": [alike[0].weight]}])
    with pytest.raises(CheckpointError, match="in 2 groups"):  # which no shape would have told
        from_accelerate(
            AccelerateState(models=stored(alike), optimizers=(turned.state_dict(),)), like={"model": alike}
        )
    half = trained(alike, [alike[1].weight])
    with pytest.raises(CheckpointError, match="1 parameters in 1 groups"):
        from_accelerate(AccelerateState(models=stored(alike), optimizers=(half.state_dict(),)))
    twins = AccelerateState(models=stored(model, twin), optimizers=(optimizer.state_dict(),))
    with pytest.raises(CheckpointError, match="it isn't certain which"):
        from_accelerate(twins, like={"model": model, "model_1": twin})


def test_shapes_check_what_is_given() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer = trained(model, model.parameters())
    state = AccelerateState(models=stored(model), optimizers=(optimizer.state_dict(),))
    with pytest.raises(CheckpointMismatchError, match="shapes of their parameters") as caught:
        from_accelerate(state, like={"optimizer": ["0.bias", "0.weight", "1.weight", "1.bias"]})
    assert [row.path for row in caught.value.rows] == ["optimizer.0.bias", "optimizer.0.weight"]
    with pytest.raises(
        CheckpointError, match=r"groups of \[4\] parameters, and like\['optimizer'\] has \[1\]"
    ):
        from_accelerate(state, like={"optimizer": ["0.bias"]})
    with pytest.raises(CheckpointError, match="4 parameters, but 1 different names"):
        from_accelerate(state, like={"optimizer": ["0.bias"] * 4})
    with pytest.raises(ValueError, match=r"parameters of no module in like"):
        from_accelerate(state, like={"optimizer": optimizer})
    with pytest.raises(ValueError, match=r"is a module, but optimizer is an optimizer"):
        from_accelerate(state, like={"optimizer": model})
    with pytest.raises(ValueError, match=r"is an optimizer, but model is a model"):
        from_accelerate(state, like={"model": optimizer})
    with pytest.raises(ValueError, match=r"like has 'net', but .* are model, optimizer\."):
        from_accelerate(state, like={"net": model})


def test_an_optimizer_that_contradicts_itself_is_refused() -> None:
    groups = [{"params": [0], "lr": 0.1}]
    stray = AccelerateState(optimizers=({"state": {5: {}}, "param_groups": groups},))
    with pytest.raises(CheckpointError, match="state for 5"):
        from_accelerate(stray, like={"optimizer": ["a"]})
    twice = AccelerateState(optimizers=({"state": {}, "param_groups": groups * 2},))
    with pytest.raises(CheckpointError, match="a parameter twice"):
        from_accelerate(twice, like={"optimizer": ["a", "b"]})


def optimizers(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Give an optimizer's tree over some of the names, in any order and any groups."""

    def make(order: list[str], cuts: list[int], held: int) -> dict[str, Any]:
        places = sorted({0, len(order), *(cut for cut in cuts if cut < len(order))})
        groups = [{"params": order[a:b], "lr": a / 8} for a, b in itertools.pairwise(places)]
        return {
            "state": {name: {"step": torch.tensor(float(held))} for name in order[:held]},
            "groups": groups,
        }

    return st.builds(make, st.permutations(names), st.lists(st.integers(1, 4), max_size=2), st.integers(0, 4))


def randoms() -> st.SearchStrategy[dict[str, Any] | None]:
    state = st.fixed_dictionaries(
        {
            "python": st.just((3, (1, 2), None)),
            "torch": st.binary(min_size=1).map(lambda b: torch.tensor(list(b))),
        },
        optional={
            "numpy": st.just(("MT19937", torch.tensor([1, 2], dtype=torch.uint32), 0, 0, 0.0)),
            "cuda": st.just([torch.arange(3)]),
            "xpu": st.just([torch.arange(2)]),
            "xm_seed": st.just(3),
        },
    )
    return st.none() | state


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    num_models = draw(st.integers(0, 3))
    tree: dict[str, Any] = {}
    names = ["model", "model_1", "model_2"][:num_models]
    for name in names:
        tree[name] = {weight: torch.randn(2) for weight in "abcd"}
    prefixes = [f"{name}/" for name in names] if num_models > 1 else [""]
    for name in ["optimizer", "optimizer_1"][: draw(st.integers(0, 2))]:
        tree[name] = draw(optimizers([draw(st.sampled_from(prefixes)) + weight for weight in "abcd"]))
    for name in ("scheduler", "scheduler_1", "sampler", "loader", "custom_0", "custom_1"):
        before = {"scheduler_1": "scheduler", "custom_1": "custom_0"}.get(name)
        if draw(st.booleans()) and (before is None or before in tree):
            tree[name] = {"last_epoch": draw(st.integers())}
    if draw(st.booleans()):
        scale = torch.tensor(draw(st.floats(1, 2**16, width=32)))
        tracker = torch.tensor(draw(st.integers(0, 2000)), dtype=torch.int32)
        tree["scaler"] = ScalerState(scale, tracker, torch.tensor(0.0), torch.tensor(0))
    ranks = draw(st.lists(randoms(), max_size=3))
    if ranks:
        tree["random"] = ranks
        if any(one is not None for one in ranks) and draw(st.booleans()):
            tree["step"] = draw(st.integers(0, 10**6))
    return tree


@given(trees())
def test_there_and_back_is_the_same(tree: dict[str, Any]) -> None:
    like = {
        name: [parameter for group in value["groups"] for parameter in group["params"]]
        for name, value in tree.items()
        if name.startswith("optimizer")
    }
    state = to_accelerate(tree)
    again = from_accelerate(state, like=like)
    assert {name: text(value) for name, value in again.items()} == {
        name: text(value) for name, value in tree.items()
    }
    assert text(to_accelerate(again)) == text(state)


def test_names_of_torch_compile_are_taken_out() -> None:
    state = AccelerateState(models=({"_orig_mod.a.weight": torch.ones(1), "_orig_mod.b": torch.ones(1)},))
    assert list(from_accelerate(state)["model"]) == ["a.weight", "b"]


def test_a_scaler_goes_both_ways() -> None:
    state = {
        "scale": 512.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 5,
    }
    tree = from_accelerate(AccelerateState(scaler=state))
    scaler = tree["scaler"]
    assert [scaler.scale.item(), scaler.growth_tracker.item(), scaler.num_skipped.item()] == [512.0, 5, 0]
    first = af.init_scaler(af.Context())
    assert [part.dtype for part in scaler[:4]] == [part.dtype for part in first[:4]]
    options = af.GradScalerKwargs(growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    assert to_accelerate(tree, scaler=options).scaler == state
    with pytest.raises(ValueError, match="wait for a step"):
        to_accelerate({"scaler": scaler._replace(unscaled=(1,))})
    assert from_accelerate(AccelerateState(scaler={})) == {}


def test_names_must_fit() -> None:
    state = AccelerateState(models=({}, {}))
    with pytest.raises(ValueError, match="names has 'model_2', but the folder holds model, model_1"):
        from_accelerate(state, names={"model_2": "a"})
    with pytest.raises(ValueError, match="two parts would be called 'model_1'"):
        from_accelerate(state, names={"model": "model_1"})
    with pytest.raises(ValueError, match="two parts would be called 'scaler'"):
        from_accelerate(state, names={"model": "scaler"})
    with pytest.raises(ValueError, match="no place for 'ema', 'model_2'"):
        to_accelerate({"model": {}, "ema": {}, "model_2": {}})
    with pytest.raises(ValueError, match="two parts of the tree the same place"):
        to_accelerate({"model": {}, "net": {}}, names={"model": "net"})
    with pytest.raises(ValueError, match="add random"):
        to_accelerate({"step": 3})
    with pytest.raises(ValueError, match="the parameter a stands in an optimizer's groups twice"):
        to_accelerate({"optimizer": {"state": {}, "groups": [{"params": ["a", "a"]}]}})
    with pytest.raises(ValueError, match="a state for b, which is in none"):
        to_accelerate({"optimizer": {"state": {"b": {}}, "groups": [{"params": ["a"]}]}})
