"""`recipes/reference.yaml` is what the schema makes of itself."""

from appliance.recipe import library
from appliance.recipe.load import load_recipe
from appliance.recipe.schema import EXAMPLES, SECTIONS, Recipe, reference

PROMISED_SECTIONS = {"model", "task", "rollout", "quantization", "correction", "algorithm", "optimizer", "batch"} | {
    "trainer",
    "cluster",
    "guard",
    "checkpoint",
    "logging",
}


def test_the_file_is_the_schema_s():
    assert library.text("reference") == reference(), "python -m appliance.recipe.schema >recipes/reference.yaml"


def test_the_file_reads_back_as_the_defaults():
    loaded = load_recipe("reference")
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            if f"{section}.{name}" not in EXAMPLES:
                assert getattr(getattr(loaded, section), name) == field.default, f"{section}.{name}"
    assert (loaded.name, loaded.extends, loaded.seed) == ("reference", None, 0)
    assert (loaded.model.builtin, loaded.trainer.steps) == ("tiny-arithmetic", 40)


def test_every_key_says_what_it_means():
    keys = {name: field for name, field in Recipe.model_fields.items() if name not in SECTIONS}
    keys |= {f"{each}.{name}": field for each, kind in SECTIONS.items() for name, field in kind.model_fields.items()}
    assert [name for name, field in keys.items() if not field.description] == []


def test_every_section_of_the_contract_exists_or_is_refused_by_name():
    assert set(SECTIONS) == PROMISED_SECTIONS
