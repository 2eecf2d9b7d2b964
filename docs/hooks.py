"""What mkdocs does to the pages beyond its plugins."""

import re
from typing import Any

__all__ = ("on_page_content",)

# Docstrings name things as Sphinx does, :func:`accelfn.gather`; mkdocstrings would show the role.
_ROLE = re.compile(r":(?:py:)?(?:attr|class|data|func|meth|mod):<code>~?([^<]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Show ``:func:`accelfn.gather``` as plain code.

    >>> on_page_content("see :func:<code>accelfn.gather</code>")
    'see <code>accelfn.gather</code>'
    """
    return _ROLE.sub(r"<code>\1</code>", html)
