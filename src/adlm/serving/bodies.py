"""Bodies of requests, and of errors.

The sampling settings of a request are generated from the schema: the type, range, choices and help of a setting are
defined only at its field in SamplingConfig. Fields of the protocol itself are defined here. An unknown field is
refused, since a misspelt setting must not be silently ignored. Limits that depend on the server or on the model are
checked in service.py and answered with 400.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from adlm.config.keys import Key, keys
from adlm.errors import similar
from adlm.rules import Choices, Range

# Settings of `adlm sample` that have another form in a request, and those that a request cannot set. A server has no
# defaults for them, except for `stop`.
OWN_FORM = ("n", "length", "prompt", "template", "banned", "required", "choices", "response_format", "stop")
NOT_IN_REQUESTS = ("batch_size",)


def encodable(text: Any) -> Any:
    """Refuse half of a character (a client cut an emoji in two): JSON can encode it, but no tokenizer can read it."""
    try:
        for part in text if isinstance(text, list) else [text]:
            if isinstance(part, str):
                part.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("lone_surrogate", "Text holds half of a character (a lone surrogate)") from None
    return text


# Also wraps unions of texts: inside a union, the message would name the branch.
ENCODABLE = AfterValidator(encodable)
Text = Annotated[str, ENCODABLE]
# JSON has one kind of number, so 7.0 is an integer. (The last annotation, or limits are missing in the document.)
WHOLE = BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)
Id = Annotated[int, WHOLE]
# In Python 0 equals False; in JSON it does not.
NOT_ZERO = BeforeValidator(lambda x: "0" if x == 0 and not isinstance(x, bool) else x)
Count = Annotated[int, Field(ge=1), WHOLE]
Words = Annotated[list[Annotated[Text, Field(min_length=1, max_length=200)]], Field(max_length=64)]
Options = Annotated[list[Annotated[Text, Field(min_length=1, max_length=1000)]], Field(max_length=256)]

WholeNumber = Annotated[int, Field(ge=0), WHOLE]
Several = Field(min_length=1, max_length=256)
# Most tokens in a body: no sequence is that long, and reading a million numbers takes a while.
MANY = 1 << 16
Tokens = Annotated[list[Id], Field(min_length=1, max_length=MANY)]
Prompts = str | Annotated[list[str], Several] | Tokens | Annotated[list[Tokens], Several]
# The length is limited because stops are searched in every frame.
Stop = Annotated[str, Field(max_length=200)]
Stops = Annotated[bool | Stop | Annotated[list[Stop], Field(max_length=16)] | None, ENCODABLE]


class OneOf:
    """Adds the allowed names of a text field to the OpenAPI document, when the document is made. A misspelt name is
    refused later, by the package, with the nearest one."""

    def __init__(self, rule: Choices):
        self.rule = rule

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "enum": sorted(self.rule.names)}


def setting(key: Key) -> tuple[Any, Any]:
    """Type and documentation of the field of a request that sets `key`."""
    marks: list[Any] = []
    if isinstance(key.rule, Range):
        # without the values of `also`: a request that wants the default leaves the field out
        marks.append(Field(**limits(key.rule)))
    elif isinstance(key.rule, Choices):
        marks.append(OneOf(key.rule))
    if key.kind is int:
        marks.append(WHOLE)
    elif key.kind is str and not marks:
        marks.append(ENCODABLE)
    return Annotated[key.kind, *marks] | None, Field(None, description=key.help)  # type: ignore[return-value]


def limits(rule: Range) -> dict[str, Any]:
    """A range as keywords of pydantic's Field."""
    found: dict[str, Any] = {}
    if rule.low > -math.inf:
        found["gt" if rule.open_low else "ge"] = rule.low
    if rule.high < math.inf:
        # OpenAPI's numbers are doubles. A limit above 2^53 is lowered to a value that a double can represent, or the
        # document would allow numbers that are refused.
        inexact = int(rule.high % 10**10) if rule.high > 2**53 and isinstance(rule.high, int) else 0
        found["lt" if rule.open_high else "le"] = rule.high - inexact
    return found


class Body(BaseModel):
    """A request. Unknown fields are refused, with the nearest name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def known(cls, given: Any) -> Any:
        unknown = [name for name in given if name not in cls.model_fields] if isinstance(given, dict) else []
        if unknown:
            near = similar(unknown[0], cls.model_fields)
            message = "Unknown field" + (f" (did you mean '{near}'?)" if near else "")
            problem = PydanticCustomError("unknown_field", message)  # type: ignore[arg-type]
            error = InitErrorDetails(type=problem, loc=(unknown[0],), input=None)
            raise ValidationError.from_exception_data(cls.__name__, [error])
        return given


class JsonSchema(BaseModel):
    """OpenAI's wrapping of a schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = Field(None, description="Ignored.")
    description: str | None = Field(None, description="Ignored.")
    strict: bool | None = Field(None, description="Always strict.")
    schema_: dict[str, Any] = Field(alias="schema", description="JSON schema of the text.")


class ResponseFormat(BaseModel):
    """OpenAI's response_format."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def plain(self) -> dict[str, Any] | str:
        """The format as an argument of `lm.generate`."""
        named = {} if self.json_schema is None else {"json_schema": {"schema": self.json_schema.schema_}}
        return {"type": self.type, **named}


# The settings of the schema that a request may set
SETTINGS = [
    name
    for section, _, name in (key.partition(".") for key in keys())
    if section == "sampling" and name not in OWN_FORM + NOT_IN_REQUESTS
]
FIELDS: dict[str, Any] = {name: setting(keys()[f"sampling.{name}"]) for name in SETTINGS}
Settings: Any = create_model("Settings", __base__=Body, **FIELDS)


class CanvasBody(Settings):
    """The canvas to fill: free text, text after a prompt, a template, or tokens with holes (null). Omitted settings
    have the server's defaults; an omitted seed is drawn at random, and returned."""

    model: str | None = Field(None, description="Id of a served model; the first one if left out.")
    prompt: Text | None = Field(None, description=keys()["sampling.prompt"].help)
    template: Text | None = Field(None, min_length=1, description=keys()["sampling.template"].help)
    tokens: list[Id | None] | None = Field(
        None, min_length=1, max_length=MANY, description="Token ids; null is a hole."
    )
    length: Count | None = Field(
        None, description="Tokens in all, prompt included; if left out, as many as the model has and the server allows."
    )
    required: Words = Field(default_factory=list, description="Words that must appear.")
    banned: Words = Field(default_factory=list, description="Words that must not appear.")
    choices: Options = Field(default_factory=list, description="What fills the holes is one of these texts.")
    response_format: ResponseFormat | None = Field(None, description="What fills the holes is JSON of this schema.")
    stop: bool | None = Field(None, description=keys()["sampling.stop"].help)


class FramesBody(CanvasBody):
    anchors: bool = Field(True, description="Also send the anchor network's guesses at holes.")


class InfillBody(CanvasBody):
    n: Count = Field(1, description="Texts; number i uses seed + i.")


class SlotsBody(Body):
    model: str | None = None
    template: Text | None = Field(None, min_length=1, description=keys()["sampling.template"].help)
    tokens: list[Id | None] | None = Field(
        None, min_length=1, max_length=MANY, description="Token ids; null is a hole."
    )
    top: Annotated[int, Field(ge=1, le=20), WHOLE] = Field(5, description="Candidates for each hole.")
    draws: Annotated[int, Field(ge=0, le=64), WHOLE] = Field(
        0, description="Draws of the other holes for the standard errors; each costs an evaluation a hole (0: none)."
    )


class TextBody(Body):
    model: str | None = None
    text: Text


class ScoreBody(TextBody):
    text: Text = Field(min_length=1)
    draws: Annotated[int, Field(ge=1, le=256), WHOLE] = Field(64, description="Draws of noise (diffusion models).")


class AnchorsBody(Body):
    model: str | None = None
    text: Text | None = Field(None, description="Text, or a template with [MASK] holes.")
    tokens: list[Id | None] | None = Field(
        None, min_length=1, max_length=MANY, description="Token ids; null is a hole."
    )
    top: Annotated[int, Field(ge=1, le=20), WHOLE] = Field(5, description="Candidates for each hole.")


class StreamOptions(Body):
    include_usage: bool = False


class CompletionBody(Settings):
    """OpenAI's completions, and every sampling setting of ours. Settings that are left out have the server's defaults;
    a seed that is left out is drawn, and returned."""

    model: str | None = Field(None, description="Id of a served model; the first one if left out.")
    prompt: Annotated[Prompts, ENCODABLE] = Field("", description="Text or token ids, or a list of such.")
    suffix: Text | None = Field(None, description="Text after the completion: the middle is filled in.")
    max_tokens: WholeNumber | None = Field(
        None, description="Tokens to draw; if left out, as many as there is room for (16 with a suffix)."
    )
    n: Count = Field(1, description="Completions of each prompt; number i uses seed + i.")
    stop: Stops = Field(None, description="Texts at which a completion ends. false: not even at an end-of-text token.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool | Annotated[int, Field(ge=0, le=5), WHOLE] | None = Field(
        None,
        description="Give each token's part of the bound on log p(completion | rest); with echo, the log-probability of"
        " each token of the prompt and the completion given those before it, and this many of the likeliest.",
    )
    echo: bool = Field(False, description="Put the prompt in front of the completion.")
    required: Words = Field(default_factory=list, description="Words that must appear.")
    banned: Words = Field(default_factory=list, description="Words that must not appear.")
    choices: Options = Field(default_factory=list, description="What fills the holes is one of these texts.")
    response_format: ResponseFormat | None = Field(None, description="What fills the holes is JSON of this schema.")
    best_of: Count | None = Field(None, description="Accepted if it equals n.")
    user: str | None = Field(None, description="Ignored.")
    presence_penalty: float | None = Field(None, ge=0, le=0, description="Only 0: not supported.")
    frequency_penalty: float | None = Field(None, ge=0, le=0, description="Only 0: not supported.")
    logit_bias: dict[str, float] | None = Field(None, max_length=0, description="Only empty: use banned.")

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False


class TextPart(Body):
    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: str | None = Field(None, description="Ignored.")

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Settings):
    """OpenAI's chat completions, and every sampling setting of ours. The model reads its own template, else "Role:
    content" lines, ended by "Assistant:"; its answer then ends before the next "User:" line."""

    model: str | None = Field(None, description="Id of a served model; the first one if left out.")
    messages: list[ChatMessage] = Field(min_length=1, max_length=256)
    max_tokens: WholeNumber | None = Field(None, description="As in completions.")
    max_completion_tokens: WholeNumber | None = Field(None, description="OpenAI's newer name of max_tokens.")
    n: Count = Field(1, description="Answers; number i uses seed + i.")
    stop: Stops = Field(None, description="Texts at which an answer ends.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[Literal[False] | None, NOT_ZERO] = Field(None, description="Only false: see completions.")
    required: Words = Field(default_factory=list, description="Words that must appear.")
    banned: Words = Field(default_factory=list, description="Words that must not appear.")
    choices: Options = Field(default_factory=list, description="What fills the holes is one of these texts.")
    response_format: ResponseFormat | None = Field(None, description="What fills the holes is JSON of this schema.")
    user: str | None = Field(None, description="Ignored.")
    presence_penalty: float | None = Field(None, ge=0, le=0, description="Only 0: not supported.")
    frequency_penalty: float | None = Field(None, ge=0, le=0, description="Only 0: not supported.")


# Errors

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}
"""Status -> type of the error."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class Problem(Exception):
    """An error for the client, raised anywhere below a route and answered by the app in OpenAI's format."""

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
