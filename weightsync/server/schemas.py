"""OpenAPI descriptions of the control messages, each whole in itself: a router has no root."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from weightsync.wire.messages import CALLS, REPLIES, UpdateInfo, UpdateRequest
from weightsync.wire.problem import MEDIA_TYPE, Problem

Schema = dict[str, Any]  # JSON Schema, which has no narrower type


def describe_body(call: str) -> Schema:
    """Return the `openapi_extra` of the route of `call`: what its body may be."""
    kind = CALLS[call]
    schema = _update_schema() if kind is UpdateRequest else schema_of(kind)
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": kind is UpdateRequest, "content": content}}


def describe_answers(call: str) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of the route of `call`: its reply, and problem documents."""
    return {
        200: _content("The reply", "application/json", schema_of(REPLIES[call])),
        "default": _content("A problem document (RFC 9457)", MEDIA_TYPE, schema_of(Problem)),
    }


def schema_of(kind: Any) -> Schema:
    """Return the JSON Schema of a type, with every definition in place of its reference."""
    schema = msgspec.json.schema(kind)
    definitions: Schema = schema.pop("$defs", {})
    inlined: Schema = _inline(schema, definitions)
    return inlined


def _update_schema() -> Schema:
    # msgspec describes no union of untagged structs: codec tells them apart by their fields.
    infos = {"anyOf": [schema_of(kind) for kind in get_args(UpdateInfo)]}
    fields = msgspec.structs.fields(UpdateRequest)
    properties = {
        field.encode_name: infos if field.name == "update_info" else schema_of(field.type)
        for field in fields
    }
    return {
        "title": UpdateRequest.__name__,
        "type": "object",
        "properties": properties,
        "required": [field.encode_name for field in fields if field.required],
        "additionalProperties": False,
    }


def _inline(node: Any, definitions: Schema) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    # A discriminator maps to references, of which none are left; each tag is an enum of one.
    return {k: _inline(v, definitions) for k, v in node.items() if k != "discriminator"}


def _content(description: str, media_type: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}
