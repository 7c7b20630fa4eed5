"""The server of `budwood view`: the page and its numbers, read-only, for this machine unless a token is set."""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budwood.errors import BudwoodError, BusyError, ConfigError
from budwood.report.names import public
from budwood.report.page import script, shell, style
from budwood.report.shelf import Asker, Shelf

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
CODES: dict[type[Exception], int] = {ConfigError: 400, BusyError: 503}
FOREIGN = ("cross-site", "same-site")  # what a browser says of a question that a page of another address asks
SHORTEST = 16  # characters of a token
LONGEST_TEXT = 20_000


@dataclass(frozen=True)
class Door:
    """Who is let in: the host names that may be asked for, and the token where one is set."""

    host: str
    port: int
    token: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < SHORTEST:
            raise ConfigError(f"--token has {len(self.token)} characters; give at least {SHORTEST}, or 'auto'.")
        if self.token is None and not loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and runs hold your data. Add --token auto "
                "(the address with the token is printed), or stay on 127.0.0.1 and use an SSH tunnel."
            )

    def host_fits(self, given: str) -> bool:
        """Whether a Host header names this server: a page of another site that points here is refused."""
        if self.token is not None and not loopback(self.host):
            return True  # reached by names that cannot be known here: the token guards
        name = given.rsplit(":", 1)[0] if not given.endswith("]") else given
        return name.strip("[]").lower() in {"127.0.0.1", "localhost", "::1", self.host.lower()}

    def token_fits(self, given: str) -> bool:
        """Whether the token is right, in a time that does not tell how nearly."""
        return self.token is None or hmac.compare_digest(given.encode(), self.token.encode())


def loopback(host: str) -> bool:
    """Whether an address stays on this machine.

    >>> loopback("127.0.0.1"), loopback("::1"), loopback("localhost"), loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def application(runs: Path, door: Door, ask: Asker | None = None) -> Starlette:
    """The server as an ASGI application."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import Response
    from starlette.routing import Route

    shelf = Shelf(runs, ask)
    head = '<link rel="stylesheet" href="style.css">'
    start = shell(head, '<script type="module" src="app.js"></script>', "budwood").encode()

    def fixed(content: bytes, kind: str) -> Callable[[Request], Response]:
        return lambda request: Response(content, media_type=kind)

    def key(request: Request) -> str:
        if found := request.query_params.get("key", ""):
            return found
        raise ConfigError("Name a run: ?key=KEY. /api/runs lists the keys.")

    def query(request: Request) -> Any:
        asked = request.query_params
        layers = tuple(x for x in asked.get("layers", "").split(",") if x)
        number = asked.get("q", "")
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise ConfigError("q has to be the number of a query.")
        named, graft = key(request), asked.get("graft", "")
        if graft and request.method == "HEAD":
            return None  # no body is sent, so no pass over the rows is made for it
        return shelf.query(named, int(number), asked.get("strategy", ""), layers, graft)

    def typed(request: Request) -> Any:
        text = request.query_params.get("text", "").strip()
        if not 0 < len(text) <= LONGEST_TEXT:
            raise ConfigError(f"Give a text of 1 to {LONGEST_TEXT:,} characters.")
        named = key(request)
        return None if request.method == "HEAD" else shelf.typed(named, text)

    only = ["GET", "HEAD"]
    routes = [
        Route("/", fixed(start, "text/html"), methods=only),
        Route("/app.js", fixed(script().encode(), "text/javascript"), methods=only),
        Route("/style.css", fixed(style().encode(), "text/css"), methods=only),
        Route("/favicon.ico", lambda request: Response(status_code=204), methods=only),
        Route("/api/runs", _json(lambda request: shelf.index()), methods=only),
        Route("/api/progress", _json(lambda request: shelf.progress()), methods=only),
        Route("/api/run", _json(lambda request: shelf.run(key(request))), methods=only),
        Route("/api/query", _json(query), methods=only),
        Route("/api/ask", _json(typed), methods=only),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_guard(door))])


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An answer as JSON; a question that cannot be meant as 400, one about nothing there as 404, one that comes while
    another is counted as 503, each with a sentence.
    """
    from starlette.responses import Response

    def reply(request: Request) -> Response:
        try:
            value, code = answer(request), 200
        except (BudwoodError, OSError, ValueError, KeyError, TypeError, IndexError) as e:
            told = public(str(e), Path.cwd()) if isinstance(e, BudwoodError) else f"not readable: {type(e).__name__}"
            value, code = {"error": told}, next((c for kind, c in CODES.items() if isinstance(e, kind)), 404)
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        return Response(body, status_code=code, media_type="application/json")

    return reply


def _guard(door: Door) -> Any:
    """Middleware: host, method, origin and token are checked first; every answer carries the policy."""
    from starlette.datastructures import Headers, MutableHeaders, QueryParams
    from starlette.requests import cookie_parser
    from starlette.responses import PlainTextResponse, RedirectResponse

    class Guard:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
            if scope["type"] != "http":
                await self.app(scope, receive, send)
                return

            async def with_policy(message: Any) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(HEADERS)
                await send(message)

            headers = Headers(scope=scope)
            asked = QueryParams(scope["query_string"])
            given = asked.get("token") or cookie_parser(headers.get("cookie", "")).get("budwood") or ""
            refusal: Any = None
            if not door.host_fits(headers.get("host", "")):
                refusal = PlainTextResponse("This server answers to its own name only.", 421)
            elif scope["method"] not in ("GET", "HEAD"):
                refusal = PlainTextResponse("This server is read-only.", 405, {"Allow": "GET, HEAD"})
            elif scope["path"].startswith("/api/") and headers.get("sec-fetch-site", "").lower() in FOREIGN:
                refusal = PlainTextResponse("Numbers are given to this server's own page only.", 403)
            elif not door.token_fits(given):
                refusal = PlainTextResponse("The token is missing or wrong.", 401)
            elif door.token and "token" in asked and scope["path"] == "/":
                refusal = RedirectResponse("./", 303)  # out of the address bar, into a cookie
                refusal.set_cookie("budwood", door.token, httponly=True, samesite="strict")
            await (refusal or self.app)(scope, receive, with_policy)

    return Guard


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; a port in use is told with what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(128)
    except (OSError, OverflowError) as e:
        sock.close()
        raise ConfigError(
            f"Port {port} on {host} cannot be used ({e}). Give another with --port, or --port 0 for any free one."
        ) from e
    return sock


def serve(runs: Path, door: Door, sock: socket.socket, ask: Asker | None = None) -> None:
    """Answer until interrupted."""
    import uvicorn

    config = uvicorn.Config(application(runs, door, ask), log_level="warning", access_log=False, server_header=False)
    uvicorn.Server(config).run(sockets=[sock])
