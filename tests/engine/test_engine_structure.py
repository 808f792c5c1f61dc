"""Models without a row in the list of families: held to their structure at the start, then updated and proven like
any other; what they compute is what transformers, the trainer, computes. And those that are refused, by the layer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import PROMPTS, Engine, free_engine, read_checkpoint, start_engine
from faults import given_to_vllm, new_update, recover, sent, take
from smoothings import random_smoothing
from torch import Tensor
from unlisted_models import UNLISTED, WINDOW, build_unlisted, make_unlisted

from appliance.engine.attest import live_scheme
from appliance.engine.structure import rehearse_updates, require_fit
from appliance.errors import EngineError, SyncError, WeightsError
from appliance.quant.profile import Origin, Profile, Settings, Smoothing, write_profile
from appliance.terms.families import FAMILIES, UNLIKE_WINDOWS
from appliance.terms.schemes import Precision, Scheme
from appliance.terms.settings import LOAD_FORMAT, Quantisation
from flashrl_compat.loader import LOAD_FORMAT as FOLDING

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OTHERS = sorted(UNLISTED.keys() - {"granite", "gemma2"})
MAX_TOKENS = 12  # of a response: longer than the tiny models' windows
Tensors = list[tuple[str, Tensor]]


@pytest.fixture(scope="module", autouse=True)
def classes_of_transformers() -> Iterator[None]:
    """vLLM runs some models by transformers' own classes, and decorates those for torch.compile, which no engine here
    uses: they would no longer be transformers' own in this process."""
    from vllm.model_executor.models.transformers.base import Base

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Base, "_decorate_cls_for_torch_compile", lambda *_, **__: None)
        yield


def start(folder: Path, *, scheme: str = "int8", **settings: object) -> Engine:
    """An engine by a plan's loader, which rehearses its updates as verl's first call has it do."""
    engine = start_engine(folder, scheme=scheme, load_format=LOAD_FORMAT, **settings)
    rehearse_updates(engine.model, vllm_config=engine.runner.vllm_config, rank=0)
    return engine


def trainers_log_probs(folder: Path, answers: list[tuple[list[int], list[float]]]) -> list[list[float]]:
    """Log-probs of the engine's tokens by transformers, in float32 and with the BF16 weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    log_probs = []
    for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_probs.append(logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist())
    return log_probs


@pytest.mark.parametrize(
    "model_type", ["granite", "gemma2", *(pytest.param(other, marks=pytest.mark.long) for other in OTHERS)]
)
def test_a_model_without_a_row_is_updated_and_proven(tmp_path: Path, model_type: str) -> None:
    """In INT8: the engine of the new weights, and back. In BF16, by the update that the governor would send: what the
    trainer computes, to the rounding of BF16. Log-probs were 0.007 to 0.024 nats apart; without one of what
    tests/unlisted_models.py sets, such as a window, a soft cap or a multiplier, they are 0.15 apart or more."""
    assert UNLISTED[model_type][0] not in FAMILIES
    old, new = (make_unlisted(tmp_path / str(seed), model_type, seed=seed) for seed in (1, 2))
    fresh = start_engine(new, scheme="int8", load_format=LOAD_FORMAT)
    wanted_new = fresh.generate(max_tokens=MAX_TOKENS)
    free_engine(fresh)
    engine = start_engine(old, scheme="int8", load_format=LOAD_FORMAT)
    wanted_old = engine.generate(max_tokens=MAX_TOKENS)
    rehearse_updates(engine.model, vllm_config=engine.runner.vllm_config, rank=0)
    assert engine.generate(max_tokens=MAX_TOKENS) == wanted_old
    live = live_scheme(engine.model)
    assert live.scheme is Scheme.INT8 and "UnquantizedLinearMethod" not in live.kernels
    for folder, expected in ((new, wanted_new), (old, wanted_old)):
        taken = engine.load(read_checkpoint(folder))
        assert (taken.layers_proven, taken.unproven) == (taken.layers, 0)
        assert engine.generate(max_tokens=MAX_TOKENS) == expected
    assert wanted_old != wanted_new
    take(engine, sent(read_checkpoint(new), precision=Precision(Scheme.BF16)))
    answers = engine.generate(max_tokens=MAX_TOKENS)
    apart = [
        abs(ours - theirs)
        for (_, log_probs), reference in zip(answers, trainers_log_probs(new, answers), strict=True)
        for ours, theirs in zip(log_probs, reference, strict=True)
    ]
    sys.stdout.write(f"{model_type}: log-probs at most {max(apart):.3f} nats from transformers'\n")
    assert max(apart) < 0.03
    free_engine(engine)


def without(stream: Tensors, name: str) -> Tensors:
    return [pair for pair in stream if pair[0] != name]


def changed(stream: Tensors, name: str, change: Callable[[Tensor], Tensor]) -> Tensors:
    return [(other, change(tensor.clone()) if other == name else tensor) for other, tensor in stream]


def with_nan(tensor: Tensor) -> Tensor:
    tensor.view(-1)[-1] = torch.nan
    return tensor


FAULTS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "dropped": without,
    "twice": lambda stream, name: [*stream, (name, dict(stream)[name])],
    "cropped": lambda stream, name: changed(stream, name, lambda tensor: tensor[:-1]),
    "not finite": lambda stream, name: changed(stream, name, with_nan),
    "unknown": lambda stream, name: [*stream, (f"{name.rpartition('.')[0]}.other.bias", torch.zeros(96).bfloat16())],
}


@pytest.fixture(scope="module", params=["granite", "phi3", "gemma2", "starcoder2"])
def updated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Tensors, Tensors]]:
    """An engine in INT8, the weights that it has, and others."""
    root = tmp_path_factory.mktemp(request.param)
    folders = [make_unlisted(root / str(seed), request.param, seed=seed) for seed in (1, 2)]
    engine = start(folders[0])
    yield engine, *(read_checkpoint(folder) for folder in folders)
    free_engine(engine)


@pytest.mark.parametrize("fault", [*FAULTS, "after the digest"])
def test_a_fault_in_any_tensor_is_caught_and_named(updated: tuple[Engine, Tensors, Tensors], fault: str) -> None:
    """Without a list of what was sent: what the structure shows is all there is. The last fault is put in behind the
    proof's back: the layer itself must answer for it."""
    engine, old, new = updated
    missed = []
    for name, _ in new:
        stream, around = new, nullcontext()
        if fault in FAULTS:
            stream = FAULTS[fault](new, name)
        else:
            around = given_to_vllm(name, lambda tensor: tensor.roll(1, 0) * 2)
        try:
            with around:
                take(engine, stream, update=new_update(engine, needs_manifest=False))
            missed.append(f"{name}: not caught")
        except SyncError as error:
            if name.rsplit(".", 2)[0] not in error.message:
                missed.append(f"{name}: {error.message}")
        recover(engine, old)
    assert missed == []


def test_a_last_projection_that_keeps_its_first_weights_is_caught(
    updated: tuple[Engine, Tensors, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the head is the embedding itself vLLM multiplies by a packed copy of it, which the look-up does not use."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    engine, old, new = updated
    monkeypatch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda *_: None)
    with pytest.raises(SyncError, match=r"(lm_head|model\.embed_tokens) on rank 0 is not as received"):
        take(engine, new, update=new_update(engine, needs_manifest=False))
    monkeypatch.undo()
    recover(engine, old)


def test_an_embedding_whose_look_up_is_not_what_came_is_caught(
    updated: tuple[Engine, Tensors, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the embedding is the head, too: its packed copy multiplies rightly here."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    engine, old, new = updated
    pack = UnquantizedEmbeddingMethod.process_weights_after_loading

    def pack_and_change(method: UnquantizedEmbeddingMethod, layer: torch.nn.Module) -> None:
        pack(method, layer)
        if not isinstance(layer, ParallelLMHead):
            layer.weight.data[-1] = 0

    monkeypatch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", pack_and_change)
    with pytest.raises(SyncError, match=r"embed_tokens on rank 0 is not as received: digest of weight"):
        take(engine, new, update=new_update(engine, needs_manifest=False))
    monkeypatch.undo()
    recover(engine, old)


# By model_type: what its configuration needs, and the layer that stands against it.
REFUSED = {
    "falcon": ({}, "transformer.h.0.self_attention.query_key_value holds 3 layers, in an order that no proof knows"),
    "opt": (
        {"ffn_dim": 160, "word_embed_proj_dim": 96},
        "model.decoder.embed_positions is a OPTLearnedPositionalEmbedding: the quantised engine does not know",
    ),
    "gpt2": ({}, "transformer.wpe is a Embedding: the quantised engine does not know how it holds its weights"),
    "mamba": (
        {},
        "backbone.layers.0.mixer is a MambaMixer: among layers that mix tokens only plain attention is known",
    ),
    "mixtral": (
        {"num_experts_per_tok": 2, "num_local_experts": 4},
        "model.layers.0.block_sparse_moe.experts.routed_experts has experts, and the model has no row in the list",
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_structure_that_shows_no_places_is_refused_by_the_layer(tmp_path: Path, model_type: str) -> None:
    fields, layer = REFUSED[model_type]
    folder = make_unlisted(tmp_path, model_type, seed=1, **fields)
    with pytest.raises(EngineError) as raised:
        start_engine(folder, scheme="int8", load_format=LOAD_FORMAT)
    assert raised.value.message.startswith(f"{folder}: {layer}")


def test_why_qwen3_5_does_not_run() -> None:
    """On a CPU vLLM's class cannot be imported; on any device its layers of a gated delta rule are not attention."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    with pytest.raises(ModuleNotFoundError, match="torchvision"):
        importlib.import_module("vllm.model_executor.models.qwen3_5")
    model, name = torch.nn.Module(), "model.layers.0.linear_attn"
    layer = QwenGatedDeltaNetAttention.__new__(QwenGatedDeltaNetAttention)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(architecture="Qwen3_5ForCausalLM", model="a-folder"),
        compilation_config=SimpleNamespace(static_forward_context={name: layer}),
    )
    fact = "among layers that mix tokens only plain attention is known"
    with pytest.raises(EngineError) as raised:
        require_fit(model, vllm_config=vllm_config)
    assert raised.value.message == f"a-folder: {name} is a QwenGatedDeltaNetAttention: {fact}"


@pytest.fixture
def granite(tmp_path: Path) -> Path:
    return make_unlisted(tmp_path / "granite", "granite", seed=1)


def test_cohere_2_sees_one_token_more_than_in_the_trainer(tmp_path: Path) -> None:
    """So preflight refuses what is longer than the window (terms/families.py). If it ever fails: put the class back
    among ALIKE_WINDOWS, and its window in tests/unlisted_models.py below the length of an answer."""
    folder = make_unlisted(tmp_path / "cohere2", "cohere2", seed=1, sliding_window=WINDOW)
    engine = start_engine(folder, scheme="int8", load_format=LOAD_FORMAT)
    mixers = engine.runner.vllm_config.compilation_config.static_forward_context
    assert [layer.sliding_window for layer in mixers.values()] == [WINDOW + 1, None]
    assert "Cohere2ForCausalLM" in UNLIKE_WINDOWS
    free_engine(engine)


def test_a_class_that_packs_in_another_order_is_refused(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.granite import GraniteForCausalLM

    packed = {"qkv_proj": ["k_proj", "q_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    monkeypatch.setattr(GraniteForCausalLM, "packed_modules_mapping", packed)
    with pytest.raises(EngineError) as raised:
        start_engine(granite, scheme="int8", load_format=LOAD_FORMAT)
    assert raised.value.message == (
        f"{granite}: model.layers.0.self_attn.qkv_proj is packed from k_proj, q_proj, v_proj, in an order that no "
        "proof knows"
    )


def test_a_checkpoint_with_a_tensor_of_no_place_is_refused(granite: Path) -> None:
    from safetensors.torch import save_file

    more = {**dict(read_checkpoint(granite)), "model.layers.0.self_attn.gate.bias": torch.zeros(96).bfloat16()}
    save_file(more, granite / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.self_attn\.gate\.bias is not a weight of this model"):
        start_engine(granite, scheme="int8", load_format=LOAD_FORMAT)


def test_a_checkpoint_that_is_not_read_is_refused(granite: Path) -> None:
    engine = start_engine(granite, scheme="int8", load_format="dummy")
    with pytest.raises(EngineError, match="with `load_format: dummy` no checkpoint is there"):
        rehearse_updates(engine.model, vllm_config=engine.runner.vllm_config, rank=0)
    free_engine(engine)


def test_a_layer_with_a_vector_beside_its_layers_is_refused(granite: Path) -> None:
    engine = start(granite)
    engine.model.model.layers[1].scale = torch.nn.Parameter(torch.ones(96))
    with pytest.raises(EngineError, match=r"model\.layers\.1 has `scale` beside its layers"):
        require_fit(engine.model, vllm_config=engine.runner.vllm_config)
    free_engine(engine)


def test_a_profile_of_another_class_is_refused(granite: Path, tmp_path: Path) -> None:
    """All of its names and sizes may fit, and other layers read a norm."""
    from transformers import AutoConfig

    from appliance.engine.config import ApplianceConfig

    config = AutoConfig.from_pretrained(granite)
    for made_of, is_refused in (("GraniteForCausalLM", False), ("", True)):
        profile = Profile(Origin("calibrated", "m"), Scheme.INT8, Settings(), Smoothing(), architecture=made_of)
        write_profile(profile, folder=tmp_path)
        engines_config = ApplianceConfig(Quantisation(scheme=Scheme.INT8, profile=str(tmp_path)))
        if not is_refused:
            engines_config.maybe_update_config(str(granite), config)
            continue
        with pytest.raises(EngineError) as raised:
            engines_config.maybe_update_config(str(granite), config)
        why = "it was made of a listed family and the model is GraniteForCausalLM, where other layers may read a norm"
        assert raised.value.message == f"{granite}: the profile {tmp_path}: {why}"
        hint = "make one of this model with `appliance profile`, or start the engine without a profile"
        assert raised.value.hint == hint


@pytest.mark.parametrize(
    "model_type",
    ["phi3", *(pytest.param(other, marks=pytest.mark.long) for other in ("granite", "cohere2", "starcoder2"))],
)
def test_a_smoothed_model_without_a_row_is_updated_and_proven(tmp_path: Path, model_type: str) -> None:
    """An update with smoothing gives what an engine computes that starts from folded weights."""
    old, new = (make_unlisted(tmp_path / str(seed), model_type, seed=seed) for seed in (1, 2))
    smoothing = random_smoothing(build_unlisted(model_type, seed=1).eval(), seed=3)
    assert any("norm" in group.source for group in smoothing.groups)
    profile = Profile(
        Origin("calibrated", "m"), Scheme.INT8, Settings(), smoothing, architecture=UNLISTED[model_type][0]
    )
    write_profile(profile, folder=tmp_path / "profile")
    with_profile = Quantisation(scheme=Scheme.INT8, profile=str(tmp_path / "profile")).engine_arguments()
    answers = {}
    for folder in (old, new):
        fresh = start_engine(folder, scheme="int8", load_format=FOLDING, **with_profile)
        answers[folder] = fresh.generate(max_tokens=MAX_TOKENS)
        free_engine(fresh)
    engine = start(old, **with_profile)
    assert engine.generate(max_tokens=MAX_TOKENS) != answers[old]  # a run's first update brings the smoothing
    for folder in (new, old):
        taken = engine.load(read_checkpoint(folder), smoothing=smoothing)
        assert (taken.layers_proven, taken.unproven) == (taken.layers, 0)
        assert engine.generate(max_tokens=MAX_TOKENS) == answers[folder]
    free_engine(engine)


def test_a_norm_that_keeps_its_first_weights_is_refused(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tensor is updated, and what it multiplies by is not: the proof of its tensor would pass."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    class Keeping(RMSNorm):
        def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
            if not hasattr(self, "first"):
                self.first = self.weight.clone()
            return torch.nn.functional.rms_norm(x, x.shape[-1:], self.first, 1e-6)

    engine = start_engine(granite, scheme="int8", load_format=LOAD_FORMAT)
    monkeypatch.setattr(engine.model.model.norm, "__class__", Keeping)
    with pytest.raises(EngineError) as raised:
        rehearse_updates(engine.model, vllm_config=engine.runner.vllm_config, rank=0)
    fact = "model.norm answers as it did before, with other weights"
    assert raised.value.message == f"{granite}: a rehearsed weight update: {fact}"
    free_engine(engine)


def test_a_layer_that_does_not_come_back_is_refused(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block does beside its layers has no tensor that could be proven."""
    from vllm.model_executor.models.granite import GraniteMLP

    engine = start_engine(granite, scheme="int8", load_format=LOAD_FORMAT)
    forward, calls = GraniteMLP.forward, []
    monkeypatch.setattr(GraniteMLP, "forward", lambda self, x: forward(self, x * (1 + len(calls.append(0) or calls))))
    with pytest.raises(EngineError) as raised:
        rehearse_updates(engine.model, vllm_config=engine.runner.vllm_config, rank=0)
    fact = "model.layers.0.mlp.gate_up_proj does not compute what it did, with its first weights again"
    assert raised.value.message == f"{granite}: a rehearsed weight update: {fact}"
    free_engine(engine)


@pytest.mark.parametrize("model_type", ["granite", "starcoder2"])
@pytest.mark.parametrize("scheme", ["fp8", "fp8-channel", "fp8-block", "int4"])
def test_every_other_scheme_takes_models_without_a_row(tmp_path: Path, scheme: str, model_type: str) -> None:
    emulated = scheme.startswith("fp8")
    engine = start(make_unlisted(tmp_path / "one", model_type, seed=1), scheme=scheme, emulated=emulated)
    other = make_unlisted(tmp_path / "other", model_type, seed=2)
    taken = engine.load(read_checkpoint(other))
    assert (taken.layers_proven, taken.unproven) == (taken.layers, 0)
    answers = engine.generate(max_tokens=4)
    free_engine(engine)
    fresh = start_engine(other, scheme=scheme, emulated=emulated, load_format=LOAD_FORMAT)
    assert fresh.generate(max_tokens=4) == answers
    free_engine(fresh)
