"""Prepare, compute in mixed precision, accumulate, clip, step."""

from accelfn.parallel.compile import CompiledForward, compile_, is_compiled, plan_regions, without_compile
from accelfn.training.backward import (
    accumulate,
    backward,
    forward_backward,
    no_sync,
    trigger_sync_in_backward,
)
from accelfn.training.clip import clip_grad_norm_, clip_grad_value_
from accelfn.training.device_map import check_devices, verify_device_map
from accelfn.training.forward import forward
from accelfn.training.grad import value_and_grad
from accelfn.training.join import join_uneven_inputs
from accelfn.training.local_sgd import LocalSGDState, average_parameters, local_sgd_step
from accelfn.training.lomo import is_lomo, lomo_backward
from accelfn.training.loss import Loss
from accelfn.training.memory import (
    BatchTooLarge,
    clear_device_cache,
    find_executable_batch_size,
    is_out_of_memory,
    release_memory,
)
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
from accelfn.training.step import optimizer_step, scheduler_step
from accelfn.training.train_step import init_train_state, make_train_step
from accelfn.training.window import StepMetrics

__all__ = (
    "BatchTooLarge",
    "CompiledForward",
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
    "check_devices",
    "clear_device_cache",
    "clip_grad_norm_",
    "clip_grad_value_",
    "compile_",
    "find_executable_batch_size",
    "forward",
    "forward_backward",
    "init_scaler",
    "init_train_state",
    "is_compiled",
    "is_lomo",
    "is_out_of_memory",
    "join_uneven_inputs",
    "local_sgd_step",
    "lomo_backward",
    "make_train_step",
    "no_sync",
    "optimizer_step",
    "plan_regions",
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
    "without_compile",
)
