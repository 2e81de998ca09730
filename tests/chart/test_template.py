"""Our renderer gives what Helm 3.21.4 gave, and rejects what it does not know."""

import json
import pathlib

import pytest
import yaml

from tests.chart.syntax import TemplateError
from tests.chart.template import Json, Templates

RECORDED = pathlib.Path(__file__).parent / "recorded" / "helm.json"
_VALUES = """\
name: web
empty: ""
yes_: true
no_: false
count: 3
none: {}
list: [b, a]
# Strings that only Go or only Python would quote are compared as objects, by `make test-chart`.
map: {z: one, a: two words, nested: {deep: [1, x]}}
things: [{name: one, size: 5}, {name: two, size: 6}]
odd: "a \\"quoted\\" \\\\ text: #x"
socket: /run/x/y.sock
"""
OTHER = '{{ define "other" }}<{{ .a }}{{ .b }}>{{ end }}'
# Of each construct and function that the chart uses; each is the body of a named template.
CASES = {
    "field": "a {{ .Values.name }} b",
    "trim": "a   {{- .Values.name -}}   \n  b",
    "trim to the left": "a\n  {{- .Values.name }} b",
    "comment": "a{{- /* a comment: {x} */}} b",
    "boolean and number": "{{ .Values.yes_ }} {{ .Values.count }} {{ 7 }} {{ true }}",
    "if": "{{ if .Values.yes_ }}yes{{ end }}{{ if .Values.no_ }}no{{ end }}",
    "else": "{{ if .Values.empty }}a{{ else }}b{{ end }}",
    "else if": "{{ if .Values.none }}a{{ else if .Values.list }}b{{ else }}c{{ end }}",
    "else if without else": "{{ if .Values.none }}a{{ else if .Values.no_ }}b{{ end }}-",
    "and, or, not": "{{ and .Values.yes_ .Values.name }} {{ or .Values.empty .Values.name }} "
    "{{ not .Values.none }} {{ and .Values.yes_ .Values.no_ }}",
    "eq, ne": '{{ eq .Values.name "web" }} {{ eq .Values.name "x" "web" }} {{ ne "a" "b" }}',
    "with": "{{ with .Values.map }}{{ .z }} {{ $.Values.name }}{{ end }}"
    "{{ with .Values.none }}x{{ end }}",
    "range": "{{ range .Values.things }}{{ .name }}={{ .size }};{{ end }}",
    "range with variables": "{{ range $key, $value := .Values.map.nested }}"
    "{{ $key }}{{ toJson $value }}{{ end }}",
    "range in the order of keys": "{{ range $key, $_ := .Values.map }}{{ $key }},{{ end }}",
    "range of one variable": "{{ range $one := .Values.list }}<{{ $one }}>{{ end }}",
    "range of nothing": "a{{ range .Values.none }}x{{ end }}b",
    "variable": '{{ $a := printf "%s-%s" .Values.name "x" }}{{ $a }}',
    "variable of an outer block": "{{ $a := .Values.name }}"
    "{{ range .Values.list }}{{ $a }}{{ . }}{{ end }}",
    "default": '{{ default "x" .Values.empty }} {{ .Values.name | default "x" }}',
    "quote": "{{ quote .Values.odd }} {{ .Values.yes_ | quote }} {{ .Values.count | quote }}",
    "indent": "{{ indent 2 .Values.name }}{{ .Values.name | nindent 4 }}",
    "nindent of lines": "a:{{ toYaml .Values.map | nindent 2 }}",
    "toYaml": "{{ toYaml .Values.map }}|{{ toYaml .Values.list }}|{{ toYaml .Values.things }}|"
    "{{ toYaml .Values.none }}|{{ toYaml .Values.odd }}",
    "toJson": "{{ toJson .Values.list }}",
    "path": "{{ dir .Values.socket }} {{ base .Values.socket }}",
    "replace": '{{ replace "/" "-" .Values.socket }}',
    "parentheses": '{{ if and (eq .Values.name "web") (not .Values.empty) }}x{{ end }}'
    '{{ (printf "%s" .Values.name) | quote }}',
    "include": '{{ include "other" (dict "a" .Values.name "b" "c") }}',
}


def case_values() -> Json:
    found: Json = yaml.safe_load(_VALUES)
    return found


def _render(text: str) -> str:
    templates = Templates()
    templates.add("case", text)
    templates.add("other", OTHER)
    return templates.render("case", {"Values": case_values()})


@pytest.mark.parametrize("name", CASES)
def test_rendered_as_by_helm(name: str) -> None:
    assert _render(CASES[name]) == json.loads(RECORDED.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ .Values.nmae }}", r"\. has no Values.nmae"),
        ("{{ .Values.name.x }}", r"\. has no Values.name.x"),
        ("{{ lookup }}", "the function lookup is not supported"),
        ('{{ include "missing" . }}', "no template is named missing"),
        ("{{ $missing }}", r"\$missing is not declared"),
        ("{{ .Values.list }}", "is printed without toYaml"),
        ("{{ eq 3 .Values.count }}", "eq of numbers is not supported"),
        ('{{ printf "%d" .Values.count }}', "'%d' is not supported"),
        ("{{ range .Values.name }}{{ end }}", "'web' is no list"),
    ],
)
def test_what_cannot_be_rendered_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(TemplateError, match=rf"^case: .*{problem}"):
        _render(text)


@pytest.mark.parametrize(
    "text",
    [
        *("{{ if .a }}", "{{ end }}", "{{ else }}", "{{ range .a }}{{ else }}{{ end }}", "{{ .a }"),
        *("{{ a.b-c }}", "{{ (a }}", "{{ a | }}", "{{ $a = 1 }}", "{{ 'a' }}"),
    ],
)
def test_what_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(TemplateError, match=r"^case: "):
        _render(text)


def test_numbers_that_helm_prints_with_an_exponent_are_errors() -> None:
    templates = Templates()
    templates.add("case", "{{ .Values.large }}")
    with pytest.raises(TemplateError, match="is printed without toYaml"):
        templates.render("case", {"Values": {"large": 1_000_000}})
