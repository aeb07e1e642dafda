"""Generates the schemas beside this file, the text of `crow --help` and the manual page.

`--check` only reports those that differ, and then fails.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from crow.cli.arguments import whole_parser
from crow.cli.reference import manual, reference_of
from crow.domain import entries, messages
from crow.settings import Settings, values
from crow.settings.types import Section
from crow.store import portable
from crow.store.codec import KINDS
from crow.store.portable import RECORDS, EntryRecord
from crow.store.sqlite.migrations import schema

__all__ = ["generate"]

BLOB = {
    "type": "object",
    "description": "Stored as the content of an earlier blob record, which is named by its sha256.",
    "properties": {
        "blob": {"type": "string"},
        "encoding": {"const": "base64", "description": "The value is the base64 of the blob, not its text."},
    },
    "required": ["blob"],
    "additionalProperties": False,
}
STORED_AS_BLOBS = {
    ("Prompt", "system"),
    ("Prompt", "tools"),
    ("Image", "data"),
    ("Attachment", "data"),
    ("File", "before"),
    ("FilePart", "data"),
}
MODULES = (portable, entries, messages)
"""The modules of the dataclasses that an export contains."""
RENAMED: Mapping[str, type] = {"File": entries.File, "FilePart": messages.File}
"""The names in the schema of two dataclasses that have the same name."""
PARTS = {"Text": "text", "Image": "image", "FilePart": "file", "Resource": "resource", "Link": "link"}


class WithoutTitles(GenerateJsonSchema):
    """Leaves out titles: they would repeat the keys."""

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002 (the base class's signature)
        """Return False always."""
        return False


def generate() -> dict[str, str]:
    """Return the text of every generated file, by its path in the repository."""
    settings: JsonSchemaValue = {
        "$schema": GenerateJsonSchema.schema_dialect,
        **Settings.model_json_schema(schema_generator=WithoutTitles),
    }
    _describe(settings)
    return {
        "schemas/config.schema.json": _text(settings),
        "schemas/export.schema.json": _text(_export_schema()),
        "crow/store/sqlite/migrations/newest.sql": schema(),
        "crow/cli/help.txt": _help(),
        "docs/crow.1": manual(reference_of(whole_parser())),
    }


def _describe(schema: JsonSchemaValue) -> None:
    """Add the docstrings of the settings. Pydantic could, but would read its own source at every start of crow."""
    for cls in (Settings, *(getattr(values, name) for name in schema["$defs"])):
        properties = schema["$defs"].get(cls.__name__, schema)["properties"]
        for base in reversed(cls.__mro__[: cls.__mro__.index(Section)]):
            for key, words in _field_docs(base):
                properties[key] = dict(sorted((properties[key] | {"description": words}).items()))


def _field_docs(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each field that has a docstring below it."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    for field, doc in pairwise(tree.body):
        match field, doc:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(words))):
                yield key, inspect.cleandoc(words).replace("\n", " ")


def _export_schema() -> JsonSchemaValue:
    """Return the schema of one line, from the dataclasses of the export format and of the domain."""
    kinds: dict[str, type] = {kind: cls for cls, kind in KINDS.items()}
    adapters: list[tuple[Any, Any, TypeAdapter[Any]]] = [
        (cls, "serialization", TypeAdapter(cls)) for cls in (*RECORDS.values(), *kinds.values())
    ]
    _, whole = TypeAdapter.json_schemas(adapters, ref_template="#/$defs/{model}", schema_generator=WithoutTitles)
    definitions = _renamed(whole["$defs"])
    for name, definition in definitions.items():
        _close(name, definition)
    for name, part in PARTS.items():
        _tag(definitions[name], part)
    definitions["Image"]["properties"].pop("type")
    definitions["Image"]["required"].remove("type")
    definitions["ImagePart"] = json.loads(json.dumps(definitions["Image"]))
    _tag(definitions["ImagePart"], "image")
    for option in definitions["User"]["properties"]["parts"]["items"]["anyOf"]:
        if option["$ref"].endswith("/Image"):
            option["$ref"] += "Part"
    for kind, record in RECORDS.items():
        _tag(definitions[record.__name__], kind)
    entry = definitions[EntryRecord.__name__]
    entry["properties"]["kind"] = {"enum": list(kinds)}
    entry["allOf"] = [
        {
            "if": {"properties": {"kind": {"const": kind}}},
            "then": {"properties": {"body": {"$ref": f"#/$defs/{cls.__name__}"}}},
        }
        for kind, cls in kinds.items()
    ]
    module = inspect.getmodule(EntryRecord)
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": "A line of a crow export",
        "description": inspect.getdoc(module),
        "oneOf": [{"$ref": f"#/$defs/{record.__name__}"} for record in RECORDS.values()],
        "$defs": dict(sorted(definitions.items())),
    }


def _renamed(definitions: JsonSchemaValue) -> JsonSchemaValue:
    """Return the definitions with the names in `RENAMED`. Pydantic names such dataclasses after their modules."""
    text = json.dumps(definitions)
    for name, cls in RENAMED.items():
        text = text.replace(f"{cls.__module__}.{cls.__qualname__}".replace(".", "__"), name)
    renamed: JsonSchemaValue = json.loads(text)
    return renamed


def _close(name: str, definition: dict[str, Any]) -> None:
    """Require every key and allow no other, as crow writes them. Large values are references to blobs."""
    properties = definition["properties"]
    definition.pop("title", None)
    definition["required"] = list(properties)
    definition["additionalProperties"] = False
    definition["description"] = " ".join(definition.get("description", "").replace("`", "").split())
    for key, value in properties.items():
        value.pop("default", None)
        if (name, key) in STORED_AS_BLOBS:
            is_optional = "anyOf" in value
            properties[key] = {"anyOf": [BLOB, {"type": "null"}]} if is_optional else BLOB
    cls = RENAMED.get(name) or next(getattr(module, name) for module in MODULES if hasattr(module, name))
    for key, words in _field_docs(cls):
        known = properties[key].get("description", "")
        properties[key] = properties[key] | {"description": f"{words.replace('`', '')} {known}".strip()}


def _tag(definition: dict[str, Any], kind: str) -> None:
    definition["properties"] = {"type": {"const": kind}, **definition["properties"]}
    definition["required"] = ["type", *definition["required"]]


def _help() -> str:
    """Return the text of `crow --help` in a terminal with 80 columns."""
    columns = os.environ.pop("COLUMNS", None)
    os.environ["COLUMNS"] = "80"
    try:
        return whole_parser().format_help()
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _text(value: JsonSchemaValue) -> str:
    return json.dumps(value, indent=2) + "\n"


def main(arguments: list[str]) -> int:
    root = Path(__file__).parents[1]
    stale = [
        name
        for name, text in generate().items()
        if not (root / name).exists() or (root / name).read_text("utf-8") != text
    ]
    if arguments == ["--check"]:
        for name in stale:
            print(f"{name} is out of date; run `make schemas`", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (root / name).write_text(generate()[name], "utf-8")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
