"""Prepare, compute in mixed precision, accumulate, clip, step."""

from accelfn.training.backward import (
    Loss,
    accumulate,
    backward,
    forward,
    forward_backward,
    is_lomo,
    lomo_backward,
    no_sync,
    trigger_sync_in_backward,
)
from accelfn.training.join import join_uneven_inputs
from accelfn.training.memory import (
    clear_device_cache,
    find_executable_batch_size,
    is_out_of_memory,
    release_memory,
)
from accelfn.training.prepare import (
    MixedPrecisionForward,
    autocast,
    prepare,
    prepare_model,
    prepare_optimizer,
    prepare_scheduler,
    unwrap_model,
    verify_device_map,
)
from accelfn.training.pure_step import PureOptimizer, PureTrainState, value_and_grad
from accelfn.training.scaler import (
    ScalerState,
    init_scaler,
    rescale_gradients,
    step_was_skipped,
    unscale_gradients,
    update_scaler,
)
from accelfn.training.step import (
    LocalSGDState,
    average_parameters,
    clip_grad_norm_,
    clip_grad_value_,
    local_sgd_step,
    optimizer_step,
    scheduler_step,
)
from accelfn.training.train_step import TrainState, init_train_state, make_train_step
from accelfn.training.window import StepMetrics

__all__ = (
    "LocalSGDState",
    "Loss",
    "MixedPrecisionForward",
    "PureOptimizer",
    "PureTrainState",
    "ScalerState",
    "StepMetrics",
    "TrainState",
    "accumulate",
    "autocast",
    "average_parameters",
    "backward",
    "clear_device_cache",
    "clip_grad_norm_",
    "clip_grad_value_",
    "find_executable_batch_size",
    "forward",
    "forward_backward",
    "init_scaler",
    "init_train_state",
    "is_lomo",
    "is_out_of_memory",
    "join_uneven_inputs",
    "local_sgd_step",
    "lomo_backward",
    "make_train_step",
    "no_sync",
    "optimizer_step",
    "prepare",
    "prepare_model",
    "prepare_optimizer",
    "prepare_scheduler",
    "release_memory",
    "rescale_gradients",
    "scheduler_step",
    "step_was_skipped",
    "trigger_sync_in_backward",
    "unscale_gradients",
    "unwrap_model",
    "update_scaler",
    "value_and_grad",
    "verify_device_map",
)
