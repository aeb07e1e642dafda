"""Masks secrets and personal data in exported text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from crow.domain.rendering import SecretMask
from crow.domain.secret_values import TOKENS

Redactor: TypeAlias = Callable[[str], str]
"""Masks the parts of a text that must not be exported, and returns the text."""

_HIDDEN = "[hidden]"

_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s{1,4})[A-Za-z0-9._~+/=-]{12,5000}")
_ASSIGNED = re.compile(
    r"""(?ix)
    ((?:password|passwd|secret|token|api[_-]?key|access[_-]?key)\\?["']?\s{0,4}[:=]\s{0,4}\\?["']?)
    [^\s"'\\,;&<>]{6,500}
    """
)
_IN_URL = re.compile(r"(?<=://)[^\s/@:]{1,200}:[^\s/@]{1,200}(?=@)")
_MAIL = re.compile(r"\b[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}\b")
_HOMES = re.compile(
    r"(?:/home|/Users)/[^/\s\"'`:;,<>()\\]{1,64}|\b[A-Za-z]:\\{1,2}Users\\{1,2}[^\\/\s\"'`:;,<>()]{1,64}"
)


def committed(secrets: Iterable[str]) -> Redactor:
    """Return a function that masks `secrets` and every text that is a token by its form, for files that people may
    commit."""
    mask = SecretMask(secrets, mask=_HIDDEN, is_guessing=False)
    return lambda text: TOKENS.sub(_HIDDEN, mask(text))


def redactor(secrets: Iterable[str], *, home: str = "", is_strict: bool = False) -> Redactor:
    """Return a function that masks `secrets`. With `is_strict`, the function also masks texts that look like a token, a
    password or an e-mail address, and writes home directories as `~`."""
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
