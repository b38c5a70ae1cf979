"""What happens around every request: its id, its origin, the API key, the count of answers. Plain ASGI, so that streams
pass through untouched and a handler sees its client's disconnect. What stands between a handler and its client runs for
every token, so it passes on what `send` returns and is no coroutine of its own."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.logs import request_id
from stretto.serve.errors import SHOWN, ApiError
from stretto.serve.metrics import ServerMetrics

OPEN_PATHS = frozenset(("/health", "/livez", "/readyz", "/startupz", "/ping", "/metrics", "/",
                        "/docs"))  # probes have no keys
OPEN_FOLDER = "/page/"  # the page's own files; what it shows of the server needs a key
ADMIN_PATHS = frozenset(("/flush_cache", "/start_profile", "/stop_profile", "/v1/load_lora_adapter",
                         "/load_lora_adapter", "/v1/unload_lora_adapter", "/unload_lora_adapter"))
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
MAX_ID_LENGTH = 256


class RequestIds:
    """X-Request-Id comes back as it came, unless a live call has that id: then as the id that was made of it. Where
    none came it is the handler's choice, or a fresh id. It is `request_id` of the scope's state, and
    `request_id_given` says whether it came from the client."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        good = 0 < len(given) <= MAX_ID_LENGTH and given.isascii() and given.isprintable()
        state = scope.setdefault("state", {})
        state["request_id"], state["request_id_given"] = (given if good else uuid.uuid4().hex), good

        token = request_id.set(state["request_id"])

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            return send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            request_id.reset(token)


class Heads:
    """HEAD is GET without the body, which the HTTP library leaves out: load balancers probe so."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self.app({**scope, "method": "GET"} if head else scope, receive, send)


class Origins:
    """Web pages of other sites may not act here, unless they are allowed to.

    A browser sends a page's request before it knows whether the page may read the answer: CORS alone would let any
    page that its user visits start work on a server of this machine. Browsers name the page's origin in such requests;
    other clients name none and pass. The server's own pages have its Host as theirs."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...] = ()):
        self.app, self._allowed = app, frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS:
            headers = Headers(scope=scope)
            if not all(self._may(origin, headers.get("host", "")) for origin in headers.getlist("origin")):
                refusal = _foreign(", ".join(headers.getlist("origin")))
                return await refusal.response(scope["path"], scope["state"]["request_id"])(scope, receive, send)
        await self.app(scope, receive, send)

    def _may(self, origin: str, host: str) -> bool:
        return "*" in self._allowed or origin in self._allowed or _is_own(origin, host)


def _is_own(origin: str, host: str) -> bool:
    """The same host and port. The scheme is left aside: a proxy may speak TLS for the server."""
    scheme, _, place = origin.lower().partition("://")
    port = DEFAULT_PORTS.get(scheme, "")
    return bool(port and place) and place.removesuffix(port) == host.lower().removesuffix(port)


def _foreign(origin: str) -> ApiError:
    shown = origin[:SHOWN]
    return ApiError(403, f"web pages of {shown!r} may not call this server; start it with --allowed-origins {shown}"
                    " if they should", code="origin_not_allowed")


class ApiKeys:
    """Any of the keys as a bearer token; compared in constant time. Probes, metrics and the page need none.

    An admin key opens everything. Where there is one, ADMIN_PATHS open to it alone; `is_admin` of the scope's state
    says to handlers whether the client may do what operators do."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], admin_keys: tuple[str, ...] = ()):
        self.app = app
        self._keys, self._admin_keys = [key.encode() for key in keys], [key.encode() for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, token = scope["path"], _token(Headers(scope=scope))
            admin = _matches(token, self._admin_keys)
            scope.setdefault("state", {})["is_admin"] = admin or not self._admin_keys
            refusal = None if admin else self._refusal(path, token)
            if refusal is not None:
                return await refusal.response(path)(scope, receive, send)
        await self.app(scope, receive, send)

    def _refusal(self, path: str, token: bytes) -> ApiError | None:
        if path in ADMIN_PATHS and self._admin_keys:
            return admin_only(path)
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or _matches(token, self._keys):
            return None
        return ApiError(401, "this server needs an API key: send the header 'Authorization: Bearer KEY'",
                        code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def admin_only(what: str) -> ApiError:
    return ApiError(403, f"{what} needs this server's admin key: send the header 'Authorization: Bearer KEY'",
                    code="admin_key_required")


def _token(headers: Headers) -> bytes:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key", "")  # where Anthropic's clients put it
    return given.strip().encode("latin-1", "replace")


def _matches(token: bytes, keys: list[bytes]) -> bool:
    return any([hmac.compare_digest(token, key) for key in keys])  # all of them: the time tells nothing


class AnswerCounts:
    """Counts answers by route and status, for /metrics."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics):
        self.app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        def counted(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unknown")  # few values, whatever clients ask for
                self._metrics.responses[route, message["status"]] += 1
            return send(message)

        await self.app(scope, receive, counted)
