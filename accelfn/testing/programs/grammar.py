"""Training programs as values: the features that may vary, and the rules that a combination must keep."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from accelfn.testing.programs.draft import Draft

# A feature's name and value; a set of them is what a program is named, covered and shrunk by.
Choice = tuple[str, Any]
Write = Callable[["Program", Draft], None]


def _nothing() -> Mapping[Any, Any]:
    return MappingProxyType({})


def _every_row_alone(program: Program) -> bool:
    """Return False."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that may vary in a program. Made by :func:`feature`.

    Attributes:
        name: Its name.
        values: Its values, the plainest first.
        write: Called as ``write(program, draft)`` for every program, whatever the value: adds the lines.
        is_axis: The values are sizes of a mesh axis.
        is_layout: It is a part of the layout, as axes are.
        is_size: The values are numbers, of which a larger one shows whatever a smaller one does.
        is_neutral: By its meaning it changes no number, so that the reference is computed at the plainest.
        same: Values whose numbers are those of another value, which the reference has instead.
        counts_as: Name of the feature whose values these are too; empty for its own name.
    """

    name: str
    values: tuple[Any, ...]
    write: Write
    is_axis: bool = False
    is_layout: bool = False
    is_size: bool = False
    is_neutral: bool = False
    same: Mapping[Any, Any] = field(default_factory=_nothing)
    counts_as: str = ""

    def __post_init__(self) -> None:
        """Check that there is something to vary.

        Raises:
            ValueError: There is no value, or one twice.
        """
        if not self.values or len({*map(repr, self.values)}) < len(self.values):
            raise ValueError(
                f"Feature {self.name}: values must be different, and at least one: {self.values}."
            )
        object.__setattr__(self, "is_layout", self.is_layout or self.is_axis)
        object.__setattr__(self, "same", MappingProxyType(dict(self.same)))


def feature(name: str, values: Sequence[Any], **options: Any) -> Callable[[Write], Feature]:
    """Make a :class:`Feature` of the function that writes its lines.

    Args:
        name: Its name.
        values: Its values, the plainest first.
        **options: The other attributes.

    >>> @feature("clip", (False, True))
    ... def clip(program, draft):
    ...     if program["clip"]:
    ...         draft.add("close", "clip()")
    >>> clip.name, clip.values
    ('clip', (False, True))
    """

    def make(write: Write) -> Feature:
        return Feature(name=name, values=tuple(values), write=write, **options)

    return make


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination of features that nobody could mean, or that has no answer on one process.

    What accelfn refuses isn't a rule: a refusal is a verdict.

    Attributes:
        name: What can't be, as a sentence.
        breaks: Whether a program does it. See :func:`together` for the usual kind.
        mend: Names and values of features, as :func:`together` takes them, of which one keeps the rule: it is
            drawn where the rule would be broken. Empty: the program isn't drawn.
    """

    name: str
    breaks: Callable[[Program], bool]
    mend: str = ""


def together(every: str, some: str = "") -> Callable[[Program], bool]:
    """Return whether a program has all of some features together with at least one of others.

    Args:
        every: Names of features that aren't at their plainest, with blanks between them; or ``name=a|b`` for
            values, ``!name`` for the plainest.
        some: Likewise; empty where ``every`` is enough.

    >>> rule = Rule("a list has no workers", together("source=list", "workers drop_last"))
    """
    needed = [_Term(word) for word in every.split()]
    others = [_Term(word) for word in some.split()]

    def breaks(program: Program) -> bool:
        return all(term.holds(program) for term in needed) and (
            not others or any(term.holds(program) for term in others)
        )

    return breaks


class _Term:
    """``name``, ``!name`` or ``name=a|b``."""

    def __init__(self, word: str) -> None:
        name, _, values = word.partition("=")
        self._name = name.lstrip("!")
        self._is_plain = name.startswith("!")
        self._values = values.split("|") if values else None

    def holds(self, program: Program) -> bool:
        value = program[self._name]
        if self._values is not None:
            return str(value) in self._values
        return (value == program.grammar.plainest[self._name]) == self._is_plain


@dataclass(frozen=True, kw_only=True, eq=False)
class Grammar:
    """All training programs of some features.

    Attributes:
        skeleton: The text with its slots; see :class:`accelfn.testing.programs.Draft`. It defines
            ``train(ctx, log)``.
        features: What may vary. Those of the layout come first, which a program is named by.
        rules: What no program does.
        scope: Names that the text uses, besides those of ``imports``.
        imports: Statements before it.
        is_imported: Whether a script imports the functions of the scope, where it can, instead of having
            their source.
        sees_other_rows: Whether the model's output for a row depends on the other rows of its rank, as with
            BatchNorm: the reference then computes the rows of each rank on their own.
    """

    skeleton: str
    features: tuple[Feature, ...]
    rules: tuple[Rule, ...] = ()
    scope: Mapping[str, Any] = field(default_factory=dict[str, Any])
    imports: str = ""
    is_imported: bool = False
    sees_other_rows: Callable[[Program], bool] = _every_row_alone

    @cached_property
    def by_name(self) -> Mapping[str, Feature]:
        """The features, by name."""
        return {one.name: one for one in self.features}

    @cached_property
    def plainest(self) -> Mapping[str, Any]:
        """The plainest value of each feature."""
        return {one.name: one.values[0] for one in self.features}

    def program(self, text: str = "", /, **values: Any) -> Program:
        """Return a program by the features that aren't at their plainest.

        Args:
            text: Features as a program prints them, such as ``"dp=2 accumulation=2"``.
            **values: Features by name.

        Raises:
            ValueError: There is no such feature or value, or the program breaks a rule.
        """
        named = [self._read(word) for word in text.split()] + [*values.items()]
        twice = [name for name, number in Counter(name for name, _ in named).items() if number > 1]
        if twice:
            raise ValueError(
                f"the feature {twice[0]} is named twice: {text!r}. A program has one value of it."
            )
        program = self.any_program(dict(named))
        broken = self.broken_rule(program)
        if broken is not None:
            raise ValueError(f"the program {str(program)!r} can't be: {broken.name}.")
        return program

    def any_program(self, values: Mapping[str, Any]) -> Program:
        """Return a program, which may break rules.

        Raises:
            ValueError: There is no such feature or value.
        """
        for name, value in values.items():
            if name not in self.by_name:
                raise ValueError(f"there is no feature {name!r}. Choose among {', '.join(self.by_name)}.")
            if not any(value == one and type(value) is type(one) for one in self.by_name[name].values):
                choices = ", ".join(map(repr, self.by_name[name].values))
                raise ValueError(f"the feature {name} can't be {value!r}. Choose among {choices}.")
        return Program(
            self,
            tuple(
                (name, values[name])
                for name, plainest in self.plainest.items()
                if values.get(name, plainest) != plainest
            ),
        )

    def _read(self, word: str) -> Choice:
        name, equals, text = word.partition("=")
        wanted = text if equals else "True"
        values = self.by_name[name].values if name in self.by_name else ()
        return name, next((value for value in values if str(value) == wanted), wanted)

    def broken_rule(self, program: Program) -> Rule | None:
        """Return the first rule that a program breaks; None if it breaks none."""
        return next((rule for rule in self.rules if rule.breaks(program)), None)


@dataclass(frozen=True)
class Program:
    """A training program: what differs from the plainest one of its grammar.

    ``program["dp"]`` is the value of a feature; ``str(program)`` names it, and :meth:`Grammar.program` reads
    that back.

    Attributes:
        grammar: The grammar.
        choices: Features that aren't at their plainest, in the grammar's order.
    """

    grammar: Grammar = field(compare=False, repr=False)
    choices: tuple[Choice, ...]

    def __getitem__(self, name: str) -> Any:
        """Return the value of a feature."""
        return self._values[name]

    @cached_property
    def _values(self) -> Mapping[str, Any]:
        return {**self.grammar.plainest, **dict(self.choices)}

    def __str__(self) -> str:
        """Return the features that aren't at their plainest."""
        return " ".join(name if value is True else f"{name}={value}" for name, value in self.choices)

    def but(self, **values: Any) -> Program:
        """Return the same program with other values of some features; it may break rules."""
        return self.grammar.any_program({**dict(self.choices), **values})

    @property
    def layout(self) -> Program:
        """The plainest program of its layout."""
        by_name = self.grammar.by_name
        return Program(self.grammar, tuple(one for one in self.choices if by_name[one[0]].is_layout))

    @property
    def num_ranks(self) -> int:
        """Number of ranks of its world."""
        return math.prod(self[one.name] for one in self.grammar.features if one.is_axis)

    def covered(self) -> frozenset[Choice]:
        """Return the features that aren't at their plainest, by the names that they count as."""
        known = self.grammar.by_name
        return frozenset((known[name].counts_as or name, value) for name, value in self.choices)

    def has(self, choices: Iterable[Choice]) -> bool:
        """Return whether it has all of some features, or larger sizes."""
        own = self.covered()

        def is_larger(name: str, value: Any) -> bool:
            known = self.grammar.by_name[name]
            return (known.is_axis or known.is_size) and self[name] >= value

        return all(one in own or is_larger(*one) for one in choices)

    def pairs(self) -> Iterator[frozenset[Choice]]:
        """Yield each pair of its features."""
        return map(frozenset, itertools.combinations(self.covered(), 2))

    def reference(self) -> Program:
        """Return the same training on one process, without what by its meaning changes no number.

        Ranks that read different data stay in it as ``dp``: they determine the batches.
        """
        values = dict(self.choices)
        for one in self.grammar.features:
            if one.is_neutral:
                values.pop(one.name, None)
            elif one.name in values:
                values[one.name] = one.same.get(values[one.name], values[one.name])
        return self.grammar.any_program({**values, "dp": self["dp"] * self["shard"], "shard": 1})

    def draft(self) -> Draft:
        """Return its text in parts, and the arguments of its world and of its context."""
        made = Draft()
        for one in self.grammar.features:
            one.write(self, made)
        return made

    def source(self) -> str:
        """Return its text, which defines ``train(ctx, log)``."""
        return self.draft().text(self.grammar.skeleton)
