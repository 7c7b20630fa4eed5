"""`influence fit`: memory, what is told, the same bytes after a kill, labels that are drawn."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from budwood.errors import ConfigError
from budwood.methods.influence import evidence as seen
from budwood.methods.influence import factors as made
from budwood.methods.influence import fit as method
from budwood.methods.influence import index, itself, memory, moments, workshop
from budwood.methods.influence.evidence import SHARES, of_covariances, told, weigh
from budwood.methods.influence.factors import Factors
from budwood.methods.influence.memory import Need
from budwood.methods.influence.moments import covariances
from budwood.methods.influence.workshop import Shop
from budwood.params import tree
from budwood.studies.api import run
from tests.interrupt import interrupted
from tests.methods.influence.toys import fit, toy

CURVED = ("ekfac", "kfac", "diagonal")
FILES = ["covariance.safetensors", "eigen.safetensors", "factors.json", "moments.safetensors"]


def test_sums_take_parts_one_at_a_time() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def parts() -> Iterator[dict[str, Tensor]]:
        for i in range(4):
            assert not [r for r in seen if r() is not None]
            fresh = torch.full((3,), float(i))
            seen.append(weakref.ref(fresh))
            part = {"a": fresh}
            del fresh
            yield part
            del part

    assert made.merged(parts())["a"].tolist() == [6.0] * 3 and len(seen) == 4


@pytest.mark.parametrize("strategy", ["kfac", "ekfac"])
def test_a_fit_holds_one_shard_at_a_time(
    strategy: str, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    alive: dict[str, list[weakref.ref[Tensor]]] = {"covariance": [], "moments": []}
    most = dict.fromkeys(alive, 0)
    real = tree.load

    def load(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
        kind = path.name.split("-")[0]
        if kind in alive:
            most[kind] = max(most[kind], len({id(t) for r in alive[kind] if (t := r()) is not None}))
        found, facts = real(path, device)
        if kind in alive:
            alive[kind].append(weakref.ref(next(t for t in found.values() if t.dim() == 2)))
        return found, facts

    monkeypatch.setattr(method.tree, "load", load)
    run("influence fit", model, task, {"threads": 1, "strategy": (strategy,), "shard_rows": 3, "out": tmp_path / "f"})
    read = 16 if strategy == "kfac" else 8  # kfac reads them again, half by half, to choose its damping
    assert len(alive["covariance"]) == read and len(alive["moments"]) == (8 if strategy == "ekfac" else 0)
    assert most == {"covariance": 0, "moments": 0}


def test_every_strategy_chooses_its_own_damping(tuned: Any, tmp_path: Path, capsys: Any) -> None:  # noqa: F811
    model, task = tuned
    settings = {"threads": 1, "shard_rows": 5}
    each = {s: run("influence fit", model, task, {**settings, "strategy": (s,), "out": tmp_path / s}) for s in CURVED}
    joint = run("influence fit", model, task, {**settings, "strategy": CURVED, "out": tmp_path / "all"})
    for strategy, alone in each.items():
        evidence = alone.metrics["damping"][strategy]
        assert evidence == joint.metrics["damping"][strategy] and len(evidence["sweep"]) == len(SHARES)
        assert alone.metrics["damping_auto"] == f"{strategy} {evidence['best']:g} x mean"
    kfac = Factors.open(tmp_path / "kfac")
    assert kfac.share("kfac") == (joint.metrics["damping"]["kfac"]["best"], "kfac")
    assert max(x["agreement"] for x in joint.metrics["damping"]["kfac"]["sweep"]) > 0.99
    assert Factors.open(tmp_path / "ekfac").share("kfac")[1] == "ekfac"  # borrowed, and told so
    capsys.readouterr()
    shown = {"threads": 1, "strategy": ("kfac",), "queries": ("3",), "progress": "plain"}
    scored = run("influence score", model, task, {**shown, "factors": tmp_path / "kfac", "out": tmp_path / "s"})
    assert scored.metrics["damping_auto"] == each["kfac"].metrics["damping_auto"]
    err = capsys.readouterr().err
    assert "--damping auto, kfac: " in err and "agreement of scores by two halves" in err and "at 10," in err
    borrowed = run("influence score", model, task, {**shown, "factors": tmp_path / "ekfac", "out": tmp_path / "b"})
    assert "as for ekfac: the factors were not fitted for kfac" in borrowed.metrics["damping_why"]["kfac"]


def test_kfac_evidence_is_that_of_covariances_of_either_half(tmp_path: Path) -> None:
    _, shop = toy("bert", rows=8)
    factors = fit(shop, tmp_path)
    halves = [made.merged([covariances(shop, np.arange(i, 8, 2))]) for i in (0, 1)]
    found = of_covariances([dict(h) for h in halves], factors.bases, shop.maps)["kfac"]
    mean = [made.means(dict(h), torch.float64) for h in halves]
    pairs = []
    for m in shop.maps:
        b = factors.basis(m.name)
        sides = [(b.q_OO.T @ x[f"G/{m.name}"] @ b.q_OO, b.q_II.T @ x[f"A/{m.source}"] @ b.q_II) for x in mean]
        one, other = (torch.outer(g.diag(), a.diag()) for g, a in sides)
        pairs.append((one, other))
    assert [x["agreement"] for x in found["sweep"]] == pytest.approx([x["agreement"] for x in weigh(pairs)["sweep"]])
    assert of_covariances([halves[0], {}], factors.bases, shop.maps) == {}


def test_evidence_is_that_of_the_same_rows_however_many_are_fitted(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors of a sample and of all rows are damped alike, and further rows count in the moments all the same."""
    model, task = tuned
    monkeypatch.setattr(seen, "ROWS", 8)
    settings = {"threads": 1, "shard_rows": 3, "strategy": ("ekfac", "kfac", "diagonal")}
    found = {
        n: run("influence fit", model, task, {**settings, "fit_rows": n, "out": tmp_path / n}) for n in ("8", "24")
    }
    few, all_ = (found[n].metrics["damping"] for n in ("8", "24"))
    assert few == all_ and set(few) == {"ekfac", "kfac", "diagonal"}
    assert sorted(f.name for f in (tmp_path / "24" / "factors").iterdir()) == FILES
    monkeypatch.setattr(seen, "ROWS", 1024)
    plain = run("influence fit", model, task, {**settings, "out": tmp_path / "plain"})
    assert plain.metrics["damping"] != all_
    ours, want = (Factors.open(r.run) for r in (found["24"], plain))
    for m in want.maps:
        got, wish = (f.tensor(f"diagonal/{m.name}") for f in (ours, want))
        assert torch.allclose(got, wish, rtol=1e-4, atol=1e-6 * float(wish.max())), m.name
        got, wish = (f.tensor(f"ekfac/{m.name}").sum() for f in (ours, want))  # bases turn by rounding
        assert float(got) == pytest.approx(float(wish), rel=1e-5)


def test_a_damping_that_is_given_saves_the_rows_that_would_tell_it(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    monkeypatch.setattr(seen, "ROWS", 8)
    found, passes = {}, {}
    real = method.second_moments
    for damping in ("0.1mean", "auto"):
        rows: list[int] = []
        monkeypatch.setattr(method, "second_moments", lambda s, o, *a, rows=rows: rows.append(len(o)) or real(s, o, *a))
        wish = {"threads": 1, "damping": (damping,), "queries": ("2",), "out": tmp_path / damping}
        found[damping] = Factors.open(run("influence score", model, task, wish).run)
        passes[damping] = sum(rows)
    assert passes["auto"] == passes["0.1mean"] + 8
    assert found["auto"].facts["evidence"] and not found["0.1mean"].facts["evidence"]
    one, other = (f.tensor(f"ekfac/{f.maps[0].name}") for f in found.values())
    assert torch.allclose(one, other, rtol=1e-3, atol=1e-6 * float(other.max()))


def test_where_nothing_is_known_the_usual_share_is_told(tmp_path: Path) -> None:
    _, shop = toy("bert")
    factors = fit(shop, tmp_path)
    assert factors.share("ekfac") == (10, None)
    assert told(factors, ["kfac"])["kfac"].startswith("10 x the mean curvature of each module, the usual share: ")


@pytest.mark.parametrize("rows", [1024, 8])  # all rows, or fewer than all, tell of damping
def test_a_fit_stopped_in_every_phase_ends_with_the_same_bytes(
    rows: int, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tuned
    monkeypatch.setattr(seen, "ROWS", rows)
    settings = {"threads": 1, "strategy": CURVED, "shard_rows": 5}
    whole = run("influence fit", model, task, {**settings, "out": tmp_path / "whole"}).run / "factors"
    out = tmp_path / "stopped"
    shards = 6 if rows > 24 else 2
    for job, done in (("covariance_shard", 1), ("eigen_part", shards + 1), ("moment_shard", shards + 4 + 1)):
        with interrupted(method, job, 2):
            run("influence fit", model, task, {**settings, "out": out})
        parts = [f for f in (out / "factors").rglob("*.safetensors") if f.parent.name == "parts"]
        assert len(parts) == done  # what was done before stays, and counts
        workshop._open.cache_clear()  # what the stopped process knew is gone
    run("influence fit", model, task, {**settings, "out": out})
    names = sorted(f.name for f in whole.iterdir())
    assert names == FILES
    for name in names:
        assert (out / "factors" / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize("verb", ["fit", "self", "index"])
def test_memory_is_kept_to_or_refused(verb: str, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, task = tuned
    settings = {"threads": 1, **({"calibration": 4} if verb == "index" else {})}
    with pytest.raises(ConfigError, match=r"--max-memory 1KB is too little .* at least \d+ MB"):
        run(f"influence {verb}", model, task, {**settings, "max_memory": "1KB", "out": tmp_path / "none"})
    assert not list((tmp_path / "none").rglob("*.safetensors"))
    needs: list[Need] = []
    for name in ("of_fit", "of_self", "of_index"):
        real = getattr(memory, name)
        for part in (memory, moments, method, itself, index):
            if hasattr(part, name):
                monkeypatch.setattr(part, name, lambda *a, real=real: needs.append(real(*a)) or needs[-1])
    usual = run(f"influence {verb}", model, task, {**settings, "out": tmp_path / "usual"})
    longest = 8  # six words and two marks
    least = max(n.held + n.row + n.token * longest for n in needs)
    spread: list[int] = []
    batches = Shop.batches
    monkeypatch.setattr(
        Shop,
        "batches",
        lambda self, f, order, **more: [
            spread.append(int(f.lengths_N[b].max()) * len(b)) or b for b in batches(self, f, order, **more)
        ],
    )
    tight = run(
        f"influence {verb}",
        model,
        task,
        {**settings, "max_memory": f"{least / 1e6 + 0.01:.4f}MB", "out": tmp_path / "tight"},
    )
    assert max(spread) < 100  # of 24 rows of up to 8 tokens
    ours, want = (tree.load(r.run / "factors" / "covariance.safetensors")[0] for r in (tight, usual))
    for key in want:
        torch.testing.assert_close(ours[key], want[key], rtol=1e-3, atol=1e-6)
