"""Bars of probes and frozen features.

make show-02
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from show import SHARED, Show, run

show = Show()
work = Path(tempfile.mkdtemp(prefix="budwood-show-"))
TIE = 1e-9  # objectives this near are the same
MINILM = SHARED / "models" / "all-MiniLM-L6-v2"


def by_layer(result: dict[str, Any], key: str) -> list[float]:
    return [x[key] for x in result["layers"]]


def spans() -> None:
    from scipy.stats import spearmanr

    tuned = work / "qa"
    run("finetune", "tiny-bert", "--task", "tiny-qa", "--mode", "span", "--epochs", 6, "--out", tuned, cwd=work)
    found = run("probe", "tiny-bert", tuned, "--task", "tiny-qa", "--out", work / "probe-qa", cwd=work)
    before, after = found["results"]
    null, blank = found["baselines"]["majority"], found["baselines"]["random_encoder"]
    depth = float(spearmanr(range(len(after["layers"])), by_layer(after, "HasAns_f1")).statistic)
    last, first = after["layers"][-1]["score"], before["layers"][-1]["score"]
    show.bar("HasAns F1 rises with depth: Spearman >= 0.9", depth >= 0.9, f"{depth:.3f}")
    gap = after["head_score"] - last
    show.bar("last layer within 1 F1 of the head", gap <= 1, f"{last:.1f} against {after['head_score']:.1f}")
    show.bar("last layer >= 10 F1 above the pretrained one", last - first >= 10, f"{last:.1f} against {first:.1f}")
    show.bar("random encoder <= all-null + 5", max(blank) <= null + 5, f"{max(blank):.1f}, all-null {null:.1f}")
    show.bar("random encoder >= 15 under the last layer", last - max(blank) >= 15, f"{last - max(blank):.1f}")
    lowest = min(by_layer(before, "score") + by_layer(after, "score"))
    show.bar("F1 with the tuned threshold never under all-null", lowest >= null, f"{lowest:.2f}, all-null {null:.2f}")


def labels() -> None:
    for task in ("tiny-tags", "tiny-entail"):
        found = run("probe", "tiny-bert", "--task", task, "--out", work / task, cwd=work)
        best = max(found["results"][0]["layers"], key=lambda x: x["score"])
        apart = best["selectivity"] > 0.1 and best["compression"] > 1.1 * best["control_compression"]
        figures = f"score {best['score']:.3f}, selectivity {best['selectivity']:.3f}, "
        figures += f"compression {best['compression']:.2f} against {best['control_compression']:.2f}"
        show.bar(f"{task}: selectivity and compression tell task from control", apart, figures)


def real() -> None:
    found = run(
        *("probe", MINILM, "--task", "sst2", "--data-dir", SHARED / "data", "--limit", 4000, "--states", "mean"),
        *("--out", work / "sst2"),
        cwd=work,
    )
    best = max(x["score"] for x in found["results"][0]["layers"])
    show.bar("MiniLM on SST-2: frozen features >= 0.80", best >= 0.80, f"{best:.3f}")


def speed() -> None:
    import probe

    lbfgs, liblinear = probe.solver()
    show.bar("label probes >= 3x scikit-learn lbfgs", lbfgs.times >= 3 and lbfgs.gap <= TIE, str(lbfgs))
    show.bar("label probes >= 20x liblinear", liblinear.times >= 20 and liblinear.gap <= TIE, str(liblinear))
    (decode,) = probe.decode()
    show.bar("decode >= 100x the loop", decode.times >= 100 and decode.gap == 0, str(decode))
    (loop,) = probe.epochs()
    show.bar("span probes >= 6x the original's per-epoch loop", loop.times >= 6, str(loop))
    for task, most in (("agnews", 1.5), ("sst2", 2.5)):
        single, more = probe.forward_pass(task, 2000)
        show.bar(f"label probes <= {most}x the forward pass ({task})", single.times <= most, str(single))
        show.bar(f"controls <= 2x ({task})", more.times <= 2, str(more))
    single, _ = probe.forward_pass("squad2", 300, "token")
    show.bar("span probes of all layers <= 1.5x the forward pass", single.times <= 1.5, str(single))


def bad_input() -> None:
    lines = {
        "a layer that does not exist": ("99", "tiny-topic", "--layers", 99),
        "a task without labels": ("label", "tiny-text"),
        "fewer rows than folds": ("fold", "tiny-topic", "--limit", 3, "--folds", 5),
    }
    for name, (word, task, *more) in lines.items():
        told = run("probe", "tiny-bert", "--task", task, *more, "--out", work / "bad", cwd=work, code=2)["stderr"]
        show.bar(f"bad input: {name}", word in told, told.strip()[-160:])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    np.seterr(all="ignore")
    show.section("span probes", spans)
    show.section("label and token probes", labels)
    show.section("real data", real, SHARED / "models")
    show.section("speed", speed, SHARED / "models")
    show.section("bad input", bad_input)
    if importlib.util.find_spec("show_02_linear"):
        import show_02_linear

        show_02_linear.sections(show, work)
    show.end()
