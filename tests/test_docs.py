"""The code in the documentation runs, and its lists of models, drafters and rules are complete."""

import re
from pathlib import Path

import pytest
import transformers
from architectures import ARCHITECTURES

import foredraft

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/guide.md", "docs/rules.md", "docs/shapes.md", "docs/drafters.md", "docs/write-a-drafter.md"]
# Models that a page names and tests cannot download, and what they are replaced by.
STAND_INS = {"Qwen/Qwen3-8B": "python-8m", "Qwen/Qwen3-0.6B": "python-1m"}


def code_of(page: str) -> str:
    """The Python blocks of a page, one after the other."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S))
    for published, embedded in STAND_INS.items():
        code = code.replace(published, str(foredraft.zoo.path(embedded)))
    return code


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs(page: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = code_of(page)
    assert code
    exec(compile(code, page, "exec"), {"__name__": "page"})


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


def test_readme_names_the_commands_that_show_and_test_the_project():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text
