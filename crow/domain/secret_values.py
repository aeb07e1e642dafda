"""Recognises environment variables that hold secrets, and the secrets in their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal

TOKENS = re.compile(
    r"""
    (?<![A-Za-z0-9_-])
    (?: sk-[A-Za-z0-9_-]{8,500}                               # OpenAI, Anthropic and many others
    | (?:ghp|gho|ghu|ghs|ghr|glpat|hf|npm|pypi|xox[a-z]|gsk|xai|shpat|dop_v1)[_-][A-Za-z0-9_-]{10,500}
    | [sr]k_(?:live|test)_[A-Za-z0-9]{10,500}                 # Stripe
    | github_pat_[A-Za-z0-9_]{10,500}
    | (?:AKIA|ASIA)[A-Z0-9]{16}\b
    | AIza[A-Za-z0-9_-]{30,100}
    | eyJ[A-Za-z0-9_-]{8,5000}+\.[A-Za-z0-9_-]{8,5000}+(?:\.[A-Za-z0-9_-]{0,5000}+)?  # JSON Web Tokens
    )
    # PEM, also with CRLF, and within JSON text, which writes line ends as escapes
    | (?:(?<=-----\n)|(?<=-----\r\n)|(?<=-----\\n)|(?<=-----\\r\\n))[A-Za-z0-9+/=\s\\]{100,20000}(?=-----END)
    """,
    re.VERBOSE,
)
"""Matches texts that are secrets by their form, such as the tokens of GitHub."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]")
_STRONG = frozenset(
    (
        *("secret", "secrets", "password", "passwords", "passwd", "passphrase", "pass", "pwd", "pw", "sshpass"),
        *("credential", "credentials", "apikey", "webhook", "pat", "jwt", "bearer", "oauth"),
    )
)
"""Words of names whose values are secrets, whatever they look like."""

_WEAK = frozenset({"key", "keys", "token", "tokens", "auth", "authorization", "cookie", "cookies", "dsn"})
"""Words of names whose values are secrets, unless they are numbers."""

_ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "accesskey", "secretkey", "privatekey", "token")
_BEGINNINGS = ("accesskey", "apikey", "secretkey", "privatekey")
_NOT_SECRET = frozenset({"PWD", "OLDPWD"})
_PUBLIC = frozenset({"public", "publishable"})
"""A weak word does not count after one of these, as in `PUBLIC_KEY`."""
_PLAIN = re.compile(r"(?i)|true|false|yes|no|on|off|none|null|0|1|always|never|auto")
_NUMBER = re.compile(r"[0-9]{1,7}(?:\.[0-9]{1,3})?")
_IN_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}://[^\s/@:]{0,200}:([^\s/@]{1,500})@")
_PARAMETER = re.compile(r"(?i)(?:^|[?&;,\s-])[a-z_.-]{0,40}(?:password|passwd|pwd|secret|token)=([^&;,\s]{4,500})")
_KEY_IN_URL = re.compile(r"(?i)://[^\s?]{1,500}\?(?:[^\s]{0,500}&)?[a-z_-]{0,40}key=([^&;\s]{4,500})")
_HEADER = re.compile(r"(?i)\b(?:bearer|basic)\s{1,4}([A-Za-z0-9._~+/=-]{12,5000})")
_NETRC = re.compile(r"(?i)\blogin\s{1,9}\S{1,200}\s{1,9}password\s{1,9}(\S{4,500})")
_MEMBER = re.compile(
    r"""(?i)["'][a-z_-]{0,40}(?:password|secret|token|key)["']\s{0,9}:\s{0,9}["']([^"'\s]{4,500})["']"""
)
_PRIVATE = "PRIVATE KEY-----"
_PLACE = re.compile(r"~?/")
_LINE_CHARS = 20
"""A line of a secret with several lines is hidden by itself if it has at least this many characters."""
_SHORTEST = 8
"""Shorter texts are never hidden in results, because they may occur by chance."""
_LONG = 20
"""A text of at least this length is hidden whatever its characters are."""


def holds_secret(name: str, value: str, exists: Callable[[str], bool]) -> bool:
    """Return whether an environment variable holds a secret, judged by the words of its name and by the form of its
    value.

    `exists` says whether a path exists: the path of a file with a secret is not secret itself.
    """
    if name in _NOT_SECRET or _PLAIN.fullmatch(value):
        return False
    if _has_secret_form(value):
        return True
    strength = _strength(name)
    is_secret = strength == "strong" or (strength == "weak" and not _NUMBER.fullmatch(value))
    return is_secret and not (_PLACE.match(value) and all(map(exists, value.split(":"))))


@lru_cache(maxsize=1_024)
def _has_secret_form(value: str) -> bool:
    return _PRIVATE in value or TOKENS.search(value) is not None or any(True for _ in _passwords(value))


@lru_cache(maxsize=1_024)
def _strength(name: str) -> Literal["none", "weak", "strong"]:
    """Return how surely a variable with this name holds a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if any(word in _STRONG or word.endswith(_ENDINGS) or word.startswith(_BEGINNINGS) for word in words):
        return "strong"
    before = ["", *words]
    is_weak = any(word in _WEAK and above not in _PUBLIC for above, word in zip(before, words, strict=False))
    return "weak" if is_weak else "none"


def secrets_in(value: str) -> Iterator[str]:
    """Return the secrets in the value of an environment variable that holds secrets.

    Texts that may occur anywhere by chance, such as `postgres`, are left out.
    """
    candidates = [value.strip(), *_passwords(value), *(found[0] for found in TOKENS.finditer(value))]
    if "\n" in value:
        candidates += [line.strip() for line in value.splitlines() if len(line.strip()) >= _LINE_CHARS]
    return (text for text in dict.fromkeys(candidates) if _is_distinctive(text))


def _passwords(value: str) -> Iterator[str]:
    for pattern in (_IN_URL, _PARAMETER, _KEY_IN_URL, _HEADER, _NETRC, _MEMBER):
        yield from (found[1] for found in pattern.finditer(value))


def _is_distinctive(text: str) -> bool:
    if len(text) < _SHORTEST or _PRIVATE in text:
        return False
    has_letter, has_digit = any(map(str.isalpha, text)), any(map(str.isdigit, text))
    is_mixed = text != text.lower() and text != text.upper()
    return len(text) >= _LONG or (has_letter and (has_digit or is_mixed)) or (has_digit and len(text) > _SHORTEST + 3)
