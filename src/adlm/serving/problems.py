"""Errors as answers: one class, one JSON shape (OpenAI's), for everything that can be refused."""

from collections.abc import Mapping

from fastapi.responses import JSONResponse

# status -> type of the error; also what OpenAPI documents
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}
MEANING = {
    400: "The body is not JSON, or a value is out of range; the message names it.",
    401: "The key is missing or wrong.",
    404: "No such model.",
    408: "The request was sent too slowly (serve.read_timeout).",
    413: "The body is larger than serve.max_body.",
    422: "The body does not have this schema.",
    429: "The queue is full (serve.queue); Retry-After says when to come back.",
    500: "The engine failed; the request may be sent again.",
    503: "The server is starting or shutting down.",
    504: "The request took longer than serve.timeout.",
}


class Problem(Exception):
    """Raised anywhere below a route; answered by the handler of the app."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)
