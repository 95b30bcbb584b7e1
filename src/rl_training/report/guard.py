"""Answers only those requests that come from the page itself.

The computer may be shared, and any web page in the user's browser can send requests to it. So every
request needs the token of the printed address, and names this server in its Host header: another
site whose name was pointed to this computer has another one (DNS rebinding).

The token is never stored in a cookie: a browser sends cookies of 127.0.0.1 to all its ports, and so
to servers of other users.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTROL_HEADER, CONTROL_VALUE = "x-rl-training", "control"
"""A header that other sites cannot send without asking first, which is always denied"""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104 (compared with, not bound to)
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers of every answer that does not set them itself"""
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,253})(?::(\d{1,5}))?", re.ASCII)
_REFUSAL = (
    b"403: open the complete address that `rl-training dashboard` printed, with its token. Through "
    b"an SSH tunnel, use the same port on both sides.\n"
)


class Guard:
    """Passes requests with the right Host and token on to `application`; others get 403."""

    def __init__(self, application: Application, token: str, host: str, port: int) -> None:
        self._application, self._token, self._port = application, token.encode(), port
        self._any_address = host in WILDCARDS
        self._names = {*LOOPBACK, _in_address(host)}
        if self._any_address:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # neither web sockets nor a lifespan are used
        guarded = _with_headers(send)
        headers = _single_values(scope["headers"])
        if self._is_own_host(headers.get("host")) and self._has_token(headers, scope):
            await self._application(scope, receive, guarded)
            return
        length = str(len(_REFUSAL)).encode()
        fields = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", length)]
        await guarded({"type": "http.response.start", "status": 403, "headers": fields})
        await guarded({"type": "http.response.body", "body": _REFUSAL})

    def _is_own_host(self, host: str | None) -> bool:
        found = _HOST.fullmatch((host or "").lower())
        if found is None or int(found[2] or 80) != self._port:
            return False
        return found[1] in self._names or (self._any_address and _is_address(found[1]))

    def _has_token(self, headers: dict[str, str | None], scope: Scope) -> bool:
        if "authorization" in headers:
            given = [(headers["authorization"] or "").removeprefix("Bearer ")]
        else:
            query = scope.get("query_string", b"").decode("latin-1")
            try:
                given = parse_qs(query, max_num_fields=16).get("token", [])
            except ValueError:
                given = []
        tokens = [each.encode(errors="replace") for each in given]
        return len(tokens) == 1 and hmac.compare_digest(tokens[0], self._token)


def is_control_request(headers: MutableMapping[str, str] | Any) -> bool:
    """Return whether a request can only have been sent by the page itself, or by a program.

    Other sites cannot send a JSON body, the two headers, or the right Origin.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return (
        kind == "application/json"
        and headers.get(CONTROL_HEADER) == CONTROL_VALUE
        and headers.get("authorization", "").startswith("Bearer ")
        and headers.get("origin", "").lower() == f"http://{headers.get('host', '')}".lower()
        and headers.get("sec-fetch-site", "same-origin") == "same-origin"
    )


def _single_values(headers: list[tuple[bytes, bytes]]) -> dict[str, str | None]:
    """Return headers by name; None for one that was sent twice, which could be read in two ways."""
    found: dict[str, str | None] = {}
    for name, value in headers:
        key = name.decode("latin-1").lower()
        found[key] = None if key in found else value.decode("latin-1")
    return found


def _with_headers(send: Send) -> Send:
    async def guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            fields = list(message.get("headers", ()))
            present = {name.lower() for name, _ in fields}
            fields += [
                (name.encode(), value.encode())
                for name, value in HEADERS.items()
                if name.encode() not in present
            ]
            message = {**message, "headers": fields}
        await send(message)

    return guarded


def _in_address(host: str) -> str:
    """Return a host as it stands in an address: IPv6 in brackets."""
    return f"[{host.lower()}]" if ":" in host else host.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def address(host: str, port: int, token: str) -> str:
    """Return the address to open, with the token."""
    name = socket.gethostname() if host in WILDCARDS else _in_address(host)
    return f"http://{name}:{port}/?token={token}"
