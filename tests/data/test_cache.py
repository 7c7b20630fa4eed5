"""Tokens kept on disk: mapped back as they were; a damaged file is made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from budwood.data.batch import Features
from budwood.data.cache import cached_features, read_features, write_features
from budwood.data.task import Row


def features() -> Features:
    return Features.from_lists(
        ["a", "b", "ü"],
        {"input_ids": [[5, 6], [7], [1, 2, 3]]},
        {"label": [1, 0, 1], "soft": [0.5, 0.25, 1.0]},
        {"cut": 2},
    )


def test_read_back_as_written_and_mapped(tmp_path: Path) -> None:
    made = features()
    write_features(tmp_path / "f.safetensors", made)
    back = read_features(tmp_path / "f.safetensors")
    assert back.ids == made.ids and back.info == made.info and np.array_equal(back.offsets_N1, made.offsets_N1)
    for name in ("ragged", "fixed"):
        for key, value in getattr(made, name).items():
            read = getattr(back, name)[key]
            assert np.array_equal(read, value) and read.dtype == value.dtype and not read.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        back.ragged["input_ids"][0] = 9


def test_a_cut_off_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path))
    rows = [Row("a", "x")]
    cached_features(rows, ["k"], features)
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-40])
    calls: list[int] = []

    def again() -> Features:
        calls.append(1)
        return features()

    assert len(cached_features(rows, ["k"], again)) == 3 and calls == [1]
    assert len(cached_features(rows, ["k"], again)) == 3 and calls == [1]
