"""Bars of probes and frozen features.

make show-02
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from show import ROOT, SHARED, Show, run

show = Show()
work = Path(tempfile.mkdtemp(prefix="budwood-show-"))
TIE = 1e-9  # objectives this near are the same
MINILM = SHARED / "models" / "all-MiniLM-L6-v2"


CHECKS = {
    "1 metric: published figures, best of all thresholds, all-null = share without answer": {
        "data/test_squad.py": "published_figures or best_ or bags or lone_article",
    },
    "2 decoders = brute force, planted spans come back by the character": {
        "data/test_squad.py": "brute_force or planted",
    },
    "3 one prediction per question, whatever the order of windows": {
        "data/test_squad.py": "real_windows or window_order",
        "data/test_encode.py": "windows_are or every_answer",
    },
    "4 a constant on all scores changes nothing and has no gradient": {
        "data/test_squad.py": "constant_shifts",
        "linalg/test_choice.py": "constant_for_all",
        "methods/probe/test_probe.py": "shifting_all",
    },
    "5 two beginnings, one optimum; train loss <= the model's own head": {
        "linalg/test_choice.py": "two_random or no_worse",
        "methods/probe/test_own_head.py": "train_loss",
    },
    "6 gradients = autograd; Newton, L-BFGS and AdamW end at one optimum": {
        "linalg/test_choice.py": "gradient_of",
        "linalg/test_streamed.py": "same_optimum",
        "methods/probe/test_probe.py": "autograd_finds",
        "methods/probe/test_descent.py": "newton_finds or one_after_the_other",
    },
    "7 states: one pass = block by block, padded = not, 16 bits change no answer": {
        "capture/test_features.py": "row_by_itself or block_after or sixteen",
        "capture/test_activations.py": "output_hidden_states",
    },
    "8 word lists 20/3/4/27/8, prompts end in a word, states do not see the batch": {
        "methods/test_linear.py": "published or long_text or depend_on_the_batch or every_form",
        "data/test_encode.py": "last_token",
        "data/test_prompt.py": "never_ends",
    },
    "9 streamed phi-p = dense = autograd = attention, in little memory": {
        "linalg/test_vocabulary.py": "conditional_mean or float32 or block_size or gpt_2",
    },
    "10 word logits = f within the span of their embeddings": {
        "methods/test_linear.py": "within_the_span or projection"
    },
    "11 kernel form = primal, projection by blocks = explicit matrix": {
        "methods/test_linear.py": "short_forms or stream",
        "linalg/test_vocabulary.py": "explicit or inner_products or moments",
    },
    "12 Quad: gradient, Gram form, what it converges to": {"models/test_quad.py": "gram or gradient or projection"},
    "13 solver <= scikit-learn at every fold and C; LEACE; description length": {
        "linalg/test_softmax.py": "scikit or equal_costs",
        "linalg/test_streamed.py": "never_above",
        "methods/probe/test_probe.py": "leace or description_length",
    },
}


def checks() -> None:
    """The tests that hold each check; a group in which a word finds no test, or a test is skipped, is not met."""
    for name, files in CHECKS.items():
        words = [w for chosen in files.values() for w in chosen.split(" or ")]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-vv", *(f"tests/{f}" for f in files), "-k", " or ".join(words)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = done.stdout.strip().splitlines() or ["no output"]
        found = {
            w: any(line.startswith(f"tests/{f}::") and w in line and "PASSED" in line for line in lines)
            for f, chosen in files.items()
            for w in chosen.split(" or ")
        }
        whole = done.returncode == 0 and all(found.values()) and "skipped" not in lines[-1]
        lacking = [f"no test passed for '{w}'" for w, yes in found.items() if not yes]
        show.bar(name, whole, "; ".join([lines[-1].strip("= "), *lacking]))


def by_layer(result: dict[str, Any], key: str) -> list[float]:
    return [x[key] for x in result["layers"]]


def spans() -> None:
    from scipy.stats import spearmanr

    tuned = work / "qa"
    # after 6 epochs the model still answers 86 of 100 questions that have no answer, and thresholds are mostly noise
    run("finetune", "tiny-bert", "--task", "tiny-qa", "--mode", "span", "--epochs", 12, "--out", tuned, cwd=work)
    found = run("probe", "tiny-bert", tuned, "--task", "tiny-qa", "--out", work / "probe-qa", cwd=work)
    before, after = found["results"]
    null, blank = found["baselines"]["never_answering"], found["baselines"]["random_encoder"]
    # as published: where a threshold is tuned, each layer trades answers for silence by itself
    kinds = ("raw_HasAns_f1", "answered_f1", "HasAns_f1")
    depth, forced, tuned_depth = (
        float(spearmanr(range(len(after["layers"])), by_layer(after, k)).statistic) for k in kinds
    )
    last, first = after["layers"][-1]["score"], before["layers"][-1]["score"]
    rises = "HasAns F1 rises with depth: Spearman >= 0.9"
    show.bar(f"{rises}, no tuned threshold", depth >= 0.9 - TIE, f"{depth:.3f} {by_layer(after, kinds[0])}")
    show.bar(
        f"{rises}, threshold tuned in each layer",
        tuned_depth >= 0.9 - TIE,
        f"{tuned_depth:.3f}; always answered {forced:.3f}",
    )
    raw, own = after["layers"][-1]["raw_f1"], after["head_raw_f1"]
    told = f"{last:.2f} against {after['head_score']:.2f}; without a tuned threshold {raw:.2f} against {own:.2f}"
    gaps = (last - after["head_score"], raw - own)
    show.bar("last layer at most 1 F1 under the head", min(gaps) >= -1, told)
    show.bar("last layer within 1 F1 of the head, either way", max(map(abs, gaps)) <= 1, told)
    show.bar("last layer >= 10 F1 above the pretrained one", last - first >= 10, f"{last:.1f} against {first:.1f}")
    show.bar("random encoder <= all-null + 5", max(blank) <= null + 5, f"{max(blank):.1f}, all-null {null:.1f}")
    show.bar("random encoder >= 15 under the last layer", last - max(blank) >= 15, f"{last - max(blank):.1f}")
    lowest = [min(x) for x in (by_layer(before, "score"), by_layer(after, "score"), blank)]
    told = "lowest {:.2f} (pretrained), {:.2f} (fine-tuned), {:.2f} (random)".format(*lowest)
    show.bar("F1 with the tuned threshold never under all-null", min(lowest) >= null, f"{told}; all-null {null:.2f}")
    import probe

    mine, head = probe.own_head(tuned)
    show.bar("converged probe's train loss <= the head's", mine <= head + 1e-4, f"{mine:.5f} against {head:.5f}")


def labels() -> None:
    # the pretrained model's first token knows nothing of entailment, so a tuned one is asked beside it
    run("finetune", "tiny-bert", "--task", "tiny-entail", "--out", work / "entail", cwd=work)
    entail = work / "entail"
    for task, model in (("tiny-tags", "tiny-bert"), ("tiny-entail", "tiny-bert"), ("tiny-entail", entail)):
        out = work / f"{task}-{Path(model).name}"
        mine = run("probe", model, "--task", task, "--out", out, cwd=work)["results"][0]
        # the layer that cross-validation chose: in layer 0 of tags words alone tell a control task as well as the tags
        (best,) = (x for x in mine["layers"] if x["layer"] == mine["best_layer"])
        apart = best["selectivity"] > 0.1 and best["compression"] > 1.1 * best["control_compression"]
        figures = f"layer {best['layer']}, score {best['score']:.3f}, selectivity {best['selectivity']:.3f}, "
        figures += f"compression {best['compression']:.2f} against {best['control_compression']:.2f}"
        show.bar(f"{task}, {Path(model).name}: selectivity and compression tell task from control", apart, figures)


def real() -> None:
    found = run(
        *("probe", MINILM, "--task", "sst2", "--data-dir", SHARED / "data", "--limit", 20000, "--states", "mean"),
        *("--out", work / "sst2"),
        cwd=work,
    )
    mine = found["results"][0]  # of the layer that cross-validation chose, not of the one that tests best
    told = f"{mine['score']:.3f} at layer {mine['best_layer']} (chosen by {mine['chosen_by']})"
    show.bar("MiniLM on SST-2: frozen features >= 0.80", mine["score"] >= 0.80, told)


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
        single, more, blank = probe.forward_pass(task, 2000)
        show.bar(f"label probes <= {most}x the forward pass ({task})", single.times <= most, str(single))
        show.bar(f"MDL, control, 5 seeds <= 2x ({task})", more.times <= 2, f"{more}; {blank}")
    single, more, blank = probe.forward_pass("squad2", 300, "token")
    show.bar("span probes of all layers <= 1.5x the forward pass", single.times <= 1.5, str(single))
    show.bar("MDL, control, 5 seeds <= 2x (squad2)", more.times <= 2, f"{more}; {blank}")


def bad_input() -> None:
    prompt = ("--mode", "prompt", "--states", "mask")
    lines = {
        "a layer that does not exist": ("layer 99", "tiny-topic", "--layers", 99),
        "a task without labels": ("'tiny-text' (kind 'text') has no labels", "tiny-text"),
        "fewer rows than folds": ("3 documents cannot make 5 folds", "tiny-topic", "--limit", 3, "--folds", 5),
        "a label word of several tokens": (
            *("label word 'unfathomable' is", "tiny-sentiment", *prompt, "--limit", 50),
            *("--label-words", "great,unfathomable"),
        ),
    }
    for i, (name, (words, task, *more)) in enumerate(lines.items()):  # a place of its own: a used one is refused too
        out = ("--out", work / f"bad-{i}")
        _refused(name, words, run("probe", "tiny-bert", "--task", task, *more, *out, cwd=work, code=2)["stderr"])
    other_states(prompt)


def other_states(prompt: tuple[str, ...]) -> None:
    """Saved probes meet a model that has changed since, and rows with another wording."""
    few = ("--limit", 60, "--limit-eval", 40)
    model, probes = work / "changing", work / "of-changing"
    tune = ("finetune", "tiny-bert", "--task", "tiny-topic", *few, "--max-steps", 2, "--out", model)
    run(*tune, cwd=work)
    run("probe", model, "--task", "tiny-topic", *few, "--no-controls", "--out", probes, cwd=work)
    run(*tune, "--seed", 1, "--overwrite", cwd=work)
    told = run("probe-predict", probes, cwd=work, code=2)["stderr"]
    _refused("features of another model", "changing' is not the model these probes were trained on", told)
    sheet, worded = work / "own.yaml", work / "worded"
    (work / "own.jsonl").write_text(
        "".join(f'{{"text": "it was {w} .", "label": "{k}"}}\n' for w, k in [("good", "pos"), ("bad", "neg")] * 30)
    )
    for wording in ("{text} all in all {mask} .", "{text} so {mask} ."):
        sheet.write_text(
            "name: own\nkind: label\nlabels: [neg, pos]\nfiles: {train: own.jsonl, test: own.jsonl}\n"
            f'template: {{masked: "{wording}", words: [terrible, great]}}\n'
        )
        if not worded.exists():
            run("probe", "tiny-bert", "--task", sheet, *prompt, "--no-controls", "--out", worded, cwd=work)
    told = run("probe-predict", worded, cwd=work, code=2)["stderr"]
    _refused("features of another prompt", "features of another prompt: '{text} all in all {mask} .' there", told)


def _refused(name: str, words: str, told: str) -> None:
    """Said in one line of budwood's own, with the words that name what is wrong."""
    plain = " ".join(told.split())
    own = "budwood: " in plain and "Traceback" not in plain
    show.bar(f"bad input: {name}", own and words in plain, plain[-200:])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    np.seterr(all="ignore")
    show.section("checks", checks)
    show.section("span probes", spans)
    show.section("label and token probes", labels)
    show.section("real data", real, SHARED / "models")
    show.section("speed", speed, SHARED / "models")
    show.section("bad input", bad_input)
    if importlib.util.find_spec("show_02_linear"):
        import show_02_linear

        show_02_linear.sections(show, work)
    show.end()
