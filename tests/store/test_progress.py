"""Progress goes to the right places, and its seconds add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from budwood.store.progress import Progress, style_for


@pytest.mark.parametrize("style", ["rich", "plain", "json", "none"])
def test_styles(style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(style, tmp_path / "p.jsonl", every=0.0)  # type: ignore[arg-type]
    with progress.stage("train", 3) as bar:
        for _ in range(3):
            bar.advance(1, "loss 1")
    out, err = capsys.readouterr()
    assert out == ""  # stdout belongs to results
    assert (style == "none") == (err == "")
    events = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert events[-1]["done"] == 3 and events[-1]["seconds"] >= 0 and progress.seconds["train"] >= 0
    if style == "plain":
        assert "train: 3 of 3, 0 s left; loss 1" in err


def test_the_log_survives_an_exception(tmp_path: Path) -> None:
    progress = Progress("none", tmp_path / "p.jsonl")
    with pytest.raises(RuntimeError), progress.stage("train", 2):
        raise RuntimeError
    assert "train" in progress.seconds
    assert style_for("json") == "json" and style_for(None) in ("plain", "rich")


def test_steps_of_this_session_are_counted() -> None:
    progress = Progress("none")
    for _ in range(2):
        with progress.stage("load"):
            pass
        with progress.stage("shards", 5, 3) as bar:
            bar.advance()
            bar.advance()
    with progress.stage("nothing left", 5, 5):
        pass
    assert progress.calls == {"load": 2, "shards": 4, "nothing left": 0}
