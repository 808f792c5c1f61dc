"""What a profile says comes true in a real engine: smoothing folded, layers kept, the mismatch that was predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import Engine, free_engine, start_engine
from families import make_family
from plans import make_plan
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from appliance.engine.replica import quantisation_of_replica
from appliance.quant.calibrate import calibrate
from appliance.quant.files import PROFILE_FILE
from appliance.quant.mismatch import measure_mismatch
from appliance.quant.profile import Origin, Profile, Settings, write_profile
from appliance.record.plan import ProfilePlan
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

pytestmark = pytest.mark.engine

SEQUENCES = torch.randint(0, 500, (24, 40), generator=torch.Generator().manual_seed(4)).tolist()


def with_large_channels(folder: Path) -> Path:
    """Three channels of every norm are large, as in trained models; a sharper head makes log-probs that differ."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[[3, 17, 40]] *= 20
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def profile_of(folder: Path, target: Path, **settings: object) -> Profile:
    profile = calibrate(
        folder,
        sequences=SEQUENCES,
        scheme=Scheme.INT8,
        settings=Settings(**settings),
        origin=Origin(kind="calibrated", model=str(folder)),
    )
    write_profile(profile, folder=target)
    return profile


def engine_with(folder: Path, *, profile: Path | None, scheme: str = "int8") -> Engine:
    settings = Quantisation(scheme=Scheme(scheme), profile=str(profile or "")).engine_arguments()
    return start_engine(folder, scheme=scheme, load_format="appliance" if profile else "auto", **settings)


def test_engines_of_two_runs_share_their_compiled_code_by_the_profile(tmp_path: Path) -> None:
    """vLLM's hash of what it compiles has the profile's folder in it. Another profile keeps other layers in BF16."""
    folder = make_family(tmp_path / "model", name="qwen2", seed=3)
    hashes = []
    for run, settings in (("a", {}), ("b", {}), ("c", {"strength": 0.0})):
        profile = tmp_path / run / "profile"
        profile_of(folder, profile, **settings)
        planned = ProfilePlan(folder=str(profile), source="", scheme=Scheme.INT8)
        plan = make_plan(tmp_path / run, profile=planned, cache_dir=str(tmp_path / "cache"))
        given = quantisation_of_replica(plan, replica=0)
        assert (Path(given.profile) / PROFILE_FILE).read_bytes() == (profile / PROFILE_FILE).read_bytes()
        arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, **given.engine_arguments())
        hashes.append(arguments.create_model_config().compute_hash())
    assert hashes[0] == hashes[1] != hashes[2]


def log_probs(engine: Engine) -> torch.Tensor:
    """Of every token of the sequences but the first, given those before it; nats."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = engine.llm.generate([{"prompt_token_ids": each} for each in SEQUENCES], params, use_tqdm=False)
    return torch.tensor(
        [
            position[token].logprob
            for output in outputs
            for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )


def kernels(engine: Engine) -> dict[str, str]:
    """Method by layer, of the layers that could be quantised."""
    return {
        name: type(module.quant_method).__name__
        for name, module in engine.model.named_modules()
        if hasattr(module, "quant_method") and ("_proj" in name or "experts" in name)
    }


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
def test_the_predicted_mismatch_comes_true_and_smoothing_lowers_it(family: str, tmp_path: Path) -> None:
    folder = with_large_channels(make_family(tmp_path / "model", name=family, seed=3))
    profile = profile_of(folder, tmp_path / "smooth")
    plain = profile_of(folder, tmp_path / "plain", strength=0.0)
    log_probs_by_name = {}
    for name, arguments in {
        "bf16": {"scheme": "bf16", "profile": None},
        "plain": {"profile": tmp_path / "plain"},
        "smooth": {"profile": tmp_path / "smooth"},
    }.items():
        engine = engine_with(folder, **arguments)
        log_probs_by_name[name] = log_probs(engine)
        free_engine(engine)
    k3 = {
        name: measure_mismatch(log_probs_by_name["bf16"], rollout_T=log_probs_by_name[name], cap=None).k3_kl
        for name in ("plain", "smooth")
    }
    assert profile.predicted and plain.predicted
    assert any(group.source.endswith("_proj.weight") for group in profile.smoothing.groups)
    # The engine rounds in other places (BF16 logits, its own attention), and 936 tokens sample a mean of squares.
    assert k3["smooth"] == pytest.approx(profile.predicted.k3_kl, rel=0.5)
    assert k3["plain"] == pytest.approx(plain.predicted.k3_kl, rel=0.5)
    assert k3["smooth"] < 0.8 * k3["plain"]


def test_the_layers_that_a_budget_keeps_are_kept_by_the_engine(tmp_path: Path) -> None:
    folder = with_large_channels(make_family(tmp_path / "model", name="qwen3-moe", seed=3))
    free = profile_of(folder, tmp_path / "free")
    assert free.predicted is not None
    profile = profile_of(folder, tmp_path / "kept", mismatch_budget=free.predicted.kl / 10)
    assert "model.layers.1.mlp.experts" in profile.suggested_ignore
    engine = engine_with(folder, profile=tmp_path / "kept")
    kept_layers = {name for name, method in kernels(engine).items() if method.startswith("Kept")}
    quantised = {name for name, method in kernels(engine).items() if method.startswith("Int8")}
    free_engine(engine)
    assert any("layers.1.mlp.experts" in name for name in kept_layers)
    assert {name for name in kept_layers if name.endswith(("o_proj", "down_proj"))} == {
        name for name in profile.suggested_ignore if name.endswith(("o_proj", "down_proj"))
    }
    assert quantised
