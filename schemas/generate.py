"""Writes the generated schemas beside this file; `--check` only says which of them differ, and fails if any does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from crow.settings import Settings
from crow.store.migrations import schema

__all__ = ["generate"]


class WithoutTitles(GenerateJsonSchema):
    """A title would repeat the key."""

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002 (the base class's signature)
        """Never."""
        return False


def generate() -> dict[str, str]:
    """The text of every generated file, by name."""
    settings: JsonSchemaValue = {
        "$schema": GenerateJsonSchema.schema_dialect,
        **Settings.model_json_schema(schema_generator=WithoutTitles),
    }
    return {"config.schema.json": json.dumps(settings, indent=2) + "\n", "store.sql": schema()}


def main(arguments: list[str]) -> int:
    here = Path(__file__).parent
    stale = [
        name
        for name, text in generate().items()
        if not (here / name).exists() or (here / name).read_text("utf-8") != text
    ]
    if arguments == ["--check"]:
        for name in stale:
            print(f"schemas/{name} is out of date; run `make schemas`", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (here / name).write_text(generate()[name], "utf-8")
        print(f"wrote schemas/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
