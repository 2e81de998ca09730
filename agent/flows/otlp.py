"""Records as OTLP logs (opentelemetry.io/docs/specs/otlp, OTLP/HTTP with binary protobuf).

The messages are those of opentelemetry-proto. Its Python exporter is not used: it takes a redirect
for success and ignores a receiver's partial success (its version 1.45), and what is lost so would
have no record.
"""

import gzip
import pathlib
import ssl
from collections.abc import Sequence

import urllib3
from google.protobuf import message
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from urllib3.util import ssl_

from agent.flows import otlp_records
from agent.flows.outlet import RecordsRejectedError
from agent.flows.records import Record

# Of one attempt, with its connection: a collector that hangs does not hold the queue for longer.
_TIMEOUT_SECONDS = 10.0
# An answer has one sentence at most; the rest of another server's page is not read.
_MAX_ANSWER_BYTES = 64 << 10
_PROTOBUF = "application/x-protobuf"
# The specification's, and those that new credentials mend: their file is read for each attempt.
_RETRIED = frozenset({401, 403, 408, 429, 502, 503, 504})


class OtlpOutput:
    """Sends records to one receiver, over a connection that is kept.

    Certificates of `https` are verified with `authority`, or the system's. Redirects and proxies of
    the environment are not followed.
    """

    def __init__(
        self,
        url: str,
        *,
        node: str,
        version: str,
        headers: pathlib.Path | None = None,
        authority: pathlib.Path | None = None,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> None:
        """url: with its path; node, version: of the resource; headers: a file of lines `Name:
        value`; authority: a file of PEM certificates."""
        self._url = url
        self._headers = headers
        self._resource = otlp_records.resource(node, version)
        self._scope = otlp_records.scope(version)
        self._pool = urllib3.PoolManager(
            timeout=urllib3.Timeout(total=timeout_seconds),
            retries=False,  # nor redirects
            ca_certs=str(authority) if authority else None,
            ssl_context=_context(has_authority=authority is not None),
        )

    def send(self, records: Sequence[Record]) -> None:
        scoped = logs_pb2.ScopeLogs(
            scope=self._scope, log_records=[otlp_records.log_record(one) for one in records]
        )
        request = logs_service_pb2.ExportLogsServiceRequest(
            resource_logs=[logs_pb2.ResourceLogs(resource=self._resource, scope_logs=[scoped])]
        )
        self._check(*self._post(request.SerializeToString()), sent=len(records))

    def close(self) -> None:
        self._pool.clear()

    def _post(self, body: bytes) -> tuple[int, str, bytes]:
        """Status, content type and content of the answer."""
        headers = {"Content-Type": _PROTOBUF, "Content-Encoding": "gzip", "User-Agent": "podgate"}
        if self._headers:
            headers |= read_headers(self._headers)
        try:
            answer = self._pool.request(
                "POST",
                self._url,
                body=gzip.compress(body, compresslevel=1),
                headers=headers,
                preload_content=False,
            )
            content = answer.read(_MAX_ANSWER_BYTES)
            # Of a longer one the rest would be the next answer of this connection.
            answer.close()
        except urllib3.exceptions.HTTPError as error:
            raise OSError(str(error)) from error
        return answer.status, answer.headers.get("Content-Type", ""), content

    def _check(self, status: int, content_type: str, content: bytes, *, sent: int) -> None:
        """Raises `RecordsRejectedError` for what must not be sent again, `OSError` for the rest."""
        if not 200 <= status < 300:
            if status in _RETRIED:
                raise OSError(f"It answers {status}.")
            raise RecordsRejectedError(sent, f"It answers {status}.")
        if not content_type.startswith(_PROTOBUF):
            return  # Some answer nothing, or in JSON.
        answer = logs_service_pb2.ExportLogsServiceResponse()
        try:
            answer.ParseFromString(content)
        except message.DecodeError:
            return
        if rejected := answer.partial_success.rejected_log_records:
            reason = answer.partial_success.error_message
            raise RecordsRejectedError(rejected, f"It rejects some: {reason or 'no reason'}")


def read_headers(path: pathlib.Path) -> dict[str, str]:
    """Of a file with lines `Name: value`. Raises `OSError` and `ValueError`."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            name, colon, value = line.partition(":")
            if not colon:
                raise ValueError(f"{path} has a line that is no header (Name: value)")
            found[name.strip()] = value.strip()
    return found


def _context(*, has_authority: bool) -> ssl.SSLContext:
    """Accepts the servers that OpenTelemetry's programs accept (Go's crypto/x509): urllib3 demands,
    since Python 3.13, extensions that many authorities of companies leave out."""
    context = ssl_.create_urllib3_context()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not has_authority:
        context.load_default_certs()
    return context
