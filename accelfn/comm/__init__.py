"""Pytrees across ranks, process control, random state."""

from accelfn.comm.agreement import Call, agree, catch, check, check_later, verify_structure
from accelfn.comm.objects import broadcast_bytes, broadcast_object_list, gather_bytes, gather_object
from accelfn.comm.process_control import (
    failing_together,
    local_main_process_first,
    main_process_first,
    on_last_process,
    on_local_main_process,
    on_local_process,
    on_main_process,
    on_process,
    print_once,
    wait_for_everyone,
)
from accelfn.comm.random_state import set_seed, synchronize_rng_states
from accelfn.comm.replicas import check_replicas
from accelfn.comm.rows import pad_across_processes, scatter
from accelfn.comm.shards import all_gather, all_to_all, permute, reduce_scatter, shard, unshard
from accelfn.comm.split import split_between_processes, split_sizes
from accelfn.comm.tensors import broadcast, gather, reduce
from accelfn.comm.triggers import TriggerState, check_trigger, set_trigger

__all__ = (
    "Call",
    "TriggerState",
    "agree",
    "all_gather",
    "all_to_all",
    "broadcast",
    "broadcast_bytes",
    "broadcast_object_list",
    "catch",
    "check",
    "check_later",
    "check_replicas",
    "check_trigger",
    "failing_together",
    "gather",
    "gather_bytes",
    "gather_object",
    "local_main_process_first",
    "main_process_first",
    "on_last_process",
    "on_local_main_process",
    "on_local_process",
    "on_main_process",
    "on_process",
    "pad_across_processes",
    "permute",
    "print_once",
    "reduce",
    "reduce_scatter",
    "scatter",
    "set_seed",
    "set_trigger",
    "shard",
    "split_between_processes",
    "split_sizes",
    "synchronize_rng_states",
    "unshard",
    "verify_structure",
    "wait_for_everyone",
)
