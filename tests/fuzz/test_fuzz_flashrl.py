"""FlashRL's YAML: an entry per engine that is written and read again the same, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_surface import attempt, fuzzed
from fuzz_text import BOMBS, VARIANTS, as_json, broken, raw, seeds, tokens_of, values, variants, wild_text
from hypothesis import strategies as st

from appliance.errors import RecipeError
from appliance.quant.files import write_config
from flashrl_compat.config_file import OUR_KEYS, THEIR_KEYS, Entry, read_config
from flashrl_compat.names import NAMES

TEXTS = [
    "configs:\n- distributed_executor_backend: external_launcher\n  fn: bf16\n  load_format: dummy\n",
    "configs:\n- fn: int8\n  load_format: auto\n  model: Qwen/Qwen2.5-0.5B\n  ignore: [lm_head, 're:.*o_proj']\n",
    "configs:\n- fn: fp8_vllm\n  module_attribute_to_preserve:\n  - workspace\n  quantization: fp8\n  emulated: true\n",
]
KEYS = (*THEIR_KEYS, *OUR_KEYS)
entries = st.dictionaries(st.one_of(st.sampled_from(KEYS), wild_text), values, max_size=5)
named = st.tuples(entries, st.sampled_from([name.theirs for name in NAMES])).map(lambda pair: pair[0] | {"fn": pair[1]})
trees = st.lists(st.one_of(named, entries, values), max_size=3).map(lambda items: as_json({"configs": items}).encode())


def read(file: Path) -> tuple[Entry, ...]:
    entries = read_config(file)
    again = file.with_name("again.yaml")
    write_config(again, [each.quantisation for each in entries], model="m")
    assert [each.quantisation for each in read_config(again)] == [each.quantisation for each in entries]
    return entries


@fuzzed(
    "FlashRL YAML",
    variants=VARIANTS,
    seed=seeds,
    content=st.one_of(raw, broken(TEXTS), tokens_of([*KEYS, "configs", "int8"]), trees),
)
def test_fuzz_flashrl_yaml(room: Path, content: bytes, seed: int) -> None:
    for each in variants(content, seed):
        (room / "flashrl.yaml").write_bytes(each)
        attempt("FlashRL YAML", lambda: read(room / "flashrl.yaml"), folder=room)


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_a_bomb_is_refused_at_once(room: Path, number: int) -> None:
    (room / "flashrl.yaml").write_text(BOMBS[number])
    with pytest.raises(RecipeError):
        read(room / "flashrl.yaml")
