"""Masks secrets and personal data in exported text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from crow.domain.rendering import SecretMask
from crow.domain.secret_values import TOKENS

Redactor: TypeAlias = Callable[[str], str]
"""Masks the parts of a text that must not be exported, and returns the text."""

_HIDDEN = "[hidden]"
"""Replaces each masked text."""

_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s{1,4})[A-Za-z0-9._~+/=-]{12,5000}")
_ASSIGNED = re.compile(
    r"""(?ix)
    ((?:password|passwd|secret|token|api[_-]?key|access[_-]?key)\\?["']?\s{0,4}[:=]\s{0,4}\\?["']?)
    [^\s"'\\,;&<>]{6,500}
    """
)
_IN_URL = re.compile(r"(?<=://)[^\s/@:]{1,200}:[^\s/@]{1,200}(?=@)")
_PROBE = "x" * 8
"""An example of a value. If a redactor hides this value after `NAME=`, then NAME is the name of a secret."""
_MAIL = re.compile(r"\b[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}\b")
_HOMES = re.compile(
    r"(?:/home|/Users)/[^/\s\"'`:;,<>()\\]{1,64}|\b[A-Za-z]:\\{1,2}Users\\{1,2}[^\\/\s\"'`:;,<>()]{1,64}"
)


def committed(secrets: Iterable[str]) -> Redactor:
    """Return a function that masks `secrets` and every text that has the form of a token, such as `ghp_...`. It is
    meant for files that people may commit."""
    mask = SecretMask(secrets, mask=_HIDDEN, is_guessing=False)
    return lambda text: TOKENS.sub(_HIDDEN, mask(text))


def redactor(secrets: Iterable[str], *, home: str = "", is_strict: bool = False) -> Redactor:
    """Return a function that masks `secrets`. With `is_strict`, the function also masks texts that look like a token, a
    password or an e-mail address, and writes home directories as `~`. `home` is the user's own home directory, or
    empty if it is unknown."""
    mask = SecretMask(secrets, mask=_HIDDEN, is_guessing=False)
    if not is_strict:
        return mask
    home = home.rstrip("/\\")
    ours = re.compile(rf"{re.escape(home)}(?![\w.-])") if home else None

    def redact(text: str) -> str:
        text = TOKENS.sub(_HIDDEN, mask(text))
        text = _BEARER.sub(rf"\1{_HIDDEN}", text)
        text = _ASSIGNED.sub(rf"\1{_HIDDEN}", text)
        text = _MAIL.sub(_HIDDEN, _IN_URL.sub(_HIDDEN, text))
        if ours is not None:
            text = ours.sub("~", text)
        return _HOMES.sub("~", text)

    return redact


def masked_json(value: object, redact: Redactor) -> Any:
    """Return a JSON value with all its texts masked. Texts are masked before they are written as JSON, because JSON
    escapes some characters of secrets. A text is hidden whole if the name of its member, such as `password`, says that
    it is secret. The member `arguments` of a tool call is a string that contains JSON, and the texts in that JSON are
    masked."""
    match value:
        case str():
            return redact(value)
        case Mapping():
            return {redact(key): _masked_member(key, inner, redact) for key, inner in value.items()}
        case list() | tuple():
            return [masked_json(inner, redact) for inner in value]
        case _:
            return value


def _masked_member(name: str, value: object, redact: Redactor) -> Any:
    if not isinstance(value, str):
        return masked_json(value, redact)
    if _PROBE not in redact(f"{name}={_PROBE}"):
        return _HIDDEN
    return masked_arguments(value, redact) if name == "arguments" else redact(value)


def masked_arguments(text: str, redact: Redactor) -> str:
    """Return the arguments of a call, a string that contains JSON, with all texts in that JSON masked. If there is
    nothing to mask, the string stays as the model wrote it."""
    try:
        value = json.loads(text)
        masked = masked_json(value, redact)
    except (ValueError, RecursionError):
        return redact(text)
    return text if masked == value else json.dumps(masked, ensure_ascii=False)
