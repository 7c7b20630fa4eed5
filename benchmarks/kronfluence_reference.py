"""Write the small reference that the parity test reads: kronfluence 1.0.1 on a fine-tuned tiny BERT, float64.

    PYTHONPATH=. python benchmarks/kronfluence_reference.py tests/golden/kronfluence.safetensors

Needs kronfluence (`bench` extra). Everything follows from one seed; a model that the file holds already is kept, as
another machine would train it to other last digits. The file holds, of four strategies at three dampings:

    model/, train/, query/   the model's weights and the rows
    A/, G/, L/, scores/      kronfluence's covariances, sums of Lambda, and scores: float64, empirical Fisher
    scores32/                the same scores by kronfluence in float32, its default
    drawn/                   scores with a Fisher of labels drawn beforehand (train/drawn), float64
    twice/                   weights, rows and scores of a toy that applies one layer twice

Also printed: how well the rankings of two seeds of kronfluence's own draws agree, on a model that is less sure.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 2,
    "attn_implementation": "eager",
}
TRAIN, QUERIES, LENGTH = 128, 16, 24
DAMPINGS = {"1e-08": 1e-8, "0.0001": 1e-4, "0.1mean": None}
STRATEGIES = ("identity", "diagonal", "kfac", "ekfac")
STEPS, UNSURE_STEPS = 30, 20  # nine rows in ten known; fewer, and drawn labels are not always the true ones
TWICE_ROWS, TWICE_QUERIES = 24, 6


def rows(seed: int, count: int) -> dict[str, Tensor]:
    """Texts of random words, padded; the label is whether word 7 or 8 is the commoner, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randint(5, 60, size, generator=generator)  # noqa: E731
    ids = draw(count, LENGTH)
    lengths = torch.randint(5, LENGTH + 1, (count,), generator=generator)
    label = torch.randint(2, (count,), generator=generator)
    ids[:, 0] = 2
    for i in range(count):
        ids[i, 1 + int(torch.randint(3, (1,), generator=generator))] = 7 + label[i]
    flip = torch.rand(count, generator=generator) < 0.1
    label = torch.where(flip, 1 - label, label)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "label": label}


def tuned(train: dict[str, Tensor], steps: int = STEPS) -> Any:
    """A BERT trained on the rows until it knows most of them."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SHAPE)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        logits = model(input_ids=train["input_ids"], attention_mask=train["attention_mask"]).logits
        loss = F.cross_entropy(logits, train["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = (logits.argmax(1) == train["label"]).double().mean()
    print(f"train accuracy {right:.3f}, loss {loss:.4f}")
    return model.eval()


class Twice(nn.Module):
    """A classifier of fixed features of one word that applies one linear layer twice."""

    def __init__(self, features_NI: Tensor) -> None:
        super().__init__()
        width = features_NI.shape[1]
        self.features = nn.Embedding.from_pretrained(features_NI, freeze=True)
        self.inner = nn.Linear(width, width)
        self.classifier = nn.Linear(width, 3)

    def forward(self, input_ids: Tensor) -> Any:
        x = torch.tanh(self.inner(self.features(input_ids[:, 0])))
        return type("Out", (), {"logits": self.classifier(torch.tanh(self.inner(x)))})()


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {k: v[i] for k, v in self.columns.items()}


def task_class() -> Any:
    from kronfluence.task import Task

    class Classify(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = self._logits(batch, model)
            label = batch["label"]
            if sample and "drawn" in batch:
                label = batch["drawn"]
            elif sample:
                with torch.no_grad():
                    label = torch.multinomial(logits.softmax(-1).detach(), 1).flatten()
            return F.cross_entropy(logits, label, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            logits = self._logits(batch, model)
            at = torch.arange(len(logits))
            others = logits.clone()
            others[at, batch["label"]] = -torch.inf
            return -(logits[at, batch["label"]] - others.logsumexp(-1)).sum()

        def _logits(self, batch: Any, model: nn.Module) -> Tensor:
            inputs = {k: v for k, v in batch.items() if k not in ("label", "drawn")}
            return model(**inputs).logits

        def get_attention_mask(self, batch: Any) -> Tensor:
            return batch["attention_mask"]

    return Classify()


Scores = dict[str, Tensor]
Wish = Callable[..., Any]


def scored(
    model: nn.Module,
    train: dict[str, Tensor],
    queries: dict[str, Tensor],
    factor_args: Wish,
    score_args: Wish,
    strategies: tuple[str, ...] = STRATEGIES,
    then: Callable[[Any], None] = lambda analyzer: None,
) -> Scores:
    """score_QN of each strategy and damping; `then` sees the analyzer before its files are gone."""
    from kronfluence.analyzer import Analyzer, prepare_model

    task, out = task_class(), {}
    with tempfile.TemporaryDirectory() as place:
        wrapped = prepare_model(copy.deepcopy(model), task)
        analyzer = Analyzer("reference", wrapped, task, cpu=True, output_dir=place, disable_tqdm=True)
        for strategy in strategies:
            analyzer.fit_all_factors(
                strategy, Rows(train), factor_args=factor_args(strategy=strategy), per_device_batch_size=16
            )
            for label, damping in DAMPINGS.items():
                name = strategy if strategy == "identity" else f"{strategy}@{label}"
                if name in out:
                    continue  # no damping without a curvature
                analyzer.compute_pairwise_scores(
                    name.replace("@", "-"), strategy, Rows(queries), Rows(train), len(queries["label"]), 16,
                    score_args=score_args(damping_factor=damping),
                )  # fmt: skip
                out[name] = analyzer.load_pairwise_scores(name.replace("@", "-"))["all_modules"]
        then(analyzer)
    return out


def sampled_args(strategy: str) -> Any:
    """Arguments in float64 with a Fisher of drawn labels."""
    from kronfluence.utils.common.factor_arguments import pytest_factor_arguments

    wish = pytest_factor_arguments(strategy=strategy)
    wish.use_empirical_fisher = False
    return wish


def used_twice(score_args: Wish) -> dict[str, Tensor]:
    """The toy's weights and rows, and kronfluence's scores by plain gradients with its flag for shared parameters."""
    from kronfluence.utils.common.factor_arguments import pytest_factor_arguments

    def shared(strategy: str) -> Any:
        wish = pytest_factor_arguments(strategy=strategy)
        wish.has_shared_parameters = True
        return wish

    torch.manual_seed(0)
    count = TWICE_ROWS + TWICE_QUERIES
    model = Twice(torch.randn(count, 5)).double()
    every = {"input_ids": torch.arange(count)[:, None], "label": torch.randint(3, (count,))}
    train, queries = ({k: v[part] for k, v in every.items()} for part in (slice(TWICE_ROWS), slice(TWICE_ROWS, None)))
    found = scored(model, train, queries, shared, score_args, ("identity",))
    weights = {f"model/{k}": v for k, v in model.state_dict().items()}
    return {**weights, "label": every["label"], "scores": found["identity"].double()}


def seeds_agree(train: dict[str, Tensor], queries: dict[str, Tensor]) -> None:
    """Print how well rankings by two seeds of kronfluence's own draws agree: no other tool's draws can do better."""
    from kronfluence.utils.common.score_arguments import pytest_score_arguments

    from budwood.linalg.ranking import spearman_by_row

    model, runs = tuned(train, UNSURE_STEPS), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        runs.append(scored(model, train, queries, sampled_args, pytest_score_arguments, STRATEGIES[1:]))
    for name, one in runs[0].items():
        print(f"{name}: seed against seed {spearman_by_row(one.numpy(), runs[1][name].numpy()).mean():.4f}")


def main(out: Path, seeds: bool = False) -> None:
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.utils.common.factor_arguments import pytest_factor_arguments
    from kronfluence.utils.common.score_arguments import pytest_score_arguments
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    train, queries = rows(1, TRAIN), rows(2, QUERIES)
    model = tuned(train)
    if out.exists():
        model.load_state_dict({k[6:]: v for k, v in load_file(out).items() if k.startswith("model/")}, strict=False)
    found = {f"model/{k}": v.clone() for k, v in model.state_dict().items() if v.is_floating_point()}
    for side, columns in (("train", train), ("query", queries)):
        found |= {f"{side}/{k}": v for k, v in columns.items()}

    def keep_factors(analyzer: Any) -> None:
        loaded = {**analyzer.load_covariance_matrices("ekfac"), **analyzer.load_lambda_matrices("ekfac")}
        for kind, short in (("activation_covariance", "A"), ("gradient_covariance", "G")):
            count = loaded[f"num_{kind}_processed"]
            for module, matrix in loaded[kind].items():
                found[f"{short}/{module}"] = matrix.double() / count[module].double()
        for module, matrix in loaded["lambda_matrix"].items():
            mean = matrix.double() / loaded["num_lambda_processed"][module].double()
            found[f"L/{module}"] = torch.stack([mean.sum(), mean.square().sum()])

    def plain(strategy: str) -> Any:
        return FactorArguments(strategy=strategy, use_empirical_fisher=True)

    exact = scored(model, train, queries, pytest_factor_arguments, pytest_score_arguments, then=keep_factors)
    found |= {f"scores/{k}": v.double() for k, v in exact.items()}
    rounded = scored(copy.deepcopy(model).float(), train, queries, plain, ScoreArguments)
    found |= {f"scores32/{k}": v for k, v in rounded.items()}
    # evenly: the model is sure of most of its rows, whose own draws would be the true labels
    labels = torch.randint(2, (TRAIN,), generator=torch.Generator().manual_seed(5))
    found["train/drawn"] = labels
    drawn = scored(model, {**train, "drawn": labels}, queries, sampled_args, pytest_score_arguments, STRATEGIES[1:])
    found |= {f"drawn/{k}": v.float() for k, v in drawn.items()}
    found |= {f"twice/{k}": v for k, v in used_twice(pytest_score_arguments).items()}
    with torch.no_grad():
        logits = model(input_ids=train["input_ids"], attention_mask=train["attention_mask"]).logits
    right = float((logits.argmax(1) == train["label"]).double().mean())
    facts = {"kronfluence": version("kronfluence"), "shape": json.dumps(SHAPE), "train accuracy": f"{right:.4f}"}
    save_file({k: v.contiguous() for k, v in found.items()}, out, metadata=facts)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB, {len(found)} tensors")
    if seeds:
        seeds_agree(train, queries)


if __name__ == "__main__":
    main(Path(sys.argv[1]), seeds=True)
