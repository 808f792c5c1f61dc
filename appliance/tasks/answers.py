"""What a truth or a response answers, in text: the alternatives of a truth, what the marks of an answer mark, and what
an unmarked text ends with. Time is linear in the text: degenerate text nests or repeats thousands of marks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from appliance.tasks.maths.english import CORRECTION, DENIALS, GUESS, HEDGES, words_of
from appliance.tasks.maths.notation import normal_form

DEEPEST_MARK = 8
_TAIL = 1000  # characters that are searched where an answer is not marked


def truth_alternatives(truth: str) -> tuple[str, ...]:
    """Return the answers any of which is right: the members of a JSON list of texts such as `["0", "1"]`, blank ones
    and repetitions left out; of any other truth the truth alone.

    `[0,1]` has numbers and stays one truth, an interval. Without any member that is not blank the truth is one as well.
    """
    if not truth.lstrip().startswith("["):
        return (truth,)
    try:
        members = json.loads(truth)
    except (ValueError, RecursionError):
        return (truth,)
    if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
        return (truth,)
    return tuple(dict.fromkeys(member for member in members if member.strip())) or (truth,)


def given_alternatives(truth: str) -> tuple[str, ...]:
    """Return the alternatives of a truth that must be there. Raises ValueError where the row has none."""
    if not truth.strip():
        raise ValueError("the row has no truth to compare with: set task.truth to its field")
    return truth_alternatives(truth)


@dataclass(frozen=True)
class MarkedAnswer:
    """An answer that is marked as one."""

    start: int
    end: int
    """End of the marked characters in the text, which begin at `start`; the mark itself is included."""
    inner: str
    """Text that is marked."""


_BRACES = re.compile(r"\\(?:boxed|fbox|framebox)\s*+\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+(-?[\w.,]*\w|\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})")


def boxes(text: str) -> list[MarkedAnswer]:
    """Find what `\\boxed{}`, `\\fbox{}` and `\\framebox{}` hold, and `\\boxed 5`; of boxes in a box the outer one."""
    spans: list[tuple[int, int, int]] = []  # of each box: its start, that of its inside, and the closing brace's place
    opened: list[tuple[int, int]] = []  # where each brace that is open, or its box, begins, and where its inside does
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            if opened:
                start, inside = opened.pop()
                if inside > start + 1:  # the brace of a box
                    while spans and spans[-1][0] > start:
                        spans.pop()
                    spans.append((start, inside, brace.start()))
        elif brace[0].endswith("{") and brace[0] != "\\{":
            opened.append((brace.start(), brace.end()))
    marks = [MarkedAnswer(start, end + 1, text[inside:end].strip()) for start, inside, end in spans]
    marks += [MarkedAnswer(found.start(), found.end(), found[1]) for found in _BARE_BOX.finditer(text)]
    return sorted(marks, key=lambda mark: mark.start)


_JOINS = re.compile(
    r"(?i)\b(?:and|or|also|other|another|second|third|either|alternatively|maybe|perhaps|possibly|as\s+well\s+as|vs|versus)\b|[,;&]|\A\s*(?:to|/|:|\+)\s*\Z"
)
_MOVES_ON = re.compile(
    r"(?i)\b(?:no|not|wait|actually|so|then|thus|therefore|hence|correct\w*|instead|rather|becomes?|gives?|get|final\w*|"
    r"answer|mistake|step|now|next|finally|plus|minus|times|divided|total|simplif\w*)\b|=>|\\implies|\\Rightarrow|[⇒→]"
)
_FARTHEST = 80  # characters between two boxes that are one answer


def _are_one_answer(between: str) -> bool:
    """Tell whether two boxes with this text between them are two parts of one answer: `and`, `or`, a comma, nothing."""
    plain = re.sub(r"\$|\\[()\[\],;! ]|\*", " ", between).strip(" .\n")
    if len(plain) > _FARTHEST or _MOVES_ON.search(plain):
        return False
    return not plain or _JOINS.search(plain) is not None


def all_boxes(text: str) -> str | None:
    """Return what all boxes of a text hold, as one list; None where it has fewer than two that differ."""
    inners = list(dict.fromkeys(box.inner for box in boxes(text)))
    return " \\text{ and } ".join(inners[-12:]) if len(inners) > 1 else None


_OR_BEFORE = re.compile(r"([^\s$]*\d[^\s$]*)\s*\$?\s*(?:,\s*)?\bor\s+(?:maybe\s+|perhaps\s+)?\$?\s*\Z")
_OR_BEHIND = re.compile(r"\s*\$?\s*(?:,\s*)?or\s+(?:maybe\s+|perhaps\s+)?\$?\s*(-?\\?\$?\d[^\s$]*)")


def last_box(text: str) -> MarkedAnswer | None:
    """Find the last box, with the boxes before it that are parts of the same answer, and with the other answers that it
    is given with: `3 or \\boxed{4}`."""
    marks = boxes(text)
    if not marks or _is_part_of_more(text, marks[-1]):
        return None
    first = len(marks) - 1
    while first and len(marks) - first < 12 and _are_one_answer(text[marks[first - 1].end : marks[first].start]):
        first -= 1
    parts = list(dict.fromkeys(mark.inner for mark in marks[first:]))
    start, end = marks[first].start, marks[-1].end
    if before := _OR_BEFORE.search(text[max(0, start - 60) : start]):
        parts.insert(0, before[1])
    if behind := _OR_BEHIND.match(text[end : end + 60]):
        parts.append(behind[1].rstrip(".,"))
    return MarkedAnswer(marks[-1].start, end, " \\text{ or } ".join(parts))


_OPERATOR_BEFORE = re.compile(
    r"(?:[\d)}=^_/+(]\s*-\s*|(?<![-\w])-|[+^_/≠]\s*|\\(?:cdot|times|div|pm|mp|neq?|sqrt(?:\[\w+\])?|frac\s*\w\s*\{?)\s*|"
    r"(?<![A-Za-z])\d|[\^_]\{|\\frac\s*\{[^{}]*\}\s*\{|\\(?:frac|sqrt)\s*\{)\Z"
)
_OPERATOR_BEHIND = re.compile(
    r"(?:\s*[|)\]}])?\s*(?:\^(?!\s*\{?\s*(?:\\circ|°))|_|!(?=[\w+*/^-])|/\s*[\w\\({]|\+|\*\s*[\w\\]|-\s*(?:\d|\\[a-z]|[a-z]\b)|"
    r"\\(?:cdot|times|div|pm|frac|sqrt|pi|sin|cos|ln)\b)|\.?\d|[A-Za-z](?![A-Za-z])|"
    r"\s*(?:\\text\s*\{\s*)?(?:hundred|thousand|million|billion|dozen)\b|\s*\?|"
    r"\s*(?:is|was|would\s+be)\s+(?:wrong|incorrect|not|false|too)\b"
)
_DENIED_BEFORE = re.compile(r"(?i)(?:\bnot|n['’]t|\bnever|\bcannot)\s+(?:be\s+|equal\s+(?:to\s+)?)?\Z")
_HEDGED_BEHIND = re.compile(
    r"(?i)[\s,;(]*(?:or|alternatively|possibly|perhaps|maybe|as\s+well\s+as|vs\.?|versus)\b[^.\n]{0,40}(?:\d|(?-i:\b[A-J]\b))"
)
_AROUND = 60  # characters around a box that may be of one formula with it


def _is_part_of_more(text: str, box: MarkedAnswer) -> bool:
    """Tell whether a box contains a part of the answer, as in `-\\boxed{4}` and `\\boxed{4}/5`, or one that the text
    takes back, denies or doubts."""
    delimiter = r"\$|\\[()\[\]]|\*\*"
    before = re.sub(delimiter, "", text[max(0, box.start - _AROUND) : box.start]).rpartition("\n")[2]
    behind = re.sub(delimiter, "", text[box.end : box.end + _AROUND])
    is_in_formula = not text[max(0, box.start - 2) : box.start].isspace()
    if _DENIED_BEFORE.search(before) or (is_in_formula and _OPERATOR_BEFORE.search(before)):
        return True
    is_coordinate = before.endswith("(") and behind.lstrip().startswith(",")
    is_factorial = re.match(r"\s*!\s*(?:\$|\\[)\]])", text[box.end : box.end + _AROUND]) is not None
    return bool(
        is_coordinate
        or is_factorial
        or _OPERATOR_BEHIND.match(behind)
        or (_HEDGED_BEHIND.match(behind) and not _OR_BEHIND.match(text[box.end : box.end + _AROUND]))
        or is_corrected(text, box.end)
    )


def is_corrected(text: str, end: int) -> bool:
    """Tell whether the text behind an answer takes it back and says another number or formula."""
    behind = text[end : end + _TAIL]
    correction = CORRECTION.search(behind)
    return correction is not None and re.search(r"\d", behind[correction.end() :]) is not None


_SPECIAL_TOKEN = re.compile(r"<[|\uff5c][A-Za-z][\w\u2581 -]{2,60}[|\uff5c]>")
_BOX_TOKENS = re.compile(r"(?s)<\|begin_of_box\|>((?:(?!<\|begin_of_box\|>).)*?)<\|end_of_box\|>")
_FINAL_CHANNEL = re.compile(r"<\|channel\|>final[^<\n]*<\|message\|>")


def without_thoughts(text: str) -> str:
    """Return what follows the last `</think>`, without a thought that does not end; of channels, as gpt-oss has them,
    the last final one. A thought is no answer, also where nothing follows."""
    if "<|channel|>" in text:
        finals = list(_FINAL_CHANNEL.finditer(text))
        text = text[finals[-1].end() :] if finals else ""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def answer_text(text: str) -> str:
    """Return the part of a response that answers, as graders read it: without thoughts and without special tokens such
    as `<|im_end|>`. Those of GLM that mark an answer, `<|begin_of_box|>4<|end_of_box|>`, are a box."""
    boxed = _BOX_TOKENS.sub(lambda match: f"\\boxed{{{match[1].strip()}}}", without_thoughts(text))
    return without_special_tokens(boxed)


def without_special_tokens(text: str) -> str:
    """Replace each special token by a space, so that none joins the text around it."""
    return _SPECIAL_TOKEN.sub(" ", text)


_TAGS = re.compile(r"(?is)<answer>(.*?)</answer>")
_ANSWER = re.compile(r"(?i)\banswer[*_ \t]*[:\uff1a][*_ \t]*(?:\n[*_ \t]*){0,2}([^\n]+)")
_LINE = re.compile(r"(?<!#)####(?!#)[ \t]*+([^\n]*+)")
_NUMBERED = re.compile(
    r"(?!\W*-\W*-)(?:[-+.$({\[\u2212\u2013\uff0d€£¥*`' \t]|\\(?![a-z]))*(?:\\[a-z]++[\s{]*+[-$]*+)?\d"
)
_CLOSING = re.compile(r"(?i)(?=</answer>)")


def last_line(text: str) -> MarkedAnswer | None:
    """Find what follows the last `####` that is followed by a number, on its line; else what the last line of all marks
    so: others are headings."""
    lines = [line for line in _LINE.finditer(text) if re.search(r"\w", line[1])]
    if not lines:
        return None
    line = next((found for found in reversed(lines) if _NUMBERED.match(found[1])), lines[-1])
    if line is lines[-1] and not _NUMBERED.match(line[1]) and text[line.end() :].strip(" \n*.</answer>"):
        return None
    inner = line[1].rpartition("####")[2] if "####" in line[1] else line[1]
    return MarkedAnswer(line.start(), line.end(), number_of_line(inner.strip()))


def answer_line(text: str) -> MarkedAnswer | None:
    """Find what follows the last `Answer:` on its line, or on the next one where that line ends there."""
    lines = list(_ANSWER.finditer(text))
    if not lines:
        return None
    statement = lines[-1]
    answer = re.split(r"(?i)\banswer[*_ \t]*[:\uff1a]", statement[1])[-1]
    answer = _bare(answer)
    sentence = _first_sentence(answer)
    if is_corrected(answer, len(sentence)):
        return None
    return MarkedAnswer(statement.start(), statement.end(), without_aside(sentence))


def _bare(text: str) -> str:
    text = text.strip().strip("*").strip()
    return text.lstrip("} ") if text.startswith("}") else text  # the end of \\text{Answer: }


_PROSE = re.compile(r"((?:USD )?-?(?:USD )?\d[\d,]*(?:\.\d+)?%?)(?![\d.]*\w)(.*)")
_ASIDE = re.compile(
    r"(?<=[\w%.}$)])\s*(?:\((?:not|since|because|as|see|out\s+of|from|i\.e\.|or\s+about|approx\w*|rounded)\b[^()]*\)|"
    r",\s+(?:not|which|that|so|as|because|since|rounded)\b.*)\s*\.?$"
)
_BRACKETED = re.compile(r"(?<=[\w%.])\s*\([^()]*\)\s*\.?$")
_MORE_MATHS = re.compile(
    r"[\d^*=+\\]|(?<![A-Za-z]{2})/(?!\s*[A-Za-z]{3,}\W*$)|\b(?:or|and|not|no|to)\b"
)  # no unit: $5/hour
_FEW_WORDS = 4


def _only_explains(aside: str) -> bool:
    """Tell whether a bracket behind a number says nothing else of it: `(9 times 2)`, but neither `(or 5)` nor
    `(wrong)`."""
    words = words_of(aside)
    if not (DENIALS | HEDGES).isdisjoint(words):
        return False
    return not re.search(r"\d", aside) or bool(words) or re.search(r"\d\s*[-+*/=]", aside) is not None


def number_of_line(line: str) -> str:
    """Return the number that a line begins with, where prose and no more mathematics follows: `72. I am sure`."""
    if len(line) < _TAIL and re.match(r"\W*\d", line):
        line = _BRACKETED.sub(lambda aside: "" if _only_explains(aside[0]) else aside[0], without_aside(line))
    prose = _PROSE.fullmatch(normal_form(line)) if len(line) < _TAIL else None
    if prose is None or _MORE_MATHS.search(prose[2]):
        return line
    return prose[1] if "." in prose[2][:-1] or len(prose[2].split()) > _FEW_WORDS else line


def marked_answer(text: str) -> str | None:
    """Return what the last mark of an answer marks: `#### x`, `\\boxed{x}`, `Answer: x` or `<answer>x</answer>`.

    Boxes that are one answer, as in `\\boxed{2} and \\boxed{3}`, are a list of them. Of `####` the last one with a
    number, as in GSM8K. A mark within a mark, such as a box in the tags, is read too, eight deep at most.
    """
    answer = None
    for _ in range(DEEPEST_MARK):
        inner = _outermost_answer(text)
        if inner is None or (answer is not None and is_part(inner, whole=text)):
            break
        answer = text = inner
    return answer


def is_part(inner: str, *, whole: str) -> bool:
    """Tell whether a mark within a mark contains only a part of the answer: the 7 of `\\boxed{\\boxed{7}+1}`."""
    if re.match(r"(?i)\W*(?:not|never)\b", whole):
        return True
    rest = re.sub(r"\\[A-Za-z]*(?:box|text)[A-Za-z]*|####", "", whole).replace(inner, "", 1)
    return (
        whole.count("\\boxed") + whole.count("\\fbox") > 0
        and re.search(r"[\d+*/^=<>]|\\frac|\\sqrt|-\s*\\", rest) is not None
    )


def _joined_tags(text: str, marks: list[MarkedAnswer]) -> list[MarkedAnswer]:
    """Return the last of the tags, with the one before it where `or` joins them."""
    if len(marks) > 1 and re.fullmatch(r"\s*(?:or|and|,)\s*", text[marks[-2].end : marks[-1].start]):
        return [MarkedAnswer(marks[-1].start, marks[-1].end, f"{marks[-2].inner} or {marks[-1].inner}")]
    return marks[-1:]


def _outermost_answer(text: str) -> str | None:
    text = _CLOSING.sub("\n", text)  # another mark within the tags ends there
    end = max((found.start() for found in _CLOSING.finditer(text)), default=0) + len("</answer>")
    marks = _joined_tags(
        text, [MarkedAnswer(found.start(), found.end(), found[1].strip()) for found in _TAGS.finditer(text, 0, end)]
    )
    # Each tag behind `end` would read to the end of the text.
    marks += [mark for mark in (answer_line(text), last_line(text), last_box(text)) if mark is not None]
    if not marks:
        return None
    last = max(marks, key=lambda mark: mark.start)
    if is_corrected(text, last.end):
        return None
    around = [mark for mark in marks if mark.start < last.start and last.end <= mark.end]
    return _bare(min(around, key=lambda mark: mark.start).inner if around else last.inner)


_STATES = re.compile(
    r"(?i)(?:\b(?P<strong>answer|result)|\b(?:solution|total|sum|value|roots?|solutions))\b[^.\n:=]{0,60}?"
    r"(?:\bis\b|\bare\b|\bequals\b|:|=)(?!\s*$)\s*(?P<said>[^\n]+)|答案(?:是|为|:)?\s*(?P<chinese>[^\n]+)"
)
_SUBJECT = re.compile(r"(?i)\b(?:answer|result|solution|total|sum|value|roots?|solutions)\b|答案")
_CORRECTED = re.compile(r"(?i)\b(?:no|wait|actually|sorry|mistake|correction|instead|rather)\b")
_DENIES = re.compile(r"(?i)\b(?:not|never|cannot|wrong|incorrect)\b|n't\b")
_SEGMENT = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$])\$(?![\d ][^$]*\s\$)([^$\n]+?)(?<!\\)\$(?!\d)", re.DOTALL
)
_SENTENCE_END = re.compile(r"(?<!\b[A-Za-z])(?<!\betc)\.\s+(?=[A-Z(\"'])|[!?](?:\s|$)|\n")


def stated_answer(text: str) -> str | None:
    """Return what the last `the answer is` of a text says, or what its last sentence says about a total or the like;
    without what explains it. None where nothing says so, or a correction follows."""
    last = len(text) - len(_last_sentence(text)) - 3
    for subject in reversed(list(_SUBJECT.finditer(text))):
        statement = _STATES.match(text, subject.start())
        if statement is None or not (statement["strong"] or statement["chinese"] or subject.start() >= last):
            continue
        answer = statement["said"] or statement["chinese"]
        sentence = _first_sentence(answer)
        behind = answer[len(sentence) :] + text[statement.end() :]
        if _CORRECTED.search(behind) or CORRECTION.search(behind) or re.search(r"(?i)\b(?:or|maybe|perhaps)\b", behind):
            return None
        return without_aside(sentence)
    return None


def last_sentence(text: str) -> str:
    """Return the last sentence of a text; empty where it denies something, asks or guesses."""
    tail = text[-_TAIL:].rstrip()
    sentence = _last_sentence(tail)
    return "" if tail.endswith("?") or _DENIES.search(sentence) or GUESS.search(sentence) else sentence


def unmarked_answers(text: str) -> list[str]:
    """Find what the end of an unmarked text may answer, the first of these that is there: what it states as the answer,
    else its last mathematics in dollar signs with what is joined to it, else what follows the last =, `is` or `are`,
    else nothing."""
    tail = text[-_TAIL:].rstrip()
    if (stated := stated_answer(tail)) is not None:
        return [stated]
    if not last_sentence(tail):
        return []
    segments = [found for found in _SEGMENT.finditer(tail)]
    if segments and not re.search(r"\d", tail[segments[-1].end() :]):
        last = len(segments) - 1
        while last and re.fullmatch(
            r"\s*(?:,|and|or|, and|, or)\s*", tail[segments[last - 1].end() : segments[last].start()]
        ):
            last -= 1
        return [tail[segments[last].start() : segments[-1].end()]]
    sentence = _last_sentence(tail)
    if re.search(r"[A-Za-z]\s*\^[^=]*=|\d[A-Za-z]\b[^=]*=", sentence):
        return []  # 2x = 4 does not say what x is
    return [part for part in re.split(r"=|≈|\bis\b|\bare\b|\bequals\b|:(?!\d)", sentence)[-1:] if part.strip()]


def without_aside(text: str) -> str:
    """Return the text without what explains it: `8, not 7`, `5 (since 2 + 3 = 5)`."""
    return _ASIDE.sub("", text) if len(text) < _TAIL else text


def _first_sentence(text: str) -> str:
    return _SENTENCE_END.split(text, maxsplit=1)[0].strip().rstrip(".!")


def _last_sentence(text: str) -> str:
    parts = [part for part in _SENTENCE_END.split(text) if part.strip()]
    return parts[-1].strip().rstrip(".!") if parts else ""
