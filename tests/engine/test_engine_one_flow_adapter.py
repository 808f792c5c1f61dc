"""The trainer's forward with a frozen quantised model and an adapter, against an engine that gets the adapter alone:
log-probs of sampled tokens, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines import Engine, free_engine, read_checkpoint, start_engine
from families import make_family
from test_engine_one_flow import FP8, PROMPTS, profile_of, recomputed_by
from torch import Tensor

from appliance.engine.adapter import AdapterUpdate
from appliance.engine.replica import adapter_request
from appliance.quant.profile import Smoothing, load_smoothing
from appliance.settings.sections import Lora
from appliance.sync.manifest import DIRECTIVE_NAME, MANIFEST_NAME, Manifest, precision_tensor, record_tensor
from appliance.terms.schemes import AS_PLANNED, Precision, Scheme
from appliance.terms.settings import Quantisation
from appliance.trainer.lora import adapter_config, adapter_weights, put_adapter_in
from appliance.trainer.rollout_forward import RolloutForward
from appliance.trainer.weights_on_disk import WeightsOnDisk

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# vLLM fills rank 6 up to 8, 10 / 6 rounds, and gate_up_proj and qkv_proj have parts without an adapter
LORA = Lora(rank=6, alpha=10, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"), dropout=0.0)
ENGINE_RANK = 8
Tensors = list[tuple[str, Tensor]]


@dataclass
class Sides:
    """An engine and the trainer's model, with the same adapter."""

    engine: Engine
    model: torch.nn.Module
    flow: RolloutForward
    update: AdapterUpdate
    base: Tensors
    number: int = 0

    def send(self, *, seed: int, precision: Precision = AS_PLANNED, with_base: bool = False) -> None:
        """One update of an adapter, drawn by this seed."""
        from vllm.config import set_current_vllm_config

        self.number += 1
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).bfloat16()
        tensors = [*(self.base if with_base else []), *adapter_weights(self.model).items()]
        if not precision.is_planned:
            tensors.insert(0, (DIRECTIVE_NAME, precision_tensor(precision)))
        manifest = Manifest(sync=self.number, records=tuple(record_tensor(name, each) for name, each in tensors))
        with set_current_vllm_config(self.engine.runner.vllm_config), torch.no_grad():
            self.update.peft_config = adapter_config(self.model)
            self.update.begin()
            self.update.load([(name, each.clone()) for name, each in [*tensors, (MANIFEST_NAME, manifest.to_tensor())]])
            self.update.finish()
        self.flow.follow(precision)
        self.flow.note_sent(manifest)

    def sampled(self) -> list[tuple[list[int], list[int], list[float]]]:
        """(prompt, response, log-probs)"""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True, logprobs=0, detokenize=False, seed=3)
        self.engine.llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = self.engine.llm.generate(prompts, params, use_tqdm=False, lora_request=adapter_request())
        rows = []
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            steps = zip(output.outputs[0].logprobs, tokens, strict=True)
            rows.append((list(output.prompt_token_ids), tokens, [step[token].logprob for step, token in steps]))
        return rows


def start(folder: Path, *, scheme: str, profile: str = "") -> Sides:
    from transformers import AutoModelForCausalLM

    quantisation = Quantisation(scheme=Scheme(scheme), emulated=scheme in FP8, profile=profile)
    engine = start_engine(
        folder,
        scheme=scheme,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=ENGINE_RANK,
        lora_target_modules=list(map(str, LORA.targets)),
        worker_extension_cls="appliance.engine.sync.SyncWorkerExtension",
        **quantisation.engine_arguments(),
    )
    smoothing = load_smoothing(Path(profile)) if profile else Smoothing()
    update = AdapterUpdate(
        engine.model,
        loras=engine.runner.lora_manager,
        model_config=engine.runner.vllm_config.model_config,
        needs_manifest=True,
        smoothing=smoothing,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    flow = RolloutForward(model, quantisation=quantisation, num_tokens=model.config.vocab_size)
    adapted = put_adapter_in(model, lora=LORA, seed=0)
    flow.add_adapters(adapted, engine_rank=ENGINE_RANK, files=WeightsOnDisk(folder))
    return Sides(engine, adapted, flow, update, read_checkpoint(folder))


@pytest.mark.parametrize("scheme", ["int8", "int4", "bf16", *FP8])
def test_log_probs_are_the_engines(scheme: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path, name="qwen2", seed=1)
    sides = start(folder, scheme=scheme)
    for seed in (1, 2):
        sides.send(seed=seed, with_base=seed == 1)
        rows = sides.sampled()
        assert recomputed_by(sides.model, rows, temperature=0.7) == [log_probs for _, _, log_probs in rows]
    assert sum(len(response) for _, response, _ in rows) == 480
    free_engine(sides.engine)
    for layer in sides.flow.linears():
        layer.freeze({})
    assert recomputed_by(sides.model, rows, temperature=0.7) != [log_probs for _, _, log_probs in rows]


def test_smoothing_and_changes_of_precision(tmp_path: Path) -> None:
    """A profile that smooths through norms, values and `up_proj`, and rollouts that an update takes to BF16 and back:
    the trainer reads weights from the model's files then."""
    from transformers import AutoModelForCausalLM

    folder = make_family(tmp_path, name="qwen2", seed=1)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    sides = start(folder, scheme="int8", profile=str(profile_of(tmp_path / "profile", model=plain)))
    in_bf16 = Precision(Scheme.BF16)
    for seed, precision in enumerate((AS_PLANNED, in_bf16, AS_PLANNED), start=1):
        sides.send(seed=seed, precision=precision, with_base=True)
        rows = sides.sampled()
        assert recomputed_by(sides.model, rows, temperature=0.7) == [log_probs for _, _, log_probs in rows]
    free_engine(sides.engine)
