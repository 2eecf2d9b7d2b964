"""What must not be shown: passwords, tokens and keys, by the names that they have."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ("HIDDEN", "hide_in_text", "hide_in_words", "is_secret")

#: Stands for what is not shown.
HIDDEN = "***"

# A token and a key are secret, but not tokens that are counted, and no tokenizer.
_WORDS = r"(?:secret|password|passwd|credential|(?:token|key)(?![a-z]))"
_SECRET = re.compile(_WORDS, re.IGNORECASE)
# A name, what parts it from its value, and the value: HF_TOKEN=abc, --api-key "a b", password: abc
_PAIR = re.compile(
    rf"""(?P<name>(?:--?)?["']?\b[\w.-]*{_WORDS}[\w.-]*["']?)
         (?P<middle>\s*[=:]\s*|(?<=\w)\s+(?=\S))
         (?P<value>"[^"]*"|'[^']*'|[^\s,;&|"']+)""",
    re.IGNORECASE | re.VERBOSE,
)
# A name and a password in an address, and what a server is shown.
_ADDRESS = re.compile(r"(?P<start>\w+://)[^/\s@]+(?P<end>@)")
_BEARER = re.compile(r"(?P<start>\bBearer\s+)[^\s\"']+(?P<end>)", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether what has this name is better not shown.

    >>> is_secret("aws_secret_access_key"), is_secret("HF_TOKEN"), is_secret("max_tokens")
    (True, True, False)
    """
    return _SECRET.search(name) is not None


def hide_in_text(text: str) -> str:
    """Hide the values of names that look secret, in a text such as a shell command. Pure.

    >>> hide_in_text("export HF_TOKEN=hf_abc; train --api-key 'a b' --lr 1")
    'export HF_TOKEN=***; train --api-key *** --lr 1'
    >>> hide_in_text("pip install git+https://ann:abc@host/repo")
    'pip install git+https://***@host/repo'
    """

    def hidden(found: re.Match[str]) -> str:
        # Without a sign between them, only a flag has what follows for its value.
        if not found["middle"].strip() and not found["name"].startswith("-"):
            return found[0]
        return f"{found['name']}{found['middle']}{HIDDEN}"

    told = _PAIR.sub(hidden, text)
    for pattern in (_ADDRESS, _BEARER):
        told = pattern.sub(rf"\g<start>{HIDDEN}\g<end>", told)
    return told


def hide_in_words(words: Sequence[str]) -> tuple[str, ...]:
    """Hide them in a command's words, each of which stands for itself. Pure.

    >>> hide_in_words(("train.py", "--token", "a b", "--password=x y", "--lr", "1"))
    ('train.py', '--token', '***', '--password=***', '--lr', '1')
    """
    found: list[str] = []
    before = ""
    for word in words:
        name, equals, _ = word.partition("=")
        if before.startswith("-") and "=" not in before and is_secret(before) and not word.startswith("-"):
            found.append(HIDDEN)
        elif equals and re.fullmatch(r"[\w.-]+", name) and is_secret(name):
            found.append(f"{name}={HIDDEN}")
        else:
            found.append(hide_in_text(word))
        before = word
    return tuple(found)
