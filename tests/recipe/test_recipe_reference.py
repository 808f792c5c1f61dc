"""`recipes/reference.yaml` and the schema say the same, both ways."""

from appliance.recipe import library
from appliance.recipe.load import load_recipe
from appliance.recipe.schema import SECTIONS, Recipe
from appliance.recipe.tree import parse

WITHOUT_DEFAULT = {"name", "model.builtin", "trainer.steps"}
PROMISED_SECTIONS = {"model", "task", "rollout", "quantization", "correction", "algorithm", "optimizer", "batch"} | {
    "trainer",
    "cluster",
    "guard",
    "checkpoint",
    "logging",
}


def reference() -> dict[str, object]:
    """dotted key -> value of the file."""
    root, problems = parse(library.text("reference").encode(), file="reference.yaml")
    assert problems == []
    flat = {}
    for key, node in root.value.items():
        if isinstance(node.value, dict):
            flat |= {f"{key}.{inner}": plain(each.value) for inner, each in node.value.items()}
        else:
            flat[key] = plain(node.value)
    return flat


def plain(value: object) -> object:
    return [each.value for each in value] if isinstance(value, list) else value


def schema() -> dict[str, object]:
    """dotted key -> default of the schema."""
    flat = {name: field.default for name, field in Recipe.model_fields.items() if name not in SECTIONS}
    for section, model in SECTIONS.items():
        flat |= {f"{section}.{name}": field.default for name, field in model.model_fields.items()}
    return flat


def test_reference_has_every_key_in_the_order_of_the_schema():
    assert list(reference()) == list(schema())


def test_reference_has_the_defaults():
    wanted = {key: list(value) if isinstance(value, tuple) else value for key, value in schema().items()}
    assert {key: value for key, value in reference().items() if key not in WITHOUT_DEFAULT} == {
        key: value for key, value in wanted.items() if key not in WITHOUT_DEFAULT
    }


def test_reference_explains_every_key_in_the_words_of_the_schema():
    lines = library.text("reference").splitlines()
    written = [(line.partition(":")[0].strip(), line.rpartition("  # ")[2]) for line in lines if "  # " in line]
    fields = {name: field for name, field in Recipe.model_fields.items() if name not in SECTIONS}
    meant = [(name, field.description) for name, field in fields.items()]
    meant += [(name, field.description) for each in SECTIONS.values() for name, field in each.model_fields.items()]
    assert written == meant


def test_reference_is_a_recipe():
    assert load_recipe("reference").name == "reference"


def test_every_section_of_the_contract_exists_or_is_refused_by_name():
    assert set(SECTIONS) == PROMISED_SECTIONS
