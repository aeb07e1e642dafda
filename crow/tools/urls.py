"""Converts URLs to a normal form, which rules, titles and requests all use.

The normal form follows RFC 3986, section 6, and the WHATWG rules for what people and servers write. Two spellings that
a server must treat alike have the same normal form. So no spelling gets past a rule.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import Literal
from unicodedata import normalize
from urllib.parse import unquote, urljoin

from crow.domain.errors import ArgumentError
from crow.domain.text import shorten

_URL_CHARS = 8_192
PORTS = {"http": 80, "https": 443}

_HOST_CHARS = 253
_LABEL_CHARS = 63
_SHOWN_CHARS = 200
_PARTS = re.compile(r"([a-z]+)://([^/?#]*)([^?#]*)(\?[^#]*)?(?:#.*)?", re.IGNORECASE | re.DOTALL | re.ASCII)
_PLACE = re.compile(r"(\[[^\[\]@]*\]|[^\[\]:@]*)(?::([0-9]*))?", re.ASCII)
_HOST = re.compile(r"[a-z0-9_.-]+")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
_ESCAPE = re.compile("%([0-9A-Fa-f]{2})|%|[^%]", re.DOTALL)
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_PATH_CHARS = _UNRESERVED | frozenset("!$&'()*+,;=:@/[]|")
_QUERY_CHARS = _PATH_CHARS | frozenset("?`^{}\\")
_EDGES = "".join(map(chr, range(0x21)))
_LINE_BREAKS = str.maketrans("", "", "\t\r\n")
_MAX_DECODED = 5
"""A path is decoded at most this many times, to find dot segments that are encoded more than once."""

_KEPT_BY_IDNA_2008 = frozenset("ßς")
"""Letters that Python's codec, which follows IDNA 2003, replaces with other letters. A replaced letter would lead to
another host."""


def normalize_url(text: str) -> str:
    """Return the normal form of an http or https URL: scheme, host, port, path and query, without a fragment.

    The normal form is plain ASCII. Requests use exactly this form. A URL is refused if its path has dot segments that
    only some servers resolve.

    :raises ~crow.domain.errors.ArgumentError: `text` is not an http or https URL, or contains credentials.
    """
    if len(text) > _URL_CHARS:
        raise ArgumentError(f"url has {len(text):,} characters; expected at most {_URL_CHARS:,}")
    parts = _PARTS.fullmatch(_with_slashes(text.strip(_EDGES).translate(_LINE_BREAKS)))
    scheme = "" if parts is None else parts[1].lower()
    if parts is None or scheme not in PORTS:
        raise _not_a_url(text, "")
    if "@" in parts[2]:
        without = f"{parts[1]}://…@{parts[2].rpartition('@')[2]}{parts[3]}"  # the query may hold a secret, too
        raise _not_a_url(without, " without user name and password")
    place = _PLACE.fullmatch(parts[2])
    if place is None or not (host := _host(place[1])) or not _is_port(place[2] or "80"):
        raise _not_a_url(text, " with a valid host and port")
    path, is_clear = _path(parts[3])
    if not is_clear:
        raise ArgumentError(
            f"url is {_shown(text)}, and servers disagree about the dots in its path; write the path without them"
        )
    query = "" if parts[4] in (None, "?") else _encoded(parts[4], _QUERY_CHARS)
    return f"{scheme}://{host}{_port(scheme, place[2])}{path}{query}"


def join_url(base: str, reference: str) -> str:
    """Return the normal form of a reference in a document, such as the target of a redirect.

    :raises ~crow.domain.errors.ArgumentError: this is not an http or https URL, or contains credentials.
    """
    cleaned = _with_slashes(reference.strip(_EDGES).translate(_LINE_BREAKS))
    try:
        # A whole URL does not go through urljoin, which would drop an empty part after ";".
        return normalize_url(cleaned if re.match("https?://", cleaned, re.IGNORECASE) else urljoin(base, cleaned))
    except ValueError:
        raise _not_a_url(reference, "") from None


def lenient_urls(url: str) -> tuple[str, ...]:
    """Return the URLs that a lenient server may treat like `url`, a URL in normal form: those with the path decoded,
    and without repeated slashes. A deny rule about one of these covers `url`, too."""
    head, path, query = _split(url)
    found = dict.fromkeys(head + form + query for once in _decodings(path) for form in (once, re.sub("/+", "/", once)))
    return tuple(form for form in found if form != url)


@lru_cache(maxsize=256)
def url_expression(pattern: str) -> str:
    """Convert the pattern of a rule to a regular expression for URLs in normal form.

    `*` stands for any text and `?` for any character. Before the path, they stop at a slash, so `https://*.a.example/*`
    covers no other host. A pattern without `://` is a glob for the whole URL.
    """
    scheme, separator, rest = pattern.strip().partition("://")
    if not separator:
        return translate(pattern)
    place, path = re.fullmatch(r"([^/]*)(.*)", _with_slashes(rest), re.DOTALL).groups()  # type: ignore[union-attr]
    if not path and not place.endswith("*"):
        path = "/"
    head = _glob(scheme.lower()) + "://" + _glob(_pattern_place(scheme.lower(), place))
    if not path:
        return head + "/.*"
    before, question, query = path.partition("?")
    path = _without_dots(_encoded(before, _PATH_CHARS)) + _encoded(question + query, _QUERY_CHARS)
    return head + translate(path)


def covers_url(pattern: str, url: str, *, ignore_case: bool = False) -> bool:
    """Return whether the pattern of a rule covers a URL in normal form."""
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else re.NOFLAG)
    return re.fullmatch(url_expression(pattern), url, flags) is not None


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _shown(text: str) -> str:
    return repr(shorten(text, _SHOWN_CHARS))


def _not_a_url(text: str, detail: str) -> ArgumentError:
    return ArgumentError(f"url is {_shown(text)}; expected an http or https URL{detail}")


def _split(url: str) -> tuple[str, str, str]:
    """Split a URL in normal form before its path and before its query."""
    start = url.index("/", url.index("://") + 3)
    path, question, query = url[start:].partition("?")
    return url[:start], path, question + query


def _with_slashes(text: str) -> str:
    """Replace the backslashes before the query. Browsers read them as slashes, and other clients do not."""
    end = re.search("[?#]", text)
    at = len(text) if end is None else end.start()
    return text[:at].replace("\\", "/") + text[at:]


def _is_port(digits: str) -> bool:
    return len(digits.lstrip("0")) <= 5 and 0 < int(digits[-5:]) <= 65_535


def _port(scheme: str, digits: str | None) -> str:
    """Return a port with its colon, or "" for the default port of the scheme."""
    port = (digits or "").lstrip("0")
    return f":{port}" if port and port != str(PORTS.get(scheme)) else ""


def _host(text: str) -> str:
    """Return a host in normal form, with brackets around an IPv6 address. An IPv4 address in the IPv6 form
    `::ffff:a.b.c.d` becomes the IPv4 address, because both reach the same server. Return "" if `text` is no host."""
    try:
        if text.startswith("["):
            address = ipaddress.IPv6Address(text[1:-1])
            if "%" in text:
                return ""
            return f"[{address}]" if address.ipv4_mapped is None else str(address.ipv4_mapped)
        decoded = unquote(text, errors="strict")
        if len(decoded) > _HOST_CHARS + 1:
            return ""
        if not decoded.isascii():
            decoded = ".".join(map(_label, re.split("[.\u3002\uff0e\uff61]", decoded)))
        name = decoded.lower().removesuffix(".")
        labels = name.split(".")
        if _NUMBER.fullmatch(labels[-1]):
            return _ipv4(labels)
    except (ValueError, UnicodeError):
        return ""
    is_name = len(name) <= _HOST_CHARS and all(0 < len(label) <= _LABEL_CHARS for label in labels)
    return name if is_name and _HOST.fullmatch(name) else ""


def _label(label: str) -> str:
    """Return a part of a host name in ASCII. :raises UnicodeError: this is not possible."""
    if _KEPT_BY_IDNA_2008.isdisjoint(label):
        return label.encode("idna").decode("ascii")
    prepared = "".join(
        char if char in _KEPT_BY_IDNA_2008 else char.encode("idna").decode("idna") for char in normalize("NFC", label)
    )
    return "xn--" + prepared.encode("punycode").decode("ascii")


def _ipv4(labels: list[str]) -> str:
    """Return an IPv4 address in normal form. Its numbers may be decimal, octal or hexadecimal. If there are fewer than
    four, the last one stands for all remaining bytes.

    :raises ValueError: a part is not a number, there are too many, or one is too large.
    """
    if len(labels) > 4 or not all(_NUMBER.fullmatch(label) and len(label) <= 20 for label in labels):
        raise ValueError(labels)
    numbers = [
        int(label[2:] or "0", 16) if label.startswith("0x") else int(label, 8 if label[0] == "0" else 10)
        for label in labels
    ]
    *first, last = numbers
    if any(number > 255 for number in first) or last >= 256 ** (5 - len(numbers)):
        raise ValueError(labels)
    return str(ipaddress.IPv4Address(last + sum(number << (24 - 8 * at) for at, number in enumerate(first))))


def _path(text: str) -> tuple[str, bool]:
    """Return the path in normal form, and whether it is clear. It is not if a server might read one of its segments as
    `.` or `..`."""
    path = _without_dots(_encoded(text or "/", _PATH_CHARS))
    forms = _decodings(path)
    segments = (segment.partition(";")[0] for form in forms for segment in re.split(r"[/\\]", form))
    return path, unquote(forms[-1]) == forms[-1] and not any(segment in (".", "..") for segment in segments)


def _decodings(path: str) -> list[str]:
    """Return the path as it is, decoded once, decoded twice and so on, until decoding changes nothing."""
    forms = [path]
    while len(forms) <= _MAX_DECODED and (decoded := unquote(forms[-1])) != forms[-1]:
        forms.append(decoded)
    return forms


def _encoded(text: str, kept: frozenset[str]) -> str:
    """Encode all characters but `kept` and existing escapes, and decode the escapes of unreserved characters."""

    def piece(found: re.Match[str]) -> str:
        if found[1] is not None:
            char = chr(int(found[1], 16))
            return char if char in _UNRESERVED else found[0].upper()
        if found[0] in kept:
            return found[0]
        return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "replace"))

    return _ESCAPE.sub(piece, text)


def _without_dots(path: str) -> str:
    """Resolve `.` and `..` segments, as RFC 3986, section 5.2.4, says."""
    output: list[str] = []
    *segments, last = path.split("/")[1:]
    for segment in segments:
        if segment == "..":
            del output[-1:]
        elif segment != ".":
            output.append(segment)
    if last == "..":
        del output[-1:]
    return "/" + "/".join([*output, "" if last in (".", "..") else last])


def _pattern_place(scheme: str, place: str) -> str:
    """Return the host and port of a pattern, in normal form unless they contain wildcards."""
    found = _PLACE.fullmatch(place)
    if found is None or "@" in place:
        return place.lower()
    host, port = found.groups()
    host = host.lower() if "*" in host or "?" in host else _host(host) or host.lower()
    return host + _port(scheme, port)


def _glob(text: str) -> str:
    """Convert a glob for scheme, host and port to a regular expression."""
    return "".join({"*": "[^/]*", "?": "[^/]"}.get(char) or re.escape(char) for char in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlRules:
    """The user's rules about the URLs of a fetch, to judge the redirects that it meets."""

    allowed: tuple[str, ...] = ()
    """Regular expressions. A URL may be fetched without asking if one of them matches the whole URL."""

    denied: tuple[str, ...] = ()
    """Regular expressions that ignore case. A URL must not be fetched if one of them matches the whole URL, or one of
    the URLs that a lenient server treats alike."""

    def judge(self, url: str) -> Literal["allow", "ask", "deny"]:
        """Judge a URL in normal form."""
        forms = (url, *lenient_urls(url))
        if any(re.fullmatch(rule, form, re.IGNORECASE | re.DOTALL) for rule in self.denied for form in forms):
            return "deny"
        return "allow" if any(re.fullmatch(rule, url, re.DOTALL) for rule in self.allowed) else "ask"


NO_URL_RULES = UrlRules()
