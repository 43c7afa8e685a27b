"""The API's description: OpenAPI 3.1 from the request schemas, and the page /docs from that.

Only what the schemas say, and a sentence for each field in FIELDS. The page refers to no other
host and has no script.

    description = describe(get_routes, endpoints, defaults)
    html = as_page(description)
"""

import html
import json
from collections.abc import Iterable

from pydantic.json_schema import models_json_schema

from gpt_faster.server.version import VERSION

REF = "#/components/schemas/"
SUMMARIES = {
    "/v1/chat/completions": "Answer a conversation",
    "/v1/completions": "Continue a text",
    "/tokenize": "The tokens of a text, or of a conversation as its template renders it",
    "/detokenize": "The text of tokens",
    "/apply-template": "A conversation as the model's template renders it",
}
EXAMPLES = {
    "/v1/chat/completions": dict(messages=[dict(role="user", content="Hello")], max_tokens=50),
    "/v1/completions": dict(prompt="Once upon a time", max_tokens=50),
    "/tokenize": dict(prompt="Hello"),
    "/detokenize": dict(tokens=[1, 2, 3]),
    "/apply-template": dict(messages=[dict(role="user", content="Hello")]),
}
FIELDS = {
    "messages": "The conversation so far",
    "prompt": "A text, token ids, or a list of either",
    "content": "The text",
    "tokens": "Token ids",
    "model": "The model's name as in /v1/models, or nothing",
    "stream": "Send the answer in pieces, as server-sent events",
    "stream_options": "include_usage: send token counts at the end",
    "n": "Number of answers",
    "stop": "Texts that end the answer; they are not a part of it",
    "max_tokens": "Max new tokens",
    "max_completion_tokens": "Max new tokens",
    "temperature": "0: the most likely token; higher: more random",
    "top_p": "Sample from the most likely tokens that have this probability together; 1: all",
    "top_k": "Sample from so many of the most likely tokens; 0 or -1: all",
    "min_p": "Drop tokens less likely than this times the most likely one; 0: none",
    "repetition_penalty": "Make tokens of the text so far less likely; 1: off",
    "frequency_penalty": "Make tokens less likely by how often they were generated; 0: off",
    "presence_penalty": "Make tokens that were generated less likely; 0: off",
    "logit_bias": "Token id → what is added to its logit, from -100 to 100",
    "seed": "Of the random numbers: the same request with it gets the same text",
    "regex": "A regular expression that the answer matches",
    "grammar": "A Lark grammar that the answer follows",
    "ignore_eos": "Go on after the model's end tokens",
    "stop_token_ids": "Token ids that end the answer",
    "echo": "Repeat the prompt before the answer",
    "logprobs": "Return log-probabilities; completions: of so many alternatives",
    "top_logprobs": "Return the log-probabilities of so many alternatives",
    "best_of": "Only as large as n",
    "response_format": "JSON, or JSON of a schema",
    "tools": "Functions that the model may call",
    "tool_choice": "none, auto, required, or one function",
    "parallel_tool_calls": "false: one call at most",
    "chat_template_kwargs": "Variables of the chat template, e.g. enable_thinking",
    "documents": "Texts that the chat template writes into the prompt, if it reads any",
    "reasoning_effort": "How much to think, if the chat template knows it",
    "enable_thinking": "false: do not think, if the chat template knows it",
    "continue_final_message": "true: continue the last message instead of answering it",
    "include_reasoning": "false: do not send the model's thoughts",
    "add_generation_prompt": "false: do not begin the assistant's answer",
    "add_special_tokens": "Add what begins a text, e.g. BOS; default: true for prompt",
    "add_special": "Add what begins a text, e.g. BOS; default: false for content",
    "parse_special": "false: special tokens in the text are plain text",
    "with_pieces": "Return each token with its text, or its bytes",
    "return_token_strs": "Return the tokens' names in the vocabulary",
    "skip_special_tokens": "true: leave special tokens out of the text",
}
STYLE = """:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border: 1px solid #8886; padding: .25rem .6rem; text-align: left; vertical-align: top; }
pre { background: #8882; padding: .6rem; overflow-x: auto; }
h2 { margin-top: 2.5rem; } h2 small { font-weight: normal; }"""


# ---- OpenAPI ------------------------------------------------------------------------------------

def describe(get_routes: Iterable, endpoints: Iterable, defaults: dict) -> dict:
    """get_routes: without a body, summarized by their functions' docstrings. endpoints: each has a
    path and a schema. defaults: the server's, by the name of a field."""
    _, schemas = models_json_schema([(each.schema, "validation") for each in endpoints],
                                    ref_template=REF + "{model}")
    schemas = schemas.get("$defs", {})
    for each in endpoints:
        add_texts(schemas[each.schema.__name__], defaults)
    paths = {}
    for each in endpoints:
        body = dict(schema={"$ref": REF + each.schema.__name__})
        if each.path in EXAMPLES:
            body["example"] = EXAMPLES[each.path]
        summary = SUMMARIES.get(each.path) or first_line(each.schema)
        paths.setdefault(each.path, {})["post"] = dict(
            operation(summary, each.path),
            requestBody=dict(required=True, content={"application/json": body}))
    for route in get_routes:
        methods = {method.lower() for method in route.methods} - {"head"}
        path = route.path.replace(":path}", "}")
        for method in sorted(methods):
            paths.setdefault(path, {})[method] = operation(first_line(route.endpoint), path)
    return dict(openapi="3.1.0", info=dict(title="gpt-faster", version=VERSION), paths=paths,
                components=dict(schemas=schemas, securitySchemes=dict(
                    key=dict(type="http", scheme="bearer"))), security=[{}, dict(key=[])])


def operation(summary: str, path: str) -> dict:
    described = dict(summary=summary, responses={
        "200": dict(description="The answer"), "default": dict(description="An error object")})
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        described["parameters"] = [{"name": name, "in": "path", "required": True,
                                    "schema": dict(type="string")}]
    return described


def first_line(documented) -> str:
    return (documented.__doc__ or "").strip().partition("\n")[0]


def add_texts(schema: dict, defaults: dict) -> None:
    """Add FIELDS' sentences and the server's defaults to a request's fields."""
    for name, field in schema.get("properties", {}).items():
        field.pop("title", None)
        if field.get("default", 0) is None:
            del field["default"]                   # absent: the server's default
        if name in FIELDS:
            field.setdefault("description", FIELDS[name])
        if defaults.get(name) is not None:
            field["default"] = defaults[name]


# ---- The page -----------------------------------------------------------------------------------

def as_page(description: dict) -> str:
    schemas, parts, shown = description["components"]["schemas"], [], []
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2>{method.upper()} <code>{escape(path)}</code></h2>\n"
                         f"<p>{escape(operation['summary'])}</p>")
            if "requestBody" not in operation:
                continue
            body = operation["requestBody"]["content"]["application/json"]
            name = body["schema"]["$ref"].removeprefix(REF)
            parts.append(table(schemas[name]))
            shown.append(name)
            if "example" in body:
                parts.append(curl(path, body["example"]))
    parts.append("<h2>Objects</h2>")
    for name, schema in schemas.items():
        if name not in shown and "properties" in schema:
            parts.append(f'<h3 id="{escape(name)}">{escape(name)}</h3>\n{table(schema)}')
    title = f"gpt-faster {escape(description['info']['version'])}"
    return ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{title}: API</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
            "<p>The fields of each route; those in bold are required. As OpenAPI: "
            '<a href="openapi.json">openapi.json</a>. With a key, send '
            "<code>Authorization: Bearer KEY</code>.</p>\n" + "\n".join(parts) +
            "\n</body></html>\n")


def table(schema: dict) -> str:
    required = schema.get("required", [])
    rows = ["<tr><th>field</th><th>type</th><th>range</th><th>default</th><th></th></tr>"]
    for name, field in schema.get("properties", {}).items():
        tag = "b" if name in required else "span"
        default = json.dumps(field["default"]) if "default" in field else ""
        cells = [f"<{tag}><code>{escape(name)}</code></{tag}>", type_of(field),
                 escape(range_of(field)), escape(default), escape(field.get("description", ""))]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def alternatives(field: dict) -> list[dict]:
    """A field's types, without null: a null is as good as no field."""
    found = field.get("anyOf") or field.get("oneOf") or [field]
    return [each for each in found if each.get("type") != "null"]


def type_of(field: dict) -> str:
    """As HTML, with links to the objects."""
    return " or ".join(dict.fromkeys(map(one_type, alternatives(field))))


def one_type(field: dict) -> str:
    if "$ref" in field:
        name = escape(field["$ref"].removeprefix(REF))
        return f'<a href="#{name}">{name}</a>'
    if "const" in field or "enum" in field:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>"
                           for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {type_of(field.get('items', {}))}"
    return escape(field.get("type", "any"))


def range_of(field: dict) -> str:
    texts = []
    for each in alternatives(field):
        low = each.get("minimum", each.get("exclusiveMinimum"))
        high = each.get("maximum", each.get("exclusiveMaximum"))
        if low is not None and high is not None:
            above = "above " if "exclusiveMinimum" in each else ""
            texts.append(f"{above}{low:,} to {high:,}")
        elif low is not None:
            texts.append(f"from {low:,}")
    return ", ".join(dict.fromkeys(texts))


def curl(path: str, example: dict) -> str:
    body = json.dumps(example, ensure_ascii=False)
    text = (f"curl http://127.0.0.1:8000{path} -H 'Content-Type: application/json' \\\n"
            f"  -d '{body}'")
    return f"<pre>{escape(text)}</pre>"


def escape(text: str) -> str:
    return html.escape(str(text))
