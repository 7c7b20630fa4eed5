"""Documented commands run as they stand: README's console and Python blocks, the recipe and task files of docs."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from budwood.cli.main import COMMANDS, build, main
from budwood.config.data import TaskFileConfig
from budwood.studies.recipe import read_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_readme_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        line[2:] for block in blocks(ROOT / "README.md", "console") for line in block.splitlines() if line[:2] == "$ "
    ]
    assert len(lines) >= 5
    for line in lines:
        with pytest.raises(SystemExit) as end:
            main(shlex.split(line)[1:])
        assert end.value.code == 0, (line, capsys.readouterr().err)


def test_readme_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "README.md", "python"):
        exec(block, names)
    tuned = names["tuned"]
    assert "accuracy" in tuned.metrics and tuned.model.is_dir() and len(tuned.table) == tuned.metrics["n"]
    assert "accuracy" in tuned._repr_html_() and tuned.plot() is not None and str(tuned)
    capsys.readouterr()


def test_influence_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "influence-show.md", "python"):
        exec(block, names)
    assert names["infl"].scores.whole().shape == (8, 200) == names["scores"].whole().shape
    assert list(names["infl"].top(query=3, k=5)["score"]) == [s for _, s in names["scores"].top(query=3, k=5)]
    capsys.readouterr()


def test_yaml_of_the_docs_is_valid(tmp_path: Path) -> None:
    (recipe,) = blocks(ROOT / "docs" / "runs.md", "yaml")
    (tmp_path / "r.yaml").write_text(recipe)
    assert [s.verb for s in read_recipe(str(tmp_path / "r.yaml")).steps] == ["finetune", "evaluate"]
    (sheet,) = blocks(ROOT / "docs" / "tasks.md", "yaml")
    assert TaskFileConfig(**yaml.safe_load(sheet)).labels == ("bad", "good")


def test_every_verb_in_the_readme_exists_and_the_other_way_round() -> None:
    text = (ROOT / "README.md").read_text()
    table = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    named = {v for row in table for v in re.findall(r"`(\w+)`", row)}
    assert named <= set(COMMANDS) and set(COMMANDS) - named <= {"completion"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_flags_named_in_the_docs_exist() -> None:
    from budwood.config.influence import QueryConfig
    from budwood.config.options import option_names
    from budwood.studies.verbs import VERBS

    known = {
        o for v in VERBS.values() for c in (v.settings,) for n, f in c.model_fields.items() for o in option_names(n, f)
    }
    known |= {"--small", "--group", "--help", "--version", "--model", "--format", "--host", "--port", "--token"}
    known |= {"--standalone", "--nproc-per-node"}  # of torchrun
    known |= {o for n, f in QueryConfig.model_fields.items() for o in option_names(n, f)}
    shown = build(["influence"])["influence"]["show"].default_command
    known |= {"--" + name.replace("_", "-") for name in inspect.signature(shown).parameters}
    for page in PAGES:
        used = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", page.read_text()))
        assert used <= known, (page.name, used - known)
