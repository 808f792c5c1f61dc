"""The benchmark's judgement on given numbers, its shapes, and one real run of two real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.bench.job import Measurement, Shapes, judge, parse_shapes, read_measurements
from appliance.errors import RecipeError
from appliance.quant.scheme import Scheme

BENCH = [sys.executable, "-m", "appliance", "bench", "arithmetic-tiny-int8"]


def measured(pair: int, scheme: Scheme, tokens_per_s: float) -> Measurement:
    return Measurement(pair=pair, scheme=scheme, tokens=int(tokens_per_s), seconds=1.0)


def test_verdict_is_the_median_of_pairwise_ratios() -> None:
    speeds = [(100, 200), (400, 600), (100, 250)]  # ratios 2.0, 1.5, 2.5; the medians alone would say 2.5
    given = [
        measured(pair, scheme, speed)
        for pair, both in enumerate(speeds)
        for scheme, speed in zip((Scheme.BF16, Scheme.INT8), both, strict=True)
    ]
    base, int8 = judge(given, schemes=(Scheme.BF16, Scheme.INT8))
    assert (base.ratio, base.tokens_per_s) == (1.0, 100)
    assert (int8.ratio, int8.ratio_min, int8.ratio_max, int8.tokens_per_s) == (2.0, 1.5, 2.5, 250)


def test_a_pair_without_its_other_half_does_not_count() -> None:
    given = [measured(0, Scheme.BF16, 100), measured(0, Scheme.INT8, 150), measured(1, Scheme.BF16, 10)]
    assert judge(given, schemes=(Scheme.BF16, Scheme.INT8))[0].tokens_per_s == 100


def test_half_a_line_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    line = json.dumps({"pair": 0, "scheme": "int8", "tokens": 5, "seconds": 0.5})
    file.write_text(f"{line}\n{line[:20]}")
    assert read_measurements(file) == [Measurement(pair=0, scheme=Scheme.INT8, tokens=5, seconds=0.5)]


def test_shapes_by_name_with_changes() -> None:
    expected = Shapes(hidden=3584, intermediate=18944, heads=28, kv_heads=4, layers=1, batch=16)
    assert parse_shapes("qwen2.5-7b,layers=1,batch=16") == expected


def test_shapes_report_every_problem() -> None:
    with pytest.raises(RecipeError) as raised:
        parse_shapes("qwen2.5-7b,layer=1,batch=many")
    known = (
        "use qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b, hidden=N, intermediate=N, heads=N, kv_heads=N, "
        "layers=N, vocabulary=N, batch=N, new_tokens=N"
    )
    assert raised.value.problems == [
        ("--shapes qwen2.5-7b,layer=1,batch=many: `layer=1` is not a size", known),
        ("--shapes qwen2.5-7b,layer=1,batch=many: `batch=many` is not a size", known),
    ]


@pytest.mark.engine
def test_bench_runs_both_schemes_and_prints_both_sides(tmp_path: Path) -> None:
    shapes = "hidden=128,intermediate=352,heads=4,kv_heads=2,layers=2,vocabulary=512,batch=4,new_tokens=8"
    done = subprocess.run(
        [*BENCH, "--pairs", "5", "--json", "--shapes", shapes, "--set", f"cluster.run_dir={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert [(m["pair"], m["scheme"], m["tokens"]) for m in report["measurements"]] == [
        (pair, scheme, 32) for pair in range(5) for scheme in ("bf16", "int8")
    ]
    assert report["schemes"][0]["ratio"] == 1.0 and report["schemes"][1]["ratio"] > 0
    assert list(tmp_path.iterdir()) == [], "a benchmark leaves nothing behind"


def test_bench_refuses_a_scheme_without_kernels(tmp_path: Path) -> None:
    done = subprocess.run(
        [*BENCH, "--schemes", "bf16,fp8", "--set", f"cluster.run_dir={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines()[0] == "error: bench: this host has no kernels for fp8"
