"""What the test of two ranks runs outside its own process: an engine over several ranks, and a reader inside each.

python ranks_worker.py RANKS SCHEME FOLDER...: generates with FOLDER/1, updates to FOLDER/2, to FOLDER/1 again, to
FOLDER/1 smoothed by FOLDER/profile, and saves it all in FOLDER/two.pt. One engine after the other. In the first one
updates follow that have each quantised layer in BF16, and some that leave one layer of one rank as it was.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from engines import Engine, read_checkpoint, start_engine
from faults import before_proof, swap_in
from torch import Tensor
from torch.nn import Module
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase

from appliance.engine.quantised import Quantising
from appliance.engine.sync import SyncWorkerExtension
from appliance.engine.update import WeightUpdate
from appliance.errors import SyncError
from appliance.quant.profile import load_smoothing
from appliance.sync.manifest import DIRECTIVE_NAME, MANIFEST_NAME, Manifest, precision_tensor, record_tensor
from appliance.terms.schemes import Precision

STALE = ("model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.down_proj")
PROMPTS = [[(7 * place + 31 * number) % 500 for place in range(24)] for number in range(4)]


class ReadingWorker(SyncWorkerExtension):
    """Named in the engine's settings."""

    def held_int8(self) -> dict[str, tuple[Tensor, Tensor]]:
        return held_int8(self.model_runner.model)

    def update_from(
        self, folder: str, profile: str = "", bf16_layers: tuple[str, ...] | None = None
    ) -> tuple[int, int, int]:
        """A whole update in each rank. Number of its tensors, of the layers, and of those proven.

        profile: folder of the one whose smoothing is folded in.  bf16_layers: the ones that the sender wants in BF16;
        None where it lists nothing.
        """
        runner = self.model_runner
        stream = read_checkpoint(Path(folder))
        if bf16_layers is not None:
            stream = [(DIRECTIVE_NAME, precision_tensor(Precision(bf16_layers=bf16_layers))), *stream]
            manifest = Manifest(sync=1, records=tuple(record_tensor(name, tensor) for name, tensor in stream))
            stream.append((MANIFEST_NAME, manifest.to_tensor()))
        update = WeightUpdate(
            runner.model,
            model_config=runner.vllm_config.model_config,
            rank=self.rank,
            needs_manifest=bf16_layers is not None,
            smoothing=load_smoothing(Path(profile)) if profile else None,
        )
        with set_current_vllm_config(runner.vllm_config), torch.no_grad():
            update.begin()
            update.load(stream)
            report = update.finish()
        return report.tensors, report.layers, report.layers_proven

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


def held_int8(model: Module) -> dict[str, tuple[Tensor, Tensor]]:
    """(answers to one-hot tokens [K, N] BF16, scales [N]) of each INT8 GEMM, by its name: what the kernels hold."""
    gemms = {name: layer for name, layer in model.named_modules() if isinstance(layer, LinearBase)}
    for layer in model.modules():
        gemms |= {gemm.prefix: gemm for gemm in getattr(getattr(layer, "quant_method", None), "gemms", ())}
    return {name: _stored_weight(gemm) for name, gemm in gemms.items() if isinstance(gemm.quant_method, Quantising)}


def _stored_weight(gemm: Module) -> tuple[Tensor, Tensor]:
    length = getattr(gemm, "input_size_per_partition", None) or gemm.length
    with torch.no_grad():
        answers_KN = gemm.quant_method.apply(gemm, torch.eye(length, dtype=torch.bfloat16), None)
    return answers_KN.clone(), gemm.quant_method.held_scale(gemm).reshape(-1).clone()


def prompt_log_probs(engine: Engine) -> list[list[float]]:
    """Of the tokens of PROMPTS after the first: nothing is sampled, so that engines stay on the same tokens."""
    from vllm import SamplingParams

    engine.llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = engine.llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [
        [step[token].logprob for token, step in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]


def main() -> None:
    ranks, scheme, *folders = sys.argv[1:]
    for place, folder in enumerate(map(Path, folders)):
        found = look(int(ranks), scheme=scheme, old=folder / "1", new=folder / "2", leaves_stale=place == 0)
        torch.save(found, folder / "two.pt")


def look(ranks: int, *, scheme: str, old: Path, new: Path, leaves_stale: bool) -> dict[str, object]:
    engine = start_engine(
        old,
        scheme=scheme,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        worker_extension_cls="ranks_worker.ReadingWorker",
    )
    llm = engine.llm
    results = {"held_old": llm.collective_rpc("held_int8"), "old": prompt_log_probs(engine)}
    reports = llm.collective_rpc("update_from", args=(str(new),))
    tensors = len(read_checkpoint(new))
    assert [report[0] for report in reports] == [tensors] * ranks
    results |= {"held_new": llm.collective_rpc("held_int8"), "new": prompt_log_probs(engine)}
    llm.collective_rpc("update_from", args=(str(old),))
    results |= {"old_again": prompt_log_probs(engine), "stale": []}
    profile = str(old.parent / "profile")
    reports = llm.collective_rpc("update_from", args=(str(old), profile))
    assert all(report[0] == tensors and 0 < report[1] == report[2] for report in reports), reports
    results |= {"held_smoothed": llm.collective_rpc("held_int8"), "smoothed": prompt_log_probs(engine)}
    if leaves_stale:
        for name, arguments in {"raised": (str(old), ""), "raised_smoothed": (str(old), profile)}.items():
            llm.collective_rpc("update_from", args=(*arguments, tuple(results["held_old"][0])))
            results[name] = prompt_log_probs(engine)
        llm.collective_rpc("update_from", args=(str(old), "", ()))
    for rank in range(ranks) if leaves_stale else ():
        for layer in STALE:
            messages = llm.collective_rpc("update_but", args=(str(new), layer, rank))
            results["stale"].append((rank, layer, messages))
            assert llm.collective_rpc("update_but", args=(str(old), "", -1)) == [""] * ranks
    llm.llm_engine.engine_core.shutdown()
    return results


if __name__ == "__main__":
    main()
