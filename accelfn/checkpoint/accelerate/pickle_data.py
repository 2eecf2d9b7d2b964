"""Read a pickle as data: nothing that it names is imported or called.

A pickle is a program that may call any function of the machine. Here only its containers, numbers and texts
are carried out. A function or class that it names stands for what the reader has put in its own table, and
everything else is refused by name. torch's restricted loading does much the same; but what it lets through is
one list for the whole process, which other threads and packages change, it knows no pickle of a protocol
above 2, and it needs NumPy for NumPy's arrays.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ("Built", "Maker", "RefusedPickleError", "read_pickle")


class RefusedPickleError(Exception):
    """The pickle asks for something that isn't data, or that the reader doesn't know."""


class Maker(NamedTuple):
    """What a name in a pickle stands for: how a value is made from arguments.

    Attributes:
        make: Gives the value.
        finish: Takes what ``make`` gave, and the state that the pickle has for it, and gives the value. None
            where such a state isn't looked at.
    """

    make: Callable[..., Any]
    finish: Callable[[Any, Any], Any] | None = None


class Built:
    """A value that still waits for its state."""

    __slots__ = ("finish", "places", "value")

    def __init__(self, value: Any, finish: Callable[[Any, Any], Any]) -> None:
        """Keep the value, and who finishes it."""
        self.value: Any = value
        self.finish: Callable[[Any, Any], Any] = finish
        self.places: list[int] = []  # in the memo, which has to know the finished value


class _Mark:
    """Stands on the stack where a container's parts begin, and for what isn't there. Never made."""


_LITERALS = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
        *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "SHORT_BINSTRING"),
        "BINSTRING",
    )
)
# Names that Python 2 had for modules; pickles of protocol 2 use them.
_OLD_MODULES = (("__builtin__", "builtins"), ("copy_reg", "copyreg"))


def read_pickle(
    data: bytes,
    names: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what a pickle holds.

    Args:
        data: The pickle, to its end.
        names: What ``module.name`` stands for: a :class:`Maker`, or a plain value.
        persistent: Gives what a reference to outside of the pickle stands for.

    Raises:
        RefusedPickleError: It names something that isn't in ``names``, or is made as no data is.
        ValueError: It isn't a whole pickle, or contradicts itself.
    """
    machine = _Machine(names, persistent)
    try:
        for code, argument, _ in pickletools.genops(data):
            machine.step(code.name, argument)
    except (LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        # What a reader's functions say of arguments that no writer gives, and a stack that has run empty.
        raise ValueError(f"its pickle contradicts itself ({error})") from error
    if len(machine.stack) != 1 or machine.stack[0] is _Mark:
        raise ValueError("its pickle contradicts itself (it leaves more than one value)")
    return _whole(machine.stack[0])


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None) -> None:
        self.names = names
        self.persistent = persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, code: str, argument: Any) -> None:
        """Carry out one instruction."""
        stack = self.stack
        if code in _LITERALS:
            stack.append(argument)
        elif code in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._remember(len(self.memo) if code == "MEMOIZE" else argument)
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif code == "MARK":
            stack.append(_Mark)
        elif code in ("NONE", "NEWTRUE", "NEWFALSE"):
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[code])
        elif code in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"):
            kinds = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
            stack.append(kinds[code]())
        elif code in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(self._pop(int(code[-1]))))
        elif code == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif code == "FROZENSET":
            stack.append(frozenset(self._pop_to_mark()))
        elif code in ("APPEND", "APPENDS"):
            self._append(self._pop(1) if code == "APPEND" else self._pop_to_mark())
        elif code in ("SETITEM", "SETITEMS"):
            self._set_items(self._pop(2) if code == "SETITEM" else self._pop_to_mark())
        elif code == "ADDITEMS":
            items = self._pop_to_mark()
            _of_type(stack[-1], set).update(items)
        elif code in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(self._named(*(argument.split(" ", 1) if code == "GLOBAL" else self._pop(2))))
        elif code in ("REDUCE", "NEWOBJ"):
            self._make(*self._pop(2))
        elif code == "BUILD":
            self._finish(*self._pop(1))
        elif code == "BINPERSID":
            if self.persistent is None:
                raise RefusedPickleError("a reference to outside of the file")
            stack.append(self.persistent(*self._pop(1)))
        elif code not in ("PROTO", "FRAME", "STOP"):
            raise RefusedPickleError(f"the pickle instruction {code}")

    def _pop(self, count: int) -> list[Any]:
        popped = self.stack[-count:]
        if len(popped) < count or any(value is _Mark for value in popped):
            raise ValueError("its pickle contradicts itself (its stack has run empty)")
        del self.stack[-count:]
        return [_whole(value) for value in popped]

    def _pop_to_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _Mark:  # an IndexError below the bottom, which read_pickle expects
            place -= 1
            if place < 0:
                raise ValueError("its pickle contradicts itself (its stack has run empty)")
        popped = self.stack[place + 1 :]
        del self.stack[place:]
        return [_whole(value) for value in popped]

    def _remember(self, place: int) -> None:
        value = self.stack[-1]
        self.memo[place] = value
        if isinstance(value, Built):
            value.places.append(place)

    def _append(self, items: list[Any]) -> None:
        _of_type(self.stack[-1], list).extend(items)

    def _set_items(self, items: list[Any]) -> None:
        held = _of_type(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):  # a Counter's update would add
            held[key] = value

    def _named(self, module: Any, name: Any) -> Any:
        module = dict(_OLD_MODULES).get(module, module)
        found = self.names.get(f"{module}.{name}", _Mark)
        if found is _Mark:
            raise RefusedPickleError(f"{module}.{name}")
        return found

    def _make(self, maker: Any, arguments: Any) -> None:
        if not isinstance(maker, Maker):
            raise RefusedPickleError(f"a call of {type(maker).__name__}")
        value = maker.make(*arguments)
        self.stack.append(value if maker.finish is None else Built(value, maker.finish))

    def _finish(self, state: Any) -> None:
        built = self.stack.pop()
        if not isinstance(built, Built):
            if isinstance(built, dict):
                self.stack.append(built)  # the attributes of an OrderedDict, such as torch's _metadata
                return
            raise RefusedPickleError(f"a state for {type(built).__name__}")
        value = built.finish(built.value, state)
        for place in built.places:
            self.memo[place] = value
        self.stack.append(value)


def _whole(value: Any) -> Any:
    """Return a value that needs no state after all, or got it already."""
    return value.value if isinstance(value, Built) else value


def _of_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(
            f"its pickle contradicts itself ({type(value).__name__} where {kind.__name__} must be)"
        )
    return value
