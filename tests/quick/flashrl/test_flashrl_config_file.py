"""FlashRL's YAML: read strictly with every problem at its line, written so that it reads back the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import RecipeError
from appliance.quant.files import write_config
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from flashrl_compat.config_file import engine_settings, entry_of_rank, read_config
from flashrl_compat.variables import HubFile, Variables

KEYS = (
    "the keys are `fn`, `load_format`, `model`, `profile`, `distributed_executor_backend`, "
    "`module_attribute_to_preserve`, `quantization`, `emulated`, `ignore`, `lm_head_fp32`"
)
FNS = (
    "use one of `bf16`, `fp8`, `fp8_vllm`, `fp8_fast`, `fp8_vllm_fast`, `fp8_tensor`, `fp8_channel`, `int8`, "
    "`int8_fast`, `int8_prune`, `int8_wo_prune`, `int4`, `fp8_block`"
)

# As `flashrl setup` of flash-llm-rl 1.0.3 writes them: yaml.dump sorts the keys.
THEIRS = """\
configs:
- distributed_executor_backend: external_launcher
  fn: bf16
  load_format: dummy
- distributed_executor_backend: external_launcher
  fn: fp8_vllm
  load_format: auto
  module_attribute_to_preserve:
  - workspace
  quantization: fp8
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "quantization.yaml"
    path.write_text(text)
    return path


def problems_of(path: Path) -> list[tuple[str, str]]:
    with pytest.raises(RecipeError) as raised:
        read_config(path)
    return raised.value.problems


def make_profile(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "profile.safetensors").touch()
    return folder


def test_a_file_of_theirs_is_read(tmp_path: Path) -> None:
    first, second = read_config(written(tmp_path, THEIRS))
    assert (first.quantisation, first.load_format) == (Quantisation(scheme=Scheme.BF16), "dummy")
    assert (second.quantisation, second.load_format) == (Quantisation(scheme=Scheme.FP8), "auto")
    assert first.backend == second.backend == "external_launcher"


def test_rank_r_takes_entry_r_mod_n(tmp_path: Path) -> None:
    entries = read_config(written(tmp_path, "configs: [{fn: bf16}, {fn: int8}, {fn: fp8_channel}]"))
    found = [str(entry_of_rank(entries, rank=rank).quantisation.scheme) for rank in range(5)]
    assert found == ["bf16", "int8", "fp8-channel", "bf16", "int8"]


def test_a_profile_is_relative_to_the_file(tmp_path: Path) -> None:
    make_profile(tmp_path / "run" / "profile")
    path = written(tmp_path / "run", "configs: [{fn: int8, profile: profile}]")
    assert read_config(path)[0].quantisation.profile == str(tmp_path / "run" / "profile")


def test_our_own_keys(tmp_path: Path) -> None:
    text = "configs: [{fn: fp8_block, emulated: true, ignore: ['re:.*o_proj'], lm_head_fp32: true, profile: null}]"
    wanted = Quantisation(scheme=Scheme.FP8_BLOCK, emulated=True, ignore=("re:.*o_proj",), lm_head_fp32=True)
    assert read_config(written(tmp_path, text))[0].quantisation == wanted


def test_every_problem_has_its_line(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
configs:
- fn: int2
  load_format: safetensors
  params_to_ignore: [q_scale]
- model: 7
  profile: nowhere
- just text
- fn: int8
  quantization: fp8
  emulated: yes
  profile: profile.pt
- fn: bf16
  emulated: true
  profile: nowhere
  distributed_executor_backend: slurm
  ignore: all
- fn: int8
  profile: nowhere
more: 1
""",
    )
    assert problems_of(path) == [
        (f"{path}:19: more: unknown key", "the only key outside the list is `configs`"),
        (f"{path}:4: configs.0.params_to_ignore: unknown key", KEYS),
        (f"{path}:2: configs.0.fn: unknown value `int2`", FNS),
        (f"{path}:3: configs.0.load_format: unknown value `safetensors`", "use one of `auto`, `dummy`"),
        (f"{path}:5: configs.1.fn: is missing", FNS),
        (f"{path}:5: configs.1.model: expected text", ""),
        (f"{path}:7: configs.2: expected a mapping of keys", KEYS),
        (f"{path}:10: configs.3.emulated: expected true or false", ""),
        (
            f"{path}:9: configs.3.quantization: `fp8` is not what `int8` means",
            "leave it out: `fn: int8` says it all",
        ),
        (
            f"{path}:11: configs.3.profile: profile.pt is a pickle of FlashRL's, which can run any code",
            "`appliance convert-profile` makes a profile of ours of it; name its folder here",
        ),
        (
            f"{path}:15: configs.4.distributed_executor_backend: unknown value `slurm`",
            "use one of `mp`, `ray`, `uni`, `external_launcher`",
        ),
        (f"{path}:16: configs.4.ignore: expected a list of texts", ""),
        (
            f"{path}:13: configs.4.emulated: `bf16` is never emulated",
            "only FP8 schemes are: leave it out",
        ),
        (f"{path}:14: configs.4.profile: `bf16` takes no profile", "leave it out"),
        (
            f"{path}:18: configs.5.profile: {tmp_path}/nowhere has no profile.safetensors",
            "name the folder of a profile, or leave it out",
        ),
    ]


def test_a_pickle_for_fp8_is_not_needed_at_all(tmp_path: Path) -> None:
    path = written(tmp_path, "configs: [{fn: fp8_channel, profile: user/repo/profile.pt}]")
    assert problems_of(path) == [
        (
            f"{path}:1: configs.0.profile: profile.pt is a pickle of FlashRL's, which can run any code",
            "leave it out: `fp8_channel` needs none here",
        )
    ]


@pytest.mark.parametrize("text", ["", "- fn: int8", "fn: int8"])
def test_a_file_without_configs_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    hint = "FlashRL's files are a mapping with a list under `configs`"
    assert problems_of(path) == [(f"{path}: `configs` is missing", hint)]


@pytest.mark.parametrize("text", ["configs: int8", "configs: []", "configs: {fn: int8}"])
def test_configs_is_a_list(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    assert problems_of(path) == [(f"{path}:1: configs: expected a list of engines' settings", "")]


def test_what_is_not_yaml_is_refused_once(tmp_path: Path) -> None:
    path = written(tmp_path, "configs: [\n")
    assert [message.split(":")[:2] for message, _ in problems_of(path)] == [[str(path), "2"]]


def test_a_pickle_by_the_name_of_a_yaml_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quantization.yaml"
    path.write_bytes(b"\x80\x04\x95")
    assert problems_of(path) == [(f"{path}:1: not UTF-8 text", "save the file as UTF-8")]


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    inside = make_profile(tmp_path / "run" / "profile")
    outside = make_profile(tmp_path / "elsewhere")
    every = (
        *(Quantisation(scheme=scheme) for scheme in Scheme),
        Quantisation(scheme=Scheme.INT8, profile=str(inside), ignore=("re:.*down_proj", "lm_head"), lm_head_fp32=True),
        Quantisation(scheme=Scheme.FP8_CHANNEL, profile=str(outside), emulated=True),
    )
    path = tmp_path / "run" / "quantization.yaml"
    write_config(path, every, model="Qwen/Qwen2.5-0.5B")
    entries = read_config(path)
    assert tuple(entry.quantisation for entry in entries) == every
    assert {entry.model for entry in entries} == {"Qwen/Qwen2.5-0.5B"}
    assert list((tmp_path / "run").glob(".*")) == []


def test_a_run_folder_can_be_moved(tmp_path: Path) -> None:
    profile = make_profile(tmp_path / "run" / "profile")
    write_config(tmp_path / "run" / "q.yaml", [Quantisation(scheme=Scheme.INT8, profile=str(profile))], model="m")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert read_config(tmp_path / "moved" / "q.yaml")[0].quantisation.profile == str(tmp_path / "moved" / "profile")


def test_a_file_may_lie_in_the_profile_itself(tmp_path: Path) -> None:
    profile = make_profile(tmp_path / "profile")
    write_config(profile / "quantization.yaml", [Quantisation(scheme=Scheme.INT8, profile=str(profile))], model="m")
    assert read_config(profile / "quantization.yaml")[0].quantisation.profile == str(profile)


def test_the_text_that_is_written(tmp_path: Path) -> None:
    write_config(tmp_path / "q.yaml", [Quantisation(scheme=Scheme.INT8), Quantisation(scheme=Scheme.BF16)], model="m")
    assert (tmp_path / "q.yaml").read_text() == (
        "configs:\n- fn: int8\n  load_format: auto\n  model: m\n- fn: bf16\n  load_format: auto\n  model: m\n"
    )


def settings_of(path: Path, **variables: object):
    return engine_settings(Variables(config=path, **variables), rank=0)


def test_a_file_and_the_variable_for_the_head(tmp_path: Path) -> None:
    plain, with_head = written(tmp_path, "configs: [{fn: int8}]"), tmp_path / "head.yaml"
    with_head.write_text("configs: [{fn: int8, lm_head_fp32: true}]")
    assert settings_of(plain).quantisation.lm_head_fp32 is False
    assert settings_of(plain, lm_head_fp32=True).quantisation.lm_head_fp32 is True
    assert settings_of(with_head).quantisation.lm_head_fp32 is True
    with pytest.raises(RecipeError) as raised:
        settings_of(with_head, lm_head_fp32=False)
    assert raised.value.problems == [
        (
            "FLASHRL_LMHEAD_FP32: it is 0, and the file says lm_head_fp32: true",
            "unset the variable, or change the file",
        )
    ]


def test_a_pattern_that_is_none_is_refused_at_its_line(tmp_path: Path) -> None:
    file = written(tmp_path, 'configs:\n- fn: int8\n  ignore: ["model.layers.0", "re:.*(down", "re:.*o_proj"]\n')
    fact = "`re:.*(down` is not a regular expression: missing ), unterminated subpattern at position 2"
    assert problems_of(file) == [(f"{file}:3: configs.0.ignore: {fact}", "correct it")]


def test_what_is_left_out_of_their_file_is_said(tmp_path: Path) -> None:
    settings = settings_of(written(tmp_path, THEIRS))
    assert (settings.backend, settings.load_format, settings.same_for_all) == ("", "dummy", False)
    assert settings.notes[1:] == (
        "distributed_executor_backend: external_launcher of the file is left out; the engine's own setting applies",
        "load_format: dummy: the weights are random until the first sync",
    )


def test_a_file_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own client, offline, on a cache of the shape that it makes."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--user--repo"
    snapshot = repo / "snapshots" / ("a" * 40)
    make_profile(snapshot / "configs" / "profile")
    (snapshot / "configs" / "int8.yaml").write_text("configs: [{fn: int8, profile: profile}]")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)

    found = engine_settings(Variables(config=HubFile("user/repo", "configs/int8.yaml")), rank=0)
    assert found.quantisation == Quantisation(scheme=Scheme.INT8, profile=str(snapshot / "configs" / "profile"))
    with pytest.raises(RecipeError) as raised:
        engine_settings(Variables(config=HubFile("user/repo", "fp8.yaml")), rank=0)
    assert raised.value.problems == [("FLASHRL_CONFIG: user/repo on the hub has no file fp8.yaml", "")]
    with pytest.raises(RecipeError) as raised:
        engine_settings(Variables(config=HubFile("user/other", "fp8.yaml")), rank=0)
    wanted = "FLASHRL_CONFIG: user/other/fp8.yaml is no file here and cannot be had from the hub"
    assert raised.value.message == wanted
