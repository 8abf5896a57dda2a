"""The exception with which the endpoint refuses a program's request."""

from aiohttp import web

from pipeline.agent.inside.frames import MAX_REASON, cut

MAX_PARAM = 200  # characters


class RequestRefused(Exception):
    """The endpoint refuses a request.

    Args:
        message: a sentence for the author of the client.
        code: short code as in OpenAI's errors, such as `invalid_value`.
        status: HTTP status; clients do not repeat requests that got one of the statuses in use here.
        param: key of the request that is at fault.
    """

    def __init__(self, message: str, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(cut(message, MAX_REASON))
        self.code, self.status, self.param = code, status, param and cut(param, MAX_PARAM)

    def response(self) -> web.Response:
        """Make the HTTP response of the refusal in OpenAI's form."""
        kind = "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return web.json_response({"error": error}, status=self.status, headers={"x-should-retry": "false"})
