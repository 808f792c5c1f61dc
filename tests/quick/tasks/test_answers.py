"""What a truth or a response answers, before anything is compared."""

from __future__ import annotations

import pytest

from appliance.tasks.answers import marked_answer, truth_alternatives


@pytest.mark.parametrize(
    ("truth", "alternatives"),
    [
        ('["0", "1"]', ("0", "1")),
        (' [" a ", "b", "b", " "] ', (" a ", "b")),
        ("[0,1]", ("[0,1]",)),
        ('["0", 1]', ('["0", 1]',)),
        ("[]", ("[]",)),
        ('["", " "]', ('["", " "]',)),
        ('{"a": "b"}', ('{"a": "b"}',)),
        ("[" * 100_000, ("[" * 100_000,)),
        ("", ("",)),
        ("42", ("42",)),
    ],
)
def test_a_json_list_of_texts_is_any_of_them(truth: str, alternatives: tuple[str, ...]) -> None:
    assert truth_alternatives(truth) == alternatives


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### Step 2: add\nIt is 5.", None),
        ("\\boxed{5}\n######", "5"),
        ("#### 5\n#### done", "5"),
        ("<answer>#### no</answer>", "no"),
        ("\\boxed{\\boxed{7}+1}", "\\boxed{7}+1"),
        ("\\boxed{\\text{Answer: } 5}", "5"),
        ("\\boxed{2} and \\boxed{3}", "2 \\text{ or } 3"),
        ("So \\boxed{2}. Adding 1 gives \\boxed{3}.", "3"),
        ("3 or \\boxed{4}", "3 \\text{ or } 4"),
        ('It says "Answer: 9". Answer: 8', "8"),
        ("<answer>1</answer> or <answer>2</answer>", "1 or 2"),
        ("Answer: 5 (since 2 + 3 = 5)", "5"),
        ("nothing", None),
    ],
)
def test_the_last_mark_of_an_answer_is_read(text: str, answer: str | None) -> None:
    assert marked_answer(text) == answer
