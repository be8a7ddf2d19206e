"""A trainer of a few lines: answers with who it is. What it is told decides how it behaves."""

import http.server
import json
import os
import signal
import socket
import sys
import time


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        told = {
            "path": self.path,
            "epoch": int(os.environ["HOLDFAST_EPOCH"]),
            "job": os.environ["HOLDFAST_JOB"],
            "body": len(self.rfile.read(length)),
            "headers": {name.lower(): value for name, value in self.headers.items()},
        }
        raw = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_POST = do_GET  # noqa: N815 -- the library looks for this name

    def log_message(self, *_: object) -> None:
        pass


def say(address: tuple[str, int], answer: bytes) -> None:
    """Answer everybody with these bytes."""
    with socket.create_server(address) as listener:
        while True:
            caller, _ = listener.accept()
            with caller:
                caller.recv(4096)
                caller.sendall(answer)


def main() -> None:
    spec = json.loads(os.environ["HOLDFAST_SPEC"])
    how = spec.get("how", "serve")
    print(f"toy: {how}, epoch {os.environ['HOLDFAST_EPOCH']}", flush=True)
    if how == "exit":
        sys.exit(7)
    if how == "done":
        sys.exit(0)
    if how == "silent":
        time.sleep(3600)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    address = (os.environ["HOST"], int(os.environ["PORT"]))
    if how == "raw":
        say(address, spec["answer"].encode())
    http.server.ThreadingHTTPServer(address, Handler).serve_forever()


if __name__ == "__main__":
    main()
