"""The reward `choice`: which letter, A to J, a response chooses."""

from __future__ import annotations

import re

from appliance.tasks.answers import answer_text, given_alternatives, marked_answer
from appliance.tasks.maths.equality import LONGEST_ANSWER
from appliance.tasks.maths.notation import normal_form
from appliance.tasks.task import Response

_TAIL = 4000  # characters that are searched where no letter is marked


def choice(response: Response) -> float:
    """Return 1.0 when the letter that is chosen last, A to J, is the truth: in a mark of an answer; else in words such
    as `the answer is C`, `C is right`, `I choose C`; else alone on a line; else in brackets.

    The I of who speaks, as in `the answer I get`, is none. Two letters, as in `A or B`, are no choice, one that is
    denied or only supposed is none, and neither is a list of the options."""
    wanted = {read_letter(truth) for truth in given_alternatives(response.truth)}
    return float(_chosen_letter(answer_text(response.text)) in wanted)


_TRUTH = re.compile(r"(?i)[*\s]*(?:(?:option|choice|answer)\s+)?(?:\(\s*([A-J])\s*\)|([A-J])[.):]?)[\s.*]*")
_TRUTH_AND_TEXT = re.compile(r"(?:\(\s*([A-J])\s*\)|([A-J])[.):])\s+\S.*", re.DOTALL)


def read_letter(truth: str) -> str:
    """Read the letter, A to J, that a truth is: `C`, `(C)`, `C. Paris`. Raises ValueError where it is none."""
    plain = normal_form(marked_answer(truth) or truth)
    letter = _TRUTH.fullmatch(plain) or _TRUTH_AND_TEXT.fullmatch(plain)
    if letter is None:
        raise ValueError(f"the truth `{truth[:60]}` is not a letter from A to J")
    return (letter[1] or letter[2]).upper()


_SPEAKER = r"I(?:['\u2019][a-z]|[ \t]+(?!(?:is|was|because|since|as|and|or|for|with|which)\b)[a-z])"
_CAPITAL = rf"(?!{_SPEAKER})(?P<capital>[A-J])(?![A-Za-z'’])"
_SMALL = r"(?P<small>[a-j])(?=\s*\)?\s*[.!*]?\s*(?:$|\n))"
_LETTER = rf"[*(\[{{\s\"']{{0,6}}(?:{_CAPITAL}|{_SMALL})"
_LIKELY = r"(?i:clearly|definitely|certainly|probably|obviously|surely|simply)"
_IS = r"(?:is|are|was|be|must\s+be|should\s+be|would\s+be|will\s+be|seems\s+to\s+be|has\s+to\s+be)"
_CHOSEN = (
    re.compile(
        rf"(?i:\b(?:no|wait|actually|rather|sorry|correction|on\s+(?:second\s+thought|reflection)|final(?=\s*:)))[,:.]?\s*(?i:it['’]s\s+|option\s+)?{_LETTER}(?=[)\].!\"',]|\s*$)"
    ),
    re.compile(
        rf"(?:(?i:\b(?:answer|choice|option|ans))(?i:\s+{_IS})?[*_ \t\"']*[:\-]?[*_]*|<answer>|####|"
        r"答案(?:是|为|：|:)|而是)"
        rf"(?:[ \t\n]*(?i:option|choice|answer|{_LIKELY}))?[ \t\n]*{_LETTER}"
    ),
    re.compile(
        rf"(?i:\b(?:choose|choosing|chose|pick|picking|select|selecting|going\s+with|go\s+with|hence|therefore|thus|so|"
        rf"(?:it|that|this)(?:['’]s|\s+{_IS})))[,:]?(?:\s+(?i:option|choice|answer))?\s*{_LETTER}(?=[\s*)\].!\"']*(?:$|\n|[.,!—–]))"
    ),
    re.compile(
        rf"{_LETTER}[\s*)\].\"']*(?i:\s+(?:is|was)\s+(?:right|correct|true|(?:the\s+|our\s+|my\s+)?(?:right|correct|best|final)?\s*"
        r"(?:answer|choice|option|one)?\b)(?<!\sis )(?<!\sis the )(?<!\sis))"
    ),
)
_ALONE = re.compile(r"(?m)^[*(\[\s\"']*(?P<capital>[A-J])[*)\].:\s\"']*$")
_BRACKETED = re.compile(r"\((?P<capital>[A-J])\)")
_FIRST = re.compile(  # all of a text of one line: a letter, or an option: `B) 12`
    r"\A\s*[*(]*(?:(?P<capital>[A-J])|(?P<small>[a-j]))(?:[*]*[).:][*]*(?:\s+\S.*)?|[*\s]*)\Z"
)
_DENIED = re.compile(
    r"(?i)(?:\bnot|n't|n’t|\bneither|\bnor|\bexcept|\bwrong|\bincorrect|\beliminate\w*|\bexclude\w*|\brules?\s+out|"
    r"\brather\s+than|\binstead\s+of|\bcannot|\bnever|\bif|\bsuppose|\bassum\w+|\bclaim\w*|\bthan|不是|"
    r"\b(?:many|some|people|one|you|others)\s+(?:(?:would|might|may)\s+)?(?:say|think|claim))"
    r"\s*(?:\b(?:is|be|by|the|that|answer|correct|right|choice|option|with|have|been|it|choose|pick|select)\b|[:*(\s])*$"
)
_DENIED_BEHIND = re.compile(
    r"(?i)[\s*)]*:\s*(?:no|wrong|false|incorrect)\b|[\s*)\].\"']*(?:,?\s*(?:which|that)\s+)?\b(?:(?:is|was|are|would\s+be|must\s+be|can)\s*(?:n't|n’t|not|never|wrong|incorrect|"
    r"false|eliminated|ruled|impossible|out|a\s+trap|too)|cannot|can't)|[\s*)\]\"']*\?"
)
_ANOTHER = re.compile(
    r"[\s*)\]}.\"'(]*(?:,?\s*(?:or|and)\b|[,/&;])\s*(?i:option|choice|maybe|perhaps)?[\s*(\[{]*(?:[A-J](?![A-Za-z'])|[b-j](?=[\s.)]*$))"
)
_OTHER_OPTION = re.compile(r"(?<!\bnot)(?<!\bthan)(?<!\bof)\s(\(?)([A-J])[).:](?:\s|$)")
_BEFORE = 60


def _chosen_letter(text: str) -> str:
    """Return the letter that a text chooses; empty where none is chosen."""
    marked = marked_answer(text)
    if marked is not None and (letter := _marked_letter(marked)) is not None:
        return letter
    plain = "\n".join(map(normal_form, text[-_TAIL:].splitlines())).strip()
    for patterns in (_CHOSEN, (_FIRST,), (_ALONE,), (_BRACKETED,)):
        matches = sorted((match for pattern in patterns for match in pattern.finditer(plain)), key=_place)
        if patterns[0] is _BRACKETED:
            matches = _without_options(matches)
        matches = [match for match in matches if not _is_denied(plain, match)]
        if matches:
            chosen, place = matches[-1], _place(matches[-1])
            is_one_of_two = len(matches) > 1 and matches[-2].end() == chosen.start() and patterns[0] is _BRACKETED
            is_list = patterns[0] is _FIRST and _has_other_option(plain, place)
            return "" if is_one_of_two or is_list or _ANOTHER.match(plain, place + 1) else _letter(chosen)
    return ""


def _has_other_option(plain: str, place: int) -> bool:
    """Tell whether an option with another letter, in the same brackets, follows the letter at this place: `A) 5 B)
    6`."""
    opening = "(" if plain[:place].endswith("(") else ""
    options = _OTHER_OPTION.finditer(plain, place + 1)
    return any(option[1] == opening and option[2] != plain[place].upper() for option in options)


def _place(found: re.Match[str]) -> int:
    return found.start("capital") if found["capital"] or "small" not in found.re.groupindex else found.start("small")


def _letter(found: re.Match[str]) -> str:
    return (found["capital"] or found["small"]).upper()


def _is_denied(plain: str, found: re.Match[str]) -> bool:
    place = _place(found)
    return bool(_DENIED.search(plain[max(0, place - _BEFORE) : place]) or _DENIED_BEHIND.match(plain, place + 1))


def _without_options(matches: list[re.Match[str]]) -> list[re.Match[str]]:
    """Drop a list of options, (A), (B), (C) and so on, that the text repeats first."""
    run = 0
    while run < len(matches) and matches[run]["capital"] == "ABCDEFGHIJ"[run]:
        run += 1
    return matches[run:] if run > 2 else matches


_ONE_LETTER = re.compile(
    rf"[*\s\"']*(?:{_LIKELY}\s+)?[(\[]?\s*(?P<letter>[A-Ja-j])\s*[)\]]?(?:[.:,*\"'\s]*|(?:\s*[.:)]|(?<=\)))\s*\S.*)"
)
_LEADING = re.compile(r"(?i)^(?:the\s+)?(?:correct\s+|final\s+)?(?:answer|option|choice)(?:\s+is)?\s*:?\s*")


def _marked_letter(marked: str) -> str | None:
    """Read the letter that a mark marks: empty where it says another thing; None where it is prose to search."""
    if len(marked) > LONGEST_ANSWER:
        return None
    plain = _LEADING.sub("", normal_form(marked).strip()).strip()
    if re.match(_SPEAKER, plain):
        return None
    match = _ONE_LETTER.fullmatch(plain) or re.match(
        r"\(?(?P<letter>[A-J])\)?(?=\s*$|\s*[).:,;&/]|\s+[A-Za-z(])", plain
    )
    if match:
        place = match.end("letter")
        if _has_other_option(plain, place - 1) or _ANOTHER.match(plain, place) or _DENIED_BEHIND.match(plain, place):
            return ""
        return match["letter"].upper()
    return None if " " in plain else ""
