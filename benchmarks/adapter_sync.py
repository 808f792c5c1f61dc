"""What an update of an adapter costs beside one of a merged model: `python -m benchmarks.adapter_sync --model FOLDER`.

Two engines of one scheme in this process take updates in turns, as workers of two runs do: one the whole model, as
`model.lora.sync: merge` sends it, the other the adapter alone. Each tensor is copied as out of shared memory, digested,
loaded, and what is due is proven. The times are of the worker's side from the first tensor to the last proof. The
trainer's side is not in them: with `merge` it merges every layer first, with `adapter` it has nothing to compute.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from appliance import console
from appliance.control_groups import usable_cores
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from benchmarks.demo import here
from benchmarks.sync import set_environment, started_runner

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_BYTES, MAX_SECONDS = 0.05, 0.3  # of an adapter's update to a merged model's


@dataclass(frozen=True)
class Row:
    """Updates of one scheme, both kinds."""

    scheme: Scheme
    bytes: tuple[int, int]
    """Bytes of an update: (merged, adapter)."""
    seconds: tuple[float, float]
    """Median seconds of an update: (merged, adapter)."""
    ratio: float
    """Median of the ratios of the seconds of neighbouring updates."""


class Side:
    """An engine that takes updates of one kind."""

    def __init__(self, folder: Path, *, scheme: Scheme, rank: int, prove_every: int) -> None:
        """rank: of the adapter; 0 for a merged model."""
        from appliance.engine.adapter import AdapterUpdate
        from appliance.engine.update import WeightUpdate

        arguments = Quantisation(scheme=scheme).engine_arguments()
        if rank:
            worker = "appliance.engine.sync.SyncWorkerExtension"
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "worker_extension_cls": worker}
        self._runner = started_runner(folder, **arguments)
        settings: dict[str, Any] = {
            "model_config": self._runner.vllm_config.model_config,
            "prove_every": prove_every,
            "needs_manifest": True,
        }
        if rank:
            update = AdapterUpdate(self._runner.get_model(), loras=self._runner.lora_manager, **settings)
            update.peft_config = {"r": rank, "lora_alpha": rank, "target_modules": list(LAYERS), "bias": "none"}
            self._update: WeightUpdate = update
        else:
            self._update = WeightUpdate(self._runner.get_model(), **settings)
        self._num_updates = 0

    def take(self, tensors: dict[str, Tensor]) -> float:
        """Take an update, and return its seconds."""
        import torch
        from vllm.config import set_current_vllm_config

        from appliance.sync.manifest import MANIFEST_NAME, Manifest, record_tensor

        self._num_updates += 1
        records = tuple(record_tensor(name, tensor) for name, tensor in tensors.items())
        manifest = Manifest(sync=self._num_updates, records=records).to_tensor()
        with set_current_vllm_config(self._runner.vllm_config), torch.no_grad():
            started = time.perf_counter()
            self._update.begin()
            for name, tensor in tensors.items():
                self._update.load([(name, tensor.clone())])
            self._update.load([(MANIFEST_NAME, manifest)])
            self._update.finish()
            return time.perf_counter() - started


def measure(folder: Path, *, scheme: Scheme, rank: int, pairs: int, prove_every: int) -> Row:
    """Measure `pairs` updates of each kind in turns, after one that brings the model and one that warms up."""
    model = weights_of(folder)
    adapters = [random_adapter(model, rank=rank, seed=seed) for seed in (1, 2)]
    merged, alone = (Side(folder, scheme=scheme, rank=side_rank, prove_every=prove_every) for side_rank in (0, rank))
    merged.take(model)
    alone.take(model | adapters[0])
    seconds = [(merged.take(model), alone.take(adapters[pair % 2])) for pair in range(-1, pairs)][1:]
    return Row(
        scheme,
        bytes=tuple(sum(tensor.nbytes for tensor in update.values()) for update in (model, adapters[0])),
        seconds=(median(first for first, _ in seconds), median(second for _, second in seconds)),
        ratio=median(second / first for first, second in seconds),
    )


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Read a model's weights in BF16, by name."""
    import torch

    from appliance.quant.checkpoint import ModelTensors

    tensors = ModelTensors(folder)
    return {name: tensors.read(name).to(torch.bfloat16) for name in tensors.names}


def random_adapter(model: dict[str, Tensor], *, rank: int, seed: int) -> dict[str, Tensor]:
    """Both matrices in BF16 of each linear layer of the decoder layers."""
    import torch

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight_NK in model.items():
        if name.removesuffix(".weight").endswith(LAYERS):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            for matrix, shape in (("lora_A", (rank, weight_NK.shape[1])), ("lora_B", (weight_NK.shape[0], rank))):
                tensors[f"{layer}.{matrix}.weight"] = (0.02 * torch.randn(*shape, generator=generator)).bfloat16()
    return tensors


def page(rows: Sequence[Row], *, model: str, rank: int, pairs: int, prove_every: int) -> str:
    where = here()
    lines = [
        "# An update of an adapter beside one of a merged model",
        "",
        "Made by `python -m benchmarks.adapter_sync --model FOLDER -o docs/results`. "
        f"Taken on {where['date']}: {where['processor']}, {where['cores']} cores.",
        "",
        f"{model}, an adapter of rank {rank} in BF16 beside all of its linear layers; {pairs} updates of each kind in "
        f"turns, medians; 1 of {prove_every} layers proven at each update. The worker's side alone: the trainer's "
        "merge is not in the seconds.",
        "",
        "| scheme | merged, MB | adapter, MB | ratio | merged, s | adapter, s | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        merged, alone = row.bytes
        lines.append(
            f"| {row.scheme} | {merged / 1e6:.1f} | {alone / 1e6:.1f} | {alone / merged:.3f} "
            f"| {row.seconds[0]:.3f} | {row.seconds[1]:.3f} | {row.ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapter_sync", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--name", default="SmolLM2-135M", help="name of the model in the page")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=16, help="updates of each kind (default: a whole round of proofs)")
    parser.add_argument("--prove-every", type=int, default=16)  # as runs of models that are not tiny have it
    parser.add_argument("--schemes", default="int8,int4")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    set_environment(usable_cores())
    settings = {"rank": options.rank, "pairs": options.pairs, "prove_every": options.prove_every}
    rows = [measure(options.model, scheme=Scheme(scheme), **settings) for scheme in options.schemes.split(",")]
    text = page(rows, model=options.name, **settings)
    console.out(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "adapter-sync.md").write_text(text)
    above = [row.scheme for row in rows if row.bytes[1] > MAX_BYTES * row.bytes[0] or row.ratio > MAX_SECONDS]
    if above:
        console.say(f"above {MAX_BYTES:.0%} of the bytes or {MAX_SECONDS:.0%} of the seconds: {', '.join(above)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
