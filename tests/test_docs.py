"""The code in the documentation runs, and its lists of models, drafters and rules are complete."""

import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import transformers
from architectures import ARCHITECTURES
from encoder_decoders import save_t5

import foredraft
from foredraft.cli import app

ROOT = Path(__file__).parent.parent
NOT_RUN = {"docs/benchmark.md", "docs/audit.md", "docs/integrations.md"}  # the second takes a minute: nightly; the last: tests/compat
PAGES = [
    str(page.relative_to(ROOT))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "```python" in page.read_text() and str(page.relative_to(ROOT)) not in NOT_RUN
]
NEEDS = {"docs/constrained-decoding.md": ("llguidance", "outlines_core")}
LARGER = {"docs/heads.md", "docs/head-files.md", "docs/models.md", "docs/self-speculation.md"}  # heads of python-8m, or many layers
# Models that a page names and tests cannot download, and what they are replaced by.
STAND_INS = {
    "Qwen/Qwen3-8B": "python-8m",
    "Qwen/Qwen3-0.6B": "python-1m",
    "meta-llama/Llama-3.1-8B-Instruct": "python-8m",
    "meta-llama/Llama-3.2-1B-Instruct": "python-1m",
}


def smaller(code: str) -> str:
    """``code`` with the smallest of the embedded models, which is faster."""
    return code.replace("python-8m", "python-1m")


def code_of(page: str) -> str:
    """The Python blocks of a page, one after the other."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S))
    for published, embedded in STAND_INS.items():
        code = code.replace(published, str(foredraft.zoo.path(embedded)))
    return code if page in LARGER else smaller(code)


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs(page: str, tmp_path, monkeypatch):
    for library in NEEDS.get(page, ()):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("foredraft.heads.checkpoints.push_to_hub", lambda *given, **options: None)
    monkeypatch.setattr("foredraft.heads.checkpoints.from_pretrained", lambda *given, **options: None)
    code = code_of(page)
    if "google-t5/" in code:
        for name in ("t5-large", "t5-small"):
            save_t5(tmp_path / name)
        code = code.replace("google-t5/", f"{tmp_path}/")
    assert code
    exec(compile(code, page, "exec"), {"__name__": "page"})


@pytest.mark.nightly
def test_code_of_the_audit_page_runs():
    exec(compile(code_of("docs/audit.md"), "docs/audit.md", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.name)
def test_example_runs(script: Path, monkeypatch):
    """Commands of an example run in this process, which has imported torch already."""
    spawn = subprocess.run

    def run(command, **options):
        if command[1:3] == ["-m", "foredraft"]:
            return app(command[3:], standalone_mode=False)
        return spawn(command, **options)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("sys.argv", [str(script)])
    monkeypatch.setattr(foredraft.zoo, "path", lambda name, path=foredraft.zoo.path: path(smaller(name)))
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda notebook: notebook.name)
def test_notebook_runs(notebook: Path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(notebook.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    exec(compile(smaller(code).replace("max_new_tokens=64", "max_new_tokens=24"), notebook.name, "exec"), {"__name__": "__main__"})


def test_there_are_five_examples_one_of_them_a_notebook():
    found = [path.suffix for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")]
    assert sorted(found) == [".ipynb", ".py", ".py", ".py", ".py"]


def model_types(section: str) -> set[str]:
    """The model types that a table of docs/models.md lists."""
    text = (ROOT / "docs" / "models.md").read_text()
    table = re.search(rf"\n## {section}\n(.*?)(?=\n## |\Z)", text, re.S)[1]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize(("section", "support"), [("Chains and trees", "tree"), ("Chains only", "chain"), ("Not supported", "refused")])
def test_tables_list_every_model_type_that_is_tested(section: str, support: str):
    classes = [getattr(transformers, each.build.args[0]) for each in ARCHITECTURES.values() if each.support == support]
    tested = {cls.config_class.model_type for cls in classes}
    listed = model_types(section)
    assert listed == tested or (support == "refused" and listed == tested | {"zamba"})


@pytest.mark.parametrize(("page", "names"), [("docs/drafters.md", foredraft.drafters.names()), ("docs/rules.md", foredraft.rules.names())])
def test_page_names_every_one(page: str, names: list[str]):
    text = (ROOT / page).read_text()
    assert [name for name in names if f"`{name}" not in text] == []


def test_no_merge_is_left_half_done():
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert not [text.name for text in texts if re.search(r"^(<{7}|>{7}) ", text.read_text(), re.MULTILINE)]


def test_readme_names_the_commands_that_show_and_test_the_project():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text
