"""An S3 server on this machine, in a process of its own, as the ``moto`` package provides one."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import fsspec  # pyright: ignore[reportMissingTypeStubs]

_SETTINGS = {"AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two", "AWS_DEFAULT_REGION": "us-east-1"}
_PATIENCE_S = 60.0


class Server(NamedTuple):
    """A server that runs.

    Attributes:
        url: Of the server.
        process: In which it runs.
        address: Of an empty bucket.
    """

    url: str
    process: subprocess.Popen[bytes]
    address: str = "s3://bucket"

    def make_bucket(self) -> None:
        """Make the bucket."""
        filesystem: Any = fsspec.filesystem("s3", skip_instance_cache=True)  # pyright: ignore[reportUnknownMemberType]
        filesystem.mkdir("bucket")

    def reset(self) -> None:
        """Let all buckets vanish."""
        urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/moto-api/reset", method="POST"), timeout=30
        )


@contextmanager
def s3_server() -> Generator[Server, None, None]:
    """Run a server with an empty bucket during a ``with`` block, which clients of this process use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    before = dict(os.environ)
    os.environ.update({**_SETTINGS, "AWS_ENDPOINT_URL": url})
    client: Any = fsspec.get_filesystem_class("s3")  # pyright: ignore[reportUnknownMemberType]
    client.clear_instance_cache()  # which may have the address of an earlier server
    command = [
        sys.executable,
        "-c",
        f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = Server(url, process)
        _wait_for(server)
        server.make_bucket()
        yield server
    finally:
        process.kill()
        process.wait()
        os.environ.clear()
        os.environ.update(before)


def _wait_for(server: Server) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not _answers(server):
        if time.monotonic() > deadline or server.process.poll() is not None:
            raise RuntimeError("the S3 server doesn't answer")
        time.sleep(0.05)


def _answers(server: Server) -> bool:
    try:
        urllib.request.urlopen(f"{server.url}/moto-api/", timeout=5)
    except OSError:
        return False
    return True
