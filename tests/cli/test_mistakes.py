"""Mistakes on the command line: said before torch is imported, with what was probably meant; and a hub that cannot be reached."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from foredraft import hub, zoo
from foredraft.errors import ConfigurationError, UnsupportedModelError
from foredraft.loading import load_model, load_tokenizer

CPU, WALL = 0.3, 30.0  # seconds; a busy machine took 5 for what takes 3
MISTAKES = [
    ("generate x --drafter draft_model", "unknown drafter 'draft_model', did you mean 'draft-model'?"),
    ("generate x --drafter prompt-lookup --drafter-option max_ngrm=3", "did you mean 'max_ngram'?"),
    ("generate x --drafter-option max_ngram=many", "max_ngram must be int, got 'many'"),
    ("generate x --drafter several:suffix,sufix", "did you mean 'suffix'?"),
    (
        "generate x --drafter several:suffix,draft-model:zoo:python-1m --learn",
        "has no option 'learn'; use the drafter that it is for alone, or",
    ),
    ("generate x --drafter rest:none.store", "there is no file 'none.store'"),
    ("generate x --drafter draft-model:./none", "no model at './none'"),
    ("generate x --drafter medusa --drafter-option siblings=4", "siblings must be str"),
    ("generate x --rule traversl", "unknown rule 'traversl', did you mean 'traversal'?"),
    ("generate x --rule rejection", "not exact for deterministic proposals"),
    ("generate x --drafter draft-model:zoo:python-1m --rule block --shape product(2,2)", "verifies chains only"),
    ("generate x --rule typical", "pass --lossy"),
    ("generate x --shape prodct(4,2)", "did you mean 'product'?"),
    ("generate x --shape chain(5) --draft-length 3", "pass one"),
    ("generate x --dtype flot16", "unknown dtype 'flot16', did you mean 'float16'?"),
    ("generate x --target ./none", "no model at './none': no such path"),
    ("generate x --target some/folder/model", "no such path"),
    ("generate x --target zoo:nope", "no embedded model 'zoo:nope'"),
    ("generate x --quantization int3", "unknown quantization 'int3'; choose int8"),
    ("generate x --json-schema none.json", "cannot read 'none.json'"),
    ("generate x --regex a --grammar none.lark", "cannot read 'none.lark'"),
    ("generate x --regex a --grammar-backend lguidance", "did you mean 'llguidance'?"),
    ("generate x --grammar-backend llguidance", "needs --json-schema, --regex or --grammar"),
    ("generate --prompts none.txt", "cannot read 'none.txt'"),
    ("audit ./none", "no such path"),
    ("audit --json /none/out.json", "cannot write '/none/out.json': there is no folder '/none'"),
    ("audit --json ~/out.json", "cannot write '~/out.json': there is no folder '~'"),
    ("demo --drafter nope", "unknown drafter 'nope'; choose none"),
    ("tune --drafter sufix", "did you mean 'suffix'?"),
    ("tune --prompts none.txt", "cannot read 'none.txt'"),
    ("tune --plot /none/out.png", "cannot write '/none/out.png'"),
    ("alpha --target ./none --draft zoo:python-1m --data x.txt", "no model at './none'"),
    ("alpha --target zoo:python-8m --draft zoo:nope --data x.txt", "no embedded model 'zoo:nope'"),
    ("alpha --target zoo:python-8m --draft zoo:python-1m --data none.txt", "cannot read 'none.txt'"),
    ("alpha --target zoo:python-8m --draft zoo:python-1m --data . --json /none/out.json", "cannot write '/none/out.json'"),
    ("table --target zoo:nope", "no embedded model 'zoo:nope'"),
    ("table --target zoo:python-8m --rule rejecton", "did you mean 'rejection'?"),
    ("serve zoo:nope", "no embedded model 'zoo:nope'"),
    ("serve zoo:python-8m --drafter sufix", "did you mean 'suffix'?"),
    ("serve zoo:python-8m --rule typical", "it changes the output distribution; name another with --rule"),
    ("chat zoo:python-8m --rule typical", "it changes the output distribution; name another with --rule"),
    ("serve zoo:python-8m --cache-memory lots", "is not an amount of memory"),
    ("serve zoo:python-8m --max-body 12", "--max-body takes a size such as 8MiB, got '12'"),
    ("serve zoo:python-8m --api-key-file none.txt", "cannot read 'none.txt'"),
    ("serve zoo:python-8m --chat-template none.jinja", "cannot read 'none.jinja'"),
    ("serve zoo:python-8m --api-key a --api-key a", "given twice"),
    ("serve zoo:python-8m --drafter draft-model:zoo:python-1m --learn --api-key a --api-key b", "add --share"),
    ("serve zoo:python-8m --drafter draft-model:zoo:python-1m --drafter-option learn={} --api-key a --api-key b", "add --share"),
    ("serve zoo:python-8m --host no.such.host.invalid", "cannot listen at no.such.host.invalid"),
    ("theory --alpha 1", "α must be at least 0 and less than 1"),
    ("theory --with none.json", "none.json is not readable JSON"),
    ("train medussa --target zoo:python-8m --data . --out x", "unknown kind of head 'medussa', did you mean 'medusa'?"),
    ("train medusa --target zoo:python-8m --data none --out x", "'none' holds no data"),
    ("data generate x.txt --target ./none --out x", "no such path"),
    ("skip search --target ./none --data . --out x", "no such path"),
    ("skip search --target zoo:python-8m --data none --out x", "'none' holds no data"),
    ("skip search --target zoo:python-8m --data . --out x --costs none.json", "cannot read 'none.json'"),
    ("datastore build x.txt --target ./none --out x", "no such path"),
]
RUN = """
import sys
from typer.testing import CliRunner
from foredraft.cli import app
for line in sys.stdin.read().splitlines():
    result = CliRunner().invoke(app, line.split())
    print(result.exit_code, " ".join(result.output.split()))
print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""


def test_mistakes_are_said_without_torch(tmp_path):
    given = "\n".join(arguments for arguments, _ in MISTAKES)
    ran = subprocess.run([sys.executable, "-c", RUN], input=given, capture_output=True, text=True, check=True, cwd=tmp_path)
    *lines, imported = ran.stdout.splitlines()
    assert imported == "[]"
    for (arguments, message), line in zip(MISTAKES, lines, strict=True):
        assert line.startswith("2 error: ") and message in line, (arguments, line)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("torchao", "generate x --quantization int8"),
        ("matplotlib", "tune --plot out.png"),
        ("matplotlib", "theory --plots out"),
        ("optuna", "skip search --target zoo:python-8m --data . --out x"),
    ],
)
def test_missing_extras_are_said_without_torch(module, arguments):
    code = f"import sys; sys.modules[{module!r}] = None\n{RUN}"
    ran = subprocess.run([sys.executable, "-c", code], input=arguments, capture_output=True, text=True, check=True)
    line, imported = ran.stdout.splitlines()
    assert f"needs {module}; install it with: pip install 'foredraft[" in line and imported == "[]"


def cpu_seconds(*command):
    before = os.times()
    assert subprocess.run([sys.executable, *command], capture_output=True).returncode in (0, 2)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.skipif(sys.platform == "win32", reason="needs the CPU time of children")
@pytest.mark.parametrize("arguments", [["drafters"], ["rules"], ["generate", "x", "--drafter", "nope"]])
def test_lists_and_mistakes_cost_little(arguments):
    """On a busy machine CPU time is dearer: then it is set against what the libraries of the command line cost by themselves."""
    libraries = "import typer, typer.rich_utils, rich.console, rich.table"
    ratios = (cpu_seconds("-m", "foredraft", *arguments) / max(CPU, 3 * cpu_seconds("-c", libraries)) for _ in range(5))
    assert any(ratio < 1 for ratio in ratios)


# -- the hub ------------------------------------------------------------------------------------------------------------


@contextmanager
def silent():
    """The address of somebody who takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def without_hub(tmp_path, **environment):
    seconds = []
    for _ in range(3):  # a busy machine may take long to start Python
        begin = time.perf_counter()
        ran = subprocess.run(
            [sys.executable, "-m", "foredraft", "generate", "x", "--target", "Qwen/Qwen3-8B"],
            env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
        )
        seconds.append(time.perf_counter() - begin)
        if seconds[-1] < WALL:
            break
    assert min(seconds) < WALL and ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    return ran.stderr


def test_without_a_network_one_message_says_so(tmp_path):
    begin = "error: 'Qwen/Qwen3-8B' is not on this machine, and "
    assert without_hub(tmp_path, HF_HUB_OFFLINE="1").startswith(begin + "HF_HUB_OFFLINE is set; give a path")
    assert without_hub(tmp_path, HF_ENDPOINT="http://127.0.0.1:9").startswith(begin + "http://127.0.0.1:9 cannot be reached")
    with silent() as endpoint:
        assert f"{endpoint} cannot be reached" in without_hub(tmp_path, HF_ENDPOINT=endpoint)


def test_a_hub_that_was_silent_is_asked_again_after_a_while(monkeypatch):
    endpoint = "http://127.0.0.1:9"
    monkeypatch.setattr(hub, "_asked", {})
    assert "cannot be reached" in hub.unreachable(endpoint)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: type("Session", (), {"head": lambda *_, **__: None})())
    assert "cannot be reached" in hub.unreachable(endpoint)
    later = time.monotonic() + hub.MEMORY
    monkeypatch.setattr(hub.time, "monotonic", lambda: later)
    assert hub.unreachable(endpoint) is None
    monkeypatch.undo()


def test_a_model_that_was_downloaded_needs_no_network(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--me--model" / "snapshots" / "0"
    shutil.copytree(zoo.path("python-1m"), snapshot)
    refs = tmp_path / "models--me--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "unreachable", lambda endpoint: "nobody answers")
    assert hub.on_this_machine("me/model") and hub.config_of("me/model")["model_type"] == "llama"
    with pytest.raises(ConfigurationError, match="'me/other' is not on this machine, and nobody answers"):
        load_tokenizer("me/other")


def test_what_cannot_be_a_hub_id_is_said_without_asking():
    for source in ("my--model", "model.git", "owner/-model", "m" * 97):
        with pytest.raises(ConfigurationError, match="no such path, and no id of the hub"):
            hub.on_this_machine(source)


def test_a_library_that_a_model_needs_is_named(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise ImportError("\nThis model requires the SentencePiece library but it was not found.\nCheck out the instructions")

    (tmp_path / "config.json").write_text("{}")
    for name, load in (("AutoTokenizer", load_tokenizer), ("AutoModelForCausalLM", load_model)):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained", fail)
        with pytest.raises(ConfigurationError, match=r"This model requires the SentencePiece library but it was not found\.$"):
            load(tmp_path)


def test_an_encoder_decoder_model_is_refused_by_path(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"\(t5\) is an encoder-decoder model"):
        load_model(str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", RUN], input=f"tune --target {tmp_path}", capture_output=True, text=True)
    assert "is an encoder-decoder model" in ran.stdout and ran.stdout.splitlines()[-1] == "[]"
