"""Each package of crow has its folder of tests, and each folder of tests its package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

OWN = {
    "app": "the modules beside the packages, such as crow/app.py",
    "guards": "rules about the whole repository",
    "release": "the archives and the registry's entry of a release",
    "interop": "published programs of others",
    "soak": "what takes minutes",
    "stdio": "whole processes",
    "support": "helpers",
}
"""The folders of tests that mirror no package, and what is in them."""


def packages(folder: Path) -> set[str]:
    return {str(path.parent.relative_to(folder)) for path in folder.rglob("*/__init__.py")}


def test_tests_mirror_the_packages() -> None:
    assert packages(ROOT / "tests") - packages(ROOT / "crow") == OWN.keys()
    untested = packages(ROOT / "crow") - packages(ROOT / "tests")
    assert {each for each in untested if not each.endswith("/migrations")} == set()  # migrations are SQL
