"""A base and its tuned copy: what is compared, what goes along, and by which hash the base is known again."""

from __future__ import annotations

from pathlib import Path

import pytest

from budwood.config.graft import GraftLearnConfig
from budwood.methods.graft.pair import open_pair
from budwood.models.grafted import remembered_hash
from budwood.models.load import load
from budwood.models.reference import resolve
from budwood.params import mask as masks
from budwood.params.graft import backbone_hash
from tests.methods.graft_for_tests import toy_task

CFG = GraftLearnConfig(task="toy", data_seed=0, model_seed=0)


@pytest.mark.parametrize("force", [False, True])
def test_a_base_with_grafts_on_it_has_a_hash_of_its_own(
    place: Path, force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path / "cache"))
    plain = resolve(str(place / "base"))
    pair = open_pair(CFG, plain, resolve(str(place / "prompt")), toy_task())
    pair.graft(masks.random(pair.sizes, 50, 0)).save(tmp_path / "a.graft")
    monkeypatch.setenv("BUDWOOD_CACHE", str(tmp_path / f"cache {force}"))
    ref = resolve(f"{place / 'base'}+{tmp_path / 'a.graft'}", force=force)
    found = open_pair(CFG, ref, resolve(str(place / "prompt")), toy_task())
    assert found.base_hash == backbone_hash(load(ref, "prompt").model) != pair.base_hash
    assert remembered_hash(plain, load(plain, "prompt").model) == pair.base_hash  # the plain base is still known
