"""A named profile is read before a run: whether it is one, for this scheme, of this model."""

import json
from pathlib import Path

import pytest

from appliance.plan.build import build_plan
from appliance.preflight import probes
from appliance.preflight.inputs import InputFacts, read_inputs
from appliance.preflight.mismatch import expected_of
from appliance.profile.command import table
from appliance.quant.files import read_file_header
from appliance.recipe.load import load_recipe

NORM = "model.layers.0.input_layernorm.weight"
pytestmark = pytest.mark.slow  # most of a second each

HEADER = {
    "schema_version": 2,
    **{
        "kind": "calibrated",
        "model": "m",
        "revision": "",
        "model_hash": "",
        "data_hash": "",
        "donor": "",
        "versions": {},
    },
    "scheme": "int8",
    "settings": {"strength": 0.5, "ignore": [], "prompts": 64, "max_tokens": 2048},
    "smoothing": [{"source": NORM, "linears": []}],
    "layers": [],
    "suggested_ignore": [],
    "predicted": None,
    "memory": None,
}
PREDICTED = {"tokens": 8, "kl": 0.25, "k3_kl": 0.5, "kl_tokens": 0.5, "probs_diff_mean": 0.0, "weight_max": 1.0}


def write_tensors(file: Path, *, shapes: dict[str, list[int]], header: dict | None = None) -> None:
    """A safetensors file whose tensors are never read."""
    entries: dict = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    if header is not None:
        entries["__metadata__"] = {"appliance": json.dumps(header)}
    text = json.dumps(entries).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text)


def write_profile(folder: Path, *, header: dict = HEADER, channels: int = 64) -> Path:
    groups = header.get("smoothing", ())
    shapes = {f"smoothing.{group.get('source') or group['norm']}": [channels] for group in groups}
    write_tensors(folder / "profile.safetensors", shapes=shapes, header=header)
    return folder


def facts(tmp_path: Path, *sets: str, model: dict[str, list[int]] | None = None) -> InputFacts:
    """With the profile in `p` and a model of these shapes, by default of one norm of 64 channels."""
    write_tensors(tmp_path / "model" / "model.safetensors", shapes=model or {NORM: [64]})
    given = ("model.builtin=null", f"model.path={tmp_path}/model", f"quantization.profile={tmp_path}/p", *sets)
    recipe = load_recipe("arithmetic-tiny-int8", sets=given)
    plan = build_plan(recipe, run_dir=tmp_path / "runs" / "a-1", host=probes.read_host(tmp_path))
    return read_inputs(plan, ask_hub=False)


def problem(tmp_path: Path, *sets: str, model: dict[str, list[int]] | None = None) -> str:
    return facts(tmp_path, *sets, model=model).profile_problem


def test_a_profile_of_this_model_and_scheme_is_taken_without_a_yaml_file(tmp_path):
    write_profile(tmp_path / "p")
    assert problem(tmp_path) == ""


@pytest.mark.parametrize(
    ("version", "settings", "is_by_rollouts"), [(2, {}, True), (2, {"response_tokens": 0}, False), (1, {}, False)]
)
def test_a_prediction_on_reference_answers_is_none_of_rollouts(tmp_path, version, settings, is_by_rollouts):
    """Profiles of schema version 1 were made so, with a budget for the error of each layer's outputs."""
    settings = {**HEADER["settings"], "error_budget": 0.05, **settings}
    smoothing = [{"source" if version == 2 else "norm": NORM, "linears": []}]
    layer = {
        **{"layer": ["a"], "linears": ["a"], "stays_in_bf16" if version == 2 else "kept": True},
        **{"weight_error": 0.0, "output_error": 0.1, "output_error_plain": 0.1},
    }
    changes = {"predicted": PREDICTED, "settings": settings, "smoothing": smoothing, "layers": [layer]}
    folder = write_profile(tmp_path, header={**HEADER, "schema_version": version, **changes})
    assert (expected_of(folder) is not None) == is_by_rollouts
    text = "\n".join(table(read_file_header(folder), folder="p"))
    basis = "over 8 tokens of its own: KL" if is_by_rollouts else "over 8 tokens: KL"
    assert f"predicted against BF16, {basis}" in text
    assert "none (for an error of at most 0.05 in a layer's outputs, or by `ignore`)" in text


def test_a_folder_without_a_profile(tmp_path):
    (tmp_path / "p").mkdir()
    assert problem(tmp_path) == f"{tmp_path}/p: the folder has no profile.safetensors"


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (b"{}", "not a safetensors file"),
        (b"", "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"{}", "not a profile of schema version 1 or 2"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path, content, refusal):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "profile.safetensors").write_bytes(content)
    assert problem(tmp_path) == f"{tmp_path}/p/profile.safetensors: {refusal}"


def test_a_header_that_lacks_a_part(tmp_path):
    write_profile(tmp_path / "p", header={key: value for key, value in HEADER.items() if key != "suggested_ignore"})
    file = f"{tmp_path}/p/profile.safetensors"
    assert problem(tmp_path) == f"{file}: its header cannot be used: suggested_ignore: Field required"


def test_scales_that_are_no_vector(tmp_path):
    write_tensors(tmp_path / "p/profile.safetensors", shapes={f"smoothing.{NORM}": [64, 2]}, header=HEADER)
    file = f"{tmp_path}/p/profile.safetensors"
    said = f"ValueError: the scales of {NORM} are no vector"
    assert problem(tmp_path) == f"{file}: its header cannot be used: {said}"


def test_a_profile_for_another_scheme(tmp_path):
    write_profile(tmp_path / "p")
    said = f"{tmp_path}/p: a profile for `int8`, and the plan's scheme is `fp8-channel`"
    assert problem(tmp_path, "rollout.scheme=fp8-channel") == said


def test_a_profile_of_a_model_with_other_layers(tmp_path):
    other = "model.layers.1.input_layernorm.weight"
    write_profile(tmp_path / "p", header={**HEADER, "smoothing": [{"source": other, "linears": []}]})
    said = f"{tmp_path}/p: of another model: it smooths {other}, which {tmp_path}/model does not have"
    assert problem(tmp_path) == said


def test_a_profile_of_a_wider_model(tmp_path):
    write_profile(tmp_path / "p", channels=128)
    said = f"{tmp_path}/p: of another model: {NORM} has 128 channels there and [64] in {tmp_path}/model"
    assert problem(tmp_path) == said


def test_a_profile_of_the_first_version_calls_a_source_a_norm(tmp_path):
    write_profile(tmp_path / "p", header={**HEADER, "schema_version": 1, "smoothing": [{"norm": NORM, "linears": []}]})
    assert problem(tmp_path) == ""
    assert read_file_header(tmp_path / "p")["smoothing"] == [
        {"source": NORM, "linears": [], "head_dim": 0, "readers_of_head": 1}
    ]


@pytest.mark.parametrize(("rows", "refusal"), [(64, ""), (32, "has 64 channels there and [32, 16]")])
def test_the_rows_of_a_linear_layer_are_its_channels(tmp_path, rows, refusal):
    up = "model.layers.0.mlp.up_proj.weight"
    write_profile(tmp_path / "p", header={**HEADER, "smoothing": [{"source": up, "linears": []}]})
    assert refusal in problem(tmp_path, model={NORM: [64], up: [rows, 16]})


@pytest.mark.parametrize(
    ("columns", "refusal"), [(128, ""), (64, "o_proj.weight reads 128 channels there and is [8, 64]")]
)
def test_query_heads_that_share_a_head_are_as_many_as_the_model_has(tmp_path, columns, refusal):
    values, out = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "vo")
    group = {"source": values, "linears": [out], "head_dim": 16, "readers_of_head": 2}
    write_profile(tmp_path / "p", header={**HEADER, "smoothing": [group]})
    assert refusal in problem(tmp_path, model={values: [64, 8], out: [8, columns]})
    assert bool(problem(tmp_path, model={values: [64, 8], out: [8, columns]})) is bool(refusal)


@pytest.mark.parametrize(("head_dim", "refusal"), [(16, ""), (32, "its heads have 16 channels, ")])
def test_heads_of_the_profile_are_of_the_models_size(tmp_path, head_dim, refusal):
    """With others every file has the same sizes, and the folded model is another function."""
    values, out = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "vo")
    group = {"source": values, "linears": [out], "head_dim": 16, "readers_of_head": 2}
    write_profile(tmp_path / "p", header={**HEADER, "smoothing": [group]})
    config = {"num_attention_heads": 128 // head_dim, "hidden_size": 128, "head_dim": head_dim}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found = problem(tmp_path, model={values: [64, 8], out: [8, 128]})
    assert refusal in found and bool(found) is bool(refusal)


def test_what_a_profile_predicts_is_known_where_it_is_one(tmp_path):
    write_profile(tmp_path / "p")
    assert facts(tmp_path).expected is None
    write_profile(tmp_path / "p", header=HEADER | {"predicted": PREDICTED})
    assert facts(tmp_path).expected.kl == 0.25
    write_profile(tmp_path / "p", header=HEADER | {"predicted": PREDICTED, "scheme": "fp8"})
    assert facts(tmp_path).expected is None


def test_a_resumed_run_has_its_own_copy_where_the_folder_is_gone(tmp_path):
    said = f"{tmp_path}/p: the folder has no profile.safetensors"
    assert problem(tmp_path) == said
    copy = write_profile(tmp_path / "runs" / "a-1" / "profile", header=HEADER | {"predicted": PREDICTED})
    assert (problem(tmp_path), facts(tmp_path).expected.kl) == ("", 0.25)
    write_profile(copy, channels=32)
    assert problem(tmp_path).startswith(f"{copy}: of another model: ")


@pytest.mark.parametrize(
    ("rows", "columns", "refusal"),
    [
        (96, 64, ""),
        (24, 64, "has 32 channels there and [24, 64]"),
        (96, 48, "reads 32 channels there and is [96, 48]"),
    ],
)
def test_parts_of_a_fused_checkpoint_are_its_last_rows(tmp_path, rows, columns, refusal):
    """A profile names the parts: Phi-3's queries, keys and values are one tensor."""
    attention = "model.layers.0.self_attn"
    readers = [f"{attention}.{part}_proj.weight" for part in "qkv"]
    source = readers[-1] if columns == 64 else NORM
    group = {"source": source, "linears": readers if source == NORM else []}
    write_profile(tmp_path / "p", header={**HEADER, "smoothing": [group]}, channels=32)
    found = problem(tmp_path, model={NORM: [32], f"{attention}.qkv_proj.weight": [rows, columns]})
    assert refusal in found and bool(found) is bool(refusal)


@pytest.mark.parametrize(
    ("made_of", "model", "refusal"),
    [
        ("", "LlamaForCausalLM", ""),
        ("GraniteForCausalLM", "GraniteForCausalLM", ""),
        ("", "GraniteForCausalLM", "it was made of a listed family and the model is GraniteForCausalLM, where "),
        ("Cohere2ForCausalLM", "LlamaForCausalLM", "it was made of Cohere2ForCausalLM and the model is a listed "),
    ],
)
def test_a_profile_of_another_class_is_refused(tmp_path, made_of, model, refusal):
    """All names and sizes may fit, and other layers read the norm."""
    write_profile(tmp_path / "p", header={**HEADER, "architecture": made_of})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": [model]}))
    found = problem(tmp_path)
    assert refusal in found and bool(found) is bool(refusal)
    assert found.startswith(f"{tmp_path}/p: of another model: ") or not found
