"""The check of the API key on every route of a model server except `/health`.

vLLM's own check covers only paths under `/v1`, which leaves `/invocations`, `/tokenize` and others open to all clients.
"""

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/health",)


class RequireKey:
    """ASGI middleware for vLLM's app that lets only requests with an API key pass.

    vLLM imports it by its path and constructs it with only the app. The keys come from the server's arguments
    (`api_key`). If the server has no keys, no request passes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or respond with status 401."""
        # A browser sends OPTIONS first, without the key, to check whether it may send a request.
        if scope["type"] == "lifespan" or scope.get("method") == "OPTIONS" or _path(scope) in OPEN:
            return await self.app(scope, receive, send)
        sent = dict(scope["headers"]).get(b"authorization", b"")
        keys = scope["app"].state.args.api_key or []
        if any(hmac.compare_digest(sent, b"Bearer " + key.encode()) for key in keys):
            return await self.app(scope, receive, send)
        await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
