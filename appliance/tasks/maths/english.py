"""English words that change what a number beside them says: one list for all who read answers.

`12 apples` answers 12, but `7 halves`, `7 below zero` or `not 7` does not answer 7. A text with one of these words is
read as words, or not at all.
"""

from __future__ import annotations

import re


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


NUMBERS = _set(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety lakh lakhs crore crores"
)
FRACTIONS = _set(
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth "
    "eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths"
)
OPERATORS = _set(
    "plus minus times divided multiplied multiple multiples over by choose mod modulo remainder factorial squared "
    "cubed point power negative twice double triple thrice reciprocal inverse opposite square cube root log logarithm "
    "sine cosine tangent absolute percent repeating recurring raised without base ratio versus vs"
)
COMPARISONS = _set(
    "less fewer more greater smaller larger higher lower least most than below above under over up exceeds exceeding "
    "beyond few too almost nearly between within max min maximum minimum at"
)
DENIALS = _set(
    "no not never neither nor none cannot wrong incorrect false except excluding unless rejected reject rejects "
    "eliminated invalid impossible failed fail fails isnt instead rather"
)
HEDGES = _set(
    "or maybe perhaps possibly alternatively either another if where when suppose guess might may could "
    "wait actually mistake correction reflection sorry otherwise but"
)
GREEK = _set("alpha beta gamma delta epsilon theta lambda mu pi rho sigma tau phi chi psi omega")
FUNCTIONS = _set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp sqrt gcd lcm max min det")

NO_PART_OF_A_NAME = DENIALS | HEDGES | (COMPARISONS - {"at", "min", "max", "maximum", "minimum", "least"}) | FUNCTIONS
NO_PART_OF_A_UNIT = (
    NUMBERS
    | FRACTIONS
    | (OPERATORS - {"square", "cube", "squared", "cubed", "percent"})
    | (COMPARISONS - {"at", "more"})
    | DENIALS
    | HEDGES
    | GREEK
    | FUNCTIONS
    | _set("is are was and such given gross")
) - {"min", "second", "seconds"}
_OF_A_VALUE = re.compile(
    r"(?i)\b(?:square|cube|root|half|third|quarter|twice|double|triple|reciprocal|inverse|opposite|negative|minus|"
    r"factorial|logarithm|log|sine|cosine|tangent|multiple|power|absolute|at\s+least|at\s+most)\b(?!\s+(?:feet|foot|"
    r"inch\w*|units?|cm|meters?|metres?))"
)


CORRECTION = re.compile(
    r"(?i)\b(?:wait|actually|i\s+made\s+a|correction|sorry|(?:up)?on\s+(?:reflection|second\s+thought)|"
    r"(?:that|this|it)(?:'s|\s+is|\s+was)\s+(?:wrong|incorrect|not\s+right|a\s+mistake))\b"
)
GUESS = re.compile(
    r"(?i)\b(?:maybe|perhaps|possibly|could|might|guess\w*|suppose|alternatively|reject\w*|fails?|failed|excluded?|"
    r"eliminated?|impossible|except|unless)\b"
)


def words_of(text: str) -> set[str]:
    """Return the words of a text, in small letters."""
    return set(re.findall(r"[a-z]+", text.lower()))


def is_name(text: str) -> bool:
    """Tell whether words can name a value and leave it what it is: `Total cost`, but no `Half of` and no `Not`."""
    if re.search(r"(?i)\b(?:square|cube|area|number|side|perimeter|volume)s?\s*$", text):
        text = re.sub(r"(?i)\b(?:square|cube)s?\s*$", "", text)
    return "n't" not in text and not _OF_A_VALUE.search(text) and NO_PART_OF_A_NAME.isdisjoint(words_of(text))
