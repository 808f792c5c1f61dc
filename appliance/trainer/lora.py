"""LoRA: an adapter beside the linear layers is trained, the model itself is not.

What a layer computes is x (W + s B A)^T, with s = alpha / rank, A [R, in] drawn at random and B [out, R] zero at first.
The adapter is in FP32 with its own optimizer; W has no gradient and stays in BF16, the format of the checkpoint.
For each update of weights verl merges, W + bf16(s B A), sends that, and puts a copy of W back, bit for bit: the digest
of W is asked before each. So engines, quantisation, digests of what is sent and proof know nothing of it; and because
a wrong merge would be digested and proven like a right one, what is sent of one layer, each time of the next one, is
compared with the same sum made here.

Checkpoints have the adapter alone, as a rank's shards and whole as PEFT reads it. `model/` is merged from it by the
same code of PEFT's as the weights that were sent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from transformers import AutoModelForCausalLM
from verl.utils.device import get_device_id

from appliance.errors import EngineError, SyncError
from appliance.quant.loading import load_whole
from appliance.record.checkpoints import ADAPTER_FOLDER
from appliance.settings.sections import Lora
from appliance.sync.manifest import digest
from appliance.terms.counts import counted

_WEIGHTS = "adapter_model.safetensors"  # PEFT's name


def put_adapter_in(module: Module, *, lora: Lora, seed: int) -> PeftModel:
    """Return the model, frozen, with an adapter. Raises EngineError for a target that is no layer of it."""
    names = {name.rpartition(".")[2] for name, each in module.named_modules() if isinstance(each, torch.nn.Linear)}
    if missing := sorted({*lora.targets} - names):
        hint = f"name some of {', '.join(sorted(names))} in model.lora.targets"
        raise EngineError(f"model.lora: the model has no linear layer {missing[0]}", hint=hint)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=[str(target) for target in lora.targets],
        lora_dropout=lora.dropout,
        bias="none",
    )
    module.enable_input_require_grads()  # type: ignore[operator]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(module, config)  # type: ignore[arg-type, return-value]


class FrozenWeights:
    """Check of the weights that do not move. Merging writes into them: a copy that was not put back would be merged
    again."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def check(self, module: Module) -> None:
        """Check the weights before each merge. Raises SyncError where one is another than at the first call, on this
        rank, and where a layer counts as merged: PEFT would pass over it, and what is sent would be the model
        without its adapter."""
        found = {name: _digest(each) for name, each in module.named_parameters() if not each.requires_grad}
        self._first = self._first or found
        if changed := [name for name, before in self._first.items() if found.get(name) != before]:
            name = changed[0].replace(".base_layer", "").removeprefix("base_model.model.")
            weights = counted(
                len(changed), "weight that LoRA leaves alone has", plural="weights that LoRA leaves alone have"
            )
            message = f"weight update: {weights} changed, first {name}"
            raise SyncError(message, hint="an adapter that was merged stayed in them; resume from the last checkpoint")
        if merged := [name for name, each in module.named_modules() if isinstance(each, LoraLayer) and each.merged]:
            layers = counted(len(merged), "layer counts", plural="layers count")
            message = f"weight update: {layers} as merged before the merge, first "
            message += merged[0].removeprefix("base_model.model.")
            raise SyncError(message, hint="their adapter would not be sent; resume from the last checkpoint")


class ExpectedMerge(NamedTuple):
    """Expected weights of one layer of an update. The tensors are None on all ranks but the first."""

    name: str
    sum_NK: Tensor | None
    """W + s B A, float32."""
    bound_NK: Tensor | None
    """Bound of the error of a merge in BF16."""

    def check(self, sent_NK: Tensor) -> None:
        """Check what was sent. Every rank calls it, and raises SyncError where the first one finds a fault: else
        they would wait for it."""
        faults = [self._fault(sent_NK)]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(faults)
        if faults[0]:
            raise SyncError(faults[0], hint="the merge went wrong; resume from the last checkpoint, and report it")

    def _fault(self, sent_NK: Tensor) -> str:
        if self.sum_NK is None:
            return ""
        apart_NK = (sent_NK.to(self.sum_NK) - self.sum_NK).abs()
        if not (wrong := int((~(apart_NK <= self.bound_NK)).sum())):
            return ""
        message = f"weight update: {self.name} is not the model's weight with its adapter: {wrong} of "
        return message + f"{apart_NK.numel()} numbers differ, by up to {float(apart_NK.max()):.3g}"


def expected_merge(module: Module, *, lora: Lora, turn: int) -> ExpectedMerge:
    """Compute what a merge is to send of one layer. Every rank calls it, the first one gets the numbers. turn: which
    layer, modulo their number.

    The bound: s B A and the sum are rounded to BF16, 2^-9 of each and of what they are then; B and A may be rounded
    before, to BF16 or by a GPU to TF32, 2^-9 of each.
    """
    layers = [(name, each) for name, each in module.named_modules() if isinstance(each, LoraLayer)]
    name, layer = layers[turn % len(layers)]
    parts = (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"])
    whole = [_whole(each.weight) for each in parts]
    short = f"{name.removeprefix('base_model.model.')}.weight"
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return ExpectedMerge(short, sum_NK=None, bound_NK=None)
    w_NK, a_RK, b_NR = (each.float() for each in whole)
    scale = lora.alpha / lora.rank
    delta_NK, most_NK = scale * (b_NR @ a_RK), scale * (b_NR.abs() @ a_RK.abs())
    bound_NK = 2.0**-8 * (w_NK.abs() + 2 * delta_NK.abs() + most_NK)
    return ExpectedMerge(short, sum_NK=w_NK + delta_NK, bound_NK=bound_NK)


def check_merge(tensors: Iterable[tuple[str, Tensor]], *, expected: ExpectedMerge) -> Iterator[tuple[str, Tensor]]:
    """Yield the same tensors. Every rank calls it, and raises SyncError where the expected one is another, or is not
    among them."""
    came = False
    for name, tensor in tensors:
        if name == expected.name:
            expected.check(tensor)
            came = True
        yield name, tensor
    if not came:
        message = f"weight update: {expected.name} has an adapter and was not sent"
        raise SyncError(message, hint="its merge cannot be checked; report it, with the model")


def save_adapter(module: Module, *, folder: Path, base: str, commit: str) -> None:
    """Save the adapter as PEFT reads it. Every rank calls it, the first one writes.

    folder: new.  base: what the adapter is trained on, a folder or a name on the hub.  commit: there, or empty.
    """
    tensors = adapter_weights(module)
    if torch.distributed.get_rank():
        return
    config = _config_of(module)
    named_before = config.base_model_name_or_path, config.revision
    config.base_model_name_or_path, config.revision = base, commit or None
    folder.mkdir()
    config.save_pretrained(str(folder))
    config.base_model_name_or_path, config.revision = named_before
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def adapter_weights(module: Module) -> dict[str, Tensor]:
    """Return the adapter's matrices whole, by PEFT's names, FP32 on the CPU. Every rank calls it."""
    whole = {name: _whole(each) for name, each in module.named_parameters() if each.requires_grad}
    tensors: dict[str, Tensor] = get_peft_model_state_dict(module, state_dict=whole)
    return tensors


def adapter_config(module: Module) -> dict[str, Any]:
    """Return PEFT's configuration of the adapter, as vLLM reads it."""
    config: dict[str, Any] = _config_of(module).to_dict()
    return config


def _config_of(module: Module) -> PeftConfig:
    return cast("PeftModel", module).peft_config["default"]


def base_weights(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights without the adapter, whole, by the checkpoint's names. Every rank calls it."""
    for name, shard in module.state_dict().items():
        if ".lora_" in name:
            continue
        shard = shard.to(get_device_id()).full_tensor() if isinstance(shard, DTensor) else shard
        yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), shard


def _digest(shard: Tensor) -> str:
    return digest(shard.to_local() if isinstance(shard, DTensor) else shard)


def _whole(shard: Tensor) -> Tensor:
    tensor = shard.detach()
    tensor = tensor.to(get_device_id()).full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.cpu().contiguous()


def merge(base: str, *, commit: str, trust_remote_code: bool, actor: Path, target: Path) -> None:
    """Write the model with the adapter merged in, in BF16, and the adapter in `adapter/` below it. Holds the whole
    model in memory.

    base: what the adapter was trained on, a folder or a name on the hub.  commit: there.  actor: of a checkpoint.
    target: a folder.
    """
    model = load_whole(
        AutoModelForCausalLM,
        base,
        revision=commit or None,
        dtype=torch.bfloat16,
        trust_remote_code=trust_remote_code,
    )
    merged = PeftModel.from_pretrained(model, str(actor / ADAPTER_FOLDER)).merge_and_unload()
    merged.save_pretrained(target)
    if (actor / "huggingface" / "config.json").is_file():  # of the base, and what it lacks it lacks here
        (target / "generation_config.json").unlink(missing_ok=True)
    shutil.copytree(actor / "huggingface", target, dirs_exist_ok=True)
    shutil.copytree(actor / ADAPTER_FOLDER, target / ADAPTER_FOLDER)
