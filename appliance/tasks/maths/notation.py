"""One normal form for answers, of a truth and of a response alike: plain text in Unicode, whatever marked it up.

LaTeX's spaces, fonts, boxes and delimiters go, Markdown's and HTML's too. Its symbols become the characters that they
draw: `\\pi` is π, `\\times` is *, `\\leq` is ≤. Thousands are joined, a mixed number is one fraction, `1e-05` is
0.00001. What is left of LaTeX has arguments or rows: `\\frac`, `\\binom`, `\\sqrt`, `\\begin`. Money and units stay:
`units.py` reads them.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

USD, EUR, GBP, JPY = "USD", "EUR", "GBP", "JPY"
DEGREE = "°"

_RANGES_END = r"(?<![^\s(\[{>:*=#$,;^\\])(?<!\d\s)"  # a dash behind anything else is one, as in `3–5` and `3 –5`
_MINUS = re.compile(rf"\u2212|{_RANGES_END}[\u2013\uff0d](?=\.?\d)")
_EXPONENT = re.compile(r"(?<![\w.,])(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,3}(?!\.?\w)")
_DOTTED = re.compile(r"(?<![\w.,'])\d{1,3}(?:(?:\.\d{3}){2,}|(?:'\d{3})+)(?![\w.,']*\d)")  # 1.234.567, 1'234
_MIXED = re.compile(r"(?<![\w.,/^])(?<!\d )(\d{1,3}(?: \d{3})+|\d{1,9}) +([1-9]\d{0,8})/(\d{1,9})(?![\d^]|\.\d)")
_SPACE = r"[ \u00a0\u2009\u202f]"  # between thousands: a usual one, no-break, thin, or both
_SPACED_THOUSANDS = re.compile(
    rf"(?<![\w.,])(?<!\d{_SPACE})\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!\d|{_SPACE}\d|,\d{{3}}(?!\d))"
)


def plain_numbers(text: str) -> str:
    """Write the text with an ASCII minus, and `1e-05` as `0.00001`: exponents of up to three digits.

    A minus is U+2212, and an en dash or a full-width one directly before a digit where no range can end.
    """
    return _EXPONENT.sub(lambda found: f"{Decimal(found[0]):f}", _MINUS.sub("-", text))


def joined_numbers(text: str) -> str:
    """Write the text with `1 1/2` as `3/2` where the fraction is a proper one, and thousands as in `12 345` joined."""
    return _SPACED_THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), _MIXED.sub(_improper, text))


def _improper(mixed: re.Match[str]) -> str:
    whole, over, under = int(mixed[1].replace(" ", "")), int(mixed[2]), int(mixed[3])
    return f"{whole * under + over}/{under}" if over < under else mixed[0]


_GREEK = {
    name: unicodedata.lookup(f"GREEK {case} LETTER {'LAMDA' if name.lower() == 'lambda' else name.upper()}")
    for lower in (
        *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu"),
        *("xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
    )
    for name, case in ((lower, "SMALL"), (lower.capitalize(), "CAPITAL"))
}
_SYMBOLS = {
    **_GREEK,
    **{f"var{name}": _GREEK[name] for name in ("epsilon", "theta", "phi", "rho", "sigma", "pi")},
    **dict.fromkeys(("times", "cdot", "ast", "bullet"), " * "),
    **{"div": " / ", "pm": "±", "mp": "∓", "infty": "∞", "cup": "∪", "cap": "∩", "in": "∈", "emptyset": "∅"},
    **{"varnothing": "∅", "setminus": "∖", "backslash": "∖", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|"},
    **dict.fromkeys(("le", "leq", "leqslant"), "≤"),
    **dict.fromkeys(("ge", "geq", "geqslant"), "≥"),
    **dict.fromkeys(("ne", "neq"), "≠"),
    **{"lt": "<", "gt": ">", "to": "→", "rightarrow": "→", "Rightarrow": "⇒", "implies": "⇒", "approx": "≈"},
    **{"simeq": "≈", "sim": "~", "equiv": "≡", "lbrace": "\\{", "rbrace": "\\}", "lbrack": "[", "rbrack": "]"},
    **{"langle": "⟨", "rangle": "⟩", "lceil": "⌈", "rceil": "⌉", "lfloor": "⌊", "rfloor": "⌋", "prime": "'"},
    **{"circ": DEGREE, "degree": DEGREE, "degrees": DEGREE, "percent": "%", "land": "∧", "lor": "∨", "wedge": "∧"},
    **{"dollar": "\\$", "euro": "€", "pounds": "£", "yen": "¥", "ldots": "...", "dots": "...", "cdots": "..."},
    **{"angle": "∠", "triangle": "△", "colon": ":", "perp": "⊥", "parallel": "∥", "lnot": "¬", "neg": "¬"},
    **dict.fromkeys(
        ("displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "left", "right", "middle", "big", "Big"), ""
    ),
    **dict.fromkeys(("bigl", "bigr", "Bigl", "Bigr", "bigg", "Bigg", "biggl", "biggr", "Biggl", "Biggr"), ""),
    **dict.fromkeys(("quad", "qquad", "space", "enspace", "medspace", "thickspace", "hfill", "newline"), " "),
    **dict.fromkeys(("bf", "rm", "it", "sf", "tt", "boldmath", "noindent", "centering", "large", "Large"), " "),
    **dict.fromkeys(("thinspace", "thinmuskip"), "\u2009"),
    **{"negthinspace": "", "therefore": "", "Longrightarrow": "⇒"},
}
_FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log"),
    *("lg", "exp", "gcd", "lcm", "max", "min", "det", "arg", "mod", "deg", "dim", "ker"),
)
_FRACTIONS = ("dfrac", "tfrac", "cfrac", "sfrac", "nicefrac")
_FONTS = (
    *("text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "textsc", "mbox", "hbox", "emph"),
    *("underline", "mathrm", "mathbf", "mathit", "mathsf", "mathtt", "mathnormal", "boldsymbol", "bm", "pmb"),
    *("operatorname", "boxed", "fbox", "framebox", "overrightarrow", "vec", "ensuremath", "mathop", "mathcal"),
    *("bold", "smash", "mathstrut", "textup", "textmd", "textsl", "unit", "si"),
)
_UNIT_FONTS = ("text", "textrm", "textnormal", "mbox", "hbox", "mathrm", "operatorname", "textit", "rm", "unit", "si")
_FONT = re.compile(rf"\\(?:{'|'.join(_FONTS)})\*?\s*\{{([^{{}}]*)\}}")
_FONT_OF_GROUP = re.compile(rf"\\(?:{'|'.join(_FONTS)})\*?\s*(?=\{{)")
_UNIT = re.compile(
    rf"(?<=[\d)}}\]])((?:\s|\\[,;:! ]|~)*)\\(?:{'|'.join(_UNIT_FONTS)})\s*\{{\s*([A-Za-zµμ]{{1,3}})\s*\}}"
)
_REPEATING = re.compile(r"(?<![\w.])(\d{0,15})\.(\d{0,15})\\(?:overline|bar|dot)\s*\{\s*(\d{1,15})\s*\}")
_LINE_SEGMENT = re.compile(r"\\overline\s*\{\s*([A-Z]{2})\s*\}")
_WORDS_IN_FORMULAS = {"and", "or", "if", "is", "for", "to", "in", "mod", "as", "not", "e", "i", "d"}
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?(\s?)")
_BLACKBOARD = re.compile(r"\\mathbb\s*\{?\s*([A-Z])\s*\}?")
_BLACKBOARD_LETTERS = {"R": "ℝ", "Z": "ℤ", "N": "ℕ", "Q": "ℚ", "C": "ℂ"}
_COLOUR = re.compile(r"\\(?:textcolor|color|colorbox)\s*\{[^{}]*\}")
_ORDINAL = re.compile(r"(?<=\d)\s?\^?\s?\{?\s?(?:st|nd|rd|th)\b\s?\}?")
_DECIMAL_COMMA = re.compile(r"(?<![\w.,])(\d{1,3}(?:\.\d{3})+),(\d+)(?![\w,]|\.\d)")  # 1.234,5
_WORD_MINUS = re.compile(r"(?i)(?<![\d)}] )(?<![\d)}])\b(?:negative|minus)\s+(?=\\?[\d.])")

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u2061\u2062\u2063", ""),
        **dict.fromkeys("✅✓✔☑🎉👍", ""),
        **dict.fromkeys("×⋅·∙•✕✖∗⨯", "*"),
        **dict.fromkeys("÷∕⁄", "/"),
        **dict.fromkeys("‐‑﹣", "-"),
        **dict.fromkeys("⩽≦", "≤"),
        **dict.fromkeys("⩾≧", "≥"),
        **dict.fromkeys("º˚∘", DEGREE),
        **dict.fromkeys("\u00a0\u2007\u202f\u2002\u2003\u2004\u2005\u2006\u2008\u200a\u205f\u3000", " "),
        **dict.fromkeys("′’‘ʹ", "'"),
        **dict.fromkeys("“”„«»″", '"'),
        **{"µ": "μ", "％": "%", "〈": "⟨", "〉": "⟩", "，": ",", "；": ";", "：": ":", "。": ".", "、": ","},
        **{"\N{KELVIN SIGN}": "K", "ϕ": "φ", "ϵ": "ε", "ϑ": "θ"},
        **{"∆": "Δ", "∣": "|", "❘": "|", "∼": "~", "⟶": "→", "⟹": "⇒", "…": "...", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"},
    }
)
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉₊₋₍₎"
_PLAIN_SCRIPT = str.maketrans(_RAISED + _LOWERED, "0123456789+-()ni" + "0123456789+-()")
_HTML = re.compile(r"(?i)</?(?:b|i|u|em|strong|p|br|span|div|center|font|code|answer)(?:\s[^<>]*)?/?>")
_OUTER_DELIMITERS = re.compile(r"\\[()\[\]]|\$\$")


def normal_form(text: str) -> str:
    """Bring an answer into the normal form; a text in the normal form stays as it is. Time and memory are linear in the
    text."""
    text = _without_markup(text.translate(_CHARACTERS))
    text = _without_latex(_with_plain_characters(text))
    text = re.sub(r"(?<=\d)\{,\}(?=\d)", ",", text)
    text = _ORDINAL.sub("", re.sub(r"\\\s*$", "", text))
    text = _WORD_MINUS.sub("-", text)
    text = re.sub(r"(?<![!\s\d)])\s*!=|\\not\s*=|(?<=[A-Za-z])\s+!=", "≠", text)
    text = _DECIMAL_COMMA.sub(lambda found: f"{found[1].replace('.', '')}.{found[2]}", text)
    text = _DOTTED.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    text = _with_one_notation_of_numbers(text)
    return re.sub(r"\s+", " ", text).strip()


def _without_markup(text: str) -> str:
    """Remove Markdown's and HTML's marks, and what delimits mathematics in a text."""
    text = re.sub(r"(?i)<sup>([^<]*)</sup>", r"^{\1}", text)
    text = re.sub(r"(?i)<sub>([^<]*)</sub>", r"_{\1}", text)
    text = re.sub(r"~~[^~]*~~", " ", text)  # struck out
    text = _OUTER_DELIMITERS.sub(" ", _HTML.sub(" ", text))
    text = re.sub(r"(?<=[\w)])\*\*(?=[\d(-])", "^", text)  # Python's power; Markdown's marks have a blank before them
    text = text.replace("**", "").replace("`", "")
    text = re.sub(r"\\\$|US\$(?=\s*[\d.])", f" {USD} ", text)
    if text.count("$") % 2:  # the rest are pairs around mathematics, but for one before a number
        text = re.sub(r"\$(?=\s*-?[\d.])", f" {USD} ", text, count=1)
    return text.replace("$", " ")


def _with_plain_characters(text: str) -> str:
    text = re.sub(f"[{_RAISED}]+", lambda found: "^{" + found[0].translate(_PLAIN_SCRIPT) + "}", text)
    text = re.sub(f"[{_LOWERED}]+", lambda found: "_{" + found[0].translate(_PLAIN_SCRIPT) + "}", text)
    text = re.sub(r"((?<!\d)\d{0,12}|)[ \u2009]?([¼-¾⅐-⅞↉])", _vulgar_fraction, text)
    if not text.isascii():
        text = "".join(character if character == "\u2009" else _narrow(character) for character in text)
    return re.sub(r"√\s*", r"\\sqrt ", text.translate(_CHARACTERS))


def _narrow(character: str) -> str:
    """Full-width and styled letters and digits as plain ones."""
    if character in "ℝℤℕℚℂ":
        return character
    plain = unicodedata.normalize("NFKC", character)
    if len(plain) == 1 and plain.isascii() and plain.isalnum():
        return plain
    return plain if "\uff01" <= character <= "\uff5e" and character != "－" else character


def _vulgar_fraction(found: re.Match[str]) -> str:
    over, _, under = unicodedata.normalize("NFKC", found[2]).partition("\u2044")
    return f" {found[1]} {over}/{under} " if found[1] else f" {over}/{under} "


def _without_latex(text: str) -> str:
    if "\\" not in text and "^" not in text and "~" not in text:
        return text
    if "\\begin" not in text:  # elsewhere two backslashes are one that was escaped, or the end of a line
        text = re.sub(r"\\\\(?=[A-Za-z{}])", r"\\", text)
        text = re.sub(r"\\\\\s*(?=\S)", ", ", text)
    text = text.replace("\\!", "").replace("\\%", "%").replace("\\&", "&").replace("\\#", "#").replace("\\_", "_")
    text = re.sub(r"(?<!\\)\\[,:]", "\u2009", text)
    text = re.sub(r"(?<!\\)\\[; ]|(?<=\S)~(?=\S)", " ", text)
    text = re.sub(r" *\u2009[ \u2009]*", "\u2009", text)
    text = re.sub(r"\\phantom\s*\{[^{}]*\}|\\hspace\*?\s*\{[^{}]*\}|\\vspace\*?\s*\{[^{}]*\}", " ", text)
    text = _BLACKBOARD.sub(lambda found: f" {_BLACKBOARD_LETTERS.get(found[1], found[1])} ", text)
    text = _COLOUR.sub(" ", text)
    text = _LINE_SEGMENT.sub(r" \1 ", _REPEATING.sub(_repeating_fraction, text))
    text = _UNIT.sub(_marked_unit, text)
    for _ in range(12):  # each turn unwraps the innermost; degenerate text nests thousands
        text, unwrapped = _FONT.subn(_unwrapped, text)
        if not unwrapped:
            break
    text = _FONT_OF_GROUP.sub("", text)  # around braces that mean something, as in \\mathbf{10^{3}}
    text = re.sub(r"\\(boxed|fbox)\b\s*", " ", text)
    text = re.sub(
        r"\^\s*\{?\s*\\(?:circ|degrees?)\s*\}?|\^\s*\{?\s*°\s*\}?|(?<=\d)\s?\^\s*\{?\s*o\s*\}?(?![a-z])", DEGREE, text
    )
    return _COMMAND.sub(_symbol, text)


def _repeating_fraction(found: re.Match[str]) -> str:
    """`0.1\\overline{6}` as the fraction that it is."""
    whole, once, again = found[1] or "0", found[2], found[3]
    nines = 10 ** len(again) - 1
    over = int(whole + once) * nines + int(again)
    return f"\\frac{{{over}}}{{{nines * 10 ** len(once)}}}"


def _marked_unit(found: re.Match[str]) -> str:
    unit = found[2]
    return found[0] if unit in _WORDS_IN_FORMULAS else f"{found[1]}⟦{unit}⟧"


def _unwrapped(found: re.Match[str]) -> str:
    """Return what a font marks, apart from its neighbours where it is a word."""
    inner = found[1]
    return f" {inner} " if len(inner.strip()) > 1 else inner


def _symbol(match: re.Match[str]) -> str:
    name, blank = match[1], match[2]
    if name in _FRACTIONS:
        return "\\frac" + blank
    if name in ("dbinom", "tbinom"):
        return "\\binom" + blank
    if name in _FUNCTIONS:
        return f" {name} "
    if name in _SYMBOLS:
        return _SYMBOLS[name] + blank
    return match[0]


def _with_one_notation_of_numbers(text: str) -> str:
    text = text.replace("\N{EURO SIGN}", f" {EUR} ").replace("£", f" {GBP} ").replace("¥", f" {JPY} ")
    text = re.sub(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)|(?<=\d)\s+[xX]\s+(?=\d)", " * ", text)
    text = re.sub(r"(?<![\w.])-\s+(?=[\d.])", lambda found: _spaced_minus(text, found), text)
    return joined_numbers(plain_numbers(re.sub(r"(?<=\d),\s*(?=\u2009)", ",", text))).replace("\u2009", " ")


def _spaced_minus(text: str, match: re.Match[str]) -> str:
    """Join a minus: `- 5` is -5 where nothing is before it that 5 could be subtracted from."""
    before = text[: match.start()].rstrip()
    return match[0] if before and (before[-1].isdigit() or before[-1] in ")]}!'%°") else "-"
