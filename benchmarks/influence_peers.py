"""Other tools on the same rows: kronfluence (padded to 128, and with dynamic padding), TRAK, dattri, bergson.

    python benchmarks/influence_peers.py MODEL_DIR rows.json [--tool kronfluence] [--queries 64] [--threads 1]

`rows.json`: {"train": [[ids...], ...], "train_labels": [...], "queries": [...], "query_labels": [...]}, token ids of a
BERT-like classifier. One JSON object: seconds, phases, batch size and peak RSS of every tool that is installed; a tool
that cannot run says why. Each runs in a process of its own, so that peaks do not mix. Needs the `bench` extra.
With "peer_rows": n in the file, tools see every k-th training row, n in all, and phases that grow with the rows are
scaled up to all of them (kronfluence's scores along the line through n / 2 and n rows).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LONGEST = 128
BATCHES = (16, 32, 64)
TOOLS = ("kronfluence-padded", "kronfluence-dynamic", "trak", "dattri", "bergson")


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Token ids, padded to `width` (None: left ragged for the collator)."""

    def __init__(self, ids: list[list[int]], labels: list[int], width: int | None) -> None:
        self.ids, self.labels, self.width = ids, labels, width

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return pad([self.ids[i]], [self.labels[i]], self.width or len(self.ids[i]), squeeze=True)


def pad(ids: list[list[int]], labels: list[int], width: int, squeeze: bool = False) -> dict[str, Tensor]:
    """A batch of rows padded to `width`."""
    out = torch.zeros(len(ids), width, dtype=torch.long)
    mask = torch.zeros_like(out)
    for i, row in enumerate(ids):
        row = row[:width]
        out[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    found = {"input_ids": out, "attention_mask": mask, "label": torch.tensor(labels)}
    return {k: v[0] for k, v in found.items()} if squeeze else found


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch padded to its own longest row."""
    return pad(
        [r["input_ids"].tolist() for r in rows], [int(r["label"]) for r in rows], max(len(r["input_ids"]) for r in rows)
    )


def load(directory: str) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(directory, num_labels=2).eval()


def margin(logits: Tensor, label: Tensor) -> Tensor:
    at = torch.arange(len(logits))
    others = logits.clone()
    others[at, label] = -torch.inf
    return logits[at, label] - others.logsumexp(-1)


def kronfluence(model: nn.Module, data: dict[str, Any], dynamic: bool) -> dict[str, Any]:
    """EKFAC factors and pairwise scores; the batch size of the covariance phase that is fastest on a sample is used."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.utils.dataset import DataLoaderKwargs

    sys.path.insert(0, str(Path(__file__).parent))
    from kronfluence_reference import task_class

    width = None if dynamic else LONGEST
    order = chosen(data)
    times = len(data["train"]) / len(order)
    if dynamic:
        order.sort(key=lambda i: -len(data["train"][i]))
    train = Rows([data["train"][i] for i in order], [data["train_labels"][i] for i in order], width)
    queries = Rows(data["queries"], data["query_labels"], width)
    task = task_class()
    model = prepare_model(model, task)
    clock = Clock()
    with tempfile.TemporaryDirectory() as place:
        analyzer = Analyzer("bench", model, task, cpu=True, output_dir=place, disable_tqdm=True)
        if dynamic:
            analyzer.set_dataloader_kwargs(DataLoaderKwargs(collate_fn=collate))
        size = _best(analyzer, train)

        own = {"factors_name": "f", "factor_args": FactorArguments(strategy="ekfac"), "overwrite_output_dir": True}
        clock(
            "covariance",
            lambda: analyzer.fit_covariance_matrices(dataset=train, per_device_batch_size=size, **own),
            times,
        )
        clock("eigen", lambda: analyzer.perform_eigendecomposition(**own))
        clock("lambda", lambda: analyzer.fit_lambda_matrices(dataset=train, per_device_batch_size=size, **own), times)

        def score(rows: Rows, name: str) -> None:
            analyzer.compute_pairwise_scores(
                name, "f", queries, rows, len(queries), size, score_args=ScoreArguments(), overwrite_output_dir=True
            )

        clock("scores", lambda: score(train, "s"))
        if times > 1:
            half = Rows(train.ids[::2], train.labels[::2], width)
            clock("half", lambda: score(half, "h"))
            clock.along("scores", "half", len(half) / len(train), times)
    return {"batch_size": size, "rows": len(train), "phases": clock.wall, "cpu": clock.cpu}


class Clock:
    """Wall-clock and processor seconds of phases."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], Any], times: float = 1.0) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.wall[name] = (time.perf_counter() - wall) * times
        self.cpu[name] = (time.process_time() - cpu) * times

    def along(self, name: str, less: str, share: float, times: float) -> None:
        """Carry a phase on to `times` its rows, along the line through what `share` of them took."""
        for seconds in (self.wall, self.cpu):
            slope = max(0.0, seconds[name] - seconds.pop(less)) / (1 - share)
            seconds[name] += slope * (times - 1)


def chosen(data: dict[str, Any]) -> list[int]:
    """Places of the training rows that a peer sees."""
    count = len(data["train"])
    few = min(count, data.get("peer_rows") or count)
    return [i * count // few for i in range(few)]


def _best(analyzer: Any, train: Rows) -> int:
    """The batch size whose covariance pass over a sample is fastest."""
    from kronfluence.arguments import FactorArguments

    sample = Rows(train.ids[:: max(1, len(train) // 64)][:64], train.labels[:64], train.width)
    seconds = {}
    for size in BATCHES:
        began = time.perf_counter()
        analyzer.fit_covariance_matrices(
            factors_name=f"try{size}",
            dataset=sample,
            per_device_batch_size=size,
            factor_args=FactorArguments(),
            overwrite_output_dir=True,
        )
        seconds[size] = time.perf_counter() - began
    return min(seconds, key=lambda s: seconds[s])


def trak(model: nn.Module, data: dict[str, Any]) -> dict[str, Any]:
    """TRAK, one checkpoint, 1,024 projected numbers, its plain CPU projector.

    Masks are written out: TRAK maps over single rows, and the model would ask of each whether its mask is whole.
    """
    from trak import TRAKer
    from trak.modelout_functions import AbstractModelOutput
    from trak.projectors import BasicProjector, ProjectionType

    def wide(mask_BT: Tensor) -> Tensor:
        """What is added to attention [B, 1, T, T]."""
        return (1.0 - mask_BT.float())[:, None, None].expand(-1, 1, mask_BT.shape[1], -1) * -1e9

    class Out(AbstractModelOutput):  # type: ignore[misc]
        def __init__(self) -> None:
            """Nothing is kept; the base class asks for one."""

        @staticmethod
        def get_output(module: Any, weights: Any, buffers: Any, ids: Tensor, mask: Tensor, label: Tensor) -> Tensor:
            found = torch.func.functional_call(
                module, (weights, buffers), (), {"input_ids": ids[None], "attention_mask": wide(mask[None])}
            )
            return margin(found.logits, label[None]).sum()

        def get_out_to_loss_grad(self, module: Any, weights: Any, buffers: Any, batch: Any) -> Tensor:
            ids, mask, label = batch
            found = torch.func.functional_call(
                module, (weights, buffers), (), {"input_ids": ids, "attention_mask": wide(mask)}
            )
            return (1 - found.logits.softmax(-1)[torch.arange(len(label)), label]).clone().detach()[:, None]

    parameters = sum(p.numel() for p in model.parameters())
    project = BasicProjector(parameters, 1024, 0, ProjectionType.rademacher, torch.device("cpu"), 16, torch.float32)
    clock = Clock()
    size = 64  # its projection is drawn anew for every batch: few and large ones serve it best
    at = chosen(data)
    train, labels = [data["train"][i] for i in at], [data["train_labels"][i] for i in at]
    with tempfile.TemporaryDirectory() as place:
        count = len(train)
        tracer = TRAKer(
            model,
            Out(),
            count,
            save_dir=place,
            device="cpu",
            projector=project,
            proj_dim=1024,
            use_half_precision=False,
        )

        def features() -> None:
            tracer.load_checkpoint(model.state_dict(), model_id=0)
            for first in range(0, count, size):
                b = pad(train[first : first + size], labels[first : first + size], LONGEST)
                tracer.featurize((b["input_ids"], b["attention_mask"], b["label"]), num_samples=len(b["label"]))
            tracer.finalize_features()

        def scores() -> None:
            tracer.start_scoring_checkpoint("q", model.state_dict(), 0, len(data["queries"]))
            for first in range(0, len(data["queries"]), size):
                b = pad(data["queries"][first : first + size], data["query_labels"][first : first + size], LONGEST)
                tracer.score((b["input_ids"], b["attention_mask"], b["label"]), num_samples=len(b["label"]))
            tracer.finalize_scores("q")

        clock("features", features, len(data["train"]) / count)
        clock("scores", scores)
    return {"batch_size": size, "rows": count, "phases": clock.wall, "cpu": clock.cpu}


def dattri(model: nn.Module, data: dict[str, Any]) -> dict[str, Any]:
    """dattri's EKFAC attributor on the classifier's linear layers."""
    from dattri.algorithm.influence_function import IFAttributorEKFAC
    from dattri.task import AttributionTask

    def loss(parameters: Any, batch: Any) -> Tensor:
        ids, mask, label = batch
        logits = torch.func.functional_call(model, parameters, (), {"input_ids": ids, "attention_mask": mask}).logits
        return F.cross_entropy(logits, label)

    def loader(side: str, size: int) -> Any:
        labels = data["train_labels" if side == "train" else "query_labels"]
        at = chosen(data) if side == "train" else range(len(labels))
        b = pad([data[side][i] for i in at], [labels[i] for i in at], LONGEST)
        rows = torch.utils.data.TensorDataset(b["input_ids"], b["attention_mask"], b["label"])
        return torch.utils.data.DataLoader(rows, batch_size=size)

    task = AttributionTask(loss_func=loss, model=model, checkpoints=model.state_dict())
    attributor = IFAttributorEKFAC(task=task, device="cpu")
    clock, few = Clock(), len(chosen(data))
    times = len(data["train"]) / few
    clock("factors", lambda: attributor.cache(loader("train", 16)), times)
    clock("scores", lambda: attributor.attribute(loader("train", 16), loader("queries", 16)), times)
    return {"batch_size": 16, "rows": few, "phases": clock.wall, "cpu": clock.cpu}


def bergson(model: nn.Module, data: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("bergson 2.5.1 loads causal language models only, so it cannot score a classifier")


WORK: dict[str, Callable[[nn.Module, dict[str, Any]], dict[str, Any]]] = {
    "kronfluence-padded": lambda m, d: kronfluence(m, d, False),
    "kronfluence-dynamic": lambda m, d: kronfluence(m, d, True),
    "trak": trak,
    "dattri": dattri,
    "bergson": bergson,
}


def one(tool: str, directory: str, data: dict[str, Any]) -> dict[str, Any]:
    """One tool in this process."""
    package = tool.split("-")[0]
    if importlib.util.find_spec(package) is None:
        return {"tool": tool, "error": f"{package} is not installed"}
    try:
        found = WORK[tool](load(directory), data)
    except Exception as e:  # noqa: BLE001  a peer's failure is a result of this benchmark
        return {"tool": tool, "error": f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"}
    status = Path("/proc/self/status").read_text()  # `ru_maxrss` would count the process that started this one
    peak = int(re.search(r"VmHWM:\s*(\d+)", status)[1]) / 1024  # type: ignore[index]
    own = {"seconds": sum(found["phases"].values()), "cpu_seconds": sum(found["cpu"].values())}
    return {"tool": tool, **own, "peak_rss_mb": peak, **found}


def peers(
    directory: str, rows: Path, tools: tuple[str, ...] = TOOLS, threads: int = 1, python: str = sys.executable
) -> list[dict[str, Any]]:
    """Every tool in a process of its own; what `benchmarks/influence.py` calls."""
    results = []
    for tool in tools:
        words = [python, __file__, directory, str(rows), "--tool", tool, "--threads", str(threads)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        results.append(json.loads(lines[-1]) if lines else {"tool": tool, "error": done.stderr.strip()[-300:]})
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tool", choices=TOOLS)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    if given.tool is None:
        print(json.dumps(peers(given.model, given.rows, threads=given.threads), indent=1))
        return
    torch.set_num_threads(given.threads)
    print(json.dumps(one(given.tool, given.model, json.loads(given.rows.read_text()))))


if __name__ == "__main__":
    main()
