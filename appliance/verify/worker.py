"""What `verify` asks of a vLLM worker: take an update made from the checkpoint's files, and say what each layer gives.

Mixed into the worker by name, as a run's own extension, whose update it uses. Each worker reads the files itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from appliance.engine.attest import live_scheme
from appliance.engine.sync import SyncWorkerExtension
from appliance.errors import ApplianceError, EngineError
from appliance.verify.job import LayerProbe

NOISE = 0.1  # of a tensor's root mean square: far above what any scheme rounds away
_PROBE_TOKENS = 8
_NOT_WEIGHTS = "rotary_emb.inv_freq"  # old checkpoints bring it, no trainer sends it


class VerifyWorker(SyncWorkerExtension):
    """Both methods return text, which every way to reach a worker can carry."""

    def verify_update(self, perturb: bool) -> str:
        """One whole update, tensor by tensor. Returns the error that ended it, or an empty text."""
        runner = self.model_runner
        update = self._weight_update()
        try:
            with set_current_vllm_config(runner.vllm_config), runner.device, torch.no_grad():
                update.begin()
                for name, tensor in checkpoint_tensors(runner.model_config):
                    update.load([(name, perturbed(tensor, name=name) if perturb else tensor)])
                update.finish()
        except ApplianceError as error:
            return error.message
        return ""

    def verify_probe(self) -> str:
        """A LayerProbe as JSON."""
        runner = self.model_runner
        live = live_scheme(runner.model)
        with set_current_vllm_config(runner.vllm_config), runner.device, torch.no_grad():
            layers = tuple((name, digest(out)) for name, out in layer_outputs(runner.model))
        return LayerProbe(
            scheme=live.scheme,
            emulated=live.emulated,
            lm_head_fp32=live.lm_head_fp32,
            kernels=tuple(sorted(live.kernels.items())),
            layers=layers,
        ).model_dump_json()


def checkpoint_tensors(model_config: object) -> Iterator[tuple[str, Tensor]]:
    """Names and BF16 tensors in the order of the files. model_config: vLLM's.  Raises EngineError without files."""
    files = sorted(_folder(model_config.model, revision=model_config.revision).glob("*.safetensors"))
    if not files:
        raise EngineError(f"verify: {model_config.model} has no safetensors files to read")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a mapping
                if not name.endswith(_NOT_WEIGHTS):
                    yield name, tensors.get_tensor(name).to(device=torch.get_default_device(), dtype=torch.bfloat16)


def _folder(model: str, *, revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.safetensors"], local_files_only=True))


def perturbed(tensor: Tensor, *, name: str) -> Tensor:
    """The tensor with noise that depends on its name alone, so that all workers make the same."""
    generator = torch.Generator("cpu").manual_seed(_seed(name))
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu").to(tensor.device)
    size = tensor.float().square().mean().sqrt().item() or 0.1
    return (tensor.float() + NOISE * size * noise).to(tensor.dtype)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def layer_outputs(model: Module) -> Iterator[tuple[str, Tensor]]:
    """For every layer with weights: what its kernel gives for a fixed input; of other layers, the weights."""
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            channels = getattr(layer, "input_size_per_partition", layer.input_size)  # a replicated layer is not cut
            x_MK = _input(_PROBE_TOKENS, channels, name=name)
            yield name, layer.quant_method.apply(layer, x_MK, bias=layer.bias)
        elif isinstance(layer, ParallelLMHead):
            x_MK = _input(_PROBE_TOKENS, layer.embedding_dim, name=name)
            yield name, layer.quant_method.apply(layer, x_MK, bias=layer.bias)
        elif isinstance(layer, VocabParallelEmbedding):
            ids = torch.arange(min(_PROBE_TOKENS, layer.num_embeddings_per_partition))
            yield name, layer.quant_method.embedding(layer, ids)
        elif isinstance(layer, RoutedExperts):
            yield name, _experts(layer, name=name)
        elif own := [parameter.reshape(-1) for parameter in layer.parameters(recurse=False)]:
            yield name, torch.cat([each.float() for each in own])


def _experts(layer: RoutedExperts, *, name: str) -> Tensor:
    """Every expert gets a token, on whatever rank it is."""
    experts, top_k = layer.global_num_experts, layer.top_k
    num_tokens = max(_PROBE_TOKENS, -(-experts // top_k))
    x_MK = _input(num_tokens, layer.hidden_size, name=name)
    ids = torch.arange(num_tokens * top_k).reshape(num_tokens, top_k) % experts
    if layer.quant_method.is_monolithic:
        logits = torch.zeros(num_tokens, experts).scatter_(1, ids, 10.0)
        return layer.forward_monolithic(x_MK.clone(), router_logits=logits.to(x_MK.dtype))
    weights = torch.full(ids.shape, 1 / top_k)
    return layer.forward_modular(x_MK.clone(), topk_weights=weights, topk_ids=ids.to(torch.int32))


def _input(tokens: int, channels: int, *, name: str) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(_seed(name))
    x_MK = torch.randn(tokens, channels, generator=generator, device="cpu")
    return x_MK.to(device=torch.get_default_device(), dtype=torch.bfloat16)


def digest(out: Tensor) -> str:
    return hashlib.sha256(out.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
