"""Headers of checkpoints against the models that their config.json describes: every fault by name, and no false one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from broken_checkpoints import EMBEDDING, HEAD, Count, Tensors, broken_checkpoints, write_broken
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, tiny
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from appliance.quant import loading
from appliance.quant.loading import Loading, TensorHeader, ask_transformers, saved_shapes

TIED = {"qwen2": True, "qwen3": True}  # the other families as their classes have it, untied
CASES = 391


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("whole")
    for family in FAMILIES:
        tiny(family, tie_word_embeddings=TIED.get(family, False)).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


def test_every_fault_of_every_family_is_found_by_the_headers(
    whole: dict[str, Path], tmp_path: Path, record_property
) -> None:
    count = Count(f"tensor dropped, cropped, of another type, prefixed, layers: {len(FAMILIES)} families (headers)")
    for family, folder in whole.items():
        for broken in broken_checkpoints(folder, folder=tmp_path / family):
            count.add(broken, message=ask_transformers(broken.folder).problem)
    record_property("said", count.settle(cases=CASES))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_checkpoint_is_taken(whole: dict[str, Path], family: str) -> None:
    assert ask_transformers(whole[family]) == Loading()


def changed(folder: Path, target: Path, change: Callable[[Tensors], Tensors], **config: object) -> Path:
    tensors = change(load_file(folder / "model.safetensors"))
    now = json.loads((folder / "config.json").read_text()) | config
    return write_broken(folder, tensors=tensors, folder=target, fault="", at="", config=now).folder


def inv_freq(tensors: Tensors) -> Tensors:
    return tensors | {f"model.layers.{each}.self_attn.rotary_emb.inv_freq": torch.ones(8) for each in (0, 1)}


TAKEN = {
    "old buffers": inv_freq,
    "in FP32": lambda tensors: {name: each.float() for name, each in tensors.items()},
    "in FP16": lambda tensors: {name: each.half() for name, each in tensors.items()},
    "norms in FP32": lambda tensors: {name: each.float() if "norm" in name else each for name, each in tensors.items()},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", TAKEN)
def test_what_transformers_takes_rightly_is_taken(
    whole: dict[str, Path], tmp_path: Path, family: str, form: str
) -> None:
    assert ask_transformers(changed(whole[family], tmp_path / "new", TAKEN[form])) == Loading()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "rename",
    [lambda name: name.removeprefix("model."), lambda name: f"model.{name}"],
    ids=["the base model's names", "a prefix too many"],
)
def test_names_that_transformers_takes_and_no_engine_are_refused(
    whole: dict[str, Path], tmp_path: Path, family: str, rename: Callable[[str], str]
) -> None:
    folder = changed(whole[family], tmp_path / "new", lambda now: {rename(name): now[name] for name in now})
    said = ask_transformers(folder)
    assert "under names that transformers accepts and vLLM does not, the first for " in said.problem
    assert said.remedy == "load the model with transformers and save it again"


def test_buffers_that_a_class_ignores_are_known_from_the_class(tmp_path: Path) -> None:
    """GPT-NeoX's masks, which its own list of keys names. A Llama has none, and vLLM's would not load them."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    model.save_pretrained(tmp_path / "whole")
    masks = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 32, 32, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e4),
    }
    assert ask_transformers(changed(tmp_path / "whole", tmp_path / "new", lambda now: now | masks)) == Loading()


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_are_read_as_one(whole: dict[str, Path], tmp_path: Path, family: str) -> None:
    tiny(family, tie_word_embeddings=TIED.get(family, False)).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    assert ask_transformers(tmp_path) == Loading()


def test_the_text_of_a_head_that_is_not_there(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(whole["qwen2"], tmp_path / "new", dict, tie_word_embeddings=False)
    assert ask_transformers(folder) == Loading(
        problem="the weights are not those of the model in config.json: 1 is missing (lm_head.weight)",
        remedy="add the file with lm_head.weight; or `tie_word_embeddings: true` in config.json, if the head is the "
        "embedding",
    )


def test_the_text_of_several_faults_has_the_first_names_and_how_many(whole: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        names = [name for name in tensors if name.startswith("model.layers.0.mlp")]
        lost = {name: each for name, each in tensors.items() if ".layers.1.mlp." not in name}
        lost[names[0]] = lost[names[0]].to(torch.int8)
        lost[names[1]] = lost[names[1]][:-2]
        return lost | {"score.weight": torch.ones(2)}

    said = ask_transformers(changed(whole["llama"], tmp_path / "new", change))
    assert said.problem == (
        "the weights are not those of the model in config.json: 1 is no float, and there is no quantization_config "
        "(model.layers.0.mlp.down_proj.weight is I8); 3 are missing (model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up_proj.weight); 1 is not part of the model "
        "(score.weight); 1 is of another shape (model.layers.0.mlp.gate_proj.weight has [94, 64] and not [96, 64])"
    )


def test_a_wrapper_that_was_saved_is_named(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(
        whole["llama"], tmp_path / "new", lambda now: {f"module.{name}": each for name, each in now.items()}
    )
    assert ask_transformers(folder).remedy == (
        "save the model again without `module.`: what was saved is a wrapper around it"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda now: now | {HEAD: now[EMBEDDING] + 1},
            "config.json ties lm_head.weight to model.embed_tokens.weight, and the files have two that differ",
        ),
        (
            lambda now: {HEAD if name == EMBEDDING else name: each for name, each in now.items()},
            "model.embed_tokens.weight is missing; vLLM does not take lm_head.weight in its place, to which "
            "config.json ties it",
        ),
        (lambda now: now | {HEAD: now[EMBEDDING].clone()}, ""),
    ],
    ids=["differs", "alone", "equal"],
)
def test_a_tied_head_in_the_files_is_the_embedding(
    whole: dict[str, Path], tmp_path: Path, change: Callable[[Tensors], Tensors], problem: str
) -> None:
    """transformers would train two, and vLLM reads none."""
    assert ask_transformers(changed(whole["qwen2"], tmp_path / "new", change)).problem == problem


def test_two_names_for_one_tensor_are_refused(whole: dict[str, Path], tmp_path: Path) -> None:
    """transformers takes the first."""
    name = "layers.0.mlp.up_proj.weight"
    folder = changed(whole["llama"], tmp_path / "new", lambda now: now | {name: now[f"model.{name}"] + 1})
    assert ask_transformers(folder).problem == (
        f"the files have one tensor of the model under two names, {name} and model.{name}"
    )


def test_a_gap_in_the_numbers_of_experts_is_found(whole: dict[str, Path], tmp_path: Path) -> None:
    """transformers counts them, and vLLM leaves out a number that it does not know."""
    folder = changed(
        whole["qwen3-moe"],
        tmp_path / "new",
        lambda now: {name.replace("layers.0.mlp.experts.3.up", "layers.0.mlp.experts.7.up"): now[name] for name in now},
    )
    assert ask_transformers(folder).problem.endswith(
        "1 is missing (model.layers.0.mlp.experts.3.up_proj.weight); 1 is not part of the model "
        "(model.layers.0.mlp.experts.7.up_proj.weight)"
    )


def test_an_architecture_that_is_not_the_type_is_refused(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(whole["llama"], tmp_path / "new", dict, architectures=["MistralForCausalLM"])
    assert ask_transformers(folder).problem == (
        "config.json names MistralForCausalLM, which vLLM builds, but by its model_type transformers builds "
        "LlamaForCausalLM"
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["down_proj.weight", "input_layernorm.weight", "embed_tokens.weight"])
def test_a_type_that_does_not_fit_the_bits_is_found_and_a_rounded_one_is_not(
    whole: dict[str, Path], tmp_path: Path, family: str, kind: str
) -> None:
    """BF16's bits named F16, and the same numbers in F16."""

    def relabelled(now: Tensors) -> Tensors:
        name = next(each for each in now if each.endswith(kind))
        return now | {name: now[name].view(torch.float16)}

    def rounded(now: Tensors) -> Tensors:
        name = next(each for each in now if each.endswith(kind))
        return now | {name: now[name].half()}

    found = ask_transformers(changed(whole[family], tmp_path / "a", relabelled))
    fine = ask_transformers(changed(whole[family], tmp_path / "b", rounded))
    assert f"{kind} is F16" in found.problem and "labelled with a type that does not fit the bits" in found.problem
    assert fine.problem == "" and fine.doubt.startswith("1 is of another type of 16 bits than the rest (")


def test_each_file_is_opened_once_for_the_bits_of_many_tensors(
    whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An opened file's header is as long as the checkpoint has tensors: once for each pair of tensors is hours."""

    def change(now: Tensors) -> Tensors:
        return {name: tensor.half() if place % 2 else tensor for place, (name, tensor) in enumerate(now.items())}

    folder = changed(whole["qwen3-moe"], tmp_path / "new", change)
    opened: list[Path] = []

    def count_opened(file: Path, **settings: str) -> object:
        opened.append(file)
        return safe_open(file, **settings)

    monkeypatch.setattr(loading, "safe_open", count_opened)
    assert "are of another type of 16 bits than the rest" in ask_transformers(folder).doubt
    assert opened == [folder / "model.safetensors"] * 2  # for its header, and for its values


@pytest.mark.parametrize("type_of_all", ["BF16", "F8_E4M3"])
def test_headers_of_many_experts_take_seconds(type_of_all: str) -> None:
    """9,000 tensors: what looks at all of them for each took 8 s of a core, and minutes of a large mixture's."""
    sizes = {"hidden_size": 8, "head_dim": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8}
    experts = {"num_experts": 1000, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "num_hidden_layers": 3}
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    shapes = saved_shapes(model)
    assert len(shapes) > 9000
    headers = {name: TensorHeader(type_of_all, shape, Path("a")) for name, shape in shapes.items()}
    started_s = time.process_time()
    found = loading._Checkpoint(model, headers=headers).judge_loading()
    assert time.process_time() - started_s < 5
    assert found.problem.startswith("" if type_of_all == "BF16" else "the weights are not those of the model")


def test_values_of_other_sizes_are_no_other_bits(whole: dict[str, Path], tmp_path: Path) -> None:
    """Biases differ by layer: a small one in BF16 among large ones in FP16 is what it says."""

    def change(now: Tensors) -> Tensors:
        biases = [name for name in now if name.endswith("q_proj.bias")]
        sizes = {name: 0.01 if place == 0 else 6.0 for place, name in enumerate(biases)}
        half = {name: each.half() for name, each in now.items()}
        half |= {name: torch.full_like(now[name], size).half() for name, size in sizes.items()}
        return half | {biases[0]: torch.full_like(now[biases[0]], 0.01)}

    found = ask_transformers(changed(whole["qwen2"], tmp_path / "new", change))
    assert found.problem == "" and "is of another type of 16 bits than the rest" in found.doubt


def test_a_tied_head_in_another_type_is_the_embedding_all_the_same(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(whole["qwen2"], tmp_path / "new", lambda now: now | {HEAD: now[EMBEDDING].float()})
    assert ask_transformers(folder) == Loading()


def test_a_file_that_is_damaged_inside_is_named(whole: dict[str, Path], tmp_path: Path) -> None:
    """A header whose shapes do not fit its bytes, which is as long as it says."""
    shutil.copytree(whole["llama"], tmp_path / "new")
    file = tmp_path / "new" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape":[64]', b'"shape":[63]', 1))
    said = ask_transformers(tmp_path / "new")
    assert said.problem.startswith("model.safetensors cannot be read: ")


def test_a_config_that_transformers_cannot_build_is_said(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(whole["llama"], tmp_path / "new", dict, model_type="no-such-model")
    said = ask_transformers(folder)
    assert said.problem.startswith("transformers cannot build the model of config.json: ValueError: ")


def test_code_of_a_model_runs_only_where_it_may(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(
        whole["llama"],
        tmp_path / "new",
        dict,
        model_type="own-llama",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    )
    (folder / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own-llama'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    assert "custom code" in ask_transformers(folder).problem and not (tmp_path / "ran").exists()
    assert ask_transformers(folder, trust_remote_code=True) == Loading() and (tmp_path / "ran").exists()
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: each for name, each in tensors.items() if name != HEAD}, folder / "model.safetensors", {"format": "pt"}
    )
    assert f"1 is missing ({HEAD})" in ask_transformers(folder, trust_remote_code=True).problem
