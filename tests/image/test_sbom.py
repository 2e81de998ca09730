"""The list of what is in the image, as deploy/sbom.py writes it."""

import email
import importlib.util
import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.image import building

_STATUS = """\
Package: libstdc++6
Status: install ok installed
Architecture: amd64
Version: 1:12.2.0-14+deb12u1
"""


@pytest.fixture
def sbom() -> ModuleType:
    """A script beside the Dockerfile, not a package."""
    spec = importlib.util.spec_from_file_location("sbom", building.ROOT / "deploy" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sbom", made)
        spec.loader.exec_module(made)
        return made


def _document(sbom: ModuleType, *packages: Any) -> dict[str, Any]:
    product = sbom.Package("podgate", "0.1.0", "pkg:oci/podgate@0.1.0", "Apache-2.0")
    found: dict[str, Any] = json.loads(sbom.document(product, packages))
    return found


def test_package_of_debian_has_the_url_that_scanners_search(sbom: ModuleType) -> None:
    package = sbom.of_debian(email.message_from_string(_STATUS), "debian-12")
    assert package.url == (
        "pkg:deb/debian/libstdc%2B%2B6@1%3A12.2.0-14%2Bdeb12u1?arch=amd64&distro=debian-12"
    )


def test_identifiers_are_legal_unique_and_related(sbom: ModuleType) -> None:
    debian = sbom.of_debian(email.message_from_string(_STATUS), "debian-12")
    python = sbom.Package("libstdc-6", "1", "pkg:pypi/libstdc-6@1")
    found = _document(sbom, debian, python)
    identifiers = [one["SPDXID"] for one in found["packages"]]
    assert len(set(identifiers)) == 3
    assert all(re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", one) for one in identifiers)
    related = {one["relatedSpdxElement"] for one in found["relationships"]}
    assert related == set(identifiers)


def test_the_same_packages_give_the_same_text(sbom: ModuleType) -> None:
    one, two = (sbom.Package(name, "1", f"pkg:pypi/{name}@1") for name in ("a", "b"))
    assert _document(sbom, one, two) == _document(sbom, two, one)
    assert _document(sbom, one)["documentNamespace"] != _document(sbom, two)["documentNamespace"]


def test_time_is_that_of_the_source(sbom: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert _document(sbom)["creationInfo"]["created"] == "2023-11-14T22:13:20Z"
