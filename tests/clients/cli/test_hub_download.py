"""Each way in which the hub refuses is one line that says what to do; the real client is asked."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.model_source import hub_model


class Hub(BaseHTTPRequestHandler):
    """A hub that refuses everything, as the server it belongs to says."""

    def do_GET(self) -> None:
        status, error_code = self.server.refusal  # type: ignore[attr-defined]
        body = json.dumps({"error": error_code}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", error_code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((403, "GatedRepo"), "org/model is gated: accept its terms"),
        ((404, "RepoNotFound"), "the hub has no model org/model"),
        ((401, "RepoNotFound"), "the hub has no model org/model"),
        ((418, "Teapot"), "org/model"),
    ],
)
def test_a_refusal_is_one_line(
    hub: ThreadingHTTPServer, refusal: tuple[int, str], words: str
) -> None:
    hub.refusal = refusal  # type: ignore[attr-defined]
    assert words in said_about("org/model")


def test_a_hub_that_is_not_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert said_about("org/model").startswith("org/model is not in the hub's cache")


def said_about(model: str) -> str:
    """Return the one line about a model that could not be fetched."""
    with pytest.raises(CliError) as caught:
        hub_model(model)
    assert caught.value.status == ExitStatus.USAGE
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)
