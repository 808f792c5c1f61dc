"""verl's load of the model that is trained: nothing of it is made up, and no attestation without that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import init_empty_weights
from broken_checkpoints import Count, broken_checkpoints
from hub_variables import set_hub
from plans import make_plan
from tiny_models import FAMILIES, tiny
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import appliance.trainer.worker  # noqa: F401  a run's processes import it by its name in the environment
from appliance.errors import AttestationError, WeightsError
from appliance.quant import loading
from appliance.quant.loading import tensors_loaded
from appliance.trainer import attest

CASES = 391


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("whole")
    for family in FAMILIES:
        tiny(family, tie_word_embeddings=family in ("qwen2", "qwen3")).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


def load_as_verl(folder: Path) -> PreTrainedModel:
    """As its engine for FSDP does."""
    from verl.utils.model import get_hf_auto_model_class

    config = AutoConfig.from_pretrained(folder)
    return get_hf_auto_model_class(hf_config=config).from_pretrained(
        pretrained_model_name_or_path=str(folder), torch_dtype=torch.float32, config=config, trust_remote_code=False
    )


def test_every_fault_of_every_family_stops_the_trainers_load(
    whole: dict[str, Path], tmp_path: Path, record_property
) -> None:
    count = Count(f"tensor dropped, cropped, of another type, prefixed, layers: {len(FAMILIES)} families (trainer)")
    for family, folder in whole.items():
        for broken in broken_checkpoints(folder, folder=tmp_path / family):
            message = ""
            try:
                load_as_verl(broken.folder)
            except WeightsError as error:
                message = str(error)
            count.add(broken, message=message)
    record_property("said", count.settle(cases=CASES))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_is_loaded_and_counted(whole: dict[str, Path], family: str) -> None:
    model = load_as_verl(whole[family])
    assert tensors_loaded(torch.nn.Sequential(model)) == len(model.state_dict())  # as an adapter holds it
    source = tiny(family, tie_word_embeddings=family in ("qwen2", "qwen3")).state_dict()
    assert all(torch.equal(tensor, source[name].float()) for name, tensor in model.state_dict().items())


def test_code_beside_published_weights_is_forgotten_unless_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `auto_map` verl's save would copy the class's code, and enter the class without a name."""
    tiny("llama").save_pretrained(tmp_path)
    file, auto_map = tmp_path / "config.json", {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": auto_map}))
    assert not hasattr(load_as_verl(tmp_path).config, "auto_map")
    monkeypatch.setattr(LlamaForCausalLM, "_auto_class", "AutoModelForCausalLM")  # as transformers marks such code
    assert load_as_verl(tmp_path).config.auto_map == auto_map


def test_a_rank_without_memory_for_the_model_looks_as_well(whole: dict[str, Path], tmp_path: Path) -> None:
    """verl loads an untied model on the first rank, and sends it to the others."""
    with init_empty_weights():
        assert tensors_loaded(load_as_verl(whole["llama"])) > 0
        broken = next(broken_checkpoints(whole["llama"], folder=tmp_path / "new"))
        with pytest.raises(WeightsError, match=r"1 is missing \(model\.embed_tokens\.weight\)"):
            load_as_verl(broken.folder)


def test_a_download_that_broke_off_goes_on_and_is_held_when_it_is_whole(
    whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache has the index and one of its files; another rank or an earlier attempt left it so."""
    set_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    snapshot = tmp_path / "models--owner--model" / "snapshots" / ("1" * 40)
    tiny("llama").save_pretrained(snapshot, max_shard_size="100KB")
    (tmp_path / "models--owner--model" / "refs").mkdir()
    (tmp_path / "models--owner--model" / "refs" / "main").write_text("1" * 40)
    late = sorted(snapshot.glob("*.safetensors"))[1:]
    contents = {file: file.read_bytes() for file in late}
    for file in late:
        file.unlink()
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def download_first(name: str, **settings: object) -> object:
        for file, content in contents.items():
            file.write_bytes(content)
        return from_pretrained(name, **settings)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", download_first)
    assert late and tensors_loaded(loading.load_whole(AutoModelForCausalLM, "owner/model")) > 0


def test_what_is_random_after_all_is_refused(whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the headers said nothing, or nobody could ask them."""
    monkeypatch.setattr(loading, "ask_transformers", lambda folder, trust_remote_code: loading.Loading())
    monkeypatch.setattr(AutoModel, "from_pretrained", classmethod(_missing_one))
    with pytest.raises(WeightsError) as raised:
        loading.load_whole(AutoModel, str(whole["llama"]))
    assert raised.value.message == f"{whole['llama']}: 1 is not in the checkpoint and would be random (lm_head.weight)"


def _missing_one(cls: type, name: str, **settings: object) -> tuple[None, dict[str, object]]:
    return None, {"missing_keys": {"lm_head.weight"}, "mismatched_keys": set(), "unexpected_keys": set()}


def test_a_rank_whose_load_nobody_held_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(2, 2)
    engine = SimpleNamespace(module=module, scaler=None, optimizer=SimpleNamespace(param_groups=[{"initial_lr": 1.0}]))
    monkeypatch.setattr(attest, "compute_dtype", lambda module: torch.bfloat16)
    worker = SimpleNamespace(rank=3, worker_dict={"a": SimpleNamespace(actor=SimpleNamespace(engine=engine))})
    with pytest.raises(AttestationError) as raised:
        attest._attest_worker(worker, make_plan(tmp_path), True)
    assert raised.value.message == "trainer rank 3 does not know whether all of its model came from the checkpoint"
