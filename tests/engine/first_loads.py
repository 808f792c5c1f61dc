"""Models as a worker of vLLM's loads them, without the engine around them: milliseconds each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from broken_checkpoints import Count, Tensors, broken_checkpoints, write_broken
from engines import forget_engines
from families import FAMILIES, make_family
from safetensors.torch import load_file, save_file
from torch.nn import Module

from appliance.errors import WeightsError
from appliance.terms.schemes import Scheme
from appliance.terms.settings import LOAD_FORMAT, Quantisation

SCHEMES = ("bf16", "int8")
CASES = {tuple(FAMILIES): 410, ("qwen3-moe",): 77}


def make_all(root: Path) -> dict[str, Path]:
    return {family: make_family(root / family, name=family, seed=3) for family in FAMILIES}


@contextmanager
def one_rank(mixture: Path, *, meeting: Path) -> Iterator[None]:
    """What a worker makes before it loads a model, with the group that experts want. mixture: a checkpoint with some.
    meeting: a file that is not there."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    forget_engines()
    with set_current_vllm_config(engine_config(mixture)):
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    forget_engines()


def engine_config(folder: Path, **arguments: object):
    """arguments: further ones of vLLM's."""
    from vllm.engine.arg_utils import EngineArgs

    common = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128}
    return EngineArgs(model=str(folder), **common, **arguments).create_engine_config()


def planned(scheme: str) -> dict[str, object]:
    """The arguments of an engine that a plan starts."""
    return {"load_format": LOAD_FORMAT, **Quantisation(scheme=Scheme(scheme)).engine_arguments()}


def load(folder: Path, **arguments: object) -> Module:
    """arguments: as of engine_config."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = engine_config(folder, **arguments)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


def count_faults(count: Count, *, whole: dict[str, Path], folder: Path, **arguments: object) -> Count:
    """Puts every fault into the checkpoint of each. folder: for broken ones.  arguments: as of engine_config."""
    for family, checkpoint in whole.items():
        for broken in broken_checkpoints(checkpoint, folder=folder / family, with_other_bits=False):
            message = ""
            try:
                load(broken.folder, **arguments)
            except WeightsError as error:
                message = error.message
            count.add(broken, message=message)
    return count


_MISTRALS_NAMES = (
    ("model.layers", "layers"),
    ("model.norm", "norm"),
    ("model.embed_tokens", "tok_embeddings"),
    ("lm_head", "output"),
    *(("self_attn.q_proj", "attention.wq"), ("self_attn.k_proj", "attention.wk")),
    *(("self_attn.v_proj", "attention.wv"), ("self_attn.o_proj", "attention.wo")),
    *(("mlp.gate_proj", "feed_forward.w1"), ("mlp.down_proj", "feed_forward.w2"), ("mlp.up_proj", "feed_forward.w3")),
    *(("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm")),
)


def add_consolidated(folder: Path, *, leave_out: str = "") -> Path:
    """Beside transformers' files those in Mistral's own format, as Mistral-7B-Instruct-v0.3 has them. leave_out: a
    tensor that they lack, by its name there."""
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for usual, own in _MISTRALS_NAMES:
            name = name.replace(usual, own)
        renamed[name] = tensor
    save_file(
        {name: tensor for name, tensor in renamed.items() if name != leave_out}, folder / "consolidated.safetensors"
    )
    return folder


def changed(folder: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy with other tensors."""
    tensors = change(load_file(folder / "model.safetensors"))
    return write_broken(folder, tensors=tensors, folder=target, fault="", at="").folder
