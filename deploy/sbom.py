"""The list of what is in the image (SBOM), as SPDX 2.3 in JSON.

Made while the image is built, from the files that are copied: Debian's packages of these files by
dpkg, and Python's distributions by their metadata. Scanners read it; it names no files.
"""

import dataclasses
import datetime
import email.message
import hashlib
import importlib.metadata
import json
import os
import re
import urllib.parse
from collections.abc import Iterable

_NONE = "NOASSERTION"
# What SPDX allows in an identifier (clause 3.2).
_NOT_IN_IDENTIFIERS = re.compile(r"[^A-Za-z0-9.-]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Package:
    """One package. url: a package URL (purl), by which databases of vulnerabilities find it."""

    name: str
    version: str
    url: str
    licence: str = _NONE
    supplier: str = _NONE


def of_debian(status: email.message.Message, release: str) -> Package:
    """A package of Debian, by its entry in dpkg's database. release: such as debian-13."""
    name, version, architecture = status["Package"], status["Version"], status["Architecture"]
    return Package(
        name,
        version,
        f"pkg:deb/debian/{_quoted(name)}@{_quoted(version)}?arch={architecture}&distro={release}",
        supplier="Organization: Debian",
    )


def of_python(distribution: importlib.metadata.Distribution) -> Package:
    """A distribution as pip installed it."""
    name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
    licence = distribution.metadata.get("License-Expression")
    version = distribution.version
    return Package(name, version, f"pkg:pypi/{name}@{version}", licence=licence or _NONE)


def document(product: Package, contained: Iterable[Package]) -> str:
    """The document of an image that contains these packages. The same packages give the same text;
    SOURCE_DATE_EPOCH is its time."""
    packages = sorted(contained, key=lambda package: package.url)
    listed = [_described(package) for package in packages]
    content = json.dumps(listed, sort_keys=True).encode()
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    created = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    image = _described(product)
    made = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{product.name}-{product.version}",
        "documentNamespace": (
            f"https://podgate.io/spdx/{product.name}-{product.version}-"
            f"{hashlib.sha256(content).hexdigest()}"
        ),
        "creationInfo": {
            "created": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": ["Tool: podgate-deploy-sbom"],
        },
        "packages": [image, *listed],
        "relationships": [
            _relationship("SPDXRef-DOCUMENT", "DESCRIBES", image),
            *(_relationship(str(image["SPDXID"]), "CONTAINS", one) for one in listed),
        ],
    }
    return json.dumps(made, indent=1) + "\n"


def _described(package: Package) -> dict[str, object]:
    kind = package.url.partition("/")[0].removeprefix("pkg:")
    identifier = _NOT_IN_IDENTIFIERS.sub("-", f"{kind}-{package.name}")
    return {
        "SPDXID": f"SPDXRef-{identifier}",
        "name": package.name,
        "versionInfo": package.version,
        "supplier": package.supplier,
        "downloadLocation": _NONE,
        "filesAnalyzed": False,
        "licenseConcluded": _NONE,
        "licenseDeclared": package.licence,
        "copyrightText": _NONE,
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": package.url,
            }
        ],
    }


def _relationship(one: str, kind: str, other: dict[str, object]) -> dict[str, object]:
    return {
        "spdxElementId": one,
        "relationshipType": kind,
        "relatedSpdxElement": other["SPDXID"],
    }


def _quoted(text: str) -> str:
    """As a package URL needs it."""
    return urllib.parse.quote(text, safe="")
