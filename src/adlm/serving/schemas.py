"""Bodies of requests and answers. What is unknown is refused: a misspelt setting must not be ignored in silence.

Limits that depend on the server's settings or on the model are checked in models.py and answered 400.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from adlm.tables import SAMPLERS


def encodable(text: Any) -> Any:
    """JSON can name half of a character (a client that cut an emoji in two); no tokenizer can read it."""
    try:
        for part in text if isinstance(text, list) else [text]:
            str(part).encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("lone_surrogate", "Text holds half of a character (a lone surrogate)") from None
    return text


# Also around unions of texts: inside, the message would name the branch.
ENCODABLE = AfterValidator(encodable)
Text = Annotated[str, ENCODABLE]
# A misspelt name is answered with the nearest one, so it is checked by the package and only documented here.
Sampler = Annotated[str, WithJsonSchema({"type": "string", "enum": sorted(SAMPLERS)})]
# JSON has one kind of number: 7.0 is as whole as 7. (Last of the annotations, or limits are missing in the document.)
WHOLE = BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)
Id = Annotated[int, WHOLE]
Count = Annotated[int, Field(ge=1), WHOLE]
Number = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
Seed = Annotated[int, Field(ge=0, lt=2**63 - 2**20), WHOLE]
Draws = Annotated[int, Field(ge=1, le=256), WHOLE]
Few = Annotated[int, Field(ge=1, le=20), WHOLE]
Logprob = Annotated[int, Field(ge=0, le=5), WHOLE]
Word = Annotated[Text, Field(min_length=1, max_length=200)]
Words = Annotated[list[Word], Field(max_length=64)]
Ids = list[int]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Settings(Body):
    """How a row is drawn. What is left out is the server's default (`adlm serve sampling.steps=64`)."""

    sampler: Sampler | None = Field(None, description="Name of a sampler; GET /v1/models lists them.")
    steps: Count | None = Field(None, description="Steps from all masks to none.")
    temperature: float | None = Field(None, ge=0, description="Divides the logits; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus.")
    top_k: Number | None = Field(None, description="Keep the k most probable tokens (0: all).")
    min_p: float | None = Field(None, ge=0, lt=1, description="Keep tokens with this share of the best one's.")
    eta: float | None = Field(None, ge=0, le=1, description="Remasking strength.")
    t_on: float | None = Field(None, gt=0, lt=1, description="remdm-loop: start of the remasking phase.")
    t_off: float | None = Field(None, gt=0, lt=1, description="remdm-loop: its end.")
    alpha_on: float | None = Field(None, gt=0, lt=1, description="remdm-loop: share of visible tokens held.")
    threshold: float | None = Field(None, ge=0, description="confidence, entropy: what is accepted.")
    guidance: float | None = Field(None, ge=0, le=100, description="Classifier-free guidance weight.")
    stride: Number | None = Field(None, description="New tokens per window beyond the model's length.")
    parity: Literal["", "release"] | None = Field(None, description="release: the public release's numbers.")


class Canvas(Settings):
    """What is to be filled: free text, after a prompt, into a template, or holes (null) between tokens."""

    model: str | None = Field(None, description="Id of a served model; the first one if left out.")
    prompt: Text | None = Field(None, description="Text to continue.")
    template: Text | None = Field(None, description="Text with holes: [MASK] is one token, [MASK:3] are three.")
    tokens: list[Id | None] | None = Field(None, min_length=1, description="Token ids; null is a hole.")
    length: Count | None = Field(
        None, description="Tokens in all, prompt included; if left out, as many as the model has and the server allows."
    )
    seed: Seed | None = Field(None, description="Decides every random choice; drawn if left out, and returned.")
    required: Words = Field(default_factory=list, description="Words that must appear.")
    banned: Words = Field(default_factory=list, description="Words that must not appear.")
    stop: bool | None = Field(None, description="End the text at its first end-of-text token.")


class FramesBody(Canvas):
    anchors: bool = Field(True, description="Also send the anchor network's guesses at holes.")


class InfillBody(Canvas):
    n: Count = Field(1, description="Texts; number i uses seed + i.")


class TextBody(Body):
    model: str | None = None
    text: Text


class ScoreBody(TextBody):
    text: Text = Field(min_length=1)
    draws: Draws = Field(64, description="Draws of noise (diffusion models).")


class AnchorsBody(Body):
    model: str | None = None
    text: Text | None = Field(None, description="Text, or a template with [MASK] holes.")
    tokens: list[Id | None] | None = Field(None, min_length=1, description="Token ids; null is a hole.")
    top: Few = Field(5, description="Candidates for each hole.")


class StreamOptions(Body):
    include_usage: bool = False


class CompletionBody(Settings):
    """OpenAI's completions, and every setting of ours."""

    model: str | None = Field(None, description="Id of a served model; the first one if left out.")
    prompt: Annotated[str | Annotated[list[str], Field(min_length=1, max_length=256)], ENCODABLE] = ""
    suffix: Text | None = Field(None, description="Text after the completion: the middle is filled in.")
    max_tokens: Count | None = Field(None, description="Tokens to draw; the rest of the row (16 with a suffix).")
    n: Count = Field(1, description="Completions of each prompt; number i uses seed + i.")
    seed: Seed | None = None
    stop: Annotated[bool | str | Annotated[list[str], Field(max_length=4)] | None, ENCODABLE] = Field(
        None, description="Texts at which a completion ends. false: not even at an end-of-text token."
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool | Logprob | None = Field(
        None, description="Give each token's share of the bound on log p(completion | rest)."
    )
    echo: bool = Field(False, description="Put the prompt in front of the completion.")
    required: Words = Field(default_factory=list)
    banned: Words = Field(default_factory=list)
    best_of: Count | None = Field(None, description="Accepted if it equals n.")
    user: str | None = Field(None, description="Ignored.")
    presence_penalty: float | None = Field(None, ge=0, le=0, description="Only 0: not supported.")
    frequency_penalty: float | None = Field(None, ge=0, le=0, description="Only 0: not supported.")
    logit_bias: dict[str, float] | None = Field(None, max_length=0, description="Only empty: use banned.")


# Answers


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class Defaults(BaseModel):
    sampler: str
    steps: int
    top_p: float
    temperature: float


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "adlm"
    length: int
    vocab_size: int
    mask: int
    anchored: bool
    causal: bool
    samplers: list[str]
    parameters: int
    default: Defaults


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Pieces(BaseModel):
    tokens: Ids
    texts: list[str]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class InfillChoice(BaseModel):
    index: int
    text: str
    tokens: Ids
    texts: list[str]
    seed: int
    nfe: int


class InfillAnswer(BaseModel):
    id: str
    model: str
    choices: list[InfillChoice]
    usage: Usage


class ScoreAnswer(BaseModel):
    nll: float = Field(description="Nats per token: an upper bound, or exact.")
    ppl: float
    stderr: float
    exact: bool
    tokens: Ids
    texts: list[str]
    per_token: list[float]


class Candidate(BaseModel):
    id: int
    text: str
    probability: float


class HoleGuess(BaseModel):
    position: int
    candidates: list[Candidate]


class AnchorsAnswer(BaseModel):
    tokens: list[int | None]
    texts: list[str | None]
    anchor: list[bool]
    count: list[int]
    tau: int
    guesses: list[HoleGuess]


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None = None


class CompletionChoice(BaseModel):
    text: str
    index: int
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    seed: int
    nfe: int | None = None


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


def without_none(body: Settings) -> dict[str, Any]:
    """The settings of a body that were given."""
    return {name: value for name in Settings.model_fields if (value := getattr(body, name)) is not None}
