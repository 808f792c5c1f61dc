"""What the test of two ranks runs outside its own process: an engine over several ranks, and a reader inside each.

python ranks_worker.py RANKS SCHEME OUT OLD NEW: generates with OLD, updates to NEW, to OLD again, and saves it all.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from engines import Engine, read_checkpoint, start_engine
from torch import Tensor
from torch.nn import Module
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase

from appliance.engine.quantised import Quantising
from appliance.engine.sync import SyncWorkerExtension
from appliance.engine.update import WeightUpdate

PROMPTS = [[(7 * place + 31 * number) % 500 for place in range(24)] for number in range(4)]


class ReadingWorker(SyncWorkerExtension):
    """Named in the engine's settings."""

    def held_int8(self) -> dict[str, tuple[Tensor, Tensor]]:
        return held_int8(self.model_runner.model)

    def update_from(self, folder: str) -> int:
        """A whole update in each rank. Number of its tensors."""
        runner = self.model_runner
        update = WeightUpdate(runner.model, model_config=runner.vllm_config.model_config, rank=self.rank)
        with set_current_vllm_config(runner.vllm_config), torch.no_grad():
            update.begin()
            update.load(read_checkpoint(Path(folder)))
            return update.finish().tensors


def held_int8(model: Module) -> dict[str, tuple[Tensor, Tensor]]:
    """(answers to one-hot tokens [K, N] BF16, scales [N]) of each INT8 GEMM, by its name: what the kernels hold."""
    gemms = {name: layer for name, layer in model.named_modules() if isinstance(layer, LinearBase)}
    for layer in model.modules():
        gemms |= {gemm.prefix: gemm for gemm in getattr(getattr(layer, "quant_method", None), "gemms", ())}
    return {name: _held(gemm) for name, gemm in gemms.items() if isinstance(gemm.quant_method, Quantising)}


def _held(gemm: Module) -> tuple[Tensor, Tensor]:
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
    ranks, scheme, out, old, new = sys.argv[1:]
    engine = start_engine(
        Path(old),
        scheme=scheme,
        tensor_parallel_size=int(ranks),
        distributed_executor_backend="mp",
        worker_extension_cls="ranks_worker.ReadingWorker",
    )
    held = engine.llm.collective_rpc("held_int8")
    found = {"held_old": held, "old": prompt_log_probs(engine)}
    tensors = engine.llm.collective_rpc("update_from", args=(new,))
    assert tensors == [len(read_checkpoint(Path(new)))] * int(ranks)
    found |= {"held_new": engine.llm.collective_rpc("held_int8"), "new": prompt_log_probs(engine)}
    engine.llm.collective_rpc("update_from", args=(old,))
    found |= {"old_again": prompt_log_probs(engine)}
    torch.save(found, out)


if __name__ == "__main__":
    main()
