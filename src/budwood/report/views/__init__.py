"""One file per view: what a run's artefacts say, as a small JSON-like value and one sentence."""
