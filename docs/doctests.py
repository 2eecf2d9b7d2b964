"""Show the examples of docstrings as code: Markdown takes their prompts for quotations."""

import re

from griffe import Class, Extension, Function, Module, Object

_EXAMPLE = re.compile(r"(?m)^(?P<indent> *)>>> .*(?:\n(?! *$).*)*")


class Doctests(Extension):
    """Puts each example of a docstring into a code block."""

    def on_module(self, *, mod: Module, **kwargs: object) -> None:
        """Change the docstring of a module."""
        _fence(mod)

    def on_class(self, *, cls: Class, **kwargs: object) -> None:
        """Change the docstring of a class."""
        _fence(cls)

    def on_function(self, *, func: Function, **kwargs: object) -> None:
        """Change the docstring of a function."""
        _fence(func)


def _fence(item: Object) -> None:
    if item.docstring is not None:
        item.docstring.value = _EXAMPLE.sub(r"\g<indent>```pycon\n\g<0>\n\g<indent>```", item.docstring.value)
