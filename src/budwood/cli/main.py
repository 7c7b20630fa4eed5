"""The command `budwood`: find the verb, run it, tell what went wrong in one paragraph."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from budwood.errors import BudwoodError, ConfigError, nearest

if TYPE_CHECKING:
    from cyclopts import App

ABOUT = """budwood: where does a skill live in a language model?

  budwood VERB MODEL... --task TASK [flags]

MODEL  tiny-bert or tiny-gpt (shipped), a Hugging Face directory or hub name, or an earlier run
TASK   tiny-sentiment and its siblings (shipped), a public task's name with --data-dir, or your own files
"""

# verb: (module that registers it, what it does)
COMMANDS = {
    "demo": ("demo", "the whole story on the shipped models, without network, in minutes"),
    "finetune": ("finetune", "teach a model a task, and score it"),
    "evaluate": ("evaluate", "score a model as it is: metrics, calibration, one record per example"),
    "fisher": ("fisher", "how much each weight matters to a task: diagonal Fisher information"),
    "linear": ("linear", "how much of a task is in the frozen features: linear classifiers on what a model says next"),
    "weights": ("weights", "`weights compare`: how far models have moved from their base, layer by layer"),
    "inject": ("inject", "teach a new skill while keeping others: EWC, L2, replay, and what each costs"),
    "graft": ("graft", "cut a fine-tuned skill out as a small file: learn, show, overlap, stitch, subtract"),
    "probe": ("probe", "a probe on every layer of every model, with control task, description length and baselines"),
    "influence": ("influence", "which training examples made a prediction: fit, score, self, query, show ..."),
    "validate": ("validate", "are scores true: lds, counterfactual, brittleness, mislabel, recall, by retraining"),
    "recipe": ("recipe", "run a YAML list of verbs as one study that can be stopped and carried on"),
    "report": ("report", "runs as one self-contained page: opens from a file, needs no network"),
    "view": ("view", "the same pages from a server on this machine, with live progress"),
    "runs": ("runs", "list runs; with --group mean, spread and median over seeds"),
    "compare": ("compare", "settings and metrics in which two runs differ"),
    "tasks": ("lists", "tasks, and whether their files are here; with a NAME three of its rows"),
    "models": ("lists", "models that need no network"),
    "doctor": ("doctor", "is this model safe to measure: determinism, padding, batch order, gradients"),
    "completion": ("completion", 'shell completion, e.g. eval "$(budwood completion bash)"'),
}
# second words of a verb, as "VERB-WORD": the verb whose module registers them
SECOND_WORDS = {"probe-predict": "probe", "probe-evaluate": "probe"}


def overview() -> str:
    """The first help page: plain text, no library imported."""
    width = max(map(len, COMMANDS))
    verbs = "\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items())
    end = "`budwood VERB --help` explains a verb; start with `budwood demo`. Exit: 0 done, 2 yours to fix, 1 our bug."
    return f"{ABOUT}\n{verbs}\n\n{end}"


def build(verbs: Sequence[str]) -> App:
    """The application with these verbs alone: the others cost nothing."""
    from importlib import import_module

    from cyclopts import App

    app = App(name="budwood", version_flags=[], help_format="plaintext")
    for module in dict.fromkeys(COMMANDS[v][0] for v in verbs):
        import_module(f"budwood.cli.{module}").register(app)
    return app


def main(words: Sequence[str] | None = None) -> None:
    """Entry point; exit codes: 0 done, 2 the user can fix it, 1 our bug."""
    words = list(sys.argv[1:] if words is None else words)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are ours to count
    if "--offline" in words:
        os.environ["HF_HUB_OFFLINE"] = "1"
    debug = "--debug" in words
    try:
        code = _dispatch(words)
    except BudwoodError as e:
        code = _fail(str(e), debug, e)
    except KeyboardInterrupt:
        code = _fail("Interrupted. The same command carries on where it stopped.", False, None, 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nothing to tell it
        code = 0
    except Exception as e:  # noqa: BLE001
        about = " ".join(f"{type(e).__name__}: {e}".split())
        code = _fail(f"This is a bug in budwood: {about}. Run again with --debug for the traceback.", debug, e, 1)
    sys.exit(code)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        print(overview())
        return 0
    if words[0] in ("--version", "version"):
        from importlib.metadata import version

        print(version("budwood"))
        return 0
    if "-".join(words[:2]) in SECOND_WORDS:
        words = ["-".join(words[:2]), *words[2:]]
    verb = words[0]
    if verb not in COMMANDS and verb not in SECOND_WORDS:
        raise ConfigError(f"There is no verb '{verb}'.{nearest(verb, COMMANDS)} `budwood --help` lists them.")
    return _run(verb, words)


def _run(verb: str, words: list[str]) -> int:
    from cyclopts import CycloptsError
    from pydantic import ValidationError

    from budwood.cli.arguments import expand, explain
    from budwood.studies.verbs import VERBS

    length = 2 if " ".join(words[:2]) in VERBS else 1  # some verbs have two words
    if (name := " ".join(words[:length])) in VERBS and not {"--help", "-h"} & set(words):
        words = [*words[:length], *expand(words[length:], VERBS[name].settings)]
    app = build(list(COMMANDS) if verb == "completion" else [SECOND_WORDS.get(verb, verb)])
    try:
        code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, ValidationError) as e:
        raise ConfigError(explain(e, name)) from e
    return code if isinstance(code, int) else 0


def _fail(text: str, debug: bool, error: BaseException | None, code: int = 2) -> int:
    if debug and error is not None:
        import traceback

        traceback.print_exception(error)
    print(f"budwood: {text.strip()}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
