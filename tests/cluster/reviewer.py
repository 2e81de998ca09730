"""An admission webhook in a pod: allows everything. `python3 reviewer.py DIRECTORY`.

It runs with the image's Python, from a ConfigMap; DIRECTORY has tls.crt and tls.key. It listens on
`PORT`, and on no port that a probe names.
"""

import http.server
import json
import pathlib
import ssl
import sys

PORT = 8443


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers AdmissionReviews (k8s.io/api/admission/v1)."""

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"uid": review["request"]["uid"], "allowed": True}
        body = json.dumps(
            {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": answer}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(directory: pathlib.Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    server = http.server.ThreadingHTTPServer(("", PORT), Handler)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
