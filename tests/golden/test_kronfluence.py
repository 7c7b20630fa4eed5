"""Parity with kronfluence 1.0.1: four strategies, three dampings, true and drawn labels, from a stored reference.

The reference is made by benchmarks/kronfluence_reference.py; where kronfluence is installed it is made again.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from budwood.capture import questions
from budwood.config.influence import FitConfig
from budwood.data.batch import Features
from budwood.linalg.ranking import pearson_by_row, spearman_by_row
from budwood.methods.influence.factors import Factors, Setting
from budwood.methods.influence.foreign import COUNTS, module_names, read_kronfluence, write_kronfluence
from budwood.methods.influence.pairs import Meeting, Resident
from budwood.methods.influence.precondition import Work, measurement, precondition, query_blocks
from budwood.methods.influence.workshop import Shop, shop_of
from budwood.models.objective import Head
from tests.cases import Case
from tests.conftest import ROOT
from tests.methods.influence import toys
from tests.methods.influence.toys import ALL, dense_scores, fit, gradients, reading_of

FILE = Path(__file__).with_name("kronfluence.safetensors")
SETTINGS = [Setting("identity")] + [Setting(s, d) for s in ALL[1:] for d in ("1e-08", "0.0001", "0.1mean")]


def test_the_reference_is_a_tuned_model_of_some_size() -> None:
    """Rankings of a saturated model, or of few rows, would agree too easily."""
    found, shape = reference()
    with safe_open(FILE, framework="pt") as f:
        facts = f.metadata()
    assert facts["kronfluence"] == "1.0.1" and 0.8 <= float(facts["train accuracy"]) <= 0.98
    assert shape["hidden_size"] >= 48 and shape["num_hidden_layers"] == 2
    assert found["scores/identity"].shape == (16, 128)


WHERE_INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("kronfluence") is None, reason="kronfluence is not installed"
)


def reference_maker() -> Any:
    """The script that made the reference."""
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import kronfluence_reference  # type: ignore[import-not-found]

    return kronfluence_reference


@lru_cache
def reference(path: Path = FILE) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as f:
        return {k: f.get_tensor(k) for k in f.keys()}, json.loads(f.metadata()["shape"])  # noqa: SIM118


def features(side: str) -> Features:
    """The padded rows of the reference without their padding."""
    found, _ = reference()
    ids, mask = found[f"{side}/input_ids"], found[f"{side}/attention_mask"]
    lists = [row[: int(m.sum())].tolist() for row, m in zip(ids, mask)]
    return Features.from_lists(
        [f"{side}/{i}" for i in range(len(lists))], {"input_ids": lists}, {"label": found[f"{side}/label"].tolist()}
    )


def shop(dtype: torch.dtype = torch.float64, fisher: str = "empirical") -> Shop:
    from transformers import BertConfig, BertForSequenceClassification

    found, shape = reference()
    model = BertForSequenceClassification(BertConfig(**shape)).double()
    left = model.load_state_dict({k[6:]: v for k, v in found.items() if k.startswith("model/")}, strict=False)
    assert not left.unexpected_keys and all(k.endswith(("position_ids", "token_type_ids")) for k in left.missing_keys)
    read = reading_of(model.to(dtype).eval(), Head(), ("a", "b"))
    return shop_of(read, features("train"), FitConfig(task="toy", fisher=fisher, strategy=ALL))


def scores(here: Shop, factors: Factors, settings: list[Setting] = SETTINGS) -> dict[str, np.ndarray]:
    queries = features("query")
    ready = precondition(factors, settings, Work(len(queries), len(here.train), 10.0), None)
    blocks = Resident(len(queries), here.like)
    question = measurement(here.read.objective, "margin")
    query_blocks(here, ready, queries, np.arange(len(queries)), question, blocks.put)
    out = np.zeros((len(settings), len(queries), len(here.train)))

    def add(setting: int, m: Any, took: np.ndarray, score_BQ: torch.Tensor) -> None:
        out[setting][:, took] += score_BQ.T.double().numpy()

    Meeting(here, ready, blocks, len(queries), add)(here.train, np.arange(len(here.train)))
    return {s.text: v for s, v in zip(settings, out)}


def test_float64_scores_are_those_of_kronfluence(tmp_path: Path) -> None:
    theirs, _ = reference()
    here = shop()
    ours = scores(here, fit(here, tmp_path))
    for name, value in ours.items():
        want = theirs[f"scores/{name}"].numpy()
        assert spearman_by_row(value, want).min() >= 0.9999, name
        assert pearson_by_row(value, want).min() >= 0.99999, name


def test_float32_scores_are_as_close_to_its_float64_as_its_own(tmp_path: Path) -> None:
    theirs, _ = reference()
    here = shop(torch.float32)
    ours = scores(here, fit(here, tmp_path))
    # two neighbours changing places in every query: the least step of a ranking, and machines do not round alike
    step = 12 / (len(here.train) * (len(here.train) ** 2 - 1))
    for name, value in ours.items():
        want = theirs[f"scores/{name}"].numpy()
        found = spearman_by_row(value, want).mean()
        assert found >= 0.998, name
        assert found >= spearman_by_row(theirs[f"scores32/{name}"].numpy(), want).mean() - step, name


def test_scores_with_the_same_drawn_labels_are_those_of_kronfluence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, _ = reference()
    drawn = theirs["train/drawn"]
    monkeypatch.setattr(questions, "sample_labels", lambda logits, targets, index, seed: drawn[list(index)])
    here = shop(fisher="sampled")
    ours = scores(here, fit(here, tmp_path), SETTINGS[1:])
    for name, value in ours.items():
        want = theirs[f"drawn/{name}"].numpy()
        assert spearman_by_row(value, want).min() >= 0.9999, name
        # other labels give other rankings: this is no second comparison of the empirical Fisher
        assert spearman_by_row(theirs[f"scores/{name}"].numpy(), want).mean() < 0.999, name


def test_a_layer_applied_twice_is_right_where_kronfluence_is_wrong(tmp_path: Path) -> None:
    theirs = {k[6:]: v for k, v in reference()[0].items() if k.startswith("twice/")}
    model = reference_maker().Twice(theirs["model/features.weight"]).double()
    model.load_state_dict({k[6:]: v for k, v in theirs.items() if k.startswith("model/")})
    labels = theirs["label"].tolist()
    rows = Features.from_lists(
        [str(i) for i in range(len(labels))], {"input_ids": [[i] for i in range(len(labels))]}, {"label": labels}
    )
    c = Case(model, Head(), rows)
    cfg = FitConfig(task="toy", fisher="empirical", strategy=ALL)
    here = shop_of(reading_of(model, c.objective, ("a", "b", "c")), rows, cfg)
    assert {m.name for m in here.maps} == {"inner", "classifier"}
    queries, setting = np.arange(len(labels))[-len(theirs["scores"]) :], Setting("identity")
    train = theirs["scores"].shape[1]
    factors = fit(here, tmp_path)
    asked = {k: v[queries] for k, v in gradients(c, here, lambda z, t: -c.objective.margin(z, t)).items()}
    want = dense_scores(asked, gradients(c, here), factors, setting)[:, :train]
    ours = toys.scores(here, factors, [setting], queries)[0][:, :train]
    scale = np.abs(want).max()
    assert np.abs(ours - want).max() <= 1e-6 * scale
    assert np.abs(theirs["scores"].numpy() - want).max() > 0.01 * scale  # it keeps one of the two uses


def test_factors_are_those_of_kronfluence(tmp_path: Path) -> None:
    theirs, _ = reference()
    here = shop()
    factors = fit(here, tmp_path)
    for m in here.maps:
        own = module_names(here.model, here.maps)[m.name]
        for side, key in (("A", f"A/{m.source}"), ("G", f"G/{m.name}")):
            want = theirs[f"{side}/{own}"]
            assert (factors.tensor(key) - want).abs().max() <= 1e-9 * want.abs().max(), (side, own)
        b = factors.basis(m.name)
        for q, values, key in ((b.q_II, b.l_I, f"A/{m.source}"), (b.q_OO, b.l_O, f"G/{m.name}")):
            whole = factors.tensor(key)
            scale = min(1.0, float(whole.abs().max()))  # output gradients are small
            assert (q @ values.diag() @ q.T - whole).abs().max() <= 1e-10 * scale, key
        moments = factors.tensor(f"ekfac/{m.name}")
        total, squares = theirs[f"L/{own}"]
        assert float(moments.sum()) == pytest.approx(float(total), rel=1e-8)
        assert float(moments.square().sum()) == pytest.approx(float(squares), rel=1e-8)


def test_factors_there_and_back(tmp_path: Path) -> None:
    here = shop()
    factors = fit(here, tmp_path / "ours")
    write_kronfluence(factors, here.model, tmp_path / "theirs")
    back = read_kronfluence(tmp_path / "theirs", here, tmp_path / "back")
    some = [Setting("ekfac", "1e-08"), Setting("kfac", "0.0001")]
    before, after = scores(here, factors, some), scores(here, back, some)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_sums_over_many_rows_are_read_as_means(tmp_path: Path) -> None:
    """kronfluence keeps sums, and counts of its own for every module: tokens for covariances, rows for Lambda."""
    here = shop()
    factors = fit(here, tmp_path / "ours")
    write_kronfluence(factors, here.model, tmp_path / "theirs")
    for file, count in COUNTS.items():
        matrices = load_file(tmp_path / "theirs" / f"{file}.safetensors")
        many = {name: 64 * (i + 1) for i, name in enumerate(matrices)}
        save_file({n: m * many[n] for n, m in matrices.items()}, tmp_path / "theirs" / f"{file}.safetensors")
        counts = {n: torch.tensor([c]) for n, c in many.items()}
        save_file(counts, tmp_path / "theirs" / f"{count}.safetensors")
    back = read_kronfluence(tmp_path / "theirs", here, tmp_path / "back")
    some = [Setting("ekfac", "0.0001"), Setting("kfac", "0.1mean")]
    before, after = scores(here, factors, some), scores(here, back, some)
    for name in before:
        np.testing.assert_allclose(after[name], before[name], rtol=1e-9, atol=1e-12 * np.abs(before[name]).max())
    told = json.loads((tmp_path / "theirs" / "factor_arguments.json").read_text())
    assert told == {"strategy": "ekfac", "use_empirical_fisher": True}


@WHERE_INSTALLED
def test_either_scores_with_the_factors_of_the_other(tmp_path: Path) -> None:
    theirs, _ = reference()
    queries, train = (
        {k: theirs[f"{side}/{k}"] for k in ("input_ids", "attention_mask", "label")} for side in ("query", "train")
    )
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.utils.common.factor_arguments import pytest_factor_arguments
    from kronfluence.utils.common.score_arguments import pytest_score_arguments

    maker = reference_maker()
    task = maker.task_class()
    analyzer = Analyzer("x", prepare_model(shop().model, task), task, cpu=True, output_dir=tmp_path, disable_tqdm=True)
    wish = pytest_factor_arguments(strategy="ekfac")
    analyzer.fit_all_factors("own", maker.Rows(train), factor_args=wish, per_device_batch_size=16)
    here, setting = shop(), Setting("ekfac", "0.0001")
    want = theirs[f"scores/{setting.text}"].numpy()
    read = read_kronfluence(analyzer.factors_output_dir("own"), here, tmp_path / "read")
    assert spearman_by_row(scores(here, read, [setting])[setting.text], want).min() >= 0.9999

    write_kronfluence(fit(here, tmp_path / "fit"), here.model, analyzer.factors_output_dir("ours"))
    assert analyzer.load_all_factors("ours").keys() == analyzer.load_all_factors("own").keys()
    both = pytest_score_arguments(damping_factor=1e-4)
    analyzer.compute_pairwise_scores("s", "ours", maker.Rows(queries), maker.Rows(train), 16, 16, score_args=both)
    assert spearman_by_row(analyzer.load_pairwise_scores("s")["all_modules"].numpy(), want).min() >= 0.9999


@WHERE_INSTALLED
def test_the_reference_is_what_kronfluence_says(tmp_path: Path) -> None:
    shutil.copy(FILE, tmp_path / "again.safetensors")  # whose model is kept: machines train to other last digits
    reference_maker().main(tmp_path / "again.safetensors")
    again, stored = reference(tmp_path / "again.safetensors")[0], reference()[0]
    assert again.keys() == stored.keys()
    for name in [k for k in stored if k.startswith(("scores/", "drawn/", "twice/scores"))]:
        assert spearman_by_row(again[name].numpy(), stored[name].numpy()).min() >= 0.9999, name
    for name in [k for k in stored if k.startswith("scores32/")]:  # rounded otherwise: the bar of float32 itself
        assert spearman_by_row(again[name].numpy(), stored[name].numpy()).mean() >= 0.998, name
