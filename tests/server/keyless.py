"""Requests without a key, as bytes on the wire, and the statuses that they must get."""

from __future__ import annotations

import socket

KEYLESS = [
    ("GET", "/page/../v1/models", 401),
    ("GET", "/page/%2e%2e/v1/models", 401),
    ("GET", "/page/..%2fv1/models", 401),
    ("GET", "/page//../v1/models", 401),
    ("GET", "/page/..;/v1/models", 401),
    ("GET", "/page/..\\v1\\models", 401),
    ("GET", "//health", 401),
    ("GET", "/HEALTH", 401),
    ("GET", "/health/", 401),
    ("GET", "/health;x", 401),
    ("GET", "/%68ealth", 401),
    ("GET", "http://localhost/health", 401),
    ("GET", "http://localhost/v1/models", 401),
    ("GET", "*", 401),
    ("GET", "/metrics", 401),
    ("GET", "/live", 401),
    ("GET", "/page/other.css", 401),
    ("POST", "/", 401),
    ("POST", "/health", 401),
    ("POST", "/version", 401),
    ("POST", "/page/style.css", 401),
    ("HEAD", "/v1/models", 401),
    ("OPTIONS", "/v1/models", 401),
    ("OPTIONS", "*", 401),
    ("DELETE", "/health", 401),
    ("TRACE", "/health", 401),
    ("GET", "/", 200),
    ("GET", "/health", 200),
    ("GET", "/health?a=/v1/models", 200),
    ("GET", "/version", 200),
    ("GET", "/page/style.css", 200),
]
"""Method, target and status: 401 unless method and target are one of a few pairs."""


def wrongly_answered(host: str, port: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Send all requests; return the status that came and the right one where they differ."""
    found = {}
    for method, target, status in KEYLESS:
        with socket.create_connection((host, port)) as peer:
            head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            peer.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
            came = int(peer.makefile("rb").readline().split()[1])
            if came != status:
                found[method, target] = came, status
    return found
