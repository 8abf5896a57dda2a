"""Requests of programs that the endpoint does not answer."""

from aiohttp import web

from pipeline.agent.frames import MAX_REASON, cut

MAX_PARAM = 200  # characters


class Refused(Exception):
    """A request that is not answered.

    Args:
        message: a sentence for who wrote the client.
        code: short, in OpenAI's manner.
        status: of HTTP; the clients repeat none of those that are used.
        param: key of the request.
    """

    def __init__(self, message: str, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(cut(message, MAX_REASON))
        self.code, self.status, self.param = code, status, param and cut(param, MAX_PARAM)

    def response(self) -> web.Response:
        """As OpenAI's clients read it."""
        kind = "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return web.json_response({"error": error}, status=self.status, headers={"x-should-retry": "false"})
