"""What commands print as JSON and YAML is what docs/reference/schemas/ describes."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from click.testing import CliRunner

from agent.operate.cli import schemas
from agent.operate.cli.main import main
from agent.operate.cli.views import pods, services
from tests.agent.operate.cli import reports
from tests.agent.operate.cli.stub_agent import StubAgent

SCHEMAS = {name: json.loads(text) for name, text in schemas.schemas().items()}


def check(name: str, document: Any) -> None:
    """Raises `jsonschema.ValidationError` if a document is not as its schema describes."""
    schema = SCHEMAS[f"{name}.schema.json"]
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(document)


@pytest.fixture
def run_directory(tmp_path: pathlib.Path) -> Iterator[str]:
    with StubAgent(tmp_path / "run"):
        yield str(tmp_path / "run")


def test_schemas_are_valid() -> None:
    meta = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)
    problems = [
        f"{name}: {error.message}"
        for name, schema in SCHEMAS.items()
        for error in meta.iter_errors(schema)
    ]
    assert problems == []


@pytest.mark.parametrize("command", ["status", "drops", "rules", "probes", "suggest"])
def test_json_is_as_its_schema_describes(command: str, run_directory: str) -> None:
    result = CliRunner().invoke(main, [command, "-o", "json", "--run-directory", run_directory])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    check(command, json.loads(result.stdout))


@pytest.mark.parametrize("command", ["status", "drops", "rules", "probes"])
def test_yaml_has_the_same_content(command: str, run_directory: str) -> None:
    where = ("--run-directory", run_directory)
    text = CliRunner().invoke(main, [command, "-o", "yaml", *where]).stdout
    expected = json.loads(CliRunner().invoke(main, [command, "-o", "json", *where]).stdout)
    (found,) = yaml.safe_load_all(text)
    assert msgspec.json.decode(msgspec.json.encode(found)) == expected


def test_documents_of_the_grpc_services_are_as_described() -> None:
    check("pods", pods.document(reports.PODS))
    check("services", services.document(reports.SERVICES))


def test_other_documents_are_as_described() -> None:
    check("status-without-agent", msgspec.to_builtins(reports.PINNED, str_keys=True))
    check("doctor", msgspec.to_builtins(reports.DOCTOR))
    for event in reports.EVENTS.events:
        check("drops-follow", msgspec.json.decode(msgspec.json.encode(event)))


def test_missing_field_is_found() -> None:
    document = msgspec.json.decode(msgspec.json.encode(reports.DROPS))
    del document["sources"][0]["protocol"]
    with pytest.raises(jsonschema.ValidationError, match="'protocol' is a required property"):
        check("drops", document)


def test_names_are_camel_case() -> None:
    def names(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            yield from schema.get("properties", {})
            schema = list(schema.values())
        if isinstance(schema, list):
            for each in schema:
                yield from names(each)

    assert [name for schema in SCHEMAS.values() for name in names(schema) if "_" in name] == []
