import pytest

from appliance.recipe.text import MAX_BYTES, parse, scalar

WRITE = "close brackets and quotes, indent with spaces, put a text with `: ` or ` #` in quotes"


def problems_of(text: str | bytes) -> list[tuple[str, str]]:
    faults = parse(text if isinstance(text, bytes) else text.encode(), file="r.yaml")[1]
    return [(finding.fact, finding.remedy) for finding in faults]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("+7", 7),
        ("007", 7),
        ("-0", 0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("yes", "yes"),
        ("22:22", "22:22"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("2026-01-01", "2026-01-01"),
        ("=", "="),
        ("e5", "e5"),
        (".", "."),
    ],
)
def test_scalar_follows_yaml_1_2(text, value):
    found = scalar(text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", [".nan", ".inf", "-.INF", "1e999", "-1e400"])
def test_scalar_refuses_what_is_not_finite(text):
    with pytest.raises(ValueError, match=r"^not a finite number$"):
        scalar(text)


def test_scalar_refuses_a_row_of_digits():
    with pytest.raises(ValueError, match=r"^a number of more than 18 digits$"):
        scalar("9" * 5000)


def test_quoted_scalars_are_text():
    root, problems = parse(b"a: '1e-6'\nb: \"true\"\nc: |-\n  5\n", file="r.yaml")
    assert problems == []
    assert [root.value[key].value for key in "abc"] == ["1e-6", "true", "5"]


def test_every_value_knows_its_line():
    root, _ = parse(b"a:\n  b: 1\n\n  c: [1,\n    2]\n", file="r.yaml")
    inner = root.value["a"].value
    assert (inner["b"].place, inner["c"].place, inner["c"].value[1].place) == ("r.yaml:2", "r.yaml:4", "r.yaml:5")


def test_all_refusals_at_once():
    text = "a: 1\na: 2\nb: &x 1\nc: *x\nd: !!python/name:os.system x\ne: .nan\n? [1]\n: 2\n<<: 3\n"
    assert problems_of(text) == [
        ("r.yaml:2: a: the key is already in line 1", "keep one of them"),
        ("r.yaml:3: b: anchors and aliases are not allowed", "write the value out"),
        ("r.yaml:4: c: anchors and aliases are not allowed", "write the value out"),
        ("r.yaml:5: d: the tag `tag:yaml.org,2002:python/name:os.system` is not allowed", "write the plain value"),
        ("r.yaml:6: e: not a finite number: `.nan`", ""),
        ("r.yaml:7: a key must be text", ""),
    ]


def test_the_first_of_two_equal_keys_stays():
    assert parse(b"a: 1\na: 2\n", file="r.yaml")[0].value["a"].value == 1


def test_depth_is_limited():
    deep = "".join(f"{'  ' * level}k:\n" for level in range(9)) + "  " * 9 + "v: 1\n"
    assert problems_of(deep) == [("r.yaml:10: more than 8 levels deep", "a recipe has three levels")]


def test_a_wall_of_brackets_is_refused_and_not_followed():
    assert problems_of("[" * 60000) == [("r.yaml:1: more than 8 levels deep", "a recipe has three levels")]


def test_size_is_limited():
    assert problems_of(b"#" * (MAX_BYTES + 1)) == [
        ("r.yaml: more than 65536 bytes, the most that a recipe may have", "is this a recipe?")
    ]


def test_billion_laughs_is_refused():
    text = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    assert len(problems_of(text)) == 6


def test_not_utf8():
    assert problems_of(b"name: ok\nx: \xff\n") == [("r.yaml:2: not UTF-8 text", "save the file as UTF-8")]


def test_not_yaml_names_the_line():
    assert problems_of("a: 1\nb: [1, 2\nc: 3\n") == [("r.yaml:3: not YAML: expected ',' or ']', but got ':'", WRITE)]


def test_control_characters():
    assert problems_of(b"a: \x00\n") == [
        ("r.yaml: not YAML: unacceptable character #x0000: special characters are not allowed", "")
    ]


def test_two_documents():
    assert problems_of("a: 1\n---\nb: 2\n") == [("r.yaml:2: a second document", "a file holds one recipe")]
