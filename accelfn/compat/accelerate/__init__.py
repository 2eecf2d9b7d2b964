"""accelfn under the names of Hugging Face Accelerate."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

import accelfn.compat.alias as _alias
from accelfn.compat.constants import (
    DistributedType as DistributedType,
)
from accelfn.compat.accelerator import (
    Accelerator as Accelerator,
)
from accelfn.compat.states import (
    PartialState as PartialState,
)
from accelfn.compat.records import (
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DeepSpeedPlugin as DeepSpeedPlugin,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    ParallelismConfig as ParallelismConfig,
    ProfileKwargs as ProfileKwargs,
)
from accelfn.context.config import (
    DDPCommunicationHookType as DDPCommunicationHookType,
)
from accelfn.bigmodel import (
    cpu_offload as cpu_offload,
    cpu_offload_with_hook as cpu_offload_with_hook,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
    infer_auto_device_map as infer_auto_device_map,
    init_empty_weights as init_empty_weights,
    init_on_device as init_on_device,
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    load_checkpoint_in_model as load_checkpoint_in_model,
    prepare_pippy as prepare_pippy,
)
from accelfn.training import (
    find_executable_batch_size as find_executable_batch_size,
)
from accelfn.data import (
    skip_first_batches as skip_first_batches,
)
from accelfn.compat.operations import (
    synchronize_rng_states as synchronize_rng_states,
)
from accelfn.compat.launchers import (
    debug_launcher as debug_launcher,
    notebook_launcher as notebook_launcher,
)
from accelfn.compat.available import (
    is_rich_available as is_rich_available,
)
from accelfn.compat.accelerate import (
    accelerator as accelerator,
    big_modeling as big_modeling,
    checkpointing as checkpointing,
    data_loader as data_loader,
    hooks as hooks,
    inference as inference,
    launchers as launchers,
    local_sgd as local_sgd,
    logging as logging,
    optimizer as optimizer,
    parallelism_config as parallelism_config,
    scheduler as scheduler,
    state as state,
    tracking as tracking,
    utils as utils,
)
from accelfn.compat.missing import refuse as _refuse

__version__ = _alias.VERSION


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
