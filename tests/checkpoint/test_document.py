"""Laws of trees as documents: what goes out comes back, to the last bit, and nothing else does any harm."""

import json
from typing import Any

import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

from accelfn.checkpoint.document import Encoded, decode, encode
from accelfn.checkpoint.stored_dtype import as_stored, from_stored
from tests.checkpoint.trees import NAMESPACE, same, trees


def written(encoded: Encoded) -> tuple[Any, dict[str, torch.Tensor]]:
    """Bring a document through JSON and its tensors into fresh memory, as files would."""
    document = json.loads(json.dumps(encoded.document, allow_nan=False))
    stored = {name: as_stored(tensor).clone() for name, tensor in encoded.tensors.items()}
    file = safetensors.torch.load(safetensors.torch.save(stored))
    return document, {name: from_stored(file[name], encoded.tensors[name].dtype) for name in stored}


def through(tree: Any, **options: Any) -> Any:
    return decode(*written(encode(tree, namespace=NAMESPACE)), namespace=NAMESPACE, **options)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(trees())
def test_what_goes_out_comes_back(tree: Any) -> None:
    assert same(tree, through(tree))
