"""What to feed: wild values, text that almost parses, and shipped files with something broken in them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]

# What people have tried elsewhere: other overrides, interpolation, shells, code, files that are none, odd text.
HOSTILE = (
    *(
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        ".",
        "/",
        "~",
        "~nobody-here/x",
        "/dev/zero",
        "/dev/null/x",
        "/proc/self",
    ),
    *("${oc.env:HOME}", "${oc.env:HOME,x}", "${model.path}", "\\${x}", "$(touch x)", "`touch x`", "; touch x", "$HOME"),
    *(
        "a,b",
        "[a,b]",
        "{a:1}",
        "+x=1",
        "++x=1",
        "~x",
        "x=1",
        "a b",
        "x\ny=1",
        "x' y=1 'z",
        "x\\'",
        "choice(1,2)",
        "glob(*)",
    ),
    *("__import__('os').system('touch x')", "!!python/object/apply:os.system ['touch x']", "!!python/name:os.system"),
    *(
        "re:(a+)+$",
        "re:" + "(" * 201,
        "re:" + "(a" * 80 + ")" * 80,
        "re:a{99999999999}",
        "re:[",
        "re:(?P<x>.)(?P=x)",
        "re:\\",
    ),
    *(
        "\x00",
        "a\x00b",
        "\x1b]0;title\x07",
        "\x1b[2J",
        "\u202e",
        "\ud800",
        "\U0010ffff",
        "e\u0301" * 50,
        "\r",
        "\x85",
        "\u2028",
    ),
    *(
        "x" * 300,
        "x" * 1100,
        "a/" * 520,
        "1" * 30,
        "9" * 40,
        "1e999",
        "nan",
        ".inf",
        "-0",
        "0x10",
        "1_000",
        "٣",
        "null",
    ),
    *(
        "file:///etc/passwd",
        "http://127.0.0.1:1/x",
        "\\\\host\\share",
        "C:\\x",
        "--help",
        "-o",
        "con",
        "",
        " ",
        "'",
        '"',
        "%s%n",
    ),
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    8,
    64,
    2**31 - 1,
    2**31,
    2**53,
    10**17,
    10**18 - 1,
    10**18,
    2**64,
    10**400,
    1e-320,
    1e-9,
    0.5,
)
NUMBERS += (1.5, 1e9, 1e18, 1e300, 1.7976931348623157e308, float("inf"), float("-inf"), float("nan"), True, False)

wild_text = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30), st.text("abz_./-:$'\\ \n0é", max_size=20))
scalars = st.one_of(
    st.none(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(),
    wild_text,
    st.sampled_from([str(n) for n in NUMBERS]),
)
_keys = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=5))
_shallow = st.one_of(st.lists(scalars, max_size=3), st.dictionaries(_keys, scalars, max_size=2))
_deep = st.one_of(st.lists(_shallow, max_size=2), st.dictionaries(_keys, _shallow, max_size=2))
values = st.one_of(scalars, scalars, scalars, _shallow, _deep)
raw = st.one_of(st.binary(max_size=200), st.text(max_size=80).map(lambda text: text.encode(errors="surrogatepass")))


def deep(levels: int) -> list[str]:
    """The same text nested so often, in every way that YAML or JSON nest."""
    return [
        *("[" * levels, "{" * levels, "[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels),
        *("- " * levels, "? " * levels, "{? " * levels, "".join(f"{' ' * i}a:\n" for i in range(min(levels, 300)))),
        *(
            "a: {" * levels,
            "[{" * levels,
            "!!str " * levels,
            "&a " * levels,
            "> " * levels,
            '"' * levels,
            "# " * levels,
        ),
    ]


BOMBS = (  # a billion laughs, and other short texts that grow, or would
    "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "a: &a\n  b: *a\n",
    "<<: [{a: 1}, {b: 2}]\n",
    "a: !!binary " + "A" * 4000,
    "%TAG ! tag:x,2000:\n--- !x\na: 1\n",
    *(text for levels in (9, 500, 20_000) for text in deep(levels)),
    *(
        f"{opened}{item * 8000}"
        for opened, item in (("rollout: {replicas: [", "x,"), ("", "k: 1\n"), ("guard: {", "k: 1,"))
    ),
    "rollout: {replicas: [" + ",".join(["x"] * 8000) + "]}",
    "".join(f"k{number}: 1\n" for number in range(6000)),
    "guard: {" + ",".join(f"k{number}: 1" for number in range(5000)) + "}",
)

TOKENS = (
    *(
        "- ",
        ": ",
        "\n",
        "\n  ",
        "\n    ",
        "{",
        "}",
        "[",
        "]",
        ",",
        "? ",
        "|",
        ">",
        "|2-\n",
        "'",
        '"',
        "# ",
        "---\n",
        "...\n",
    ),
    *(
        "&a ",
        "*a",
        "!!python/object/apply:os.system ",
        "!!binary ",
        "!x ",
        "%YAML 1.1\n",
        "<<: ",
        "\t",
        "\ufeff",
        "\r\n",
    ),
    *(
        '"\\ud800"',
        '"\\U00110000"',
        '"\\UFFFFFFFF"',
        '"\\x00"',
        '"\\e[2J"',
        '"\\N"',
        "~",
        "null",
        "yes",
        "1e5",
        ".nan",
        "22:22",
    ),
)


@st.composite
def broken(draw: st.DrawFn, texts: list[str], *, tokens: tuple[str, ...] = TOKENS) -> bytes:
    """A good text in which some pieces were cut, doubled, moved, or replaced."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 40)))
        piece, how = text[start:end], draw(st.integers(0, 4))
        new = {
            0: "",
            1: piece * 2,
            2: draw(st.sampled_from(tokens)),
            3: draw(wild_text),
            4: piece + draw(st.sampled_from(tokens)),
        }[how]
        text = text[:start] + new + text[end:]
    return text.encode(errors="surrogatepass")


seeds = st.integers(0, 2**32 - 1)
VARIANTS = 5


def variants(content: bytes, seed: int) -> list[bytes]:
    """What was drawn, and the same with a few bytes changed, cut, doubled or moved: VARIANTS cases for one drawing."""
    dice, contents = random.Random(seed), [content]
    for _ in range(VARIANTS - 1):
        changed = bytearray(content)
        for _ in range(dice.randint(1, 3)):
            start = dice.randint(0, len(changed))
            end = min(len(changed), start + dice.choice((0, 1, 1, 2, 4, 16)))
            piece = bytes(changed[start:end])
            changed[start:end] = dice.choice(
                (b"", piece * 2, piece[::-1], bytes([dice.randrange(256)]), dice.choice(_ODD))
            )
        contents.append(bytes(changed))
    return contents


_ODD = (
    *(token.encode() for token in TOKENS),
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"-1",
    b"1e999",
    b"9" * 30,
    b"\\u0000",
    b"../",
)


def tokens_of(words: list[str]) -> st.SearchStrategy[bytes]:
    """Marks of the grammar and words of the schema, in any order."""
    piece = st.one_of(st.sampled_from(TOKENS), st.sampled_from(words), wild_text)
    return st.lists(piece, max_size=15).map(lambda pieces: "".join(pieces).encode(errors="surrogatepass"))


def as_json(value: Any) -> str:
    """JSON, which YAML reads as well: every odd character and number is written so that it arrives."""
    return json.dumps(value)
