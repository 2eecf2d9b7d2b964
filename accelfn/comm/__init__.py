"""Pytrees across ranks, process control, random state."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from accelfn.comm.agreement import (
    Call as Call,
    agree as agree,
    catch as catch,
    check as check,
    check_later as check_later,
    count_call as count_call,
    verify_structure as verify_structure,
)
from accelfn.comm.objects import (
    broadcast_bytes as broadcast_bytes,
    broadcast_object_list as broadcast_object_list,
    gather_bytes as gather_bytes,
    gather_object as gather_object,
)
from accelfn.comm.process_control import (
    TriggerState as TriggerState,
    check_trigger as check_trigger,
    failing_together as failing_together,
    local_main_process_first as local_main_process_first,
    main_process_first as main_process_first,
    on_last_process as on_last_process,
    on_local_main_process as on_local_main_process,
    on_local_process as on_local_process,
    on_main_process as on_main_process,
    on_process as on_process,
    print_once as print_once,
    set_trigger as set_trigger,
    wait_for_everyone as wait_for_everyone,
)
from accelfn.comm.random_state import set_seed as set_seed, synchronize_rng_states as synchronize_rng_states
from accelfn.comm.replicas import check_replicas as check_replicas
from accelfn.comm.rows import (
    pad_across_processes as pad_across_processes,
    scatter as scatter,
    split_between_processes as split_between_processes,
    split_sizes as split_sizes,
)
from accelfn.comm.pieces import sharded as sharded
from accelfn.comm.shards import (
    all_gather as all_gather,
    all_to_all as all_to_all,
    permute as permute,
    pmean as pmean,
    psum as psum,
    reduce_scatter as reduce_scatter,
    shard as shard,
    unshard as unshard,
)
from accelfn.comm.tensors import broadcast as broadcast, gather as gather, reduce as reduce
