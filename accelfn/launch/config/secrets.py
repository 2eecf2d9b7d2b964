"""What must not be shown: passwords, tokens and keys, by the names that they have."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Stands for what is not shown.
HIDDEN = "***"

# Whatever has one of these in its name.
_ALWAYS = ("secret", "password", "passwd", "passphrase", "credential")
# A token is secret unless it is one of a text; a key is only where it opens something: data has keys too.
_OF_TEXT = frozenset(
    (
        *("pad", "eos", "bos", "unk", "cls", "sep", "mask", "image", "video", "audio", "special"),
        *("start", "end", "stop", "first", "last", "next", "new", "max", "min", "num", "per"),
    )
)
_OPENING = frozenset(
    (
        *("api", "access", "private", "auth", "encryption", "signing", "ssh"),
        *("account", "service", "license", "wandb"),
    )
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# A name, and what parts it from its value, and the value: HF_TOKEN=abc, --api-key "a b", password: abc
_NAME = re.compile(r"""(?P<dash>--?)?["']?\b(?P<name>[A-Za-z_][\w.-]*)["']?""")
_VALUE = re.compile(r"""(?P<middle>\s*[=:]\s*|(?<=\w)\s+(?=\S))(?:"[^"]*"|'[^']*'|[^\s,;&|"']+)""")
# A name and a password in an address, and what a server is shown.
_ADDRESS = re.compile(r"(?P<start>\w+://)[^/\s@]+(?P<end>@)")
_BEARER = re.compile(r"(?P<start>\bBearer\s+)[^\s\"']+(?P<end>)", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether what has this name is better not shown.

    That is: a secret, password, passphrase or credential of any kind; ``..._token``, but not a token of a
    text (``pad_token``); ``..._key`` and ``..._key_id`` of what is opened (``api_key``, ``access_key_id``),
    but not any key (``text_key``, ``num_key_value_heads``).

    >>> is_secret("aws_secret_access_key"), is_secret("HF_TOKEN"), is_secret("--wandbApiKey")
    (True, True, True)
    >>> is_secret("max_tokens"), is_secret("pad_token_id"), is_secret("text_key")
    (False, False, False)
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if any(mark in word for word in words for mark in _ALWAYS):
        return True
    if words[-2:-1] and words[-2].endswith("key") and words[-1] == "id":
        words.pop()
    last, before = (words[-1:] or [""])[0], (words[-2:-1] or [""])[0]
    if last.endswith("token"):
        return (last.removesuffix("token") or before) not in _OF_TEXT
    return last.endswith("key") and (last.removesuffix("key") or before) in _OPENING


def hide_in_text(text: str) -> str:
    """Hide the values of names that look secret, in a text such as a shell command. Pure.

    >>> hide_in_text("export HF_TOKEN=hf_abc; train --api-key 'a b' --lr 1")
    'export HF_TOKEN=***; train --api-key *** --lr 1'
    >>> hide_in_text("pip install git+https://ann:abc@host/repo")
    'pip install git+https://***@host/repo'
    """
    shown, end = "", 0
    for found in _NAME.finditer(text):
        value = _VALUE.match(text, found.end()) if found.start() >= end and is_secret(found["name"]) else None
        # Without a sign between them, only a flag has what follows for its value.
        if value is not None and (value["middle"].strip() or found["dash"]):
            shown += f"{text[end : found.end()]}{value['middle']}{HIDDEN}"
            end = value.end()
    shown += text[end:]
    for pattern in (_ADDRESS, _BEARER):
        shown = pattern.sub(rf"\g<start>{HIDDEN}\g<end>", shown)
    return shown


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
