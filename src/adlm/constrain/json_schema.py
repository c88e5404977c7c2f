"""JSON schemas as regular expressions: every text that matches is JSON that the schema accepts.

The converse need not hold. Of the texts that a schema accepts, the expression matches those with properties in the
order of the schema and no others, at most one space after `,` and `:`, and no exponents in bounded numbers. A keyword
that a regular expression cannot express (uniqueItems, recursion, ...) is refused by name, never silently ignored.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from adlm.constrain.automaton import (
    CHARACTER,
    LONGEST,
    NATURAL,
    NUMBER,
    either,
    integers,
    literal,
    number_between,
    refuse,
    string_pattern,
)
from adlm.errors import require

COLON, COMMA = ":[ ]?", ",[ ]?"
DATE = (
    "[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:0[0-9]|1[0-4]):[0-5][0-9])"
OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
HOST = rf"{LABEL}(?:\.{LABEL}){{0,4}}"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{OCTET}(?:\.{OCTET}){{3}}",
    "hostname": HOST,
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,16}})?@{HOST}",
    "uri": rf"https?://{HOST}(?:/[A-Za-z0-9._~-]{{0,32}}){{0,4}}",
}
ANNOTATIONS = {
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "deprecated",
    "readOnly", "writeOnly",
}  # fmt: skip
DEPTH = 32
ANY_DEPTH = 2
"""How deep values may be nested where a schema does not specify them."""


def schema_of(given: Any) -> Any:
    """The schema from a caller's argument: OpenAI's {"type": "json_schema", ...} or {"type": "json_object"}, a schema,
    or either as JSON text. None for {"type": "text"}, no constraint."""
    if isinstance(given, str):
        try:
            given = {"type": given} if given in ("json_object", "text") else json.loads(given)
        except (ValueError, RecursionError) as error:
            raise refuse(f"not JSON ({error})") from None
    if not isinstance(given, (Mapping, bool)):
        raise refuse(f"must be a JSON schema or OpenAI's form of one, got {given!r:.60}")
    if isinstance(given, bool):
        return given
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        named = given.get("json_schema")
        if not isinstance(named, Mapping) or "schema" not in named:
            raise refuse('{"type": "json_schema"} needs json_schema.schema')
        return named["schema"]
    return given


def schema_regex(schema: Any) -> str:
    """The regular expression of a schema."""
    return SchemaTranslation(schema).value(schema, "")


class SchemaTranslation:
    """Translates one schema to a regular expression; $ref is resolved in `root`."""

    def __init__(self, root: Any):
        self.root, self.open = root, []
        self.referred: dict[str, str] = {}
        """$ref -> its regular expression. Without it, definitions that name each other twice would double the work at
        each level."""
        self.written = 0
        """Characters of all values, nested ones included."""

    def value(self, schema: Any, place: str) -> str:
        """The regular expression of any schema. `place`: its location, for messages."""
        found = self.written_out(schema, place)
        self.written += len(found)
        check_size(max(len(found), self.written // DEPTH))
        return found

    def written_out(self, schema: Any, place: str) -> str:
        if schema is True or schema == {}:
            return any_value(ANY_DEPTH)
        if not isinstance(schema, Mapping):
            raise refuse(f"{place or 'the schema'} is no schema that any text matches: {schema!r:.60}")
        require(place.count(".") <= DEPTH, f"response_format: nested deeper than {DEPTH}")
        for key, translate in SPECIAL.items():
            if key in schema:
                return translate(self, schema, place)
        kinds = schema.get("type", implied_types(schema))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not kinds and "type" not in schema:
            self.only(schema, ANNOTATIONS, place)
            return any_value(ANY_DEPTH)
        if not kinds or not all(isinstance(kind, str) and kind in TYPES for kind in kinds):
            raise refuse(f"{place or 'the schema'} has type {schema.get('type')!r:.60}; known are {', '.join(TYPES)}")
        known = ANNOTATIONS | {"type"} | {word for kind in kinds for word in TYPES[kind][1]}
        self.only(schema, known, place)
        return either([TYPES[kind][0](self, schema, place) for kind in dict.fromkeys(kinds)])

    def only(self, schema: Mapping[str, Any], known: set[str], place: str) -> None:
        """Refuse keywords that would be ignored."""
        for word in schema:
            if word not in known:
                raise refuse(f"{place + '.' if place else ''}{word} is not supported here")

    # Keywords that define a whole schema

    def values(self, schema: Mapping[str, Any], place: str) -> str:
        """Translate const and enum."""
        self.only(schema, ANNOTATIONS | {"type", "const", "enum"}, place)
        found = listed_values(schema, place)
        kinds = schema.get("type")
        if kinds is not None:
            named = [k for k in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(k, str)]
            allowed = [JSON_TYPES[k] for k in named if k in JSON_TYPES]
            found = [value for value in found if any(is_kind(value) for is_kind in allowed)]
            if not found:
                raise refuse(f"{place or 'the schema'} has no value of type {kinds!r:.60}")
        try:
            return either([literal(json.dumps(value, ensure_ascii=False, allow_nan=False)) for value in found])
        except ValueError:
            raise refuse(
                f"{place or 'the schema'} holds a number that JSON has no word for (infinite, or nan)"
            ) from None

    def any_of(self, schema: Mapping[str, Any], place: str) -> str:
        word = next(word for word in ("anyOf", "oneOf", "allOf") if word in schema)
        self.only(schema, ANNOTATIONS | {word}, place)
        options = schema[word]
        if not isinstance(options, list) or not options:
            raise refuse(f"{place}.{word} must be a list of schemas")
        if word == "allOf" and len(options) > 1:
            raise refuse(f"{place + '.' if place else ''}allOf of several schemas is not supported")
        if word == "oneOf":
            kinds = [self.kinds_of(option) for option in options]
            if any(first.meets(second) for first, second in itertools.combinations(kinds, 2)):
                raise refuse(f"{place + '.' if place else ''}oneOf needs options of different types; anyOf may overlap")
        return either([self.value(option, f"{place}.{word}[{i}]") for i, option in enumerate(options)])

    def kinds_of(self, schema: Any) -> "Kinds":
        """What a schema may accept; without `type` that includes every type that its keywords do not apply to."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            schema = self.resolve(schema["$ref"])
        if isinstance(schema, Mapping) and ("const" in schema or "enum" in schema):
            return Kinds(set(), listed_values(schema, ""))
        kinds = schema.get("type", [*TYPES]) if isinstance(schema, Mapping) else [*TYPES]
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return Kinds({"number" if kind == "integer" else str(kind) for kind in kinds}, [])

    def reference(self, schema: Mapping[str, Any], place: str) -> str:
        self.only(schema, ANNOTATIONS | {"$ref"}, place)
        name = str(schema["$ref"])
        if name in self.open:
            raise refuse(f"{name} refers to itself: a recursive schema is no regular expression")
        require(len(self.open) < DEPTH, f"response_format: $ref leads to $ref more than {DEPTH} times")
        if name not in self.referred:
            found = self.resolve(name)
            self.open.append(name)
            self.referred[name] = self.value(found, place)
            self.open.pop()
        return self.referred[name]

    def resolve(self, name: Any) -> Any:
        found, name = self.root, str(name)
        for part in name.removeprefix("#/").split("/") if name.startswith("#/") else [None]:
            part = unquote(part).replace("~1", "/").replace("~0", "~") if part is not None else None
            if not isinstance(found, Mapping) or part not in found:
                raise refuse(f"$ref {name!r:.60} is not found in the schema")
            found = found[part]
        return found

    # By type

    def object(self, schema: Mapping[str, Any], place: str) -> str:
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        named = isinstance(required, list) and all(isinstance(name, str) for name in required)
        if not isinstance(properties, Mapping) or not named:
            raise refuse(f"{place or 'the schema'} has properties or required of the wrong kind")
        unknown = [name for name in required if name not in properties]
        if unknown:
            raise refuse(f"{place + '.' if place else ''}required names {unknown[0]!r:.60}, which is no property")
        if not properties:
            return self.map(schema, more, place)
        for word in ("minProperties", "maxProperties"):
            if word in schema:
                raise refuse(f"{place + '.' if place else ''}{word} is not supported beside properties")
        members = [
            (literal(json.dumps(str(name), ensure_ascii=False)) + COLON + self.value(one, f"{place}.{name}"), name)
            for name, one in properties.items()
        ]
        return r"\{" + in_order([(text, name in required) for text, name in members]) + r"\}"

    def map(self, schema: Mapping[str, Any], more: Any, place: str) -> str:
        """An object with any names. A name may occur twice, and then the last one counts, so only one is certain."""
        low, high = bounds(schema, "minProperties", "maxProperties", place)
        if low > 1:
            raise refuse(f"{place + '.' if place else ''}minProperties above 1 is not supported")
        if more is False or high == 0:
            if low:
                raise refuse(f"{place or 'the schema'} needs a property and allows none")
            return r"\{\}"
        one = f'"{CHARACTER}*"{COLON}{self.value(more, f"{place}.additionalProperties")}'
        return r"\{" + several(one, low, high) + r"\}"

    def array(self, schema: Mapping[str, Any], place: str) -> str:
        low, high = bounds(schema, "minItems", "maxItems", place)
        first = schema.get("prefixItems", [])
        if schema.get("uniqueItems") and (high is None or high > 1):
            raise refuse(f"{place + '.' if place else ''}uniqueItems is not supported: regular expressions forget")
        if not isinstance(first, list):
            raise refuse(f"{place}.prefixItems must be a list of schemas")
        given = [self.value(one, f"{place}.prefixItems[{i}]") for i, one in enumerate(first)]
        check_size(sum(map(len, given)))
        rest = schema.get("items", True)
        if rest is False:
            high = len(given) if high is None else min(high, len(given))
        if high is not None and high < low:
            raise refuse(f"{place or 'the schema'} needs at least {low} items and allows {high}")
        item = self.value(rest, f"{place}.items") if rest is not False else ""
        if not given:
            return r"\[" + several(item, low, high) + r"\]"
        if high is not None and high < len(given):
            given = given[:high]
        if not given:
            return r"\[\]"
        tail, top = "", None if high is None else high - len(given)
        if top != 0:
            tail = f"(?:{COMMA}{item}){repeat(max(0, low - len(given)), top)}"
        for i in range(len(given) - 1, -1, -1):  # backwards: the array may end after any item, once there are enough
            joined = given[i] + tail
            tail = (COMMA if i else "") + joined
            tail = f"(?:{tail})?" if i >= low else tail
        return r"\[" + tail + r"\]"

    def string(self, schema: Mapping[str, Any], place: str) -> str:
        low, high = bounds(schema, "minLength", "maxLength", place)
        kinds = [word for word in ("pattern", "format") if word in schema]
        sized = [word for word in ("minLength", "maxLength") if word in schema]
        if len(kinds) + bool(sized) > 1:
            raise refuse(f"{place + '.' if place else ''}{kinds[0]} beside {[*kinds[1:], *sized][0]} is not supported")
        if "format" in schema:
            if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
                known = ", ".join(FORMATS)
                raise refuse(f"{place + '.' if place else ''}format {schema['format']!r:.40} is not one of {known}")
            return f'"{FORMATS[schema["format"]]}"'
        inside = string_pattern(schema["pattern"], place) if "pattern" in schema else CHARACTER + repeat(low, high)
        return f'"{inside}"'

    def number(self, schema: Mapping[str, Any], place: str) -> str:
        return number_between(*limits(schema, place), place) if limited(schema) else NUMBER

    def integer(self, schema: Mapping[str, Any], place: str) -> str:
        if not limited(schema):
            return f"-?{NATURAL}"
        low, above, high, below = limits(schema, place)
        first = None if low is None else int(-(-low // 1)) + (above and low == int(low))
        last = None if high is None else int(high // 1) - (below and high == int(high))
        if first is not None and last is not None and first > last:
            raise refuse(f"{place or 'the schema'} has no integer between its bounds")
        return integers(first, last)

    def boolean(self, schema: Mapping[str, Any], place: str) -> str:
        return "(?:true|false)"

    def null(self, schema: Mapping[str, Any], place: str) -> str:
        return "null"


class Kinds(NamedTuple):
    """Types (integers and numbers count as one), or values."""

    types: set[str]
    values: Sequence[Any]

    def meets(self, other: "Kinds") -> bool:
        """Whether a value may belong to both."""
        pairs = [(self.types, other.values), (other.types, self.values)]
        of_type = any(
            JSON_TYPES[kind](v) for types, values in pairs for kind in types & JSON_TYPES.keys() for v in values
        )
        words = [{json.dumps(v, sort_keys=True) for v in values} for values in (self.values, other.values)]
        return of_type or bool(self.types & other.types) or bool(words[0] & words[1])


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Translate = Callable[[SchemaTranslation, Mapping[str, Any], str], str]
TYPES: dict[str, tuple[Translate, tuple[str, ...]]] = {
    "object": (
        SchemaTranslation.object,
        ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    ),
    "array": (SchemaTranslation.array, ("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
    "string": (SchemaTranslation.string, ("minLength", "maxLength", "pattern", "format")),
    "number": (SchemaTranslation.number, BOUNDS),
    "integer": (SchemaTranslation.integer, BOUNDS),
    "boolean": (SchemaTranslation.boolean, ()),
    "null": (SchemaTranslation.null, ()),
}
"""Type -> its translation, and the keywords that apply to it."""
SPECIAL: dict[str, Translate] = {
    "$ref": SchemaTranslation.reference, "const": SchemaTranslation.values, "enum": SchemaTranslation.values,
    "anyOf": SchemaTranslation.any_of, "oneOf": SchemaTranslation.any_of, "allOf": SchemaTranslation.any_of,
}  # fmt: skip
JSON_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "integer": lambda v: v.is_integer() if isinstance(v, float) else isinstance(v, int) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}


def check_size(characters: int) -> None:
    """Refuse a schema before its regular expression fills the memory."""
    require(
        characters <= LONGEST,
        f"response_format: the schema is too large: its regular expression has more than {LONGEST} characters",
    )


def listed_values(schema: Mapping[str, Any], place: str) -> list[Any]:
    """The values that const or enum allows."""
    found = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(found, list) or not found:
        raise refuse(f"{place + '.' if place else ''}enum must be a list of values")
    return found


def implied_types(schema: Any) -> list[str]:
    """The types that the keywords of a schema without `type` apply to. (It would allow values of other types, too.)"""
    return [kind for kind, (_, words) in TYPES.items() if kind != "integer" and any(word in schema for word in words)]


def bounds(schema: Mapping[str, Any], least: str, most: str, place: str) -> tuple[int, int | None]:
    low, high = schema.get(least, 0), schema.get(most)
    for word, value in ((least, low), (most, high)):
        given = word in schema
        if given and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10_000):
            raise refuse(f"{place + '.' if place else ''}{word}={value!r:.40} must be a whole number up to 10000")
    if high is not None and high < low:
        raise refuse(f"{place + '.' if place else ''}{least}={low} is above {most}={high}")
    return low, high


def repeat(low: int, high: int | None) -> str:
    return "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"


def several(one: str, low: int, high: int | None) -> str:
    """Between low and high repetitions of `one`, separated by commas."""
    if high == 0:
        return ""
    some = f"{one}(?:{COMMA}{one}){repeat(max(0, low - 1), None if high is None else high - 1)}"
    return some if low else f"(?:{some})?"


def in_order(members: Sequence[tuple[str, bool]]) -> str:
    """Members in their order, separated by commas; each is (text, whether it is required)."""
    first = next((i for i, (_, needed) in enumerate(members) if needed), None)
    if first is None:
        check_size(sum((i + 1) * len(text) for i, (text, _) in enumerate(members)))
        options = [
            text + "".join(f"(?:{COMMA}{later})?" for later, _ in members[i + 1 :])
            for i, (text, _) in enumerate(members)
        ]
        return f"(?:{'|'.join(options)})?"
    before = "".join(f"(?:{text}{COMMA})?" for text, _ in members[:first])
    after = (f"{COMMA}{text}" if needed else f"(?:{COMMA}{text})?" for text, needed in members[first + 1 :])
    return before + members[first][0] + "".join(after)


def any_value(depth: int) -> str:
    """Any JSON, nested up to `depth`."""
    simple = [f'"{CHARACTER}*"', NUMBER, "true", "false", "null"]
    if not depth:
        return either(simple)
    inner = any_value(depth - 1)
    member = f'"{CHARACTER}*"{COLON}{inner}'
    return either([*simple, r"\[" + several(inner, 0, None) + r"\]", r"\{" + several(member, 0, None) + r"\}"])


def limited(schema: Mapping[str, Any]) -> bool:
    return any(word in schema for word in BOUNDS)


def limits(schema: Mapping[str, Any], place: str) -> tuple[float | None, bool, float | None, bool]:
    """(low, whether it is excluded, high, whether it is excluded)."""
    for word in BOUNDS:
        value = schema.get(word, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 10**15:
            raise refuse(f"{place + '.' if place else ''}{word}={value!r:.40} must be a number up to 10^15")
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    out_low, out_high = (
        above is not None and (low is None or above >= low),
        below is not None and (high is None or below <= high),
    )
    return above if out_low else low, out_low, below if out_high else high, out_high
