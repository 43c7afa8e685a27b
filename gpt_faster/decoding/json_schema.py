"""JSON schemas as llguidance keeps them: a grammar that never allows more than the schema does.

Resolves references, drops annotations, writes older drafts as 2020-12, and refuses each
restriction that a grammar cannot keep, by name and place. It knows neither tokens nor requests.

    bundle = Bundle()                              # several schemas in one document
    call = {"properties": {"arguments": bundle.add(schema)}}
    text = json.dumps(bundle.document(call))       # references point into its own $defs
"""

import json
import math
import re
from urllib.parse import unquote, urldefrag, urljoin

# ---- Keywords -----------------------------------------------------------------------------------

# These hold schemas: one, a list, or one for each name.
ONE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else",
       "propertyNames", "unevaluatedItems", "unevaluatedProperties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = {"minimum": math.inf, "exclusiveMinimum": math.inf,      # allowed numbers are this way
          "maximum": -math.inf, "exclusiveMaximum": -math.inf}
KEPT = {*COUNTS, *BOUNDS, "type", "enum", "const", "required", "multipleOf", "pattern", "format"}
# What llguidance cannot keep, by the type of value that it restricts ("" for any). Each has values
# that restrict nothing: restricts_nothing().
NOT_KEPT = {"not": "", "if": "", "then": "", "else": "", "$dynamicRef": "", "$recursiveRef": "",
            "disallow": "", "extends": "", "divisibleBy": "number", "contains": "array",
            "unevaluatedItems": "array", "propertyNames": "object", "dependentRequired": "object",
            "dependentSchemas": "object", "dependencies": "object",
            "unevaluatedProperties": "object"}
# Other formats are annotations, as the standard says.
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
           "uri"}

# Patterns of generators with lookaheads, which a grammar cannot have -> the same without them.
DURATION_TIME = (r"T(?:\d+H(?:\d+M)?(?:\d+([.,]\d+)?S)?|\d+M(?:\d+([.,]\d+)?S)?"
                 r"|\d+([.,]\d+)?S)")
PATTERNS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",    # pydantic's Decimal
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?"
    r"(\d+([.,]\d+)?S)?)?)$":                      # zod's duration
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{DURATION_TIME})?"
        rf"|{DURATION_TIME})$",
}

MAX_PATTERN = 4000                                 # characters: llguidance needs half a second
MAX_PATTERNS = 20_000                              # of all patterns together
MAX_SCHEMAS = 20_000                               # within a schema
MAX_PROPERTIES = 2000                              # of one object: half a second
MAX_MULTIPLE = 100_000                             # an automaton of so many states
SMALLEST = 1e-30                                   # above an exclusive bound of 0


class Bundle:
    """Schemas rewritten for one document, whose $defs they share under new names."""

    def __init__(self):
        self.definitions, self.names, self.roots = {}, {}, []
        self.n_pattern = self.n_schema = self.n_multiple = 0
        self.notes = []                            # restrictions that are not kept

    def add(self, schema, name: str = "#") -> dict | bool:
        """The schema, with references into this document. ValueError if it cannot be kept.

        name: of the schema, in error messages.
        """
        return self.add_part(schema, schema, name)

    def add_part(self, schema, part, name: str) -> dict | bool:
        """As add(), of a part of the schema, which may refer to other parts."""
        try:
            source = Source(schema)
            self.roots.append(source)              # names holds ids of its nodes
            return self._rewrite(source, part, name)
        except RecursionError:
            raise ValueError("the schema is nested too deeply") from None

    def document(self, schema: dict | bool) -> dict:
        if schema is False:
            raise ValueError("Unsatisfiable schema: it allows no value")
        schema = {} if schema is True else schema
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    # ---- One schema -----------------------------------------------------------------------------

    def _rewrite(self, source, node, path: str) -> dict | bool:
        self.n_schema += 1
        if self.n_schema > MAX_SCHEMAS:
            raise ValueError(f"more than {MAX_SCHEMAS:,} schemas in one are not supported")
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise ValueError(f"{path}: a JSON schema must be an object or a boolean")
        original = node                            # source knows its base address
        node = modern({k: v for k, v in node.items() if v is not None or k == "const"},
                      source.draft)
        node = self._named_values(source, node, path)
        kept = {}
        for key, value in node.items():
            if key in NOT_KEPT:
                if not self._restricts_nothing(node, key):
                    raise ValueError(f'{path}: "{key}" is not supported')
            elif key in KEPT:
                kept |= self._checked(node, key, value, path)
            elif key == "uniqueItems":
                self._note_unique(node, value, path)
            elif key == "$ref":
                kept |= self._reference(source, original, path)
            elif key == "oneOf":
                kept |= self._one_of(source, value, path)
            elif key in ("allOf", "anyOf", "prefixItems"):
                kept[key] = self._rewrite_list(source, value, f"{path}/{key}")
            elif key in ("properties", "patternProperties"):
                kept[key] = self._rewrite_named(source, value, f"{path}/{key}")
            elif key in ("items", "additionalProperties"):
                kept[key] = self._rewrite(source, value, f"{path}/{key}")
            # any other keyword is an annotation
        if node.get("not") in ({}, True):
            return False
        if set(kept) == {"allOf"} and len(kept["allOf"]) == 1:
            return kept["allOf"][0]
        is_joined = len(kept) > 1 and {"anyOf", "oneOf", "$ref"} & set(kept) or "allOf" in kept
        if self.n_multiple > 1 and is_joined:
            text = json.dumps(kept)                # llguidance intersects them wrongly
            n = text.count('"multipleOf"')
            if n > 1 or n and '"$ref"' in text:
                raise ValueError(f'{path}: several "multipleOf" for one number are not supported')
        return kept

    def _rewrite_list(self, source, values, path: str) -> list:
        if not isinstance(values, list):
            raise ValueError(f"{path}: expected a list of schemas")
        return [self._rewrite(source, value, f"{path}/{i}") for i, value in enumerate(values)]

    def _rewrite_named(self, source, values, path: str) -> dict:
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected an object of schemas")
        if len(values) > MAX_PROPERTIES:
            raise ValueError(f"{path}: more than {MAX_PROPERTIES:,} are not supported")
        if path.endswith("/patternProperties"):
            values = {self._pattern(name, path): value for name, value in values.items()}
        return {name: self._rewrite(source, value, f"{path}/{escaped(name)}")
                for name, value in values.items()}

    # ---- Keywords with plain values -------------------------------------------------------------

    def _checked(self, node: dict, key: str, value, path: str) -> dict:
        if key == "format":
            return {key: value} if value in FORMATS else {}
        if key == "pattern":
            return {key: self._pattern(value, f"{path}/{key}")}
        if key in ("const", "enum") and not all(
                map(is_exact, value if key == "enum" and isinstance(value, list) else [value])):
            raise ValueError(f'{path}: "{key}" has a number that is not exact in 64 bits')
        if key in BOUNDS and is_number(value):
            return bound(node, key, path)
        if key in COUNTS and isinstance(value, float) and value.is_integer():
            value = int(value)
        if key == "minProperties" and isinstance(value, int):
            required = node.get("required")
            if value <= len(set(required) if isinstance(required, list) else ()):
                return {}
            if value > 1 and may_be(node, "object"):
                raise ValueError(f'{path}: "minProperties" over 1 is not supported')
        self.n_multiple += key == "multipleOf"
        if key == "multipleOf" and is_number(value) and may_be(node, "number"):
            digits = re.sub(r"[eE].*|\D", "", str(value)).strip("0")
            if int(digits or 0) > MAX_MULTIPLE:
                raise ValueError(f'{path}: "multipleOf" is not supported with {value}')
        return {key: value}

    def _pattern(self, pattern, path: str) -> str:
        if not isinstance(pattern, str):
            raise ValueError(f"{path}: expected a regular expression")
        pattern = PATTERNS.get(pattern, pattern)
        self.n_pattern += len(pattern)
        if len(pattern) > MAX_PATTERN or self.n_pattern > MAX_PATTERNS:
            raise ValueError(f'{path}: "pattern" is limited to {MAX_PATTERN:,} characters, and all '
                             f"patterns together to {MAX_PATTERNS:,}")
        if look := re.search(r"\(\?<?[=!]", pattern):
            raise ValueError(f'{path}: "pattern" with "{look[0]}" is not supported')
        return pattern

    def _note_unique(self, node: dict, value, path: str) -> None:
        if value is True and may_be(node, "array") and node.get("maxItems", 2) > 1:
            self.notes.append(f"{path}: uniqueItems is not enforced: items may be repeated")

    def _restricts_nothing(self, node: dict, key: str) -> bool:
        value, kind = node[key], NOT_KEPT[key]
        if kind and not may_be(node, kind):
            return True
        if key == "not":
            return value in ({}, True, False)      # {} and True: _rewrite() returns False
        if key == "if":
            return "then" not in node and "else" not in node
        if key in ("then", "else"):
            return "if" not in node
        if key == "contains":
            return node.get("minContains") == 0 and "maxContains" not in node
        if key in ("unevaluatedItems", "unevaluatedProperties", "propertyNames"):
            return value in (True, {})
        return value in ({}, [])

    # ---- Names of properties --------------------------------------------------------------------

    def _named_values(self, source, node: dict, path: str) -> dict:
        """propertyNames and unevaluatedProperties, written as properties where that is the same."""
        node = dict(node)
        if node.get("unevaluatedProperties") is False and not {
                "additionalProperties", "$ref", "allOf", "anyOf", "oneOf"} & set(node):
            node["additionalProperties"] = node.pop("unevaluatedProperties")
        names = node.get("propertyNames")
        if not isinstance(names, dict):
            return node
        names, names_source = self._followed(source, names, path)
        if not isinstance(names, dict):
            return {**node, "propertyNames": names}
        rules = {k: v for k, v in names.items()
                 if k in {*KEPT, *NOT_KEPT, "allOf", "anyOf", "oneOf"} - {"format"}
                 and not (k == "type" and v in ("string", ["string"]))}
        others = node.get("additionalProperties", True)
        if not rules:
            del node["propertyNames"]
        elif "patternProperties" in node or not may_be(node, "object"):
            return node
        elif set(rules) in ({"enum"}, {"const"}):
            listed = rules.get("enum", [rules.get("const")])
            allowed = [name for name in listed if isinstance(name, str)] \
                if isinstance(listed, list) else []
            given = node.get("properties", {})
            if not isinstance(given, dict):
                return node
            node["properties"] = {k: v for k, v in given.items() if k in allowed}
            node["properties"] |= {name: others for name in allowed if name not in given}
            node["additionalProperties"] = False
            del node["propertyNames"]
        elif not node.get("properties"):
            lengths = [rules.get("minLength", 0), rules.get("maxLength", "")]
            if set(rules) == {"pattern"}:
                pattern = rules["pattern"]
            elif set(rules) <= {"minLength", "maxLength"} and all(
                    isinstance(n, int) or n == "" for n in lengths):
                pattern = rf"^[\s\S]{{{lengths[0]},{lengths[1]}}}$"
            else:
                return node
            del node["propertyNames"]
            node |= {"patternProperties": {pattern: others}, "additionalProperties": False}
        return node

    # ---- References -----------------------------------------------------------------------------

    def _reference(self, source, node: dict, path: str) -> dict:
        target, where = self._followed(source, {"$ref": node["$ref"]}, path, node)
        if isinstance(target, bool):
            return {} if target else {"allOf": [False]}
        return {"$ref": self._defined(source, target, where)}

    def _defined(self, source, node: dict, path: str, discriminator: str = "") -> str:
        """A reference to a definition of this schema. discriminator: a property that it needs."""
        key = id(node), discriminator
        if key not in self.names:
            self.names[key] = name = str(len(self.names))
            self.definitions[name] = None          # its place, before those that it refers to
            kept = self._rewrite(source, node, path)
            if discriminator and isinstance(kept, dict):
                needed = dict.fromkeys([*kept.get("required", []), discriminator])
                kept = {**kept, "type": "object", "required": list(needed)}
            self.definitions[name] = kept
        return f"#/$defs/{self.names[key]}"

    def _followed(self, source, node, path: str, base=None) -> tuple:
        """The schema behind references that have no restrictions beside them, and its name."""
        seen, base = set(), node if base is None else base
        while isinstance(node, dict) and "$ref" in node and is_bare(node):
            if id(node) in seen:
                raise ValueError(f'{path}: "$ref" refers to itself')
            seen.add(id(node))
            path = f"{path}/$ref" if not isinstance(node["$ref"], str) else node["$ref"]
            node = base = source.find(node["$ref"], base)
        if not isinstance(node, (dict, bool)):
            raise ValueError(f"{path}: a JSON schema must be an object or a boolean")
        return node, path

    # ---- Alternatives ---------------------------------------------------------------------------

    def _one_of(self, source, options, path: str) -> dict:
        """oneOf as anyOf, if no value can match two options; else llguidance decides."""
        path = f"{path}/oneOf"
        if not isinstance(options, list):
            raise ValueError(f"{path}: expected a list of schemas")
        found = [self._followed(source, option, f"{path}/{i}")
                 for i, option in enumerate(options)]
        values, types, objects = set(), set(), []
        is_disjoint, n_value, value_types = True, 0, set()
        for option, _ in found:
            option = option if isinstance(option, dict) else {}
            finite = finite_values(option)
            if finite is not None:
                values |= finite
                n_value += len(finite)
                value_types |= {kind for kind, _ in finite}
                continue
            kinds = types_of(option)
            if "object" in kinds or not kinds:
                objects.append(option)
                kinds = kinds - {"object"}
            is_disjoint &= not kinds & types
            types |= kinds
        is_disjoint &= n_value == len(values) and not value_types & types
        discriminator = ""
        if len(objects) > 1:
            discriminator = self._discriminator(source, objects)
            is_disjoint &= discriminator is not None and len(types) + len(objects) == len(
                [option for option, _ in found if finite_values(option) is None])
        elif objects and not types_of(objects[0]):
            is_disjoint &= len(options) == 1
        if not is_disjoint:
            return {"oneOf": self._rewrite_list(source, options, path)}
        kept = []
        for i, (option, where) in enumerate(found):
            if discriminator and any(option is each for each in objects):
                kept.append({"$ref": self._defined(source, option, where, discriminator)})
            else:
                kept.append(self._rewrite(source, options[i], f"{path}/{i}"))
        return {"anyOf": kept}

    def _discriminator(self, source, options: list[dict]) -> str | None:
        """A property with other values in each option."""
        if any(not types_of(option) <= {"object"} for option in options):
            return None
        first = options[0].get("properties")
        for name in first if isinstance(first, dict) else ():
            values, n_value = set(), 0
            for option in options:
                properties = option.get("properties")
                value = properties.get(name) if isinstance(properties, dict) else None
                if isinstance(value, dict):
                    value, _ = self._followed(source, value, name)
                finite = finite_values(value) if isinstance(value, dict) else None
                if finite is None:
                    break
                values |= finite
                n_value += len(finite)
            else:
                if n_value == len(values):
                    return name
        return None


# ---- References ---------------------------------------------------------------------------------

class Source:
    """One schema document: its identifiers and anchors."""

    def __init__(self, root):
        self.root, draft = root, root.get("$schema") if isinstance(root, dict) else None
        draft = re.search(r"draft[-/](\d+)", draft) if isinstance(draft, str) else None
        self.draft = int(draft[1]) if draft else 2020
        self.resources, self.anchors, self.bases = {"": root}, {}, {}
        nodes = [(root, "")]
        while nodes:
            node, base = nodes.pop()
            if isinstance(node, dict):
                base = self._identify(node, base)
                self.bases[id(node)] = base
                nodes += [(child, base) for child in children(node)]

    def _identify(self, node: dict, base: str) -> str:
        name = node.get("id" if self.draft < 6 else "$id")
        if isinstance(name, str) and not (self.draft < 2019 and "$ref" in node):
            url, anchor = urldefrag(joined(base, name))
            if anchor:                             # up to draft 7
                self.anchors[url, anchor] = node
            else:
                base = url
                self.resources[base] = node
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                self.anchors[base, node[key]] = node
        return base

    def find(self, reference, node):
        """What a reference in this node refers to. ValueError if it is not in the document."""
        if not isinstance(reference, str):
            raise ValueError('"$ref" must be a string')
        unknown = ValueError(f'"$ref": {reference[:100]!r} is not in the schema')
        url, fragment = urldefrag(joined(self.bases.get(id(node), ""), reference))
        fragment = unquote(fragment)
        if url not in self.resources:
            raise unknown
        if fragment and not fragment.startswith("/"):
            if (url, fragment) not in self.anchors:
                raise unknown
            return self.anchors[url, fragment]
        target = self.resources[url]
        for key in fragment.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and re.fullmatch(r"\d{1,9}", key):
                target = dict(enumerate(target)).get(int(key))
            else:
                target = target.get(key) if isinstance(target, dict) else None
            if target is None:
                raise unknown
            if isinstance(target, dict):
                url = self.bases.setdefault(id(target), url)
        return target


def joined(base: str, reference: str) -> str:
    try:
        return base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError:
        raise ValueError(f'"$ref": {reference[:100]!r} is not a valid address') from None


def children(node: dict) -> list:
    """The schemas in a schema."""
    found = [node[key] for key in ONE if key in node]
    for key in LISTS:
        if isinstance(node.get(key), list):
            found += node[key]
    for key in NAMED:
        if isinstance(node.get(key), dict):
            found += node[key].values()
    return found


def escaped(name: str) -> str:
    return name[:60].replace("~", "~0").replace("/", "~1")


# ---- What a schema says -------------------------------------------------------------------------

def modern(node: dict, draft: int) -> dict:
    """A schema of an older draft in the words of 2020-12."""
    if isinstance(node.get("items"), list):
        rest = {"items": node["additionalItems"]} if "additionalItems" in node else {}
        node = {**{k: v for k, v in node.items() if k != "items"},
                "prefixItems": node["items"], **rest}
    elif draft < 2020:
        node.pop("prefixItems", None)
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(key), bool):
            is_exclusive = node.pop(key)
            if is_exclusive and bound in node:
                node[key] = node.pop(bound)
    return node


def is_bare(node: dict) -> bool:
    """Whether a reference stands alone, but for annotations."""
    others = {*KEPT, *NOT_KEPT, *ONE, *LISTS, "properties", "patternProperties"}
    return not others & set(node)


def types_of(node: dict) -> set[str]:
    """The types of value that a schema allows, if it says so; every integer is a number."""
    kinds = node.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    kinds = kinds if isinstance(kinds, list) else []
    return {"number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str)}


def may_be(node: dict, kind: str) -> bool:
    kinds = types_of(node)
    return not kinds or kind in kinds


def finite_values(node: dict) -> set | None:
    """The values of const or enum as (type, value), without objects and lists; None: others."""
    listed = [node["const"]] if "const" in node else node.get("enum")
    names = {str: "string", bool: "boolean", type(None): "null", int: "number", float: "number"}
    if not isinstance(listed, list) or not all(type(value) in names for value in listed):
        return None
    return {(names[type(value)], value) for value in listed}


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_exact(value) -> bool:
    """Whether the numbers in a value survive being read as 64 bits."""
    if isinstance(value, (list, dict)):
        return all(map(is_exact, value.values() if isinstance(value, dict) else value))
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= 2**53
    return True


def bound(node: dict, key: str, path: str) -> dict:
    """A bound in numbers of 64 bits, which may exclude more but no less.

    An exclusive one of numbers becomes inclusive: llguidance allows 0 for {"exclusiveMinimum": 0,
    "maximum": 0.5}.
    """
    towards, limit = BOUNDS[key], node[key]
    is_far = limit > 2**63 - 1 if towards > 0 else limit < -2**63
    if is_far or abs(limit) > 1e300:
        raise ValueError(f'{path}: "{key}" is not supported with so large a number')
    nearest = float(limit)
    if nearest != limit:
        is_outside = nearest < limit if towards > 0 else nearest > limit
        limit = math.nextafter(nearest, towards) if is_outside else nearest
    if not key.startswith("exclusive"):
        exclusive = f"exclusive{key.capitalize()}"
        return {key: limit} if exclusive not in node or node.get("type") == "integer" else {}
    if node.get("type") == "integer":
        return {key: limit}
    key = key.removeprefix("exclusive").lower()
    limit += math.copysign(max(abs(limit) * 2**-50, SMALLEST), towards)
    inclusive = bound({key: node[key]}, key, path)[key] if is_number(node.get(key)) else limit
    return {key: max(limit, inclusive) if towards > 0 else min(limit, inclusive)}


def rewrite(schema: dict | bool) -> tuple[dict, list[str]]:
    """-> a schema for llguidance, and the restrictions that are not kept. ValueError if one must
    be."""
    bundle = Bundle()
    document = bundle.document(bundle.add(schema))
    return document, bundle.notes


def rewrite_in_lark(grammar: str) -> str:
    """A Lark grammar with each %json schema rewritten."""
    parts, at, decoder = [], 0, json.JSONDecoder()
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        if found.start() < at:
            continue                               # inside the schema before
        try:
            schema, end = decoder.raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as e:
            raise ValueError(f"%json: not a JSON schema ({e})") from None
        options = schema.pop("x-guidance", None)
        document, _ = rewrite(schema)
        if options is not None:
            document = {"x-guidance": options, **document}
        parts += [grammar[at:found.end()], json.dumps(document)]
        at = end
    return "".join([*parts, grammar[at:]])
