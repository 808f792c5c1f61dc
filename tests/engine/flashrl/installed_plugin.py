"""What the test of the installed plugin runs outside its own process: vLLM and the plugin's wheel, and no appliance.

python installed_plugin.py WHEEL OLD NEW PROMPTS RESULT: an engine of OLD's weights takes NEW's by `load_weights`. What
it said before and after: RESULT, as JSON.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

from safetensors.torch import load_file
from vllm import LLM, SamplingParams


def generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return [(list(each.token_ids), [next(iter(token.values())).logprob for token in each.logprobs]) for each in answers]


def load(worker: object, checkpoint: str) -> int:
    """Tensor by tensor, as TRL does."""
    weights = load_file(Path(checkpoint) / "model.safetensors")
    for each in weights.items():
        worker.model_runner.model.load_weights([each])
    return len(weights)


def main() -> None:
    wheel, old, new, prompts, result = sys.argv[1:]
    for name in ("appliance", "flashrl_compat"):
        assert Path(importlib.util.find_spec(name).origin).is_relative_to(wheel), name
    assert importlib.util.find_spec("appliance.launch") is None
    installed = [each.name for each in importlib.metadata.distributions() if each.name.startswith("flashrl")]
    assert installed == ["flashrl-compat"]
    llm = LLM(old, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=64 << 20)
    answers = [generate(llm, json.loads(prompts))]
    assert llm.collective_rpc(load, args=(new,)) == [26]
    answers.append(generate(llm, json.loads(prompts)))
    Path(result).write_text(json.dumps({"said": answers, "version": llm.llm_engine.get_weight_version()}))


if __name__ == "__main__":
    main()
