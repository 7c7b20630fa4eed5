"""The server: what it tells, and what it refuses."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budwood.errors import ConfigError
from budwood.methods.influence.scores import Matrix, Scores, writing_scores
from budwood.report.shelf import Shelf
from budwood.report.view import Door, open_socket
from tests.report import runs_for_tests as made

uvicorn = pytest.importorskip("uvicorn")


class Served:
    """A server in a thread."""

    def __init__(self, runs: Path, door: Door | None = None, ask: Any = None) -> None:
        from budwood.report.view import application

        self.sock = open_socket("127.0.0.1", 0)
        self.port = self.sock.getsockname()[1]
        app = application(runs, door or Door("127.0.0.1", self.port), ask)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.sock]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def raw(self, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as s:
            s.sendall(data)
            s.settimeout(30)  # machines may be busy
            out = b""
            try:
                while chunk := s.recv(65536):
                    out += chunk
            except OSError:
                pass
            return out

    def get(self, path: str, method: str = "GET", host: str | None = None, more: str = "") -> tuple[int, bytes, bytes]:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {host or f'127.0.0.1:{self.port}'}\r\nConnection: close\r\n{more}\r\n"
        )
        reply = self.raw(head.encode())
        top, _, body = reply.partition(b"\r\n\r\n")
        return int(top.split()[1]), top, body

    def json(self, path: str) -> Any:
        code, _, body = self.get(path)
        assert code == 200, (path, body)
        return json.loads(body)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made.one_of_each(tmp_path_factory.mktemp("view") / "runs")


@pytest.fixture(scope="module")
def served(runs: dict[str, Path]) -> Iterator[Served]:
    server = Served(runs["tuned"].parent)
    yield server
    server.close()


def test_list_then_details_then_rows(served: Served, runs: dict[str, Path]) -> None:
    index = served.json("/api/runs")
    assert {r["key"] for r in index["runs"]} == set(runs)
    run = served.json("/api/run?key=influence")
    assert run["detail"]["of"] == {"train": 60, "queries": 24} and "tops" not in run["detail"]
    reply = served.json("/api/query?key=influence&q=5&strategy=ekfac&layers=layer.1,layer.2")
    scores = Scores.open(runs["influence"])
    row = scores.row(5, Matrix("ekfac", "auto", "layer.1")) + scores.row(5, Matrix("ekfac", "auto", "layer.2"))
    assert reply["answer"]["top"]["rows"][0] == int(row.argmax())
    np.testing.assert_allclose(reply["answer"]["top"]["scores"][0], row.max(), rtol=1e-5)
    assert len(reply["answer"]["inner"]["layers"]) == 40


def test_answers_carry_a_strict_policy(served: Served) -> None:
    for path in ("/", "/app.js", "/style.css", "/api/runs", "/nothing"):
        _, head, _ = served.get(path)
        assert b"content-security-policy: default-src 'none'" in head.lower() and b"unsafe" not in head
        assert b"nosniff" in head


def test_only_reading(served: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
        assert served.get("/api/runs", method)[0] == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "localhost.evil", "[::2]"]
)
def test_foreign_hosts_are_refused(served: Served, host: str) -> None:
    code, _, body = served.get("/api/runs", host=host or " ")
    assert code in (400, 421) and b"runs" not in body


def test_own_names_are_not(served: Served) -> None:
    for host in ("localhost", f"LOCALHOST:{served.port}", "[::1]:80"):
        assert served.get("/", host=host)[0] == 200


def test_paths_lead_nowhere_else(served: Served, tmp_path: Path) -> None:
    for path in (
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/api/../../run.json",
        "//etc/passwd",
        "/runs/tuned/run.json",
    ):
        assert served.get(path)[0] == 404
    for key in ("../data", "..%2f..%2fetc", "%2fetc", "tuned/../tuned", "tuned%00", "", "." * 5000):
        code, _, body = served.get(f"/api/run?key={key}")
        assert code in (404, 400) and b"no such run" in body or code == 400


def test_links_out_of_the_runs_are_not_followed(tmp_path: Path) -> None:
    outside = made.write_run(tmp_path / "elsewhere", "finetune", {"metric": "accuracy", "score": 0.123})
    inside = made.influence(tmp_path / "runs" / "i", {"task": "reviews"})
    (tmp_path / "runs" / "link").symlink_to(outside)
    np.save(tmp_path / "secret.npy", np.ones((24, 60), np.float32))
    (inside / "scores" / "ekfac.npy").unlink()
    (inside / "scores" / "ekfac.npy").symlink_to(tmp_path / "secret.npy")
    shelf = Shelf(tmp_path / "runs")
    assert [r["key"] for r in shelf.refresh()] == ["i"]
    assert "outside the runs directory" in shelf.run("i")["detail"]["problem"]


def test_malformed_requests_do_not_bring_it_down(served: Served) -> None:
    rng = random.Random(0)
    ask = "/api/query?key=influence&q=1&strategy=ekfac"
    whole = f"GET {ask} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nConnection: close\r\n\r\n".encode()
    for n in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 12)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if n % 3 == 0:
            data = data[: rng.randrange(1, len(data))] + b"\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as s:
            s.sendall(bytes(data))
            s.shutdown(socket.SHUT_WR)
            s.settimeout(5)
            try:
                while s.recv(65536):
                    pass
            except OSError:
                pass
    odd = (
        "q=-1",
        "q=99999999999999999999",
        "q=1e3",
        "q=²",
        "q=1&strategy=none",
        "q=1&strategy=ekfac&layers=x",
        "q=1&strategy=" + "e" * 4000,
    )
    for query in odd:
        code, _, body = served.get(f"/api/query?key=influence&{query}".replace("²", "%C2%B2"))
        assert code in (400, 404) and b"error" in body, query
    assert served.json("/api/runs")["runs"]


def test_a_token_is_asked_for(runs: dict[str, Path]) -> None:
    secret = "s" * 24
    server = Served(runs["tuned"].parent, Door("0.0.0.0", 1, secret))
    try:
        assert server.get("/api/runs")[0] == 401
        assert server.get("/api/runs?token=wrong")[0] == 401
        code, head, _ = server.get(f"/?token={secret}")
        assert code == 303 and b"httponly" in head.lower() and b"samesite=strict" in head.lower()
        assert server.get("/api/runs", more=f"Cookie: budwood={secret}\r\n")[0] == 200
    finally:
        server.close()


def test_places_that_cannot_be_served() -> None:
    with pytest.raises(ConfigError, match="--token"):
        Door("0.0.0.0", 7777)
    with pytest.raises(ConfigError, match="16"):
        Door("127.0.0.1", 7777, "short")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            open_socket("127.0.0.1", taken.getsockname()[1])


def test_no_runs_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from budwood.cli.main import main

    monkeypatch.chdir(tmp_path)
    for words in (["view"], ["report"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert "budwood" in capsys.readouterr().err
    assert Shelf(tmp_path).refresh() == []


def test_new_and_changed_runs_appear(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    made.write_run(tmp_path / "a", "finetune", {"metric": "accuracy", "score": 0.1})
    assert [r["score"] for r in shelf.refresh()] == [0.1]
    before = shelf.stamp()
    made.write_run(tmp_path / "a", "finetune", {"metric": "accuracy", "score": 0.25})
    made.write_run(tmp_path / "b", "finetune", {}, status="running")
    assert [r["score"] for r in shelf.refresh()] == [0.25, None] and shelf.stamp() != before


def test_typed_texts_are_answered(runs: dict[str, Path]) -> None:
    def ask(room: Any, text: str) -> dict[str, Any]:
        return {"rows": [{"id": "train-1", "text": "a row", "score": 0.5, "label": "good"}], "said": text}

    place = runs["self"] / "index"
    place.mkdir(exist_ok=True)
    (place / "index.json").write_text("{}")
    server = Served(runs["tuned"].parent, ask=ask)
    try:
        assert server.json("/api/run?key=self")["detail"]["asks"] is True
        reply = server.json("/api/ask?key=self&text=hello%20there")
        assert reply["answer"]["said"] == "hello there" and reply["texts"] == ["a row"]
        assert server.get("/api/ask?key=self&text=")[0] == 400
    finally:
        server.close()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")
def test_a_large_matrix_is_read_by_row(tmp_path: Path) -> None:
    """Peak memory of one query stays far below the matrix."""
    import subprocess
    import sys

    queries, train = 500, 100_000  # 200 MB
    given = made.write_reviews(tmp_path / "data", hostile=False)
    made.write_run(tmp_path / "runs" / "big", "influence score", {"strategies": ["ekfac"]}, given=given)
    ids = [f"q{i}" for i in range(queries)], [f"t{i}" for i in range(train)]
    with writing_scores(tmp_path / "runs" / "big" / "scores", *ids) as desk:
        desk.put(Matrix("ekfac", main=True), slice(7, 8), slice(None), np.arange(train, dtype=np.float32)[None])
    code = (
        "import re; from pathlib import Path; from budwood.report.shelf import Shelf;"
        f"s = Shelf(Path({str(tmp_path / 'runs')!r})); s.run('big');"
        "a = s.query('big', 7, 'ekfac', ())['answer']['top'];"
        "peak = re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1];"
        "print(a['rows'][0], a['scores'][0], peak)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    best, score, peak = done.stdout.split()
    assert (int(best), float(score)) == (train - 1, train - 1)
    assert int(peak) / 1024 < 190  # with Python, numpy and pyarrow in it; the matrix alone is 200


def test_a_question_without_its_run_is_told_from_one_about_no_run(served: Served) -> None:
    for path in ("/api/run", "/api/run?key=", "/api/query?q=0", "/api/ask?text=a"):
        code, _, body = served.get(path)
        assert code == 400 and "Name a run: ?key=KEY" in json.loads(body)["error"], path
    assert served.get("/api/query?key=influence&q=x")[0] == 400
    assert served.get("/api/run?key=nope")[0] == 404


def test_view_of_one_run_opens_at_it(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from budwood.cli.main import main
    from budwood.report import view

    shown: list[Path] = []
    monkeypatch.setattr(view, "serve", lambda directory, *rest: shown.append(directory))
    with pytest.raises(SystemExit) as end:
        main(["view", str(runs["tuned"]), "--port", "0"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and shown == [runs["tuned"].resolve().parent]
    assert "/#view=runs&open=tuned " in said and "is a run; all runs of runs are served" in said
    assert Shelf(shown[0]).run("tuned")["full"]["name"] == "tuned"


def test_influence_in_the_weights_of_a_graft(served: Served, runs: dict[str, Path], monkeypatch: Any) -> None:
    """The server ranks by what `influence show --graft` counts, once per query; a run without a graft says so."""
    from budwood.methods.influence import masked

    (runs["graft"] / "reviews.graft").write_bytes(b"a graft")
    counted = np.random.default_rng(3).normal(size=60)
    asked: list[tuple[int, str, str]] = []

    def count(run: Path, scores: Scores, query: int, matrix: Matrix, graft: Path) -> tuple[np.ndarray, str]:
        asked.append((query, matrix.strategy, graft.name))
        return counted, ""

    monkeypatch.setattr(masked, "graft_scores", count)
    path = "/api/query?key=influence&q=4&strategy=ekfac&graft="
    top = served.json(f"{path}graft")["answer"]["top"]
    order = np.argsort(-counted, kind="stable")
    assert top["rows"] == [*order[:20].tolist(), *order[-20:].tolist()]
    np.testing.assert_allclose(top["scores"], counted[top["rows"]], rtol=1e-5)
    assert served.json(f"{path}graft")["answer"]["top"] == top and asked == [(4, "ekfac", "reviews.graft")]
    code, _, body = served.get(f"{path}tuned")
    assert code == 404 and "holds no graft file" in json.loads(body)["error"]
    assert served.get(f"{path}nope")[0] == 404
