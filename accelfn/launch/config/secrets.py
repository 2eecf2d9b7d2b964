"""Redact passwords, tokens and keys, recognized by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Replaces a secret.
HIDDEN = "***"

# A name that contains one of these is secret.
_ALWAYS = ("secret", "password", "passwd", "passphrase", "credential")
# A token is secret unless it is a text token; a key is secret only if it grants access.
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
# A name, then a separator and a value: HF_TOKEN=abc, --api-key "a b", password: abc
_NAME = re.compile(r"""(?P<dash>--?)?["']?\b(?P<name>[A-Za-z_][\w.-]*)["']?""")
_VALUE = re.compile(r"""(?P<middle>\s*[=:]\s*|(?<=\w)\s+(?=\S))(?:"[^"]*"|'[^']*'|[^\s,;&|"']+)""")
# User and password in a URL, and a bearer token.
_ADDRESS = re.compile(r"(?P<start>\w+://)[^/\s@]+(?P<end>@)")
_BEARER = re.compile(r"(?P<start>\bBearer\s+)[^\s\"']+(?P<end>)", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether the value of a name is a secret.

    Secrets, passwords, passphrases and credentials are; so are ``..._token`` except text tokens
    (``pad_token``), and ``..._key`` or ``..._key_id`` that grant access (``api_key``, ``access_key_id``, not
    ``text_key`` or ``num_key_value_heads``).

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
    """Redact the values of secret names in a text such as a shell command. Pure.

    >>> hide_in_text("export HF_TOKEN=hf_abc; train --api-key 'a b' --lr 1")
    'export HF_TOKEN=***; train --api-key *** --lr 1'
    >>> hide_in_text("pip install git+https://ann:abc@host/repo")
    'pip install git+https://***@host/repo'
    """
    shown, end = "", 0
    for match in _NAME.finditer(text):
        value = _VALUE.match(text, match.end()) if match.start() >= end and is_secret(match["name"]) else None
        # Without = or :, the next word is a value only after a flag.
        if value is not None and (value["middle"].strip() or match["dash"]):
            shown += f"{text[end : match.end()]}{value['middle']}{HIDDEN}"
            end = value.end()
    shown += text[end:]
    for pattern in (_ADDRESS, _BEARER):
        shown = pattern.sub(rf"\g<start>{HIDDEN}\g<end>", shown)
    return shown


def hide_in_words(words: Sequence[str]) -> tuple[str, ...]:
    """Redact secrets in the arguments of a command. Pure.

    >>> hide_in_words(("train.py", "--token", "a b", "--password=x y", "--lr", "1"))
    ('train.py', '--token', '***', '--password=***', '--lr', '1')
    """
    shown: list[str] = []
    before = ""
    for word in words:
        name, equals, _ = word.partition("=")
        if before.startswith("-") and "=" not in before and is_secret(before) and not word.startswith("-"):
            shown.append(HIDDEN)
        elif equals and re.fullmatch(r"[\w.-]+", name) and is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(hide_in_text(word))
        before = word
    return tuple(shown)
