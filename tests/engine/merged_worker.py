"""Run as a child: an adapter is trained under FSDP2 and merged by verl for each of some updates.

Arguments: the model's checkpoint, that of another model, the file to write. In it is a list with, by update, what
would be sent: `sent`, and what it would be with one thing wrong in the merge, by the name of it.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"
import appliance.trainer.worker  # noqa: F401, I001  (verl's platform, before torch is asked for a device)
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM
from verl.utils.fsdp_utils import apply_fsdp2
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from appliance.settings.sections import Lora
from appliance.terms.shapes import Linear
from appliance.trainer.lora import put_adapter_in

UPDATES = 3
LORA = Lora(rank=4, alpha=8, targets=tuple(map(str, Linear)), dropout=0.0)


def main() -> None:
    model, other, out = sys.argv[1:]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{out}.meet", rank=0, world_size=1)
    module = trained(model)
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=0.02)
    ids, updates = torch.arange(24)[None], []
    for _ in range(UPDATES):
        module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update = {"sent": merged(module)}
        with flag(module, "scaling", lambda scaling: {name: value / 2 for name, value in scaling.items()}):
            update["half the scale"] = merged(module)
        with flag(module, "merged_adapters", lambda _: ["default"]):  # as a merge that was not cleaned away leaves it
            update["not merged"] = merged(module)
        with weights(module, update["sent"]):
            update["merged twice"] = merged(module)
        with weights(module, load_file(Path(other) / "model.safetensors")):
            update["another base"] = merged(module)
        updates.append(update)
    torch.save(updates, out)
    torch.distributed.destroy_process_group()


def trained(model: str) -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    module = put_adapter_in(base, lora=LORA, seed=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    apply_fsdp2(module, {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}, {})
    return module


def merged(module: torch.nn.Module) -> dict[str, Tensor]:
    engine: Any = SimpleNamespace(module=module, _is_offload_param=False)
    found = {name: each.clone() for name, each in FSDPEngine._merged_lora_per_tensor_param(engine)}
    found.pop("lm_head.weight", None)  # tied
    return found


@contextmanager
def flag(module: torch.nn.Module, name: str, change: Any):
    """An attribute of every layer of the adapter, for a while."""
    layers = [each for each in module.modules() if isinstance(each, LoraLayer)]
    before = [getattr(each, name) for each in layers]
    for layer, value in zip(layers, before, strict=True):
        setattr(layer, name, change(value))
    yield
    for layer, value in zip(layers, before, strict=True):
        setattr(layer, name, value)


@contextmanager
def weights(module: torch.nn.Module, values: dict[str, Tensor]):
    """The model's own linear layers with these weights, for a while."""
    base_weights = {name: each for name, each in module.named_parameters() if name.endswith("base_layer.weight")}
    before = {name: each.full_tensor().detach().clone() for name, each in base_weights.items()}
    for name, parameter in base_weights.items():
        short = name.removeprefix("base_model.model.").replace(".base_layer", "")
        parameter.data.to_local().copy_(values[short])
    yield
    for name, parameter in base_weights.items():
        parameter.data.to_local().copy_(before[name])


if __name__ == "__main__":
    main()
