"""`crow serve token` and `crow serve pair`: the tokens with which clients log in to `crow serve`."""

from __future__ import annotations

import argparse
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta

from crow import adapters
from crow.cli.output import Column, in_terminal, print_json, print_table
from crow.cli.sessions import parse_day
from crow.domain.errors import ArgumentError
from crow.domain.text import on_one_line
from crow.serve.tokens import new_token
from crow.settings import Loaded
from crow.settings.values import ServeSettings
from crow.store import AccessStore, Token
from crow.store.transcript import time_text

_PAIRING_MINUTES = 10
"""A link of `crow serve pair` can be used for this long."""

_TokenCommand = Callable[[AccessStore, argparse.Namespace], Awaitable[None]]


def add_token_commands(parser: argparse.ArgumentParser) -> None:
    """Add `pair`, `token add`, `token list` and `token revoke` to the parser of `crow serve`."""
    subcommands = parser.add_subparsers(metavar="COMMAND")
    words = "pair a browser or phone with the server: print a link that can be used once, and its QR code"
    pairing = subcommands.add_parser("pair", help=words, description=f"{words[0].upper()}{words[1:]}.")
    pairing.set_defaults(token_command=_pair)
    pairing.add_argument(
        "principal", metavar="PRINCIPAL", nargs="?", help="whose sessions it shows (default: the only principal)"
    )
    pairing.add_argument("--url", metavar="URL", help="how the browser reaches the server, if crow cannot work it out")
    words = "add, list and revoke tokens for crow serve"
    token_parser = subcommands.add_parser("token", help=words, description=f"{words.capitalize()}.")
    commands = token_parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: _TokenCommand, words: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        added.set_defaults(token_command=run)
        added.add_argument("--json", action="store_true", help="print JSON lines")
        return added

    adding = add("add", _add_token, "make a token for a principal, and print it once")
    adding.add_argument("principal", metavar="PRINCIPAL", help="who the token is for, such as ann")
    adding.add_argument("--label", metavar="TEXT", default="", help="what the token is for, such as laptop")
    adding.add_argument(
        "--expires",
        metavar="WHEN",
        help="when the token expires: after 12h, 90d, 8w or 1y, or after a day such as 2027-01-31",
    )
    listing = add("list", _list_tokens, "list tokens; their secrets are stored nowhere")
    listing.add_argument("--all", action="store_true", help="also list tokens that are revoked or have expired")
    revoking = add("revoke", _revoke_tokens, "revoke tokens, and end the connections that use them")
    revoking.add_argument("ids", metavar="ID", nargs="+", help="the id of a token, which crow serve token list shows")


async def run_token_command(loaded: Loaded, options: argparse.Namespace) -> int:
    """Run `crow serve pair` or a command of `crow serve token`, and return the exit code."""
    options.serve_settings = loaded.settings.serve
    store = await adapters.open_store(loaded)
    try:
        await options.token_command(store, options)
    finally:
        await store.close()
    return 0


async def _add_token(store: AccessStore, options: argparse.Namespace) -> None:
    """`crow serve token add`."""
    expires_ms = None if options.expires is None else _parse_expiry(options.expires, now=datetime.now().astimezone())
    text, token = new_token(options.principal, label=options.label, expires_ms=expires_ms)
    await store.add_token(token)
    if options.json:
        print_json([{**_values(token), "token": text}])
        return
    sys.stdout.write(f"{text}\n")
    if in_terminal():
        until = "" if expires_ms is None else f", valid until {time_text(expires_ms)[:16]}"
        sys.stderr.write(f"Token {token.id} for {token.principal}{until}. It is shown only now; keep it secret.\n")


async def _pair(store: AccessStore, options: argparse.Namespace) -> None:
    """`crow serve pair`."""
    address = _browser_address(options.serve_settings, options.url)
    now_ms = time.time_ns() // 1_000_000
    tokens = await store.tokens()
    principals = sorted({token.principal for token in tokens if _state(token, now_ms) == "valid"})
    if not tokens:
        raise ArgumentError(
            f"The server needs no token yet: open {address} in a browser on this machine. To let a phone connect, "
            "first add a token: crow serve token add NAME"
        )
    if options.principal is None and len(principals) != 1:
        named = f"These have a valid token: {', '.join(principals)}." if principals else "Nobody has a valid token."
        raise ArgumentError(f"Name the principal: crow serve pair NAME. {named}")
    expires_ms = now_ms + _PAIRING_MINUTES * 60_000
    text, token = new_token(
        options.principal or principals[0], label="a browser to pair", expires_ms=expires_ms, is_pairing=True
    )
    await store.add_token(token)
    link = f"{address}#pair={text}"
    sys.stdout.write(f"{link}\n")
    if in_terminal():
        import segno  # a part of the extra `serve`, needed only here

        segno.make(link).terminal(out=sys.stderr, compact=True)
        sys.stderr.write(
            f"Open the link within {_PAIRING_MINUTES} minutes. It works once. The browser then gets a token of its own "
            f"for {token.principal}; crow serve token list shows it.\n"
        )


def _browser_address(settings: ServeSettings, url: str | None) -> str:
    """Return the URL of the page for browsers, which ends in a slash.

    :raises ArgumentError: `url` is no URL, or the server listens where no browser can connect.
    """
    if url is not None:
        if not re.fullmatch(r"https?://[^\s/?#]+/?", url):
            raise ArgumentError(f'--url is "{url}"; expected a URL without a path, such as https://crow.example.org')
        return url.rstrip("/") + "/"
    host, _, port = settings.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise ArgumentError(
            f'The server listens on "{settings.listen}", which a browser cannot open. Name its URL with --url.'
        )
    if settings.hosts:
        host = settings.hosts[0]
    elif host.strip("[]") in {"0.0.0.0", "::"}:  # noqa: S104 - this compares, and listens nowhere
        host = _own_address() or host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{port}/"


def _own_address() -> str:
    """Return the address of this machine in its network, or an empty string. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent, suppress(OSError):
        unsent.connect(("192.0.2.1", 9))
        return str(unsent.getsockname()[0])
    return ""


async def _list_tokens(store: AccessStore, options: argparse.Namespace) -> None:
    """`crow serve token list`."""
    now_ms = time.time_ns() // 1_000_000
    tokens = [token for token in await store.tokens() if options.all or _state(token, now_ms) == "valid"]
    if options.json:
        print_json({**_values(token), "state": _state(token, now_ms)} for token in tokens)
        return
    print_table(
        (Column("Id"), Column("Principal"), Column("Label"), Column("State"), Column("Created"), Column("Last used")),
        [
            (
                token.id,
                token.principal,
                on_one_line(token.label),
                _state(token, now_ms)
                + ("" if token.expires_ms is None else f" (until {time_text(token.expires_ms)[:10]})"),
                time_text(token.created_ms)[:10],
                "never" if token.used_ms is None else time_text(token.used_ms)[:16],
            )
            for token in tokens
        ],
        empty=f'There are no {"" if options.all else "valid "}tokens. "crow serve token add PRINCIPAL" makes one.',
    )


async def _revoke_tokens(store: AccessStore, options: argparse.Namespace) -> None:
    """`crow serve token revoke`: revoke either all of the named tokens or none."""
    known = {token.id for token in await store.tokens()}
    unknown = [name for name in options.ids if name not in known]
    if unknown:
        raise ArgumentError(
            f'There is no token "{unknown[0]}". "crow serve token list --all" shows the ids of all tokens.'
        )
    for name in options.ids:
        was_valid = await store.revoke_token(name)
        if options.json:
            print_json([{"id": name, "revoked": was_valid}])
        else:
            sys.stdout.write(f"{name}: {'revoked' if was_valid else 'was revoked before'}\n")


def _parse_expiry(text: str, *, now: datetime) -> int:
    """Convert a time from now (`12h`, `90d`, `8w`, `1y`) or a date to Unix ms. :raises ArgumentError: `text` has
    another form."""
    match = re.fullmatch(r"([0-9]{1,5})([hdwy])", text)
    if match is None:
        return parse_day("--expires", text, days_later=1)
    unit = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1), "y": timedelta(days=365)}[
        match[2]
    ]
    try:
        return round((now + int(match[1]) * unit).timestamp() * 1000)
    except (OverflowError, ValueError, OSError):
        raise ArgumentError(f'--expires is "{text}"; expected at most a few hundred years.') from None


def _state(token: Token, now_ms: int) -> str:
    if token.revoked_ms is not None:
        return "revoked"
    return "expired" if token.expires_ms is not None and token.expires_ms <= now_ms else "valid"


def _values(token: Token) -> dict[str, object]:
    """Return the values that `--json` prints for a token. They do not include the hash."""
    times = {"created": token.created_ms, "expires": token.expires_ms, "used": token.used_ms}
    return {
        "id": token.id,
        "principal": token.principal,
        "label": token.label,
        **{name: None if ms is None else time_text(ms, "seconds") for name, ms in times.items()},
        "revoked": None if token.revoked_ms is None else time_text(token.revoked_ms, "seconds"),
    }
