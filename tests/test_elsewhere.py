"""What other systems do differently: Windows, Macs, shared folders, other versions of torch. They are played here."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from types import SimpleNamespace

import httpx
import pytest
import torch
from starlette.applications import Starlette
from starlette.routing import Mount

from foredraft import device, files, hub
from foredraft.backends import compilation
from foredraft.serving import pages, sockets


def windows(**changed) -> SimpleNamespace:
    """``os`` as it calls itself there."""
    return SimpleNamespace(**{**vars(os), "name": "nt", "sep": "\\", **changed})


def test_windows_syncs_files_that_are_open_for_writing(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(files, "os", windows(open=lambda path, how: opened.append(how) or os.open(path, how)))
    (tmp_path / "file").touch()
    files.to_disk(tmp_path / "file")
    assert opened == [os.O_RDWR]


def test_a_folder_that_cannot_be_synced_takes_files_all_the_same(tmp_path, monkeypatch):
    fsync = os.fsync

    def of_files_alone(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    with files.replacing(tmp_path / "file") as new:
        new.write_text("new", encoding="utf-8")
    assert [each.read_text(encoding="utf-8") for each in tmp_path.iterdir()] == ["new"]


def test_a_port_is_not_shared_on_windows(monkeypatch):
    monkeypatch.setattr(sockets, "os", windows())
    with sockets.bind("127.0.0.1", 0) as bound:
        assert not bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def test_scripts_of_the_page_are_scripts_whatever_the_system_calls_them(monkeypatch):
    monkeypatch.setattr("starlette.responses.guess_type", lambda *_: ("text/plain", None))
    transport = httpx.ASGITransport(Starlette(routes=[Mount("/page", pages.Files(directory=pages.FOLDER))]))

    async def kind(path: str) -> str:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get(path)).headers["content-type"].partition(";")[0]

    assert asyncio.run(kind("/page/app.js")) == "text/javascript"


def test_a_gguf_file_may_be_named_with_backslashes(monkeypatch):
    monkeypatch.setattr(hub, "os", windows())
    assert hub.parted(r"C:\models\file.gguf") == ("C:/models", "file.gguf")


@pytest.mark.parametrize(("kind", "waits"), [("cpu", False), ("mps", True), ("xpu", True), ("cuda", True)])
def test_gpus_of_every_make_are_waited_for(kind, waits, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.accelerator, "synchronize", asked.append)
    device.wait_for(torch.device(kind))
    assert bool(asked) == waits


def test_a_compiler_that_torch_cannot_use_is_a_reason(monkeypatch):
    def refused():
        raise RuntimeError("Torch.compile() is only support MSVC with English language pack")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", refused)
    assert "needs a C++ compiler" in (compilation._no_compiler() or "")


@pytest.mark.parametrize(
    ("named", "parts"),
    [
        ("org/Model-GGUF/Q4_K_M/model.gguf", ("org/Model-GGUF", "Q4_K_M/model.gguf")),
        ("org/Model-GGUF/model.gguf", ("org/Model-GGUF", "model.gguf")),
        ("./a/b/c/model.gguf", ("./a/b/c", "model.gguf")),
        ("/a/b/c/model.gguf", ("/a/b/c", "model.gguf")),
        ("model.gguf", (".", "model.gguf")),
        ("org/model", ("org/model", None)),
    ],
)
def test_a_gguf_file_may_stand_in_a_folder_of_a_repository(named, parts):
    assert hub.parted(named) == parts


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfdef f():")
    assert files.read_text(path) == "def f():"
