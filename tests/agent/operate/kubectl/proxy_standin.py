"""A stand-in for `kubectl proxy --unix-socket=PATH`: FOLDER has its answers, and gets its requests.

`answers.json`: by method and path without its query, the status and the body.
"""

import http.server
import json
import pathlib
import socketserver
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    folder: pathlib.Path

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        with (self.folder / "requests").open("a", encoding="utf-8") as requests:
            found = [self.command, self.path, dict(self.headers), content]
            requests.write(json.dumps(found) + "\n")
        answers = json.loads((self.folder / "answers.json").read_text(encoding="utf-8"))
        key = f"{self.command} {self.path.partition('?')[0]}"
        status, body = answers.get(key, [404, "404: Not Found"])
        text = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def get_request(self):  # type: ignore[no-untyped-def]
        request, _ = super().get_request()
        return request, ("unix", 0)


def main(folder: pathlib.Path, *arguments: str) -> None:
    (path,) = (one.partition("=")[2] for one in arguments if one.startswith("--unix-socket="))
    Handler.folder = folder
    with Server(path, Handler) as server:
        sys.stdout.write(f"Starting to serve on {path}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
