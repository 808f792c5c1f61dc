"""Tensor parallel over two ranks on one host, real processes: each holds its part of what one rank holds.

Legend: N output channels, K input channels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import free_engine, read_checkpoint, start_engine
from families import make_family, make_model
from faults import Tally, settle
from ranks_worker import held_int8, prompt_log_probs
from smoothings import random_smoothing
from torch import Tensor

from appliance.quant.files import Origin, Settings
from appliance.quant.profile import Profile, fold, load_smoothing, write_profile
from appliance.terms.schemes import Scheme

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

RANKS = 2
# Key-value heads: one that both ranks hold a copy of, with biases; one for each rank and experts.
FAMILIES = {"qwen2": {"num_key_value_heads": 1}, "qwen3-moe": {}}
CUT_IN_ROWS = ("o_proj", "down_proj", "w2")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each family: checkpoints of two seeds, a profile that smooths all that can be, and `two.pt`, what
    two ranks made of them."""
    root = tmp_path_factory.mktemp("ranks")
    for name, sizes in FAMILIES.items():
        for seed in ("1", "2"):
            make_family(root / name / seed, name=name, seed=int(seed), **sizes)
        smoothing = random_smoothing(make_model(name, seed=1, **sizes), seed=3, largest=1)
        profile = Profile(Origin("calibrated", "m"), Scheme.INT8, Settings(), smoothing)
        write_profile(profile, folder=root / name / "profile")
    child = subprocess.run(
        [
            sys.executable,
            Path(__file__).parent / "ranks_worker.py",
            str(RANKS),
            "int8",
            *(root / name for name in FAMILIES),
        ],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return root


@pytest.fixture(scope="module", params=FAMILIES)
def reports(request: pytest.FixtureRequest, two_ranks: Path) -> dict:
    """What one rank and two ranks hold and answer, for the same two checkpoints."""
    folder = two_ranks / request.param
    old, new = folder / "1", folder / "2"
    weights, smoothing = read_checkpoint(old), load_smoothing(folder / "profile")
    answers = {"family": request.param, "two": torch.load(folder / "two.pt")}
    for name, scheme, checkpoint, smoothed in (
        ("bf16", "bf16", old, "bf16_smoothed"),
        ("old", "int8", old, ""),
        ("new", "int8", new, "smoothed"),
    ):
        engine = start_engine(checkpoint, scheme=scheme)
        answers |= {name: prompt_log_probs(engine), f"held_{name}": held_int8(engine.model)}
        if smoothed:
            report = engine.load(weights, smoothing=smoothing)
            answers |= {smoothed: prompt_log_probs(engine), f"held_{smoothed}": held_int8(engine.model)}
            folded = [(each, fold(each, tensor, smoothing=smoothing)) for each, tensor in weights]
            assert engine.load(folded).telemetry == report.telemetry
            assert prompt_log_probs(engine) == answers[smoothed]
        free_engine(engine)
    return answers


def shards(name: str, whole: Tensor, *, rank: int, dim: int, family: str) -> Tensor:
    """A rank's part of an output dimension: of queries, keys and values, of gate and up, or all of it."""
    if "qkv" in name:
        heads, kv_heads = {"qwen2": (4, 1), "qwen3-moe": (4, 2)}[family]
        queries, keys, values = whole.split([heads * 32, kv_heads * 32, kv_heads * 32], dim=dim)
        kv_parts = min(kv_heads, RANKS)
        parts = [
            queries.chunk(RANKS, dim)[rank],
            *(one.chunk(kv_parts, dim)[rank % kv_parts] for one in (keys, values)),
        ]
        return torch.cat(parts, dim=dim)
    if "gate_up" in name or "w13" in name:
        return torch.cat([half.chunk(RANKS, dim)[rank] for half in whole.chunk(2, dim)], dim=dim)
    return whole


def codes(answers_KN: Tensor, scale_N: Tensor) -> Tensor:
    """[K, N] from the answers to one-hot tokens, see `held_codes` in test_engine_int8."""
    return (answers_KN.double() / scale_N.double()).round()


@pytest.mark.parametrize("when", ["old", "new", "smoothed"], ids=["as-loaded", "after-an-update", "smoothed"])
def test_codes_and_scales_are_parts_of_one_ranks(reports: dict, when: str) -> None:
    """Exactly, where rows are cut too: their scales are those of the whole rows."""
    whole = reports[f"held_{when}"]
    assert {name.rsplit(".", 1)[-1] for name in whole} >= {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    for rank, by_layer in enumerate(reports["two"][f"held_{when}"]):
        assert by_layer.keys() == whole.keys()
        for name, (answers_KN, scale_N) in by_layer.items():
            wanted_KN, wanted_N = codes(*whole[name]), whole[name][1]
            if name.endswith(CUT_IN_ROWS):
                wanted_KN = wanted_KN.chunk(RANKS)[rank]
            else:
                wanted_KN = shards(name, wanted_KN, rank=rank, dim=1, family=reports["family"])
                wanted_N = shards(name, wanted_N, rank=rank, dim=0, family=reports["family"])
            assert torch.equal(scale_N, wanted_N), (name, rank)
            assert torch.equal(codes(answers_KN, scale_N), wanted_KN), (name, rank)


@pytest.mark.parametrize("when", ["old", "smoothed"])
def test_log_probs_of_two_ranks_are_those_of_one_to_int8s_noise(reports: dict, when: str) -> None:
    """Each rank quantises its part of a token with a scale of its own where rows are cut, as vLLM's kernels do, so two
    ranks are another sample of INT8's activation noise and not the same numbers. Two independent samples of the whole
    noise would differ by sqrt(2) of it, and here most of it is common."""
    one_rank, two_ranks, bf16 = (
        torch.tensor(answer) for answer in (reports[when], reports["two"][when], reports["bf16"])
    )
    noise = float((one_rank - bf16).abs().mean())
    assert 0 < noise < 0.1
    assert float((two_ranks - one_rank).abs().mean()) < 2**0.5 * noise


def test_smoothing_moves_no_bit_of_what_is_not_quantised(reports: dict) -> None:
    """Rows and biases are divided, and columns multiplied, by the same powers of two, whichever rank has them. Of all
    layers in BF16, experts among them on one rank; two ranks cannot have quantised experts in BF16."""
    assert reports["bf16_smoothed"] == reports["bf16"] != reports["old"] != reports["smoothed"]
    two = reports["two"]
    if reports["family"] == "qwen2":
        assert two["raised_smoothed"] == two["raised"]
        assert two["raised"] != two["old"] != two["smoothed"] != two["raised"]


def test_an_update_over_two_ranks_comes_and_goes(reports: dict) -> None:
    two = reports["two"]
    assert two["old_again"] == two["old"]
    assert two["new"] != two["old"]
    one, moved = torch.tensor(reports["new"]), torch.tensor(two["new"])
    noise = float((torch.tensor(reports["old"]) - torch.tensor(reports["bf16"])).abs().mean())
    assert float((moved - one).abs().mean()) < 2**0.5 * 2 * noise  # other weights, so another noise of the same size


def test_stale_weights_on_one_rank_of_two(two_ranks: Path) -> None:
    """Both ranks take the update, a layer of one of them keeps its old kernel."""
    tally = Tally("stale weights on one rank of two (int8)")
    for rank, layer, messages in torch.load(two_ranks / next(iter(FAMILIES)) / "two.pt")["stale"]:
        tally.injected += 1
        assert messages[1 - rank] == ""
        caught = messages[rank].startswith(f"weight update 1: {layer} on rank {rank} is not as received: ")
        tally.caught += caught
        tally.missed += [] if caught else [f"{rank} {layer}: {messages}"]
    settle(tally, cases=6)
