"""What suites are run with: a folder for their work, and methods that are not the real ones."""

import shutil
import sys

import pytest
from fake_peers import engine

from benchmarks import peer_process
from benchmarks.peer_process import ADAPTERS


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """A folder of adapters, with a function that writes one and installs an environment for it."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    shutil.copy(ADAPTERS / "serve.py", folder)
    monkeypatch.setattr(peer_process, "ADAPTERS", folder)
    monkeypatch.setattr("benchmarks.speed_runner.READ", 1 << 20)

    def put(name, installed=True, **how):
        (folder / f"{name}.py").write_text(engine(name, **how))
        if installed:
            home = tmp_path / "peers" / name / "venv" / "bin"
            home.mkdir(parents=True)
            (home / "python").symlink_to(sys.executable)

    put("foredraft", second=0.01, per_pass=3)
    return put
