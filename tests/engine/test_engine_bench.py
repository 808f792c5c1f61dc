"""`appliance bench` on real engines: as users start it, and what it says of memory with its child in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import forget_engines, run_here
from transformers import Qwen2Config, Qwen2ForCausalLM

from appliance.bench import child
from appliance.bench.child import qwen2_config
from appliance.bench.command import run_bench
from appliance.bench.job import parse_shapes
from appliance.errors import EngineError
from appliance.launch import side_job
from appliance.recipe.load import load_recipe
from appliance.tasks.tiny_model import save_tokenizer
from appliance.terms.schemes import Scheme

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SHAPES = "hidden=128,intermediate=352,heads=4,kv_heads=2,layers=2,vocabulary=512,batch=8,new_tokens=8"
# qkv 128 x 256, o 128 x 128, gate and up 128 x 704, down 352 x 128: elements of two layers, and their output channels.
MATRICES = 2 * (128 * 256 + 128 * 128 + 128 * 704 + 352 * 128)
CHANNELS = 2 * (256 + 128 + 704 + 128)
# Embedding and head, five norms, the bias of each qkv: BF16 under every scheme.
OTHERS = 2 * 512 * 128 + 5 * 128 + 2 * 256
BF16_BYTES = 2 * (MATRICES + OTHERS)
INT8_BYTES = MATRICES + 4 * CHANNELS + 2 * OTHERS
INT4_BYTES = MATRICES // 2 + 2 * (CHANNELS + 2 * 10 * 128) + 2 * OTHERS  # one group of 128, of down 11 of 32
SEQUENCE_BYTES = 32 * 2 * 2 * 2 * 32 * 2  # one block of 32 tokens: 2 layers, K and V, 2 heads of 32, BF16


def test_it_measures_both_schemes_and_keeps_the_result(tmp_path: Path) -> None:
    more = ("--pairs", "5", "--json", "--shapes", SHAPES, "--set", f"cluster.run_dir={tmp_path}")
    command = [sys.executable, "-m", "appliance", "bench", "arithmetic-tiny-int8", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert [(m["pair"], m["scheme"], m["tokens"]) for m in report["measurements"]] == [
        (pair, scheme, 64) for pair in range(5) for scheme in ("bf16", "int8")
    ]
    assert report["schemes"][0]["ratio"] == 1.0 and report["schemes"][1]["ratio"] > 0
    assert [(e["weight_bytes"], e["sequences"] >= 8) for e in report["engines"]] == [
        (BF16_BYTES, True),
        (INT8_BYTES, True),
    ]
    result_file = Path(report["kept"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [result_file], "nothing else is left behind"
    assert result_file.parent == tmp_path / ".cache" / "bench"
    stored = json.loads(result_file.read_text())
    assert (stored["device"], stored["shapes"], stored["pairs"]) == ("cpu", "h128-i352-a4-kv2", 5)
    assert [each["ratio"] for each in stored["schemes"]] == [report["schemes"][1]["ratio"]]


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The core is a process of its own, and vLLM tells whoever asked for it no more than that it failed."""
    model = tmp_path / "model"
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=320, hidden_act="gelu")
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    save_tokenizer(model, max_positions=64)
    sets = ("model.builtin=null", f"model.path={model}", f"cluster.run_dir={tmp_path / 'runs'}")
    command = [sys.executable, "-m", "appliance", "bench", "arithmetic-tiny-int8", "--schemes", "bf16"]
    command += [argument for each in sets for argument in ("--set", each)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr.splitlines()[-2:] == [
        "error: the rollout engine does not start: ValueError: Unsupported activation: gelu. Only silu is supported "
        "for now.",
        "hint: these are vLLM's own words; the log says where the error was raised",
    ]
    assert done.returncode == EngineError.exit_code


def test_shapes_take_responses_of_any_length() -> None:
    """vLLM refuses a sequence that is longer than the model's positions."""
    assert qwen2_config(parse_shapes("qwen2.5-7b,new_tokens=8192")).max_position_embeddings >= 16 + 8192


def test_a_repetition_begins_without_the_prompts_of_the_last_one() -> None:
    """A run's update empties the cache of prompts, too."""
    calls = []

    class FakeEngine:
        def reset_prefix_cache(self) -> bool:
            calls.append("reset")
            return True

        def generate(self, prompts: list[object], params: list[object], *, use_tqdm: bool) -> list[object]:
            calls.append(len(prompts))
            return []

    workload = parse_shapes(SHAPES).workload
    for pair in range(2):
        child._measure(FakeEngine(), prompts=[[1], [2]], workload=workload, pair=pair, scheme=Scheme.INT8)
    assert calls == ["reset", 2, "reset", 2]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Takes what run_bench takes."""
    forget_engines()
    monkeypatch.setattr(side_job, "_run", run_here)
    recipe = load_recipe("arithmetic-tiny-int8", sets=(f"cluster.run_dir={tmp_path}",))
    settings = {"schemes": (Scheme.BF16, Scheme.INT8, Scheme.INT4), "pairs": 5, "json_mode": True}
    return lambda **sizes: run_bench(recipe, **settings, **sizes)


def test_little_memory_leaves_room_for_more_sequences_beside_quantised_weights(
    bench: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    budget = BF16_BYTES + 3 * SEQUENCE_BYTES + SEQUENCE_BYTES // 2
    assert bench(shapes=SHAPES, kv_memory_gb=budget / (1 << 30)) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["memory_bytes"] == budget
    engine_facts = [(e["scheme"], e["weight_bytes"], e["kv_bytes"], e["sequences"]) for e in report["engines"]]
    int8_fits, int4_fits = ((budget - weights) // SEQUENCE_BYTES for weights in (INT8_BYTES, INT4_BYTES))
    assert int4_fits > int8_fits > 3
    assert engine_facts == [
        ("bf16", BF16_BYTES, 3 * SEQUENCE_BYTES, 3),
        ("int8", INT8_BYTES, int8_fits * SEQUENCE_BYTES, int8_fits),
        ("int4", INT4_BYTES, int4_fits * SEQUENCE_BYTES, int4_fits),
    ]
    assert {m["tokens"] for m in report["measurements"]} == {64}, "all sequences, whatever is made at once"
    assert "-kvmem-" in report["kept"]


def test_weights_that_leave_no_room_are_said(bench: Callable[..., int]) -> None:
    with pytest.raises(EngineError) as raised:
        bench(shapes=SHAPES.replace("layers=2", "layers=3"), kv_memory_gb=0.001)
    held = (BF16_BYTES + 2 * (MATRICES // 2 + 2 * 128 + 256)) / (1 << 30)
    assert (raised.value.message, raised.value.hint, raised.value.exit_code) == (
        f"bench: the weights take {held:.4f} GiB, --kv-memory gives 0.0010 GiB",
        "give more: it is the memory for weights and KV cache together",
        4,
    )
