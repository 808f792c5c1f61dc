"""What the test of stale weights on one rank of two runs outside its own process: an engine over two ranks.

python stale_worker.py OUT OLD NEW: updates from OLD to NEW, each time with one layer of one rank left as it was.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from engines import read_checkpoint, start_engine
from faults import before_proof, swap_in
from vllm.config import set_current_vllm_config

from appliance.engine.sync import SyncWorkerExtension
from appliance.engine.update import WeightUpdate
from appliance.errors import SyncError

LAYERS = ("model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.2.mlp.down_proj")


class StaleWorker(SyncWorkerExtension):
    """Named in the engine's settings."""

    def update_but(self, folder: str, layer: str, stale_rank: int) -> str:
        """A whole update, after which `layer` has its old kernel on one rank. What this rank says of it, or nothing."""
        runner = self.model_runner
        method = dict(runner.model.named_modules())[layer].quant_method if layer else None
        stale = swap_in(method) if stale_rank == self.rank else None
        update = WeightUpdate(runner.model, model_config=runner.vllm_config.model_config, rank=self.rank)
        around = before_proof(stale) if stale else nullcontext()
        with around, set_current_vllm_config(runner.vllm_config), torch.no_grad():
            update.begin()
            update.load(read_checkpoint(Path(folder)))
            try:
                update.finish()
            except SyncError as error:
                return error.message
        return ""


def main() -> None:
    out, old, new = sys.argv[1:]
    engine = start_engine(
        Path(old),
        scheme="int8",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls="stale_worker.StaleWorker",
    )
    said = []
    for rank in (0, 1):
        for layer in LAYERS:
            said.append([rank, layer, engine.llm.collective_rpc("update_but", args=(new, layer, rank))])
            assert engine.llm.collective_rpc("update_but", args=(old, "", -1)) == ["", ""]
    Path(out).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
