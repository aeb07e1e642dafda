"""Documents, schemas and metadata agree with the code."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import crow
from crow.domain.protected_names import ROWS
from crow.settings.load import setting_keys

ROOT = Path(__file__).parents[2]
MODULES = sorted(module.name for module in pkgutil.walk_packages(crow.__path__, "crow."))


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def imported_by(code: str) -> set[str]:
    """The modules that a new interpreter has imported after running `code`."""
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_the_command_line_imports_nothing_slow() -> None:
    loaded = imported_by("import crow.cli")
    assert loaded.isdisjoint({"acp", "pydantic", "rich", "anyio", "openai", "mcp", "aiosqlite", "tomllib"})


IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", ())
    assert module.__doc__, name
    assert [symbol for symbol in public if not hasattr(module, symbol)] == [], name
    assert len(set(public)) == len(public), name
"""


def test_every_module_has_a_docstring_defines_its_public_names_and_prints_nothing(tmp_path: Path) -> None:
    names = [name for name in MODULES if not name.endswith("__main__")]  # importing that runs it
    done = subprocess.run([sys.executable, "-c", IMPORTS, *names], capture_output=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert list(tmp_path.iterdir()) == []


def test_the_newest_release_in_the_changelog_is_this_version() -> None:
    releases = re.findall(r"^## \[([^\]]+)\](?: - (\S+))?$", read("CHANGELOG.md"), re.MULTILINE)
    versions = [version for version, _ in releases if version != "Unreleased"]
    assert versions[0] == crow.__version__
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for version, date in releases if version != "Unreleased")


def test_constraints_pin_every_dependency_by_name_and_version_alone() -> None:
    pins = read("constraints.txt").splitlines()
    form = r'[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.+!]*(; python_version >= "3\.\d+")?'
    assert [pin for pin in pins if not re.fullmatch(form, pin)] == []
    pinned = {_plain(pin.split("==")[0]) for pin in pins}
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {_plain(re.split(r"[<>=!~\[; ]", name)[0]) for name in wanted} - pinned == set()


def test_every_dependency_is_explained_in_the_architecture() -> None:
    text = read("ARCHITECTURE.md")
    dependencies = tomllib.loads(read("pyproject.toml"))["project"]["dependencies"]
    assert [name for spec in dependencies if f"**{(name := re.split(r'[<>=]', spec)[0])}**" not in text] == []


@pytest.mark.long
def test_generated_files_are_up_to_date() -> None:
    generated = runpy.run_path(str(ROOT / "schemas" / "generate.py"))["generate"]()
    assert {name: read(name) for name in generated} == generated


def test_the_documentation_has_the_table_of_protected_names() -> None:
    page = read("docs/permissions.md")
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.names)
        assert f"| {names} | {row.reason} | {'no' if row.is_fixed else 'yes'} |" in page


def test_every_setting_is_in_the_schema_and_in_the_documentation() -> None:
    schema = json.loads(read("schemas/config.schema.json"))
    sections = {name: part["$ref"].split("/")[-1] for name, part in schema["properties"].items() if "$ref" in part}
    in_schema = {name for name in schema["properties"] if name not in sections} | {
        f"{section}.{name}" for section, kind in sections.items() for name in schema["$defs"][kind]["properties"]
    }
    assert in_schema == set(setting_keys())
    page = read("docs/configuration.md")
    assert [key for key in setting_keys() if f"`{key}`" not in page] == []


def test_the_documents_name_only_files_and_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "schemas" / "README.md"]
    assert len(documents) >= 14
    for document in documents:
        text = document.read_text("utf-8")
        links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)
        assert [link for link in links if not (document.parent / link).exists()] == [], document
        assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) - targets == set(), document
        paths = set(re.findall(r"`((?:benchmarks|crow|tests|schemas)/[\w./]+)`", text))
        assert [path for path in sorted(paths) if not (ROOT / path).exists()] == [], document


def test_every_test_that_the_threats_name_exists() -> None:
    rows = [line for line in read("docs/threats.md").splitlines() if line.startswith("| ") and "|---" not in line]
    named = {test for row in rows for test in re.findall(r"`(test_\w+)`", row)}
    tests = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
    }
    assert named - tests == set()
    assert len(named) > 30
    assert [row for row in rows if "`test_" not in row and not row.startswith("| Actor")] == [], "a row without a test"


def test_the_architecture_names_only_functions_that_exist() -> None:
    missing = [
        f"{path}:{name}"
        for path, name in re.findall(r"`(crow/[\w/]+\.py):([\w.]+)`", read("ARCHITECTURE.md"))
        if name not in set(_defined(ast.parse(read(path))))
    ]
    assert missing == []


def test_every_make_target_explains_itself() -> None:
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    done = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, timeout=60, check=True)
    assert set(re.findall(r"^  make ([a-z]+) +\S", done.stdout, re.MULTILINE)) == targets


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _defined(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
            yield from _defined(node, f"{prefix}{node.name}.")


def test_the_contract_of_the_importers_names_every_other_module_of_the_store() -> None:
    linter = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]
    (contract,) = (one for one in linter["contracts"] if one.get("source_modules") == ["crow.store.importers"])
    modules = {path.stem for path in (ROOT / "crow" / "store").iterdir() if not path.name.startswith("_")}
    known = {f"crow.store.{name}" for name in modules - {"codec", "importers", "portable"}}
    assert set(contract["forbidden_modules"]) == known


def test_the_page_about_helpers_of_tests_names_each_of_them() -> None:
    page = read("tests/support/README.md")
    helpers = {path.name for path in (ROOT / "tests" / "support").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", page)) - {"conftest.py"} == helpers
    assert all((ROOT / name).exists() for name in re.findall(r"`(tests/[\w./]+)`", page))
