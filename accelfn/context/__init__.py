"""Who this process is and how it was configured: records, environment, ``init_context``."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from accelfn.context.call_log import (
    BackwardPass as BackwardPass,
    CallLog as CallLog,
    Entry as Entry,
    Unsettled as Unsettled,
    call_site as call_site,
)
from accelfn.context.collectives import (
    Collectives as Collectives,
    Part as Part,
    ReduceOp as ReduceOp,
    StartedAllGather as StartedAllGather,
    chunk_bytes as chunk_bytes,
)
from accelfn.config import Config as Config, Precision as Precision, Strategy as Strategy
from accelfn.context.context import (
    Context as Context,
    close_context as close_context,
    configure as configure,
    takes_context as takes_context,
    with_mesh as with_mesh,
)
from accelfn.context.device import (
    DeviceFacts as DeviceFacts,
    DevicePlan as DevicePlan,
    Hardware as Hardware,
    check_fp8 as check_fp8,
    check_precision as check_precision,
    plan_device as plan_device,
    read_hardware as read_hardware,
)
from accelfn.context.device_modules import (
    device_module as device_module,
    device_random_state as device_random_state,
    empty_device_cache as empty_device_cache,
    seed_torch as seed_torch,
    set_device_random_state as set_device_random_state,
    wait_for_device as wait_for_device,
)
from accelfn.context.environment import (
    EnvironmentPlan as EnvironmentPlan,
    detect_environment as detect_environment,
)
from accelfn.context.failure import (
    MessageBoard as MessageBoard,
    announce_end as announce_end,
    news as news,
    note_failure as note_failure,
    publish as publish,
    store_board as store_board,
    text_of as text_of,
)
from accelfn.context.init import (
    Meeting as Meeting,
    init_context as init_context,
    join_meeting as join_meeting,
)
from accelfn.context.mesh import (
    AXES as AXES,
    JOINED as JOINED,
    Mesh as Mesh,
    MeshPlan as MeshPlan,
    build_mesh as build_mesh,
    plan_mesh as plan_mesh,
)
from accelfn.context.options import ContextOptions as ContextOptions
from accelfn.context.peer_monitor import (
    PeerMonitor as PeerMonitor,
    late_error as late_error,
)
from accelfn.context.planned import plan_context as plan_context
from accelfn.context.process_group import (
    close_gloo_connections as close_gloo_connections,
    process_group_collectives as process_group_collectives,
)
from accelfn.context.threads import (
    MakeError as MakeError,
    Poll as Poll,
    Threads as Threads,
    wait_for as wait_for,
)
from accelfn.context.world import (
    Background as Background,
    Owned as Owned,
    World as World,
    WorldIdentity as WorldIdentity,
)
from accelfn.context.xla import end_step as end_step
