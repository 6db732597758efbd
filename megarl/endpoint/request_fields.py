"""Schemas of requests: what several APIs share, and the error of a body that does not match.

The schemas are pydantic models. Null counts as absent, and fields that a schema does not declare are not
read.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from megarl.agents.protocol import Message, Schema
from megarl.endpoint.api_error import ApiError, invalid, refuse_unsupported, unsupported
from megarl.machine.errors import in_short, named
from megarl.machine.strict_json import MAX_DEPTH, is_too_deep

_MOST_SHOWN = 3  # problems in one error
_UNSUPPORTED = "unsupported"
_NOT_DEEP = f"contain JSON of at most {MAX_DEPTH} nested levels"
# What pydantic expects, where its own words are those of Python.
_RULES = {
    "bool_type": "be true or false",
    "dict_type": "be an object",
    "int_type": "be an integer",
    "list_type": "be a list",
    "mapping_type": "be an object",
    "model_type": "be an object",
    "string_type": "be a string",
}


class RequestFields(BaseModel):
    """An object in a request."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class ConversationFields(RequestFields, ABC):
    """The body of a request that continues a conversation.

    Attributes:
        neutral: Values with which parameters change nothing, although the API here does not have them.
    """

    neutral: ClassVar[Mapping[str, Collection[Any]]]

    model: str | None = None

    @abstractmethod
    def query(self) -> TurnQuery:
        """Return the query of a request. Raises ApiError."""


def read_query(
    schema: type[ConversationFields], body: Mapping[str, Any], ignored: Collection[str]
) -> TurnQuery:
    """Return the query of a request.

    Raises:
        ApiError: A parameter is not supported or invalid, or the conversation is empty, or ends with a
            message of the assistant.
    """
    refuse_unsupported(body, schema.model_fields, schema.neutral, ignored)
    query = checked(schema, body).query()
    if not query.messages:
        raise invalid("messages", "is empty")
    if query.messages[-1]["role"] == "assistant":
        raise unsupported("an assistant message at the end (prefill)", "end with another message")
    return query


def checked[Schema: RequestFields](schema: type[Schema], body: Mapping[str, Any]) -> Schema:
    """Return the fields of a body.

    Raises:
        ApiError: A field has the wrong type or value. The error has its path, its value and what it must be.
    """
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        problems = [_problem(body, each) for each in error.errors(include_url=False)[:_MOST_SHOWN]]
        first = problems[0]
        message = ". ".join(each.message for each in problems)
        raise ApiError(message, code=first.code, parameter=first.parameter) from None


def _problem(body: Any, error: ErrorDetails) -> ApiError:
    path, value = _place(body, error)
    if error["type"] == "missing":
        return invalid(path, "is missing")
    if error["type"] == _UNSUPPORTED:
        return unsupported(f"{path}.type={in_short(value.get('type'))}", error["msg"])
    rule = _RULES.get(error["type"]) or re.sub(r"^\w+ should ", "", error["msg"])
    return invalid(path, f"is {in_short(value)}; it must {rule}")


def _place(body: Any, error: ErrorDetails) -> tuple[str, Any]:
    """Return the path of a problem, such as `messages[0].content`, and the value there."""
    path = ""
    value = body
    last = len(error["loc"]) - 1
    for number, step in enumerate(error["loc"]):
        if isinstance(step, int):
            if not isinstance(value, list):  # a text that is read as a list
                break
            path += f"[{step}]"
            value = value[step]
        # The other steps are not fields, but names of schemas.
        elif isinstance(value, Mapping) and (step in value or number == last):
            value = value.get(step)
            name = named(step) if step.isidentifier() else f"[{in_short(step)}]"
            path += f".{name}" if path and not name.startswith("[") else name
    return path, value


# ---- types of fields


def wrong(rule: str) -> PydanticCustomError:
    """Return the error of a validator. `rule` follows "it must"."""
    return PydanticCustomError("rule", "Value should {rule}", {"rule": rule})


def _read_as(kind: Any) -> GetPydanticSchema:
    """Return metadata of an annotation: a field is validated by `kind` instead of the annotated type."""
    return GetPydanticSchema(lambda source, handler: handler.generate_schema(kind))


def of_kinds(schemas: Mapping[str | None, type[RequestFields]], hint: str) -> GetPydanticSchema:
    """Annotate an object whose field `type` selects its schema.

    Args:
        schemas: The schemas by kind. None: the field is absent.
        hint: What to do instead of sending another kind.
    """

    def refuse_others(value: Any) -> Any:
        if not isinstance(value, dict):
            raise wrong("be an object")
        kind = value.get("type")
        if not isinstance(kind, str | None) or kind not in schemas:
            raise PydanticCustomError(_UNSUPPORTED, hint)  # pyrefly: ignore
        return value

    tagged = tuple(Annotated[schema, Tag(schema.__name__)] for schema in dict.fromkeys(schemas.values()))
    if len(tagged) == 1:
        return _read_as(Annotated[tagged[0], BeforeValidator(refuse_others)])
    by_kind = Discriminator(lambda value: schemas[value.get("type")].__name__)
    any_of: Any = reduce(or_, tagged)
    return _read_as(Annotated[any_of, by_kind, BeforeValidator(refuse_others)])


class TextPart(RequestFields):
    text: str = ""
    refusal: str = ""


def as_parts(content: Any) -> Any:
    """Return the content of a message, which may be a text, as a list of parts."""
    if not isinstance(content, str | list):
        raise wrong("be a string or a list of parts")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of(*kinds: str) -> GetPydanticSchema:
    """Annotate the text of a message that is sent as a text, or as a list of parts of these kinds."""

    def joined(parts: list[TextPart]) -> str:
        return "".join(part.text or part.refusal for part in parts)

    part = Annotated[TextPart, of_kinds(dict.fromkeys(kinds, TextPart), "messages may contain text only")]
    return _read_as(Annotated[list[part], BeforeValidator(as_parts), AfterValidator(joined)])


def _listed_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise wrong("be a string or a list of strings that are not empty")
    return stops


def _read_arguments(given: Any) -> Any:
    """Read the arguments of a call, which APIs of OpenAI write as JSON in a text.

    Some clients send "" for a call without arguments. A text that is not JSON stays a text.
    """
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        raise wrong("be a string that contains JSON")
    if not given.strip():
        return {}
    try:
        arguments = json.loads(given)
    except RecursionError:
        raise wrong(_NOT_DEEP) from None
    except ValueError:
        return given
    if is_too_deep(arguments):
        raise wrong(_NOT_DEEP)
    return arguments


def _refuse_odd_schema(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, dict | None) or not isinstance(schema.get("required"), list | None):
        raise wrong("be a JSON schema, whose `properties` are an object and whose `required` is a list")
    return schema


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
StopTexts = Annotated[list[str], BeforeValidator(_listed_stops), Field(max_length=64)]
CallArguments = Annotated[Any, BeforeValidator(_read_arguments)]
JsonSchema = Annotated[dict[str, Any], AfterValidator(_refuse_odd_schema)]
Name = Annotated[str, Field(min_length=1)]


class ToolFunction(RequestFields):
    """A tool, with the field names of OpenAI's APIs."""

    name: Name
    description: str | None = None
    parameters: JsonSchema | None = None

    def for_template(self) -> dict[str, Any]:
        no_parameters = {"type": "object", "properties": {}}
        function = {
            **self.model_dump(include={"name", "description"}, exclude_none=True),
            "parameters": no_parameters if self.parameters is None else self.parameters,
        }
        return {"type": "function", "function": function}


def system_messages(text: str) -> list[Message]:
    """Return the messages before those of a conversation, whose instructions are a field of its own."""
    return [{"role": "system", "content": text}] if text else []


def server_event(kind: str, **fields: Any) -> str:
    """Return a server-sent event that has its kind twice."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def call_of(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call, as chat templates read it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def written_arguments(call: Mapping[str, Any]) -> str:
    """Return the arguments of a call as APIs of OpenAI write them."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


# ---- a request for a turn and its answer, independent of the API


@dataclass(frozen=True, kw_only=True)
class TurnQuery:
    """A request.

    Attributes:
        messages: The conversation, as chat templates read it: content is text, and arguments of calls are
            JSON values.
        tools: The tools that the model may call; None without tools.
        num_choices: Number of samples.
        max_tokens: Tokens per sample, in addition to the limits of the run.
        stop: Texts that end a sample, and are not part of its text.
    """

    messages: Sequence[Message]
    tools: Sequence[Schema] | None = None
    num_choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class SampledChoice(NamedTuple):
    """A sample as a client reads it.

    Attributes:
        text: What the model wrote outside of thinking and calls.
        reasoning: What it wrote between `<think>` and `</think>`; empty if there is none.
        num_reasoning: Tokens of this thinking and its tags.
        calls: The calls that could be read, as chat templates read them. Others are part of the text.
        finish_reason: "length" if a limit of tokens ended it.
        stop: The text of `TurnQuery.stop` that ended it, if one did.
        tokens: The UTF-8 bytes of each token, which may be a part of a character.
        log_probs: The log-prob of each token.
    """

    text: str
    reasoning: str
    num_reasoning: int
    calls: Sequence[Mapping[str, Any]]
    finish_reason: Literal["stop", "length"]
    stop: str | None
    tokens: Sequence[bytes]
    log_probs: Sequence[float]


class TurnReply(NamedTuple):
    """The answer to a request.

    Attributes:
        id: Names the answer among those of the process. APIs write it with a prefix.
        num_prompt_tokens: Tokens before the samples.
        num_reused: How many of them are recorded tokens of earlier turns.
    """

    id: str
    choices: Sequence[SampledChoice]
    num_prompt_tokens: int
    num_reused: int
