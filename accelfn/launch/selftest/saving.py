"""Check of checkpoints: what was saved comes back, and training goes on as if nothing had been."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from accelfn.checkpoint import load_state, save_state, verify_checkpoint
from accelfn.comm import broadcast_object_list, on_main_process
from accelfn.launch.selftest.learning import make_parts, width_for
from accelfn.launch.selftest.trial import Trial, demand
from accelfn.training import prepare, unwrap_model

__all__ = ("check_checkpoint",)


def check_checkpoint(trial: Trial) -> str:
    """A model, its optimizer and the random states are saved, changed, and loaded."""
    ctx = trial.ctx
    # Several machines share the working directory rather than the system's own for such files.
    within = trial.folder or (None if ctx.world.num_nodes == 1 else ".")

    def make() -> str:
        return tempfile.mkdtemp(prefix="accelfn-test-", dir=within)

    folder = Path(broadcast_object_list(ctx, [make() if ctx.is_main_process else ""])[0])
    try:
        model, optimizer, _ = prepare(ctx, *make_parts(ctx, 4, 8, width_for(ctx)))
        model(torch.ones(2, 6, device=ctx.device)).sum().backward()
        optimizer.step()
        tree: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 1}
        before = {name: tensor.clone() for name, tensor in unwrap_model(model).state_dict().items()}
        save_state(ctx, folder / "checkpoint", tree)
        drawn = torch.rand(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        back = load_state(ctx, folder / "checkpoint", {**tree, "step": 0})
        after = unwrap_model(model).state_dict()
        other = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
        demand(not other, f"{', '.join(other)} came back with other bits")
        demand(back["step"] == 1, f"the number that was saved as 1 came back as {back['step']}")
        demand(torch.equal(drawn, torch.rand(3)), "the random states did not come back")

        def count() -> int:
            return verify_checkpoint(folder / "checkpoint").num_bytes

        num_bytes = on_main_process(ctx, share=True)(count)()
        return f"{num_bytes} bytes"
    finally:
        if ctx.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
