"""A tree as a document of JSON and the tensors that it names, and back. No pickle, no code, no import.

What JSON has stands for itself: None, bool, int, finite float, str, list, and dict with keys that are all
texts, none of which begins with ``"$"``. Everything else is an object with its kind under ``"$"``:

- ``tensor``, ``sparse``, ``array`` and ``raw`` (of numpy), ``generator`` (of torch): the name, dtype and
  shape of a stored tensor, see ``leaves``, ``arrays``. ``again`` is the same object as one before.
- ``tuple``, ``deque``, ``dict`` with other keys, ``ordereddict``, ``defaultdict``, ``namedtuple``,
  ``structseq``, and ``node`` for what is registered with optree: their children stand inside.
- ``object``: what was asked for its state, a model or an optimizer, with that state inside.
- ``set``, ``frozenset`` and values without structure, see ``plain``.

Tensors are named by their path, a JSON pointer without its first slash (``model/0.weight``). Tensors that
share memory are stored once and share it again when they come back, see ``sharing``. A tensor comes back with
the strides that its ``clone()`` has, and where it shares memory with the strides that it had; marks of
conjugation and negation are resolved first. Containers that stand at two places come back as two.

Classes of namedtuples, enums and nodes are stored by name, and are looked up where the program already has
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from accelfn.checkpoint.document.decoder import Decoder, Restore
from accelfn.checkpoint.document.encoder import Convert, Encoder
from accelfn.checkpoint.files.manifest import Json

__all__ = ("Encoded", "decode", "encode")


class Encoded(NamedTuple):
    """Result of :func:`encode`.

    Attributes:
        document: Of JSON.
        tensors: What it names. They are in the caller's memory, of any strides, and ask for no gradient.
    """

    document: Json
    tensors: dict[str, torch.Tensor]


def encode(tree: Any, *, convert: Convert | None = None, namespace: str = "") -> Encoded:
    """Take a tree apart into a document and tensors. Pure: nothing is copied but what numpy can't lend.

    Args:
        tree: Of tensors, numpy arrays, plain values and objects with ``state_dict`` and ``load_state_dict``,
            in any containers that Python or optree have.
        convert: Called as ``convert(path, value)`` with every value that is no tensor, array, plain value or
            container of Python, before anything else is tried. What it returns is stored as the state of the
            object; ``NotImplemented``: go on without it.
        namespace: In which classes are registered with optree, besides the global one.

    Raises:
        TypeError: Something can't be stored: of an unknown class, code, a tensor without data, a container
            that contains itself. All such values are listed by path.

    >>> encode({"step": 3, "w": torch.zeros(2)}).document
    {'step': 3, 'w': {'$': 'tensor', 'name': 'w', 'dtype': 'float32', 'shape': [2]}}
    """
    encoder = Encoder(convert, namespace)
    return Encoded(encoder.document(tree), encoder.tensors)


def decode(
    document: Json,
    tensors: Mapping[str, torch.Tensor],
    *,
    like: Any = None,
    namespace: str = "",
    restore: Restore | None = None,
) -> Any:
    """Build the tree again.

    Args:
        document: As :func:`encode` gave it, also after it went through JSON.
        tensors: What it names. Their memory becomes that of the tree.
        like: A tree to load into. Where the document has the state of an object, and an object stands there
            in ``like``, the object takes it up; elsewhere ``like`` only lends its classes. Without it, states
            come back as plain trees. What of ``like`` fits is not checked here, see ``fit``.
        namespace: In which classes are registered with optree, besides the global one.
        restore: Called as ``restore(path, object, state)`` for objects in ``like``, after the whole document
            was read; what it returns stands in the tree. Without it: ``object.load_state_dict(state)``, and
            the object. The states of objects within an object's state come as plain trees.

    Raises:
        DamagedCheckpointError: The document is malformed, or tensors aren't what it says. No object was
            changed.
        CheckpointMismatchError: An object in ``like`` has no ``load_state_dict``, and there is no
            ``restore``.
        CheckpointError: A class isn't imported or registered.
        MissingExtraError: There are numpy arrays and no numpy.

    >>> document, tensors = encode({"step": 3, "w": torch.zeros(2)})
    >>> decode(document, tensors)
    {'step': 3, 'w': tensor([0., 0.])}
    """
    return Decoder(tensors, namespace, restore).tree(document, like)
