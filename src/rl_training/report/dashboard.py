"""The dashboard: the report page, served live on this computer.

Needs the extra `dashboard`. `guard.py` decides which requests are answered, `live.py` reads the
runs, and `control.py` stops and resumes them.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rl_training.errors import UserError
from rl_training.report.control import ControlRefusedError, Resumed, stop
from rl_training.report.guard import WILDCARDS, Application, Guard, address, is_control_request
from rl_training.report.live import TITLE, LiveRuns
from rl_training.validation import user_path

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

PORT, HOST, MOST_PORTS = 7860, "127.0.0.1", 65_535
MAX_BODY_BYTES = 1_024
"""Longest body of a request"""
PART_BYTES = 256 * 2**10
"""Bytes of a video that are sent at once"""
BACKLOG, MOST_CONNECTIONS = 64, 128
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
    "connect-src 'self'; media-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def serve(
    folder: str | Path = "runs", port: int = PORT, host: str = HOST, *, allow_control: bool = False
) -> None:
    """Serve a live page about the runs in `folder` until Ctrl-C.

    The folder need not exist yet: its runs are shown as they come. Prints the address to open; only
    who has its token gets an answer. Port 0 takes any free one. With `allow_control`, the page can
    stop and resume runs.
    """
    uvicorn = _uvicorn()
    root = user_path(folder)
    if root.exists() and not root.is_dir():
        raise UserError(f"{root}: is not a folder; name one that contains run folders")
    with contextlib.closing(_listening_socket(host, port)) as listening:
        (bound, used_port), token = listening.getsockname()[:2], secrets.token_urlsafe(32)
        if bound in WILDCARDS:
            host = bound  # which has other spellings, such as 0
        application = Guard(
            make_application(root, allow_control=allow_control), token, host, used_port
        )
        print(_welcome(root, address(host, used_port, token), bound, allow_control), flush=True)
        config = uvicorn.Config(
            application,
            access_log=False,  # its lines would contain the token
            log_level="warning",
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its cleanup
            uvicorn.Server(config).run(sockets=[listening])
    print("dashboard stopped", flush=True)


def make_application(root: Path, *, allow_control: bool = False) -> Application:
    """Return the dashboard of a folder without its `Guard`."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    pages = _Pages(root, allow_control)
    routes = [
        Route("/", pages.index, methods=["GET"]),
        Route("/data.json", pages.data, methods=["GET"]),
        Route("/videos/{name}.mp4", pages.video, methods=["GET"]),
    ]
    if allow_control:
        routes += [
            Route("/control/stop", pages.stop, methods=["POST"]),
            Route("/control/resume", pages.resume, methods=["POST"]),
        ]
    return Starlette(routes=routes)


class _Pages:
    """The answers of the dashboard. Functions that are not `async` run in threads."""

    def __init__(self, root: Path, allow_control: bool) -> None:
        self._resumed = Resumed()
        self._runs = LiveRuns(root, problems=self._resumed.problems, control=allow_control)

    def index(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse

        from rl_training.report.page import render

        nonce = secrets.token_urlsafe(18)
        html = render({"title": TITLE}, live=True, nonce=nonce)
        headers = {"content-security-policy": _POLICY.format(nonce=nonce)}
        return HTMLResponse(html.encode(errors="replace"), headers=headers)

    def data(self, request: Request) -> Response:
        """Answer with what changed since the version that the page has, or 304 if nothing did."""
        from starlette.responses import Response

        known = request.headers.get("if-none-match", "").strip('W/"')
        changes = self._runs.changes(known)
        headers = {"etag": f'"{changes.version}"', "vary": "accept-encoding"}
        if changes.version == known:
            return Response(status_code=304, headers=headers)
        body = changes.body
        if "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["content-encoding"] = changes.compressed, "gzip"
        return Response(body, headers=headers, media_type="application/json")

    def video(self, request: Request) -> Response:
        """Answer with a video, or with the part that a player asks for."""
        from starlette.responses import PlainTextResponse, StreamingResponse

        try:
            folder, name = self._runs.video(request.path_params["name"])
            file = folder.open(name)
        except (UserError, OSError):
            return PlainTextResponse("there is no such video", 404)
        size = os.fstat(file.fileno()).st_size
        start, end = _wanted_part(request.headers.get("range", ""), size)
        headers = {"accept-ranges": "bytes", "content-length": str(max(0, end - start))}
        is_part = (start, end) != (0, size)
        if is_part:
            headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
        code = 206 if is_part else 200
        return StreamingResponse(_parts(file, start, end), code, headers, "video/mp4")

    async def stop(self, request: Request) -> Response:
        return await self._control(request, self._stop)

    async def resume(self, request: Request) -> Response:
        return await self._control(request, self._resume)

    def _stop(self, identifier: str) -> str:
        process = stop(self._runs.folder(identifier))
        return f"process {process} was asked to save and stop"

    def _resume(self, identifier: str) -> str:
        process = self._resumed.start(identifier, self._runs.folder(identifier))
        return f"resumed in process {process}"

    async def _control(self, request: Request, act: Callable[[str], str]) -> Response:
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse

        if not is_control_request(request.headers):
            return JSONResponse({"error": "this request may come from another site"}, 403)
        identifier = await _named_run(request)
        if identifier is None:
            return JSONResponse({"error": 'the body must be {"run": "..."}'}, 400)
        try:
            done = await run_in_threadpool(act, identifier)
        except (UserError, OSError) as error:
            refused = isinstance(error, ControlRefusedError)
            return JSONResponse({"error": str(error)}, 409 if refused else 404)
        return JSONResponse({"done": done})


def _wanted_part(header: str, size: int) -> tuple[int, int]:
    """Return the first byte and the end of the part in a Range header; everything without one."""
    found = re.fullmatch(r"bytes=(\d{1,15})-(\d{0,15})", header, re.ASCII)
    if found is None or int(found[1]) >= size:
        return 0, size
    end = int(found[2]) + 1 if found[2] else size
    start = int(found[1])
    return (start, min(end, size)) if end > start else (0, size)


def _parts(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    with file:
        file.seek(start)
        left = end - start
        while left > 0 and (part := file.read(min(left, PART_BYTES))):
            left -= len(part)
            yield part


async def _named_run(request: Request) -> str | None:
    """Return the identifier in the body of a request, or None if the body is anything else."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        return None
    run = values.get("run") if isinstance(values, dict) else None
    return run if isinstance(run, str) else None


def _uvicorn() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(
            f"the dashboard needs the package {error.name}; install it with "
            "`pip install 'rl-training[dashboard]'`"
        ) from None
    return uvicorn


def _listening_socket(host: str, port: int) -> socket.socket:
    """Bind the port first, so that a taken one is reported in one line and port 0 is known."""
    if not 0 <= port <= MOST_PORTS:  # the rest of the number would be dropped
        raise UserError(f"--port {port}: must be from 0 to {MOST_PORTS}")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host}: is not an address of this computer ({error})") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"--host {host}: is not an address of this computer") from None
        raise UserError(
            f"--host {host} --port {port}: cannot be used ({error.strerror}); choose another port, "
            "or --port 0 for any free one"
        ) from None
    return listening


def _welcome(root: Path, where: str, bound: str, allow_control: bool) -> str:
    lines = [f"dashboard of {root.absolute()}", f"  {where}"]
    if not root.exists():
        lines.append(
            "this folder does not exist yet; runs appear on the page when they are trained in it"
        )
    if not ipaddress.ip_address(bound).is_loopback:
        lines.append("other computers can reach it; the connection is not encrypted")
    if allow_control:
        lines.append("anyone who has this address can stop and resume runs")
    return "\n".join([*lines, "press Ctrl-C to end it; runs go on"])
