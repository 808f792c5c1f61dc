"""A KV cache in FP8 of a real engine: scales that are measured, written, read back and asked of the kernels; and every
fault that was injected into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import Engine, free_engine, make_checkpoint, read_checkpoint, start_engine
from trainings import HAS_FP8_CACHE, NO_FP8_CACHE

from appliance.errors import EngineError, SyncError
from appliance.quant.kv_scales import LARGEST, Pairs, digest_of, scales_of

pytestmark = [pytest.mark.engine, pytest.mark.skipif(not HAS_FP8_CACHE, reason=NO_FP8_CACHE)]

MEMORY = 8 << 20  # bytes of the KV cache
PROMPTS = [[(7 * row + 3 * column) % 500 + 1 for column in range(40)] for row in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kv"), seed=5)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """Whose cache is written with rounding, as a run's."""
    from appliance.engine.kv_cache import FP8_ROUNDING, rounding
    from appliance.patch import apply_patch

    apply_patch(FP8_ROUNDING, rounding)
    engine = start_engine(folder, scheme="int8", kv_cache_dtype="fp8_e4m3", kv_cache_memory_bytes=MEMORY)
    yield engine
    free_engine(engine)


def read_prompts(engine: Engine, *, new_tokens: int = 1) -> list[list[float]]:
    """The log-probs of what each prompt is followed by, greedily."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False,
        skip_reading_prefix_cache=True,
    )  # fmt: skip
    outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [[next(iter(words.values())).logprob for words in output.outputs[0].logprobs] for output in outputs]


def scales_in(engine: Engine):
    from appliance.engine.kv_cache import KvCacheScales

    return KvCacheScales(engine.model)


def measured(engine: Engine, *, in_place: Pairs | None = None) -> Pairs:
    """The ranges of the prompts' keys and values. in_place: scales meanwhile."""
    worker_scales = scales_in(engine)
    worker_scales.begin(in_place or {})
    read_prompts(engine)
    return worker_scales.end()


def written_to(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[float, float]]]:
    """The largest |key| and |value| of each token, as vLLM's own operation gets them."""
    from vllm import _custom_ops

    seen, original = {}, _custom_ops.cpu_attn_reshape_and_cache
    names = [layer.layer_name for layer in engine.model.modules() if hasattr(layer, "_k_scale_float")]

    def note(key, value, *arguments, **keywords):
        layer = names[len(seen.setdefault("calls", [])) % len(names)]
        seen["calls"].append(layer)
        pairs = zip(key.flatten(1).abs().amax(1).tolist(), value.flatten(1).abs().amax(1).tolist(), strict=True)
        seen.setdefault(layer, []).extend(pairs)
        return original(key, value, *arguments, **keywords)

    monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", note)
    read_prompts(engine)
    del seen["calls"]
    return seen


def test_the_same_memory_holds_twice_as_many_tokens(engine: Engine, folder: Path) -> None:
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    other = start_engine(folder, scheme="int8", kv_cache_memory_bytes=MEMORY)
    blocks = [one.runner.vllm_config.cache_config.num_gpu_blocks for one in (other, engine)]
    sequences = [
        get_max_concurrency_for_kv_cache_config(one.runner.vllm_config, one.runner.kv_cache_config)
        for one in (other, engine)
    ]
    sizes = [sum(tensor.size for tensor in one.runner.kv_cache_config.kv_cache_tensors) for one in (other, engine)]
    free_engine(other)
    assert blocks[1] == 2 * blocks[0] and sequences[1] == 2 * sequences[0]
    assert sizes[0] == sizes[1] <= MEMORY


def test_what_is_measured_is_what_the_layers_write(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = measured(engine)
    of_tokens = written_to(engine, monkeypatch)
    assert list(ranges) == list(of_tokens) == [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]
    for name, pairs in of_tokens.items():
        assert len(pairs) == sum(map(len, PROMPTS))
        for measure, largest in zip(ranges[name], (max(column) for column in zip(*pairs, strict=True)), strict=True):
            assert 0.9 * largest < measure <= largest  # 239 of 240 tokens are at most the 99.9th percentile


def test_scales_are_written_read_back_and_asked_of_the_kernels(engine: Engine) -> None:
    worker_scales, scales = scales_in(engine), scales_of(measured(engine))
    assert worker_scales.write(scales, sync=3) == digest_of(scales, sync=3) == worker_scales.check(sync=3)
    layer = engine.model.model.layers[1].self_attn.attn
    keys, values = scales[layer.layer_name]
    assert (layer._k_scale_float, float(layer._v_scale)) == (keys, values)
    after = read_prompts(engine, new_tokens=8)
    assert all(math.isfinite(number) for row in after for number in row)
    # What is written with a scale of 30 times is cut to numbers of few bits: the log-probs show that it is used.
    worker_scales.begin({name: (30 * keys, 30 * values) for name, (keys, values) in scales.items()})
    by_coarse_scales = read_prompts(engine, new_tokens=8)
    worker_scales.end()
    assert by_coarse_scales != after


def test_what_is_written_is_the_nearest_number(engine: Engine) -> None:
    """vLLM's own kernel cuts bits off; a tie, a sixteenth of all BF16 numbers, may go either way."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    x_THD = (torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(0)) * 2).bfloat16()
    caches = []
    for update in (CPUAttentionBackendImpl.do_kv_cache_update, CPUAttentionBackendImpl.do_kv_cache_update.__wrapped__):
        cache = torch.zeros(1, 2, 32, 128, dtype=torch.uint8)
        layer = SimpleNamespace(_k_scale_float=2.0**-5, _v_scale_float=2.0**-5, isa="vec")
        impl = SimpleNamespace(attn_type="decoder", isa="vec", kv_cache_dtype="fp8_e4m3", is_fp8_kv_cache=True)
        update(impl, layer, x_THD, x_THD, cache, torch.arange(32))
        values = cache.view(1, 2, 64, 64).chunk(2, dim=2)[1].contiguous()[0].transpose(0, 1)
        caches.append(values.view(torch.float8_e4m3fn).double() * 2.0**-5)
    x_THD = x_THD.double()
    nearest_THD = (x_THD * 32).float().to(torch.float8_e4m3fn).double() / 32
    rounded, cut = ((cache - x_THD).abs() for cache in caches)
    normal = x_THD.abs() > 2.0**-6 / 32
    assert torch.equal(rounded[normal], (nearest_THD - x_THD).abs()[normal])
    assert (caches[1].abs() <= x_THD.abs()).all() and float(cut.sum() / rounded.sum()) > 1.8


def test_an_engine_that_cuts_bits_off_is_caught(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    worker_scales, scales = scales_in(engine), scales_of(measured(engine))
    own = CPUAttentionBackendImpl.do_kv_cache_update.__wrapped__
    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", own)
    with pytest.raises(
        SyncError, match=r"the cache of model.layers.0.self_attn.attn has the codes .-192.0, -1.125, 1.25"
    ):
        worker_scales.write(scales, sync=1)


def test_scales_keep_log_probs_closer_than_1_where_values_are_small(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    """Values of a thousandth are below the smallest normal FP8 numbers, and a scale brings them back."""
    from safetensors.torch import save_file

    tensors = dict(read_checkpoint(folder))
    for name, tensor in tensors.items():
        if ".v_proj." in name:
            tensors[name] = tensor / 512
        if ".o_proj." in name:
            tensors[name] = tensor * 512
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    exact_engine = start_engine(small, scheme="bf16", kv_cache_memory_bytes=MEMORY)
    exact = read_prompts(exact_engine)
    free_engine(exact_engine)
    small_engine = start_engine(small, scheme="bf16", kv_cache_dtype="fp8_e4m3", kv_cache_memory_bytes=MEMORY)
    worker_scales = scales_in(small_engine)

    def gap(scales: Pairs) -> float:
        worker_scales.write(scales, sync=1)
        pairs = zip(read_prompts(small_engine), exact, strict=True)
        return sum(abs(one - other) for row in pairs for one, other in zip(*row, strict=True))

    scales = scales_of(measured(small_engine))
    ours, ones = gap(scales), gap({name: (1.0, 1.0) for name in scales})
    free_engine(small_engine)
    assert ours < ones / 3, (ours, ones)


def test_an_update_of_weights_resets_scales_and_says_so(engine: Engine, folder: Path) -> None:
    worker_scales, scales = scales_in(engine), scales_of(measured(engine))
    worker_scales.write(scales, sync=1)
    engine.load(read_checkpoint(folder))
    with pytest.raises(SyncError, match=r"KV scales: .*layers.0.self_attn.attn has 1 for its keys, .* was written"):
        worker_scales.check(sync=1)


Fault = Callable[[object, pytest.MonkeyPatch], None]


def _kernel_float(layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels of a CPU read."""
    layer._k_scale_float *= 1.07


def _tensor(layer, monkeypatch: pytest.MonkeyPatch) -> None:
    layer._v_scale.fill_(1.0)


def _host_copy(layer, monkeypatch: pytest.MonkeyPatch) -> None:
    layer._k_scale_cpu.fill_(float("nan"))


def _zero(layer, monkeypatch: pytest.MonkeyPatch) -> None:
    layer._v_scale_float = 0.0


def _one_bit(layer, monkeypatch: pytest.MonkeyPatch) -> None:
    layer._k_scale_float = math.nextafter(layer._k_scale_float, 1.0)


@pytest.mark.parametrize("fault", [_kernel_float, _tensor, _host_copy, _zero, _one_bit])
@pytest.mark.parametrize("number", [0, 2])
def test_a_wrong_scale_is_caught_before_rollouts(
    engine: Engine, fault: Fault, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_scales, scales = scales_in(engine), scales_of(measured(engine))
    worker_scales.write(scales, sync=2)
    layer = engine.model.model.layers[number].self_attn.attn
    fault(layer, monkeypatch)
    with pytest.raises(SyncError, match=rf"KV scales: {layer.layer_name} has "):
        worker_scales.check(sync=2)


@pytest.mark.parametrize("factor", [0.94, 1.06, 2.0])
@pytest.mark.parametrize("place", ["k_scale", "v_scale"])
@pytest.mark.parametrize("operation", ["cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache"])
def test_a_kernel_that_uses_another_scale_is_caught(
    engine: Engine, operation: str, place: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers hold what was sent, and the kernel computes with something else, as one that has kept an old scale."""
    from vllm import _custom_ops

    worker_scales, scales = scales_in(engine), scales_of(measured(engine))
    original = getattr(_custom_ops, operation)

    def wrong(*arguments, **keywords):
        return original(*arguments, **keywords | {place: factor * keywords[place]})

    monkeypatch.setattr(_custom_ops, operation, wrong)
    with pytest.raises(SyncError, match=r"KV scales: (the cache|attention) of model.layers.0.self_attn.attn"):
        worker_scales.write(scales, sync=2)


def test_stale_scales_are_caught(engine: Engine) -> None:
    worker_scales, scales = scales_in(engine), scales_of(measured(engine))
    worker_scales.write(scales, sync=4)
    with pytest.raises(SyncError, match="KV scales: those of weight update 4 are in place, 5 is the newest"):
        worker_scales.check(sync=5)
    with pytest.raises(SyncError, match="KV scales: none were written for weight update 1"):
        scales_in(engine).check(sync=1)


def test_scales_of_other_layers_are_refused(engine: Engine) -> None:
    worker_scales, scales = scales_in(engine), scales_of(measured(engine))
    scales = dict(scales)
    scales["model.layers.7.self_attn.attn"] = scales.pop("model.layers.1.self_attn.attn")
    with pytest.raises(SyncError, match="sent for 3 layers, this engine has 3, of which 2 were sent"):
        worker_scales.write(scales, sync=1)


def test_ranges_do_not_depend_on_the_scales_that_were_in_place(engine: Engine) -> None:
    ranges = measured(engine)
    scales_in(engine).write(
        scales_of({name: (4 * keys, 4 * values) for name, (keys, values) in ranges.items()}), sync=1
    )
    assert measured(engine) == ranges
    assert max(largest for pair in ranges.values() for largest in pair) < LARGEST


def test_keys_that_are_not_finite_are_an_error(engine: Engine) -> None:
    import torch

    layer = engine.model.model.layers[1].self_attn.attn
    worker_scales = scales_in(engine)
    worker_scales.begin({})
    read_prompts(engine)
    worker_scales._largest[layer.layer_name, "keys"].append(torch.tensor([float("inf")]))
    with pytest.raises(SyncError, match=rf"{layer.layer_name} wrote keys that are not finite"):
        worker_scales.end()


def test_an_engine_without_fp8_keys_has_no_scales(folder: Path) -> None:
    from appliance.engine.kv_cache import kv_cache_format

    engine = start_engine(folder, scheme="int8", kv_cache_memory_bytes=MEMORY)
    try:
        assert kv_cache_format(engine.model) == "auto"
        with pytest.raises(EngineError, match="no attention layer of this engine has a KV cache in FP8"):
            scales_in(engine)
    finally:
        free_engine(engine)


def test_the_format_is_read_off_the_layers(engine: Engine) -> None:
    from appliance.engine.kv_cache import kv_cache_format

    assert kv_cache_format(engine.model) == "fp8"
    layer = engine.model.model.layers[2].self_attn.attn
    layer.kv_cache_dtype = "auto"
    try:
        with pytest.raises(EngineError, match="2 of 3 attention layers have a KV cache in FP8"):
            kv_cache_format(engine.model)
    finally:
        layer.kv_cache_dtype = "fp8_e4m3"
