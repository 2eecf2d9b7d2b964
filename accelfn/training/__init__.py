"""Prepare, compute in mixed precision, accumulate, clip, step."""

from accelfn.training.clip import clip_grad_norm_, clip_grad_value_
from accelfn.training.grad import value_and_grad
from accelfn.training.join import join_uneven_inputs
from accelfn.training.module_step import TrainState
from accelfn.training.precision import MixedPrecisionForward, autocast
from accelfn.training.prepare import (
    prepare,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
    unwrap_model,
)
from accelfn.training.pure_step import PureOptimizer, PureTrainState
from accelfn.training.scaler import (
    ScalerState,
    init_scaler,
    rescale_gradients,
    step_was_skipped,
    unscale_gradients,
    update_scaler,
)
from accelfn.training.step import accumulate, backward, no_sync, optimizer_step, scheduler_step
from accelfn.training.train_step import init_train_state, make_train_step
from accelfn.training.window import Loss, StepMetrics

__all__ = (
    "Loss",
    "MixedPrecisionForward",
    "PureOptimizer",
    "PureTrainState",
    "ScalerState",
    "StepMetrics",
    "TrainState",
    "accumulate",
    "autocast",
    "backward",
    "clip_grad_norm_",
    "clip_grad_value_",
    "init_scaler",
    "init_train_state",
    "join_uneven_inputs",
    "make_train_step",
    "no_sync",
    "optimizer_step",
    "prepare",
    "prepare_model",
    "prepare_optimizer",
    "prepare_scheduler",
    "rescale_gradients",
    "scheduler_step",
    "step_was_skipped",
    "unscale_gradients",
    "unwrap_model",
    "update_scaler",
    "value_and_grad",
)
