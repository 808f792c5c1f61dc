"""Updates that bring an adapter alone, to engines whose base stays: answers, what is proven, and faults.

The reference of answers is PEFT's own forward in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines import PROMPTS, Engine, free_engine, read_checkpoint, start_engine
from faults import Tally
from torch import Tensor

from appliance.engine.adapter import AdapterLayers, AdapterUpdate
from appliance.engine.attest import live_scheme
from appliance.engine.replica import adapter_request
from appliance.engine.update import WeightState
from appliance.errors import SyncError
from appliance.quant.profile import Smoothing, SmoothingGroup
from appliance.sync.manifest import MANIFEST_NAME, Manifest, record_tensor

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RANK, ALPHA = 8, 16
CONFIG = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "up_proj"], "bias": "none"}
Tensors = list[tuple[str, Tensor]]


@dataclass
class Bench:
    """An engine with its base, and two adapters."""

    engine: Engine
    base: Tensors
    adapters: tuple[Tensors, Tensors]
    update: AdapterUpdate | None = None

    def begin(self, **settings: object) -> AdapterUpdate:
        """A worker's updates, none taken yet."""
        runner = self.engine.runner
        self.update = AdapterUpdate(
            self.engine.model,
            loras=runner.lora_manager,
            model_config=runner.vllm_config.model_config,
            needs_manifest=True,
            **settings,
        )
        self.update.peft_config = dict(CONFIG)
        return self.update

    def take(self, tensors: Tensors, *, number: int, around: AbstractContextManager[None] = nullcontext()) -> object:
        """One whole update, with its manifest."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.engine.runner.vllm_config), torch.no_grad():
            self.update.begin()
            for name, tensor in [*tensors, manifest(tensors, number=number)]:
                self.update.load([(name, tensor.clone())])
            with around:
                return self.update.finish()

    def answers(self) -> list[tuple[list[int], list[float]]]:
        """Greedy tokens and their log-probs by the adapter."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, detokenize=False)
        self.engine.llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        outputs = self.engine.llm.generate(prompts, params, use_tqdm=False, lora_request=adapter_request())
        return [
            (list(o.outputs[0].token_ids), [next(iter(p.values())).logprob for p in o.outputs[0].logprobs])
            for o in outputs
        ]


def manifest(tensors: Tensors, *, number: int) -> tuple[str, Tensor]:
    records = tuple(record_tensor(name, tensor) for name, tensor in tensors)
    return MANIFEST_NAME, Manifest(sync=number, records=records).to_tensor()


def adapter(base: Tensors, *, seed: int, size: float = 0.05) -> Tensors:
    """Both matrices of each linear layer but those of the last decoder layer's MLP."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: (size * torch.randn(*shape, generator=generator)).bfloat16()  # noqa: E731
    tensors = []
    for name, weight_NK in base:
        if name.endswith("proj.weight") and "layers.2.mlp" not in name:
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            tensors.append((f"{layer}.lora_A.weight", draw(RANK, weight_NK.shape[1])))
            tensors.append((f"{layer}.lora_B.weight", draw(weight_NK.shape[0], RANK)))
    return tensors


@pytest.fixture(scope="module", params=["int8", "bf16", "fp8-channel", "int4"])
def bench(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Iterator[Bench]:
    engine = start_engine(
        checkpoints[0],
        scheme=request.param,
        emulated=request.param == "fp8-channel",
        enable_lora=True,
        max_loras=1,
        max_lora_rank=RANK,
        worker_extension_cls="appliance.engine.sync.SyncWorkerExtension",
    )
    base = read_checkpoint(checkpoints[0])
    yield Bench(engine, base, (adapter(base, seed=1), adapter(base, seed=2)))
    free_engine(engine)


def pefts_log_probs(folder: Path, tensors: Tensors, tokens: list[list[int]]) -> list[list[float]]:
    """The log-probs of each prompt's next tokens by transformers with PEFT, in float32."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = sorted({name.split(".")[-3] for name, _ in tensors})
    exclude = r".*layers\.2\.mlp.*"
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, exclude_modules=exclude)
    model = get_peft_model(model, config)
    loaded = set_peft_model_state_dict(model, {name: tensor.float() for name, tensor in tensors})
    assert not loaded.unexpected_keys
    results = []
    for prompt, more in zip(PROMPTS, tokens, strict=True):
        ids = [*prompt, *more]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        results.append([float(logits[len(prompt) - 1 + place, token]) for place, token in enumerate(more)])
    return results


def test_what_reads_the_layers_sees_the_base_alone(bench: Bench) -> None:
    """vLLM's wrappers answer for a layer's public attributes, so each layer would be there twice."""
    model = bench.engine.model
    layers = AdapterLayers(model, loras=bench.engine.runner.lora_manager, dtype=torch.bfloat16)
    with layers.taken_off():
        kernels = live_scheme(model).kernels
        names = [name for name, layer in model.named_modules() if hasattr(layer, "quant_method")]
    assert not any("base_layer" in name for name in names) and sum(kernels.values()) == len(names)
    twice = [name for name, layer in model.named_modules() if hasattr(layer, "quant_method")]
    assert len(twice) > len(names)


def test_it_answers_as_pefts_model_does(bench: Bench, checkpoints: tuple[Path, Path]) -> None:
    """To the noise of BF16 or of the codes, which the base alone has too."""
    first, second = bench.adapters
    bench.begin()
    zero = [(name, torch.zeros_like(tensor)) for name, tensor in first]
    taken = bench.take([*bench.base, *zero], number=1)
    assert (taken.tensors, taken.layers_proven) == (len(bench.base) + len(zero), taken.layers)
    of_base = bench.answers()
    for number, tensors in enumerate((first, second), start=2):
        taken = bench.take(tensors, number=number)
        assert taken.tensors == len(tensors) and taken.bytes == sum(tensor.nbytes for _, tensor in tensors)
        answers = bench.answers()
        assert answers != of_base
        exact = pefts_log_probs(checkpoints[0], tensors, [tokens for tokens, _ in answers])
        apart = [
            abs(a - b)
            for (_, ours), theirs in zip(answers, exact, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        ]
        noise = {"bf16": 0.1, "int8": 0.3, "fp8-channel": 0.6, "int4": 1.5}[bench.engine.scheme]
        assert sum(apart) / len(apart) < noise, apart
    bench.take(zero, number=4)
    assert bench.answers() == of_base  # bit for bit: the base has not moved


@pytest.mark.parametrize("bench", ["bf16"], indirect=True)
def test_smoothing_is_folded_into_an_adapter_too(bench: Bench) -> None:
    """By powers of two: in BF16, where nothing is quantised, no bit of an answer may change."""
    generator = torch.Generator().manual_seed(3)
    length = dict(bench.base)["model.layers.0.mlp.down_proj.weight"].shape[1]
    layers = {"model.layers.0.mlp.up_proj.weight": ("model.layers.0.mlp.down_proj.weight",)}
    groups = [
        SmoothingGroup(
            source=source, linears=linears, scale_K=2.0 ** torch.randint(-2, 3, (length,), generator=generator)
        )
        for source, linears in layers.items()
    ]
    answers = []
    for smoothing in (Smoothing(), Smoothing(tuple(groups))):
        bench.begin(smoothing=smoothing)
        bench.take([*bench.base, *bench.adapters[0]], number=1)
        answers.append(bench.answers())
    assert answers[0] == answers[1]


def wrapper_of(bench: Bench, layer: str) -> object:
    return bench.update._adapter_layers._wrappers[layer]


LAYER = "model.layers.1.self_attn.qkv_proj"
LAST = "model.layers.2.self_attn.o_proj"


@contextmanager
def after(bench: Bench, change: Callable[[], object]) -> Iterator[None]:
    """Something goes wrong when vLLM has taken the adapter."""
    layers = bench.update._adapter_layers
    install = layers.install

    def then_change(*args: object, **others: object) -> None:
        install(*args, **others)
        change()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "install", then_change)
        yield


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def faults_in_engine(bench: Bench) -> dict[str, tuple[AbstractContextManager[None], str]]:
    """By fault, what makes it while an update ends, and what the error must say."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper, adapters = wrapper_of(bench, LAYER), bench.engine.runner.lora_manager._adapter_manager
    received = f"the adapter of {LAYER} is not as received"

    def half(
        self: object, y: Tensor, x: Tensor, a: object, b: object, scale: float, *args: object, **o: object
    ) -> None:
        product(self, y, x / 2, a, b, scale, *args, **o)

    product = PunicaWrapperCPU.add_lora_linear
    nothing = lambda *args, **others: None  # noqa: E731
    base = wrapper.base_layer
    other = adapters.modules["model.layers.0.self_attn.qkv_proj"].base_layer
    method, others_method = base.quant_method, other.quant_method

    class OfAnotherLayer:
        """Multiplies by another layer's weights."""

        def __getattr__(self, name: str) -> object:
            return getattr(method, name)

        def apply(self, layer: object, *inputs: object) -> Tensor:
            return others_method.apply(other, *inputs)

    return {
        "one bit of A": (
            after(bench, lambda: wrapper.lora_a_stacked[1][0, 0, 0, :1].view(torch.int16).bitwise_xor_(1)),
            received,
        ),
        "one bit of B": (
            after(bench, lambda: wrapper.lora_b_stacked[2][0, 0, 3, :1].view(torch.int16).bitwise_xor_(1)),
            received,
        ),
        "B without its scale": (after(bench, lambda: wrapper.lora_b_stacked[0].div_(2)), received),
        "a layer's old adapter": (replaced(wrapper, "set_lora", nothing), received),
        "no adapter at all": (after(bench, lambda: adapters.remove_all_adapters()), "vLLM holds no adapter"),
        "a path that adds nothing": (replaced(PunicaWrapperCPU, "add_lora_linear", nothing), "the adapter of model"),
        "a path that adds half": (replaced(PunicaWrapperCPU, "add_lora_linear", half), "the adapter of model"),
        "a base with another layer's kernel": (
            replaced(base, "quant_method", OfAnotherLayer()),
            f"{LAYER} on rank 0",
        ),
        "a norm that changed": (
            after_base(bench, "model.norm"),
            "model.norm on rank 0 is not as received",
        ),
    }


@contextmanager
def after_base(bench: Bench, name: str) -> Iterator[None]:
    weight = bench.engine.model.get_submodule(name).weight.data
    old = weight.clone()
    weight[0] += 1
    try:
        yield
    finally:
        weight.copy_(old)


def faults_in_stream(bench: Bench) -> dict[str, tuple[Tensors, Tensors, str]]:
    """By fault: what was sent, what comes, and what the error must say."""
    right = bench.adapters[1]
    a, b = right[0], right[1]
    gate, up = right[2], right[4]
    swapped = [a, b, (gate[0], up[1]), right[3], (up[0], gate[1]), *right[5:]]
    nan = [(a[0], a[1].clone().fill_(torch.nan)), *right[1:]]
    cropped = [(a[0], a[1][:, :-1]), *right[1:]]
    elsewhere = [(a[0].replace("layers.0", "layers.9"), a[1]), (b[0].replace("layers.0", "layers.9"), b[1]), *right]
    return {
        "of the update before": (right, bench.adapters[0], "arrived with digest"),
        "two matrices swapped": (right, swapped, "arrived with digest"),
        "dropped": (right, right[1:], "was sent and did not arrive"),
        "doubled": ([*right, a], [*right, a], f"{a[0]} came twice"),
        "not finite": (nan, nan, f"{a[0]} has a value that is not finite"),
        "half of a layer": (right[1:], right[1:], "has no lora_A"),
        "of another shape": (cropped, cropped, "is not as received: shapes of part 0"),
        "of a layer that is not there": (elsewhere, elsewhere, "weight update"),
        "no matrix of an adapter": (
            [("x.lora_A.bias", a[1])],
            [("x.lora_A.bias", a[1])],
            "is not a matrix of an adapter",
        ),
    }


def test_every_fault_is_caught(bench: Bench, record_property: Callable[[str, object], None]) -> None:
    from vllm.config import set_current_vllm_config

    tally = Tally(f"updates of an adapter alone ({bench.engine.scheme})")

    def fresh() -> None:
        bench.begin()
        bench.take([*bench.base, *bench.adapters[0]], number=1)

    def tried(says: str, attempt: Callable[[], object]) -> None:
        caught = ""
        try:
            attempt()
        except SyncError as error:
            caught = error.message
            assert bench.update.state is WeightState.BROKEN
            with pytest.raises(SyncError, match="the engine's weights are half-updated"):
                bench.update.begin()
        bench.update._adapter_layers.put_on()
        tally.injected += 1
        tally.caught += says in caught and caught != ""
        tally.missed += [] if says in caught and caught else [f"{says}: {caught or 'not caught'}"]

    for intended, stream, says in (fresh() or faults_in_stream(bench)).values():
        fresh()

        def attempt(intended: Tensors = intended, stream: Tensors = stream) -> None:
            with set_current_vllm_config(bench.engine.runner.vllm_config), torch.no_grad():
                bench.update.begin()
                for name, tensor in [*stream, manifest(intended, number=2)]:
                    bench.update.load([(name, tensor.clone())])
                bench.update.finish()

        tried(says, attempt)
    for case in faults_in_engine(bench):
        fresh()
        around, says = faults_in_engine(bench)[case]
        tried(says, lambda around=around: bench.take(bench.adapters[1], number=2, around=around))
    bench.begin()
    tried("an adapter came before the weights", lambda: bench.take(bench.adapters[0], number=1))
    fresh()
    assert tally.missed == []
    assert tally.injected == tally.caught == 19
    record_property("said", str(tally))
