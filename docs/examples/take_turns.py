"""Three models take turns on a device that has room for one; a hook of one's own watches them.

    python docs/examples/take_turns.py

Without an accelerator the device is a simulated one, ``"cpu:0"``.
"""

from typing import Any

import torch
from torch import nn

import accelfn as af
from accelfn.bigmodel import CpuOffload, ModelHook, UserCpuOffloadHook, add_hook_to_module


class Watch(ModelHook):
    """Writes down which model runs, and what the models hold on the device meanwhile."""

    def __init__(self, name: str, chain: list[tuple[str, CpuOffload]]) -> None:
        self.name = name
        self.chain = chain

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        there = [name for name, hook in self.chain if hook.is_loaded]
        print(f"{self.name} runs on {tuple(args[0].shape)}; on the device: {', '.join(there)}")
        return args, kwargs

    def after_error(self, module: nn.Module) -> None:
        print(f"{self.name} failed")


def build() -> dict[str, nn.Module]:
    af.set_seed(0)
    return {
        "encoder": nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64)),
        "denoiser": nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
        "decoder": nn.Linear(64, 3),
    }


def run(models: dict[str, nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    hidden = models["encoder"](tokens)
    for _ in range(2):
        hidden = models["denoiser"](hidden)  # comes once
    return models["decoder"](hidden)


def main() -> None:
    device = "cpu:0" if not torch.accelerator.is_available() else torch.accelerator.current_device_index()
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = run(build(), tokens)

        models = build()
        chain: list[tuple[str, CpuOffload]] = []
        hook: UserCpuOffloadHook | None = None
        for name, model in models.items():
            _, hook = af.bigmodel.cpu_offload_with_hook(model, device, prev_module_hook=hook)
            chain.append((name, hook.hook))
            add_hook_to_module(model, Watch(name, chain), append=True)  # inside of the one that is there
        found = run(models, tokens)
        assert hook is not None
        hook.offload()
    print(f"on the device at the end: {[name for name, one in chain if one.is_loaded]}")
    # Another device may round otherwise.
    difference = (found.cpu() - expected).abs().max().item()
    print("the outputs are equal" if difference == 0 else f"the outputs differ by {difference:.1e}")
    if difference > 1e-4:
        raise RuntimeError("the outputs differ from those of the models in memory")


if __name__ == "__main__":
    main()
