"""JSON schemas of people's generators: a grammar allows only what the library jsonschema accepts, and says what it cannot keep.

Texts are random walks over a matcher's mask with a real tokenizer: no model runs.
"""

import datetime
import decimal
import enum
import json
import random
import threading
import time
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest
import referencing
import torch
from conftest import SMOLLM2
from pydantic import BaseModel, Field

from gpt_faster.decoding.grammar import Grammars, json_schema, lark, regex
from gpt_faster.decoding.json_schema import PATTERNS, rewrite
from gpt_faster.formats.load import open_checkpoint
from gpt_faster.server.parsing import TOOL_FORMATS, AnswerParser, tool_call_grammar
from gpt_faster.text.token_bytes import token_bytes
from gpt_faster.text.tokenizer_files import load as load_tokenizer

EOS = 2


class Walker:
    """Random texts that a grammar allows: mostly short tokens, soon those that end something."""

    def __init__(self):
        self.tokenizer = load_tokenizer(open_checkpoint(SMOLLM2).tokenizer)
        self.grammars = Grammars(self.tokenizer, [EOS], self.tokenizer.n_vocab)
        self.pieces = token_bytes(self.tokenizer)
        self.words = torch.zeros(-(-self.tokenizer.n_vocab // 32), dtype=torch.int32)
        self.ends = self.are(lambda piece: piece in (b'"', b"}", b"]", b'"}', b"}}", b"]}", b'"]', b"0"))
        self.short = self.are(lambda piece: len(piece) < 4)

    def are(self, test):
        chosen = np.zeros(32 * len(self.words), bool)
        chosen[[i for i, piece in enumerate(self.pieces) if piece and test(piece)]] = True
        return chosen

    def allowed(self, matcher):
        matcher.fill(self.words)
        return np.unpackbits(self.words.numpy().view(np.uint8), bitorder="little").astype(bool)

    def text(self, spec, rng, n_token=150, n_free=25):
        """None if it does not come to an end."""
        matcher, pieces = self.grammars.matcher(spec), []
        for i in range(n_token):
            allowed = self.allowed(matcher)
            assert allowed.any(), b"".join(pieces)
            if allowed[EOS] and (allowed.sum() == 1 or i > n_free or rng.random() < .3):
                return b"".join(pieces).decode()
            allowed[EOS] = False
            for some, p in ((self.ends, .95 if i > n_free else .25), (self.short, .8)):
                if (allowed & some).any() and rng.random() < p:
                    allowed &= some
            token = int(rng.choice(allowed.nonzero()[0]))
            matcher.advance(token)
            pieces.append(self.pieces[token])
        return None

    def texts(self, spec, n=8, seed=0, **limits):
        rng = random.Random(seed)
        return [text for _ in range(n) if (text := self.text(spec, rng, **limits)) is not None]

    def accepts(self, spec, text):
        matcher, ids = self.grammars.matcher(spec).matcher, self.tokenizer.backend.encode(text, special=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def walker():
    return Walker()


def spec_of(schema):
    return json_schema(json.dumps(schema))


def check(walker, schema, reference=None, at_least=1, **how):
    reference = schema if reference is None else reference
    validator = jsonschema.validators.validator_for(reference, default=jsonschema.Draft202012Validator)(reference, registry=referencing.Registry())
    texts = walker.texts(spec_of(schema), **how)
    for text in texts:
        validator.validate(json.loads(text))
    assert len(texts) >= at_least, texts
    return texts


# ---- Keywords ------------------------------------------------------------------------------------

DRAFT_4, DRAFT_7 = (f"http://json-schema.org/draft-0{i}/schema#" for i in (4, 7))
BOOL, A_OR_B = {"type": "boolean"}, {"enum": ["a", "b"]}
KEPT = [
    {}, {"type": "boolean"}, {"type": ["string", "null"], "maxLength": 3}, {"enum": [1, "a", None, True, [1]]}, {"const": {"a": [1, {"b": None}]}},
    {"const": 0.1}, {"const": -0.0}, {"const": 1e22}, {"const": 2**53},
    # annotations
    {"type": "null", "title": "x", "description": "d", "default": 3, "examples": ["b"], "deprecated": True, "readOnly": True, "$comment": "c", "x-y": 1},
    {"type": "string", "contentMediaType": "a/b", "contentEncoding": "base64", "contentSchema": {}}, {"type": "string", "format": "path"},
    {"type": "integer", "format": "int32", "nullable": True}, {"discriminator": {"propertyName": "k"}, "type": "boolean"},
    # numbers
    {"type": "integer", "minimum": 3, "maximum": 17}, {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, {"type": "number", "minimum": .5, "maximum": .75},
    {"type": "integer", "maximum": 2**63 - 1, "minimum": 2**63 - 99}, {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 99},
    {"type": "integer", "multipleOf": 7, "maximum": 100, "minimum": 0}, {"type": "number", "multipleOf": .25, "minimum": 0, "maximum": 9},
    {"type": "number", "minimum": 3, "exclusiveMinimum": True, "$schema": DRAFT_4, "maximum": 4}, {"minimum": 5}, {"type": "integer", "minimum": 1.5, "maximum": 2.5},
    # strings
    {"type": "string", "minLength": 2, "maxLength": 4}, {"type": "string", "maxLength": 2.0}, {"type": "string", "pattern": "^a+$"}, {"type": "string", "pattern": "^a|b$", "maxLength": 6},
    {"type": "string", "pattern": "^[^a]$"}, {"type": "string", "pattern": "^\\d{3}-[\\s\\S]$"}, {"minLength": 3},
    *({"type": "string", "format": name, "maxLength": 40} for name in ("date-time", "date", "time", "duration", "uuid", "ipv4", "ipv6")),
    # arrays
    {"type": "array", "items": BOOL, "minItems": 1, "maxItems": 3}, {"type": "array", "prefixItems": [BOOL, {"const": 1}], "items": False},
    {"type": "array", "prefixItems": [BOOL], "items": {"const": 2}, "maxItems": 4}, {"type": "array", "items": [BOOL], "additionalItems": {"const": 3}, "$schema": DRAFT_7},
    {"type": "array", "items": BOOL, "uniqueItems": True, "maxItems": 1}, {"type": "array", "items": BOOL, "uniqueItems": False},
    {"type": "array", "contains": {"const": 1}, "minContains": 0, "items": BOOL}, {"type": "array", "items": {"not": {}}}, {"type": "string", "uniqueItems": True, "contains": {}},
    # objects
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}, {"type": "object", "properties": {"a": BOOL}, "required": ["b", "a"]},
    {"type": "object", "additionalProperties": BOOL, "minProperties": 1, "maxProperties": 2}, {"type": "object", "minProperties": 0, "additionalProperties": BOOL},
    {"type": "object", "properties": {"a": BOOL, "b": BOOL}, "additionalProperties": False, "minProperties": 1},
    {"type": "object", "properties": {"a": BOOL, "b": BOOL}, "required": ["a", "b"], "minProperties": 2, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x": BOOL}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x": BOOL}, "properties": {"xa": {"enum": [True, 3]}}, "additionalProperties": {"const": 0}},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": BOOL}, {"type": "object", "propertyNames": A_OR_B, "additionalProperties": BOOL},
    {"type": "object", "propertyNames": {"pattern": "^a+$"}, "additionalProperties": BOOL}, {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}, "additionalProperties": BOOL},
    {"type": "object", "propertyNames": A_OR_B, "additionalProperties": BOOL, "required": ["a"], "properties": {"a": {"const": 3}, "z": {}}},
    {"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 1}}, "additionalProperties": False}, {"type": "object", "unevaluatedProperties": False, "properties": {"a": BOOL}},
    {"type": "object", "dependentRequired": {}, "additionalProperties": BOOL}, {"type": "string", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "properties": {'a"b': BOOL, "é\n": {"const": 1}, "~/": {"const": 2}}, "additionalProperties": False},
    # alternatives
    {"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "integer"}]}, {"oneOf": [{"const": True}, {"const": 1}]}, {"oneOf": [{}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}}}, {"type": "object", "properties": {"k": A_OR_B | {"enum": ["b"]}}}]},
    {"type": "object", "oneOf": [{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"enum": ["b", "c"]}}}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"type": "object", "properties": {"a": {"maximum": 3, "minimum": 0}}}]},
    {"allOf": [{"properties": {"a": {"const": 1}}, "additionalProperties": False}, {"properties": {"b": {}}}], "type": "object"},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "additionalProperties": False},
    {"if": {"type": "string"}}, {"then": {"const": "a"}, "type": "boolean"},
]


@pytest.mark.parametrize("schema", KEPT, ids=lambda schema: json.dumps(schema)[:60])
def test_keywords_that_are_kept(walker, schema):
    check(walker, schema)


REFUSED = [
    ({"not": {"type": "string"}}, '"not"'), ({"if": {"type": "string"}, "then": {"const": "a"}}, '"if"'), ({"if": True, "else": False}, '"if"'),
    ({"type": "array", "contains": {"const": 1}}, '"contains"'), ({"type": "array", "unevaluatedItems": False}, '"unevaluatedItems"'),
    ({"properties": {"a/b": {"dependentRequired": {"a": ["b"]}}}}, '#/properties/a~1b: "dependentRequired"'), ({"dependentSchemas": {"a": {"required": ["b"]}}}, '"dependentSchemas"'),
    ({"dependencies": {"a": ["b"]}}, '"dependencies"'), ({"propertyNames": {"not": {"const": "a"}}}, '"propertyNames"'),
    ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]}, '"unevaluatedProperties"'), ({"$dynamicRef": "#x"}, '"\\$dynamicRef"'),
    ({"type": "object", "additionalProperties": BOOL, "minProperties": 2}, '"minProperties" over 1'),
    ({"type": "object", "patternProperties": {"^x": BOOL, "y$": {"const": 1}}}, "not disjoint"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, '"oneOf"'), ({"oneOf": [{"type": "string"}, {"const": "b"}]}, '"oneOf"'), ({"oneOf": [{"const": 1}, {"const": 1.0}]}, '"oneOf"'),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, '"oneOf"'), ({"oneOf": [{"minimum": 3}, {"type": "string"}]}, '"oneOf"'),
    ({"type": "integer", "multipleOf": 123457}, '"multipleOf"'), ({"multipleOf": 0.123457}, '"multipleOf"'), ({"type": "number", "minimum": 1e20}, '"minimum"'), ({"maximum": -10**400}, '"maximum"'),
    ({"multipleOf": 5, "allOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, 'several "multipleOf"'), ({"const": 2**63 + 1}, '"const"'), ({"enum": [1, [2**64]]}, '"enum"'),
    ({"type": "string", "pattern": "^(?=a)b"}, '"pattern" with'), ({"type": "string", "pattern": "^(a)\\1$"}, "backreferences"), ({"pattern": 3}, "regular expression"),
    ({"pattern": "a?" * 3000}, '"pattern" is limited'), ({"type": "foo"}, "Invalid type"), ({"enum": []}, "anyOf is empty"), ({"anyOf": {}}, "list of schemas"), ({"items": 3}, "#/items"),
    ({"$ref": "http://other/x.json"}, "is not in the schema"), ({"$ref": "#/$defs/a"}, "is not in the schema"), ({"$ref": 3}, "must be a string"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a", "title": "b"}}}, "refers to itself"),
]


@pytest.mark.parametrize("schema, reason", REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_keywords_that_are_refused(walker, schema, reason):
    with pytest.raises(ValueError, match=reason):
        walker.grammars.check(spec_of(schema))


def test_nulls_are_absent(walker):
    check(walker, {"type": "boolean", "enum": None, "items": None, "$ref": None}, BOOL)


def test_a_false_schema_is_refused():
    with pytest.raises(ValueError, match="allows no value"):
        rewrite(False)


def test_sets_are_accepted_and_noted():
    assert rewrite({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})[1] == ["#: uniqueItems is not enforced: items may be repeated"]
    assert rewrite({"type": "array", "uniqueItems": True, "maxItems": 1})[1] == []


def test_bounds_of_numbers(walker):
    """No number beside a bound is allowed that it excludes: llguidance 1.9 allows 0 for {"exclusiveMinimum": 0, "maximum": 0.5}."""
    rng, n_allowed = random.Random(1), 0
    for _ in range(60):
        digits = rng.randrange(9)
        low = rng.randrange(-30, 30) * rng.choice([1, 10, 1000]) + rng.randrange(10**digits) / 10**digits
        high = round(low + rng.choice([10**-digits, .5, 1, 5, 17 * 10**-digits]), digits)
        schema = {"type": rng.choice(["number", "number", "integer"])}
        schema |= {key: low for key in rng.sample(["minimum", "exclusiveMinimum"], rng.randrange(3))}
        schema |= {key: high for key in rng.sample(["maximum", "exclusiveMaximum"], rng.randrange(3))}
        try:
            walker.grammars.check(spec := spec_of(schema))
        except ValueError as e:
            assert "Unsatisfiable" in str(e)
            continue
        near = {decimal.Decimal(repr(bound)) + decimal.Decimal(repr(sign * step)) for bound in (float(low), float(high)) for sign in (1, -1)
                for step in (0., 1., .1, 1e-5, 10.**-digits, .1 * 10.**-digits)}
        for text in {text for x in near for text in (format(x, "f"), str(int(x)), str(int(x) + 1))}:
            if walker.accepts(spec, text):
                n_allowed += 1
                jsonschema.validate(json.loads(text), schema)
    assert n_allowed > 200


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_without_their_lookaheads_are_the_same(pattern):
    import re
    rng, parts = random.Random(0), "0 12 . + - P 3Y 1M 2D T 4H 5S 1,5S W 6W ..".split()
    texts = ["".join(rng.choices(parts, k=rng.randrange(6))) for _ in range(5000)]
    assert 10 < sum(bool(re.search(pattern, text)) for text in texts)
    for text in texts:
        assert bool(re.search(pattern, text)) == bool(re.search(PATTERNS[pattern], text)), text


# ---- References ----------------------------------------------------------------------------------

NODE = {"type": "object", "properties": {"v": BOOL, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": False}
REFERENCES = [
    {"$ref": "#/definitions/a~1b~0c%20d", "definitions": {"a/b~c d": {"const": 1}}}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}}, {"$ref": "#foo", "$defs": {"z": {"$anchor": "foo", "const": 5}}}, {"$id": "urn:uuid:1", "$ref": "#/$defs/a", "$defs": {"a": {"const": 3}}},
    {"$id": "http://x.y/root.json", "$ref": "item.json", "$defs": {"i": {"$id": "item.json", "type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": 2}}}, "n": {"const": 3}}},
    {"type": "object", "$ref": "#/properties/x", "properties": {"x": {"type": ["integer", "object"], "maximum": 9}}}, {"$ref": "#/x/1", "x": [1, {"const": 1}]},
    {"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer", "minimum": 3}}}, {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": False}},
    {"$schema": DRAFT_7, "$ref": "#/definitions/A", "definitions": {"A": {"$id": "#an", "type": "array", "items": {"$ref": "#an"}, "maxItems": 1}}},
    {"type": "object", "properties": {"$ref": {"const": "a"}, "$id": {"const": "b"}, "$defs": {"const": 1}}, "required": ["$ref", "$id"], "additionalProperties": False},
    {"$defs": {"P": {"oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}]}, "C": {"type": "object", "properties": {"k": {"const": "c"}}, "additionalProperties": False},
               "D": {"type": "object", "properties": {"k": {"enum": ["d"]}, "q": {"type": "array", "items": {"$ref": "#/$defs/P"}, "maxItems": 1}}, "required": ["q"], "additionalProperties": False}},
     "$ref": "#/$defs/P"},
    {"enum": [{"$ref": "#/a"}]}, {"default": {"$ref": "#/nope"}, "type": "null"}, {"const": {"$id": "x"}},
]


@pytest.mark.parametrize("schema", REFERENCES, ids=lambda schema: json.dumps(schema)[:60])
def test_references(walker, schema):
    check(walker, schema)


def tool(name, parameters):
    return dict(type="function", function=dict(name=name, parameters=parameters))


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_a_forced_call_keeps_each_tools_own_definitions(walker, form):
    def uses(definition):
        return {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}, "whole": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["a"],
                "additionalProperties": False, "$defs": {"A": definition}}
    tools = [tool("one", uses({"const": 1})), tool("two", uses({"const": "two"})), tool("three", None), tool("four", {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}})]
    names = set()
    for text in walker.texts(tool_call_grammar(tools, TOOL_FORMATS[form]), 40):
        parser = AnswerParser(TOOL_FORMATS[form], tools)
        [delta] = [*parser.push(text), *parser.finish("stop")]
        [call] = delta["tool_calls"]
        [parameters] = [t["function"]["parameters"] for t in tools if t["function"]["name"] == call["function"]["name"]]
        jsonschema.validate(json.loads(call["function"]["arguments"]), parameters or {"type": "object"})
        names.add(call["function"]["name"])
    assert names == {"one", "two", "three", "four"}


def test_a_grammars_json_is_rewritten_too(walker):
    spec = lark('start: "<" a ">" | "[" b "]"\na: %json {"$ref": "#/$defs/x~1y", "$defs": {"x/y": {"const": 1}}}\nb: %json {"x-guidance": {"whitespace_flexible": true}, "type": "boolean"}\n')
    assert {"<1>", "[true]"} <= set(walker.texts(spec, 30))
    for text in ('start: %json {"not": {"const": 1}}', 'start: %json {"a": '):
        with pytest.raises(ValueError, match="not"):
            lark(text)


# ---- Generators ----------------------------------------------------------------------------------

class Color(enum.Enum):
    RED, GREEN = "red", "green"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    friends: Annotated[list["Pet"], Field(max_length=2)] = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
Dog.model_rebuild()


class Tree(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    value: int
    left: "Tree | None" = None
    right: "Tree | None" = None


OPEN = [dict[Annotated[str, Field(pattern="^a+$")], int]]   # its schema allows more than the model
FIELDS = [bool, int, str, decimal.Decimal, Color, Color | None, Pet, list[Pet], Tree, Tree | None, Cat, Annotated[set[Color], Field(max_length=1)], dict[str, Cat], dict[Color, int], dict[Literal["x", "y"], bool],
          *OPEN, dict[Annotated[str, Field(min_length=2)], Color], dict[uuid.UUID, bool], tuple[int, Color], tuple[bool, ...], Literal[1, "a", None],
          datetime.datetime, datetime.date, uuid.UUID, datetime.timedelta, bytes, Annotated[int, Field(multiple_of=5, gt=0, lt=100)], Annotated[float, Field(gt=0, lt=1)],
          Annotated[str, Field(max_length=5)], Annotated[str, Field(pattern=r"^[A-Z]{2}\d?$")], int | Color | None, Any]


@pytest.mark.parametrize("seed", range(12))
def test_answers_to_pydantics_schemas(walker, seed):
    rng = random.Random(seed)
    kinds = rng.sample(FIELDS, 4)
    model = pydantic.create_model("M", __config__=pydantic.ConfigDict(extra="forbid"), **{f"f{i}": (kind, ...) if rng.random() < .8 else (kind | None, None) for i, kind in enumerate(kinds)})
    for text in check(walker, model.model_json_schema(), n=3, seed=seed, n_token=600, n_free=60, at_least=0 if set(kinds) & {Any, str, bytes, decimal.Decimal} else 1):
        if set(kinds) & set(OPEN):
            continue
        try:
            model.model_validate_json(text)
        except pydantic.ValidationError as e:      # of formats, which are wider than Python's dates
            assert {error["type"].split("_")[0] for error in e.errors()} <= {"datetime", "date", "time", "decimal", "uuid"}, (text, e)


# As zod 4's toJSONSchema writes them.
ZOD = [
    {"$schema": DRAFT_7, "type": "object", "properties": {"m": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}}, "required": ["m"], "additionalProperties": False},
    {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": {"type": "number"}, "required": ["a", "b"]},
    {"type": "array", "prefixItems": [BOOL, {"type": "number", "const": 1}], "items": False, "minItems": 2, "maxItems": 2}, {"type": "string", "format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"},
    {"$schema": DRAFT_7, "type": "array", "items": [BOOL, {"type": "number", "const": 1}], "additionalItems": False, "minItems": 2}, {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    {"type": "string", "format": "duration", "pattern": next(p for p in PATTERNS if "P(" in p), "maxLength": 12}, {"type": "string", "format": "base64", "contentEncoding": "base64", "pattern": "^(?:[0-9a-zA-Z+/]{4})*$", "maxLength": 8},
    {"oneOf": [{"type": "object", "properties": {"k": {"type": "string", "const": k}}, "required": ["k"], "additionalProperties": False} for k in "abc"]},
    {"type": "object", "properties": {"v": BOOL, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": False},
]


@pytest.mark.parametrize("schema", ZOD, ids=lambda schema: json.dumps(schema)[:60])
def test_answers_to_zods_schemas(walker, schema):
    check(walker, schema)


# ---- Hostile ones --------------------------------------------------------------------------------

def chain(n):
    return {"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{(i + 1) % n}"}}} for i in range(n)}}


HOSTILE = {
    "many alternatives": lambda: spec_of({"enum": [f"value {i}" for i in range(100_000)]}), "many objects": lambda: spec_of({"anyOf": [{"required": [f"a{i}"]} for i in range(10_000)]}),
    "a long chain of references": lambda: spec_of(chain(15_000)), "a chain that fits": lambda: spec_of(chain(100)), "deep": lambda: spec_of(json.loads('{"items":' * 400 + "{}" + "}" * 400)),
    "large counts": lambda: spec_of({"type": "array", "items": {"type": "string", "maxLength": 10**9}, "maxItems": 10**9, "minItems": 10**6}),
    "a large pattern": lambda: spec_of({"pattern": "((a{1,1000}){1,1000}){1,1000}"}), "many patterns": lambda: spec_of({"anyOf": [{"pattern": "a?" * 1000 + str(i)} for i in range(50)]}),
    "exponential": lambda: regex("(a|b)*a(a|b){25}"), "nested": lambda: regex("((((a*)*)*)*)*b"), "long": lambda: regex("a?" * 50_000), "rules": lambda: lark("".join(f"x{i}: x{i + 1}\n" for i in range(1500)) + 'x1500: "a"\nstart: x0'),
    "many properties": lambda: spec_of({"type": "object", "properties": {f"a{i}": {} for i in range(20_000)}}), "a large multiple": lambda: lark('start: %json {"multipleOf": 99999989}'),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_grammars_cost_seconds_at_most(walker, kind):
    """They end the process, or take minutes, where nothing bounds them. In a thread, as in the server: its stack is small."""
    outcome = []

    def compile_it():
        try:
            matcher = walker.grammars.matcher(HOSTILE[kind]())
            walker.allowed(matcher)
            outcome.append("compiled")
        except ValueError as e:
            outcome.append(str(e))
    start, thread = time.monotonic(), threading.Thread(target=compile_it)
    thread.start()
    thread.join()
    assert outcome and time.monotonic() - start < 20, outcome
    assert ("compiled" in outcome) == (kind in ("a chain that fits", "large counts", "a large pattern", "exponential", "nested", "rules")), outcome
