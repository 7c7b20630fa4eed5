"""Write the small reference that the parity test reads: kronfluence 1.0.1 on a fine-tuned tiny BERT, float64.

    PYTHONPATH=. python benchmarks/kronfluence_reference.py tests/golden/kronfluence.safetensors

Needs kronfluence (`bench` extra). Everything follows from one seed. The file holds the model's weights, the rows, and
kronfluence's covariances, Lambda row sums and scores of four strategies at three dampings, empirical Fisher.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 2,
    "attn_implementation": "eager",
}
TRAIN, QUERIES, LENGTH = 64, 12, 14
DAMPINGS = {"1e-08": 1e-8, "0.0001": 1e-4, "0.1mean": None}
STRATEGIES = ("identity", "diagonal", "kfac", "ekfac")


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


def tuned(train: dict[str, Tensor]) -> Any:
    """A BERT trained on the rows until it knows most of them."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SHAPE)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        logits = model(input_ids=train["input_ids"], attention_mask=train["attention_mask"]).logits
        loss = F.cross_entropy(logits, train["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = (logits.argmax(1) == train["label"]).double().mean()
    print(f"train accuracy {right:.3f}, loss {loss:.4f}")
    return model.eval()


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
            if sample:
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
            inputs = {k: v for k, v in batch.items() if k != "label"}
            return model(**inputs).logits

        def get_attention_mask(self, batch: Any) -> Tensor:
            return batch["attention_mask"]

    return Classify()


def main(out: Path) -> None:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.utils.common.factor_arguments import pytest_factor_arguments
    from kronfluence.utils.common.score_arguments import pytest_score_arguments
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    train, queries = rows(1, TRAIN), rows(2, QUERIES)
    model = tuned(train)
    found = {f"model/{k}": v.clone() for k, v in model.state_dict().items() if v.is_floating_point()}
    for side, columns in (("train", train), ("query", queries)):
        found |= {f"{side}/{k}": v for k, v in columns.items()}
    task = task_class()
    wrapped = prepare_model(model, task)
    with tempfile.TemporaryDirectory() as place:
        analyzer = Analyzer("reference", wrapped, task, cpu=True, output_dir=place, disable_tqdm=True)
        for strategy in STRATEGIES:
            arguments = pytest_factor_arguments(strategy=strategy)
            analyzer.fit_all_factors(
                strategy, Rows(train), factor_args=arguments, per_device_batch_size=16, overwrite_output_dir=True
            )
            for label, damping in DAMPINGS.items():
                scoring = pytest_score_arguments(damping_factor=damping)
                name = f"{strategy}-{label}"
                analyzer.compute_pairwise_scores(
                    name, strategy, Rows(queries), Rows(train), QUERIES, 16, score_args=scoring,
                    overwrite_output_dir=True,
                )  # fmt: skip
                scores = analyzer.load_pairwise_scores(name)["all_modules"]
                key = strategy if strategy == "identity" else f"{strategy}@{label}"
                found[f"scores/{key}"] = scores.double()
        loaded = {**analyzer.load_covariance_matrices("ekfac"), **analyzer.load_lambda_matrices("ekfac")}
        for kind, short in (("activation_covariance", "A"), ("gradient_covariance", "G")):
            count = loaded[f"num_{kind}_processed"]
            for module, matrix in loaded[kind].items():
                found[f"{short}/{module}"] = matrix.double() / count[module].double()
        for module, matrix in loaded["lambda_matrix"].items():
            mean = matrix.double() / loaded["num_lambda_processed"][module].double()
            found[f"L/{module}"] = torch.stack([mean.sum(), mean.square().sum()])
    facts = {"kronfluence": "1.0.1", "shape": json.dumps(SHAPE)}
    save_file({k: v.contiguous() for k, v in found.items()}, out, metadata=facts)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB, {len(found)} tensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
