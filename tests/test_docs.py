"""The code in the README and in the tutorial runs, and the README is true about architectures and names."""

import re
from pathlib import Path

import pytest
from architectures import ARCHITECTURES

import foredraft

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/write-a-drafter.md", "docs/drafters.md"])
def test_code_of_a_page_runs(page: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "page"})


def test_readme_names_every_architecture_that_is_tested():
    text = (ROOT / "README.md").read_text()
    for support, pattern in (("tree", r"in tests for: (.*?)\.\n"), ("chain", r"can not be told apart: (.*?) through a copy")):
        listed = re.search(pattern, text, re.S)[1]
        assert set(re.findall(r"\w+", listed)) == {name for name, each in ARCHITECTURES.items() if each.support == support}


def test_readme_names_every_drafter_and_rule():
    text = (ROOT / "README.md").read_text()
    for name in [*foredraft.drafters.names(), *foredraft.rules.names()]:
        assert f"`{name}" in text, name
