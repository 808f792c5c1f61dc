"""What a run left behind, and what a model says of itself: `status` and planning read it whatever it is."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from fuzz_surface import attempt, fuzzed
from fuzz_text import VARIANTS, as_json, broken, deep, raw, seeds, values, variants
from hypothesis import strategies as st
from plans import make_plan

from appliance import page
from appliance.plan.bench_results import model_shapes
from appliance.plan.engines import layers_with_experts
from appliance.preflight.checks import estimates
from appliance.record.events import StepMetrics, first_failure, run_started
from appliance.record.plan import WeightsPlan
from appliance.report.page import print_report
from appliance.report.summary import print_status
from appliance.settings.sections import Model
from appliance.terms.shapes import read_shape

for _template in page._environment().list_templates(["j2"]):  # loaded and compiled once, before anybody listens
    page._environment().get_template(_template)

RECORD = {"state": "failed", "phase": "rollout", "attempt": 2, "exit_code": 5, "reason": "", "schema_version": 1}
EVENT = {"time": 1.0, "kind": "progress", "what": "x", "why": "", "done": 1, "total": 2, "exit_code": 5, "step": 1}
KINDS = ["phase", "progress", "attest", "note", "guard", "failure", "stop", "resume", "checkpoint"]
MEMORY = {"time": 1.0, "pss_bytes": 4096, "processes": 2}
SAMPLE = {
    "prompt": "1+1=",
    "response": "2",
    "truth": "2",
    "accuracy": 1.0,
    "reward": 1.0,
    "tokens": 1,
    "finished": True,
}
SAMPLES = {"step": 1, "scheme": "int8", "validation": [SAMPLE], "training": [SAMPLE]}
ATTEST = {"role": "rollout", "scheme": "int8", "patches": ["a"], "detail": {"kernels": {"Int8Kernel": 16}}}
NAMES = [field.name for field in dataclasses.fields(StepMetrics) if field.name != "line"]


def wild(good: dict[str, Any], keys: list[str]) -> st.SearchStrategy[str]:
    return st.dictionaries(st.sampled_from(keys), values, max_size=4).map(lambda found: as_json(good | found))


events = st.tuples(wild(EVENT, list(EVENT)), st.sampled_from(KINDS)).map(
    lambda pair: pair[0].replace("progress", pair[1])
)
lines = st.lists(
    st.one_of(events, wild({"step": 1, "time_s": 2.0, "reward_mean": 0.5}, NAMES), st.sampled_from(deep(2000))),
    max_size=6,
)


beside = st.one_of(
    wild(MEMORY, list(MEMORY)),
    wild(SAMPLES, list(SAMPLES)),
    wild(SAMPLE, list(SAMPLE)).map(lambda text: as_json(SAMPLES).replace(as_json(SAMPLE), text)),
    wild(ATTEST, list(ATTEST)),
    st.sampled_from(deep(2000)),
)


@pytest.fixture
def run_dir(room: Path) -> Path:
    folder = room / "runs/r-1"
    folder.mkdir(parents=True)
    make_plan(folder).write(folder / "plan.json")
    return folder


def look(run_dir: Path) -> None:
    """With a stdout that takes no half of a character, as a terminal's; pytest's takes any."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
        for json_mode in (False, True):
            print_status(str(run_dir), run_root=run_dir.parent, json_mode=json_mode)
        print_report(str(run_dir), run_root=run_dir.parent, output=None)
    assert not list(run_dir.glob(".report.html.*"))
    first_failure(run_dir)
    run_started(run_dir)


@fuzzed(
    "run folders",
    record=st.one_of(wild(RECORD, list(RECORD)), st.just(as_json(RECORD))),
    lines=lines,
    other=beside,
    noise=raw,
)
def test_fuzz_run_folders(run_dir: Path, record: str, lines: list[str], other: str, noise: bytes) -> None:
    (run_dir / "attest").mkdir(exist_ok=True)
    for name in ("memory.jsonl", "samples.jsonl", "versions.json", "attest/a.json"):
        (run_dir / name).write_text(f"{other}\n")
    (run_dir / "run.json").write_text(record)
    for name in ("events.jsonl", "metrics.jsonl"):
        (run_dir / name).write_bytes("\n".join([*lines, ""]).encode() + noise)
    attempt("run folders", lambda: look(run_dir), folder=run_dir.parent.parent)


CONFIG = {
    **{"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64},
    **{
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "head_dim": 16,
    },
}


def plan_with(folder: Path) -> None:
    model, weights = Model(path=str(folder)), WeightsPlan(name_or_path=str(folder))
    plan = make_plan(folder / "r-1", model=model, weights=weights, device="h100")
    shape = read_shape(folder / "config.json")
    estimates(plan, model_bytes=10**9, shape=shape)
    (folder / f"{model_shapes(model, weights=weights)}.json").is_file()
    layers_with_experts(weights)


configs = wild(CONFIG, [*CONFIG, "num_experts", "moe_intermediate_size", "tie_word_embeddings", "auto_map"])


@fuzzed(
    "config.json",
    variants=VARIANTS,
    seed=seeds,
    content=st.one_of(
        configs.map(str.encode), raw, broken([as_json(CONFIG)]), st.sampled_from(deep(2000)).map(str.encode)
    ),
)
def test_fuzz_model_configs(room: Path, content: bytes, seed: int) -> None:
    for each in variants(content, seed):
        (room / "config.json").write_bytes(each)
        attempt("config.json", lambda: plan_with(room), folder=room)
