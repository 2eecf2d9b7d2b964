"""Pytrees on one rank: take apart, map, pack, slice, join, move."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from accelfn.tree.digest import digest_tensors as digest_tensors, split_flat as split_flat
from accelfn.tree.local import (
    concatenate as concatenate,
    convert_to_fp32 as convert_to_fp32,
    count_rows as count_rows,
    find_batch_size as find_batch_size,
    find_device as find_device,
    listify as listify,
    map_tensors as map_tensors,
    pad_input_tensors as pad_input_tensors,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from accelfn.tree.maps import (
    global_norm as global_norm,
    leaves_with_paths as leaves_with_paths,
    map as map,  # noqa: A004 -- the field's word, used as tree.map
    pieces as pieces,
    where as where,
)
from accelfn.tree.packing import (
    Buffer as Buffer,
    PackSpec as PackSpec,
    Packed as Packed,
    flatten_group as flatten_group,
    flatten_tensor as flatten_tensor,
    pack as pack,
    plan_layout as plan_layout,
    require_tensors as require_tensors,
    unpack as unpack,
)
from accelfn.tree.sharded import Sharded as Sharded
from accelfn.tree.structure import (
    TensorInformation as TensorInformation,
    TreeSpec as TreeSpec,
    flatten as flatten,
    from_local as from_local,
    initialize_tensors as initialize_tensors,
    is_dtensor as is_dtensor,
    is_packed_sequence as is_packed_sequence,
    leaf_paths as leaf_paths,
    local_of as local_of,
    tree_structure as tree_structure,
)
