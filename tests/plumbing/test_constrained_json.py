"""JSON schemas of many kinds: every text that is generated under one is valid, by an independent validator."""

import contextlib
import json
import random
import re
import time
import tracemalloc

import jsonschema
import pytest
from exports import export
from vocabularies import words

pytest.importorskip("outlines_core", reason="needs the extra `constrain` (outlines-core)")

from adlm.constrain.automaton import byte_automaton, integers, number_between, string_pattern
from adlm.constrain.json_schema import schema_of, schema_regex
from adlm.data.tokenizers import raw_bytes

WORDS = ["name", "age", "id", "tags", "price", "city", "is_active", "größe", "a b", "created"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "uri"]
PATTERNS = [
    "^[A-Z]{2}[0-9]{1,3}$",
    r"^\d{3}-\d{2}$",
    "^(?:red|green|blue)$",
    "^[a-z_]+$",
    r"^v\d\.\d$",
    "^[ -~]{1,3}$",
    "^.{1,2}$",
]


def random_schema(rng: random.Random, depth: int = 2) -> dict:
    """One of a public style: what people write for tools and forms."""
    kinds = ["string", "text", "pattern", "format", "integer", "range", "number", "boolean", "null", "enum", "const"]
    kinds += ["object", "object", "array", "anyOf", "nullable", "tuple", "map", "ref"] if depth else []
    kind = rng.choice(kinds)

    def inner() -> dict:
        return random_schema(rng, depth - 1)

    low = rng.randint(0, 2)
    if kind == "text":
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 3)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == "format":
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == "range":
        a, b = sorted(rng.sample(range(-150, 1200), 2))
        bounds = [
            {"minimum": a, "maximum": b},
            {"exclusiveMinimum": a},
            {"maximum": b},
            {"exclusiveMaximum": b + 1, "minimum": a},
        ]
        return {"type": rng.choice(["integer", "number"]), **rng.choice(bounds)}
    if kind == "enum":
        return {
            "enum": rng.sample(
                ["red", "x y", 'q"uo\\te', 3, -1.5, None, True, [1, "a"], {"k": []}, "é"], rng.randint(1, 4)
            )
        }
    if kind == "const":
        return {"const": rng.choice(["fixed", 7, None, {"deep": [1, {"x": "y"}]}])}
    if kind == "object":
        names = rng.sample(WORDS, rng.randint(1, 3))
        required = [n for n in names if rng.random() < 0.6]
        more = {"additionalProperties": False} if rng.random() < 0.5 else {}
        return {"type": "object", "properties": {n: inner() for n in names}, "required": required, **more}
    if kind == "array":
        return {"type": "array", "items": inner(), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [inner() for _ in range(2)]}
    if kind == "nullable":
        return {"type": [rng.choice(["string", "integer", "boolean"]), "null"]}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": rng.randint(0, 2)}
    if kind == "map":
        return {"type": "object", "additionalProperties": random_schema(rng, 0), "maxProperties": 2}
    if kind == "ref":
        return {"$ref": "#/$defs/thing"}
    return {"type": kind}


def rooted(rng: random.Random) -> dict:
    schema = {
        "type": "object",
        "properties": {"it": random_schema(rng)},
        "required": ["it"],
        "additionalProperties": False,
    }
    schema["$defs"] = {"thing": random_schema(rng, 0)}
    return schema


def test_a_reference_is_read_as_a_part_of_an_address():
    """Characters that an address cannot hold are written as %20, / and ~ in a name as ~1 and ~0."""
    schema = {"$defs": {"a b/c~d": {"const": 7}}, "$ref": "#/$defs/a%20b~1c~0d"}
    assert re.fullmatch(schema_regex(schema), "7") and not re.fullmatch(schema_regex(schema), "8")


def valid(schema, text: str) -> None:
    kind = jsonschema.Draft202012Validator  # whose `time` has an offset: that of the plain FormatChecker is draft 3's
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


@pytest.fixture(scope="module", params=[raw_bytes, words])
def lm(request, tmp_path_factory):
    """Random weights: a model that has never seen JSON."""
    import adlm

    folder = tmp_path_factory.mktemp("json") / "export"
    return adlm.load(export(folder, request.param(), length=160), "cpu")


def check(lm, numbers) -> None:
    for number in numbers:
        schema = rooted(random.Random(number))
        sampler = ["mdlm", "remdm-cap", "confidence"][number % 3]
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}} if number % 2 else schema
        (text,) = lm.generate(response_format=form, length=150, steps=3, sampler=sampler, seed=number, n=1)
        valid(schema, text.text)


def test_texts_are_valid_json_of_their_schema(lm):
    check(lm, range(12))


@pytest.mark.slow
def test_two_hundred_schemas(lm):
    check(lm, range(200))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf is not supported here"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, ".a.not is not supported here"),
        ({"type": "string", "format": "color"}, "format 'color' is not one of"),
        ({"type": "string", "pattern": "a(?=b)"}, "is not supported from"),
        ({"type": "string", "pattern": "^a$", "maxLength": 3}, "pattern beside maxLength is not supported"),
        ({"properties": {"me": {"$ref": "#"}}}, "is not found"),
        ({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}, "refers to itself"),
        ({"allOf": [{}, {}]}, "allOf of several schemas"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf needs options of different types"),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "oneOf needs options of different types"),
        ({"oneOf": [{"enum": ["a", 1]}, {"const": 1}]}, "oneOf needs options of different types"),
        ({"oneOf": [{"type": "null"}, {"minimum": 3}]}, "oneOf needs options of different types"),
        ({"oneOf": [{"type": "null"}, {"anyOf": [{"type": "null"}]}]}, "oneOf needs options of different types"),
        ({"type": "number", "minimum": 3, "maximum": 2}, "has no number between its bounds"),
        ({"type": "number", "minimum": -3, "exclusiveMaximum": -3}, "has no number between its bounds"),
        ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": -2}, "has no number between its bounds"),
        ({"type": "colour"}, "has type 'colour'; known are"),
        (False, "is no schema that any text matches"),
        ({"type": "object", "required": ["a"]}, "required names 'a', which is no property"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "has no integer between its bounds"),
        ({"enum": [1], "type": "string"}, "has no value of type 'string'"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        schema_regex(schema)


def test_options_that_share_no_value_stand_side_by_side():
    automaton = byte_automaton(
        schema_regex({"oneOf": [{"type": ["integer", "number"]}, {"const": "a"}, {"enum": ["1"]}]})
    )
    for text, accepted in (("12", True), ("1.5", True), ('"a"', True), ('"1"', True), ('"b"', False)):
        state = automaton.start
        for byte in text.encode():
            state = automaton.next_SB[state, byte]
        assert bool(automaton.accepting_S[state]) == accepted, text


@pytest.mark.parametrize(
    "given", ["{", 3, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}]
)
def test_a_format_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match="response_format: "):
        schema_of(given)


def test_integers_between_bounds_are_exactly_those():
    rng = random.Random(0)
    for _ in range(60):
        low, high = sorted(rng.choices(range(-130, 1200), k=2))
        for a, b in ((low, high), (None, high), (low, None)):
            regex = re.compile(integers(a, b))
            for n in range(-140, 1300):
                inside = (a is None or a <= n) and (b is None or n <= b)
                assert (regex.fullmatch(str(n)) is not None) == inside, (a, b, n)


def test_numbers_between_bounds_are_inside():
    rng = random.Random(0)
    for _ in range(40):
        low, high = sorted(rng.choices(range(-20, 40), k=2))
        above, below = rng.random() < 0.5, rng.random() < 0.5
        try:
            regex = re.compile(number_between(low, above, high, below, ""))
        except ValueError:
            assert low == high
            continue
        for n in range(-2200, 4200):
            x = n / 100
            inside = (low < x or (low == x and not above)) and (x < high or (x == high and not below))
            for text in {f"{x:.2f}", f"{x:g}"}:
                assert inside or regex.fullmatch(text) is None, (low, above, high, below, text)
                assert not inside or x == 0 or regex.fullmatch(text), (low, above, high, below, text)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("rest", [{"const": 1}, False])
def test_lists_have_every_length_that_is_allowed_and_no_other(first, rest):
    """All bounds on the number of items, by the independent validator; one item has one spelling."""
    for low in (None, 0, 1, 2, 3):
        for high in (None, 0, 1, 2, 3, 4):
            bounds = {"minItems": low, "maxItems": high}
            schema = {"type": "array", "items": rest, **{word: n for word, n in bounds.items() if n is not None}}
            schema |= {"prefixItems": [{"const": 1}] * first} if first else {}
            possible = [n for n in range(8) if jsonschema.Draft202012Validator(schema).is_valid([1] * n)]
            try:
                regex = re.compile(schema_regex(schema))
            except ValueError:
                assert not possible, schema
            else:
                assert [n for n in range(8) if regex.fullmatch(json.dumps([1] * n))] == possible, schema


def test_patterns_never_leave_their_string():
    for pattern in [*PATTERNS, "[^a]+", ".+", r"\W\S", "a|b", "x"]:
        regex = string_pattern(pattern, "")
        assert "&&" in regex or not (re.fullmatch(regex, '"') or re.fullmatch(regex, "\\"))


SETS = [
    r"[\w-]",
    "[a-]",
    "[+-]",
    "[A-Z -]",
    "[^ -]",
    "[^a-]",
    "[-x]",
    "[^-]",
    "[0-9--5]",
    "[^0-9--5]",
    r"[\^-a]",
    r"[a\-c]",
]
SETS += ["[a^]", "[!&&a]", "[~~]", r"[\d.-]", r"[^\w~&-]", r"[^\s]", r"\S", "."]


@pytest.mark.parametrize("pattern", SETS)
def test_a_set_of_a_pattern_holds_the_characters_that_the_schema_means(pattern):
    """One character after another: what stands for itself in JSON, and what only some standards call a space."""
    automaton = byte_automaton(string_pattern(f"^{pattern}$", ""))
    for code in [*range(0x20, 0x7F), 0xA0, 0xE9, 0x1680, 0x2003, 0x2028, 0x3000]:
        state = automaton.start
        for byte in chr(code).encode():
            state = automaton.next_SB[state, byte]
        meant = re.fullmatch(pattern, chr(code), re.ASCII if "w" in pattern else 0) is not None
        meant &= chr(code) not in '"\\' and not (pattern == "." and code == 0x2028)
        assert bool(automaton.accepting_S[state]) == meant, chr(code)


def referring(levels: int, one: dict) -> dict:
    """A schema whose definitions name the next one twice."""
    named = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "items": False, **one}
        for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**named, f"d{levels}": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        referring(30, {}),
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)} | {"3000": {}}},
        {"type": "object", "properties": {str(i): {"type": "null"} for i in range(20_000)}},
        {"type": "array", "prefixItems": [{"type": "null"}] * 20_000},
        {"anyOf": [{"$ref": "#/$defs/long"}] * 20_000, "$defs": {"long": {"enum": ["x" * 90_000]}}},
    ],
    ids=["doubled", "chain", "optional", "tuple", "named often"],
)
def test_a_small_schema_of_a_huge_expression_is_refused_at_once(schema):
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"too large|more than 32 times"):
            schema_regex(schema)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1 << 26 and time.process_time() - began < 20, most


def test_definitions_that_name_each_other_twice_take_no_time_of_their_own():
    """What is referred to twice is read once, also where nothing of it is written."""
    assert schema_regex(referring(30, {"maxItems": 0})) == r"\[\]"
    assert schema_regex(referring(3, {"minItems": 2})).count("null") == 8


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"oneOf": [{"enum": 5}, {"type": "string"}]}, "enum must be a list"),
        ({"enum": [float("inf")], "type": "integer"}, "no value of type 'integer'"),
        ({"enum": [10**400, 1.5], "type": "string"}, "no value of type 'string'"),
        ({"const": float("inf")}, "JSON has no word for"),
        ({"type": "integer", "minimum": float("nan")}, "minimum=nan must be a number"),
        ({"type": "string", "minLength": None, "maxLength": 3}, "minLength=None must be a whole number"),
        ({"type": "object", "properties": {"a": {}}, "required": [["a"]]}, "of the wrong kind"),
        ({"type": "string", "format": []}, r"format \[\] is not one of"),
        ({"enum": [1], "type": [[1]]}, "no value of type"),
        ({"enum": [1], "type": {}}, "no value of type"),
        ({"$ref": {"a": 1}}, "is not found"),
    ],
)
def test_schemas_of_wrong_kinds_are_refused_in_one_line(schema, says):
    with pytest.raises(ValueError, match=says):
        schema_regex(schema)


def test_spoilt_schemas_are_refused_in_one_line():
    """Any part of an ordinary schema replaced by what does not belong there."""
    odd = [None, True, 0, -1, 1.5, 10**400, float("inf"), "", "x", [], {}, [[]], [{}], {"a": []}, ["string", []]]

    def places(value, at=()):
        yield at
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, part in parts:
            yield from places(part, (*at, key))

    for number in range(1500):
        rng = random.Random(number)
        schema = rooted(rng)
        *path, last = rng.choice([at for at in places(schema) if at])
        inner = schema
        for part in path:
            inner = inner[part]
        inner[last] = rng.choice(odd)
        with contextlib.suppress(ValueError):
            schema_regex(schema_of(schema))
