"""Refusals of programs' requests by the endpoint."""

from aiohttp import web

from pipeline.agent.inside.frames import MAX_REASON, cut

MAX_PARAM = 200  # characters


class RequestRefused(Exception):
    """The endpoint refuses a request.

    Args:
        message: a sentence for the author of the client.
        code: short code in OpenAI's manner.
        status: HTTP status; clients do not repeat requests with the statuses in use.
        param: key of the request.
    """

    def __init__(self, message: str, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(cut(message, MAX_REASON))
        self.code, self.status, self.param = code, status, param and cut(param, MAX_PARAM)

    def response(self) -> web.Response:
        """Write the refusal as OpenAI's clients read it."""
        kind = "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return web.json_response({"error": error}, status=self.status, headers={"x-should-retry": "false"})
