"""The text that rewards read: what the model wrote, special tokens included, after what the prompt had begun."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from plans import make_files, make_own_task, make_reward

from appliance.record.plan import CodeFile
from appliance.tasks.code import program_of
from appliance.tasks.library import TASKS
from appliance.tasks.response_text import ResponseReader, begun_by_prompt
from appliance.tasks.rewards import BUILT_IN, load_rewards
from appliance.tasks.task import Response

WORDS = ["<pad>", "<|im_end|>", "<|end|>", "<|im_start|>", "<think>", "</think>", "<answer>", "</answer>", "<|box|>"]
SPECIAL = len(WORDS)
CHATML = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n OPENING{% endif %}"
)


class WordTokenizer:
    """A token a word. It renders and decodes as those of transformers do."""

    def __init__(self, template: str = CHATML.replace(" OPENING", ""), *, eos: str = "<|end|>") -> None:
        self.words = [*WORDS, *map(str, range(100))]
        self.all_special_ids = [*range(SPECIAL)]
        self.eos_token_id, self.pad_token_id = self.words.index(eos), 0
        self._template = jinja2.Template(template, keep_trailing_newline=True)

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool, **given: Any) -> str:
        assert not tokenize
        return self._template.render(messages=messages, raise_exception=_refuse, **given)

    def get_added_vocab(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(WORDS)}

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [self.words.index(word) for word in self.words if text.startswith(word)]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(self.words[token] for token in ids if not (skip_special_tokens and token < SPECIAL))

    def ids(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]


def _refuse(why: str) -> None:
    raise jinja2.TemplateError(why)


@pytest.mark.parametrize(
    ("said", "finished", "text"),
    [
        ("<think> 1 </think> <answer> 2 </answer> <|end|>", True, "<think> 1 </think> <answer> 2 </answer>"),
        ("<|box|> 7 <|box|> <|end|>", True, "<|box|> 7 <|box|>"),
        ("7 <|im_end|>", True, "7"),  # the engine stops there, whatever the tokenizer calls its end
        ("7 <|im_end|>", False, "7"),  # it ended the turn
        ("7 <|end|> <pad> <pad>", False, "7"),
        ("7 <|box|>", True, "7"),  # a token at which the engine was to stop
        ("7 <|box|>", False, "7 <|box|>"),
        ("7 <|im_end|> 8", False, "7"),  # another turn, which nobody asked for
        ("7 <|im_end|> <|box|> <|end|>", True, "7"),
        ("<pad> 7 <pad> 8 <pad>", False, "<pad> 7 <pad> 8"),
        ("<|end|>", True, ""),
        ("", False, ""),
    ],
)
def test_only_what_ends_a_response_is_left_out(said: str, finished: bool, text: str) -> None:
    tokenizer = WordTokenizer()
    assert ResponseReader(tokenizer).text(tokenizer.ids(said), finished=finished) == text


GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{m['role']}}\n{{m['content']}}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n OPENING{% endif %}"
)
ALWAYS = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}<|im_start|>a\n OPENING"
)


@pytest.mark.parametrize("template", [CHATML, GEMMA, ALWAYS])
@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>\n\n</think>\n\n", "<answer>", "<seed:think>"])
def test_the_prompt_may_have_begun_the_answer(template: str, opening: str) -> None:
    assert begun_by_prompt(WordTokenizer(template.replace(" OPENING", opening))) == opening


OF_TURNS = (
    "{% for m in messages %}{{ '<User>' if m['role'] == 'user' else 'BEGIN' }}{{m['content']}}{% endfor %}"
    "{% if add_generation_prompt %}BEGIN OPENING{% endif %}"
)


@pytest.mark.parametrize("begin", ["<AI>", "<reserved_107>", "<Assistant>", "<response>", "<response>\n<x>a</x>"])
@pytest.mark.parametrize("opening", ["", "<think>\n", "<answer>"])
def test_what_stands_before_a_given_answer_is_the_turns(begin: str, opening: str) -> None:
    template = OF_TURNS.replace("BEGIN", begin).replace(" OPENING", opening)
    expected = opening if "<x>" not in begin else f"<x>a</x>{opening}"
    assert begun_by_prompt(WordTokenizer(template)) == expected


@pytest.mark.parametrize("given", ["<think>\n\n</think>\n\n", "<think>\n", ""])
def test_a_thought_is_begun_whatever_a_given_answer_has_before_it(given: str) -> None:
    """Qwen3 puts an empty thought before an answer that has none, and other templates the opened tag alone."""
    template = OF_TURNS.replace("'BEGIN'", f"'<AI>{given}'".replace("\n", "\\n")).replace(
        "BEGIN OPENING", "<AI><think>\n"
    )
    assert begun_by_prompt(WordTokenizer(template)) == "<think>\n"


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[0].content.no.no }}", "hello", ""])
def test_a_template_that_fails_begins_nothing(template: str) -> None:
    assert begun_by_prompt(WordTokenizer(template)) == ""


def test_format_sees_what_the_prompt_had_begun_and_other_trainers_functions_do_not(tmp_path: Path) -> None:
    tokenizer = WordTokenizer(CHATML.replace(" OPENING", "<think>\n"))
    reader = ResponseReader(tokenizer)
    text = reader.text(tokenizer.ids("1 </think> <answer> 7 </answer> <|end|>"), finished=True)
    assert text == "<think>\n1 </think> <answer> 7 </answer>"
    file = tmp_path / "rewards.py"
    file.write_text(
        "def ours(response): return float(response.startswith('<think>'))\n"
        "def verls(data_source, solution_str, ground_truth): return float(solution_str.startswith('1 </think>'))\n"
        "def trls(completions, **_): return [float(completions[0].startswith('1 </think>'))]\n"
    )
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    code = (CodeFile(path=str(file), copy_name="rewards.py", sha256=digest),)
    functions = [make_reward(name, file=str(file)) for name in ("ours", "verls", "trls")]
    task = make_own_task(make_reward("format"), make_reward("number"), *functions)
    response = Response(text, "7", json.dumps({"prompt": "1?"}), begun=reader.begun)
    rewards = load_rewards(task, files=make_files(*code), parts_of_row=lambda row: (row["prompt"], "7"))
    grades = [reward.value(response) for reward in rewards]
    assert grades == [1.0] * 5


def test_length_and_exact_are_of_what_the_model_wrote() -> None:
    task = make_own_task(make_reward("length", target=1), make_reward("exact"))
    response = Response("<think>\n7", "7", json.dumps({"prompt": "1?"}), begun="<think>\n")
    rewards = load_rewards(task, files=make_files(), parts_of_row=lambda row: (row["prompt"], "7"))
    assert [reward.value(response) for reward in rewards] == [1.0] * 2


GPT_OSS = "<|channel|>analysis<|message|>It is 5, no, 3.<|end|><|start|>assistant<|channel|>final<|message|>4"


@pytest.mark.parametrize("reward", ["math", "number", "exact"])
@pytest.mark.parametrize("text", ["4<|im_end|>\n", "<|start_of_answer|>4", "4<\uff5cend\u2581of\u2581sentence\uff5c>"])
def test_special_tokens_do_not_answer(reward: str, text: str) -> None:
    assert BUILT_IN[reward].grade(Response(text, "4")) == 1.0
    assert BUILT_IN[reward].grade(Response(text, "5")) == 0.0


@pytest.mark.parametrize(
    ("reward", "truth", "text"),
    [
        *((reward, "4", GPT_OSS) for reward in ("math", "number")),
        *((reward, "4", "It is 5 + 9: <|begin_of_box|>4<|end_of_box|>") for reward in ("math", "number")),
        ("choice", "B", "<|begin_of_box|>B<|end_of_box|>"),
        ("choice", "B", "B<|im_end|>"),
        ("gsm8k", "4", "#### <|begin_of_box|>4<|end_of_box|><|eot_id|>"),
        ("dapo-math", "4", "Answer: 4<|eot_id|>"),
    ],
)
def test_every_grader_of_answers_reads_what_special_tokens_stand_around(reward: str, truth: str, text: str) -> None:
    assert _grade(reward, text, truth=truth) == 1.0
    assert _grade(reward, text, truth="A" if truth == "B" else "3") == 0.0


def _grade(reward: str, text: str, *, truth: str) -> object:
    if reward in TASKS:
        return TASKS[reward].score(response=text, truth=truth)
    return BUILT_IN[reward].grade(Response(text, truth))


def test_a_special_token_joins_no_digits() -> None:
    assert _grade("number", "1<|box|>2", truth="12") == _grade("math", "1<|box|>2", truth="12") == 0.0
    assert _grade("math", "$0 < |x|$, so \\boxed{0<|x|<4}", truth="0<|x|<4") == 1.0


THOUGHTS = [
    "<think>\n#### ANSWER",
    "<think>\nAnswer: ANSWER</think>",
    "<think>1</think>\n<think>\\boxed{ANSWER}",
    "<|channel|>analysis<|message|>Answer: ANSWER",
]


@pytest.mark.parametrize("reward", ["math", "number", "choice", "gsm8k", "dapo-math"])
@pytest.mark.parametrize("thought", THOUGHTS)
def test_a_thought_is_no_answer(reward: str, thought: str) -> None:
    truth = "B" if reward == "choice" else "4"
    mark = "#### ANSWER" if reward == "gsm8k" else "Answer: ANSWER"
    assert _grade(reward, thought.replace("ANSWER", truth), truth=truth) == 0.0
    answered = f"<think>\nAnswer: 9</think>\n{mark} <think> Answer: 9".replace("ANSWER", truth)
    assert _grade(reward, answered, truth=truth) == 1.0


def test_an_exclamation_mark_is_a_factorial_where_the_truth_is_one() -> None:
    assert _grade("math", "Answer: 5!", truth="5!") == _grade("math", "Answer: $5!$.", truth="$5!$") == 1.0
    assert _grade("math", "Answer: 5!", truth="5") == 1.0
    assert _grade("math", "5! is 120. Answer: 5", truth="5!") == _grade("math", "Answer: 4!", truth="5!") == 0.0


def test_a_program_in_a_thought_is_none() -> None:
    assert program_of("<think>\n```python\nprint(1)\n```").strip() == ""
    assert program_of("<think>\n```python\nprint(1)\n```</think>").strip() == ""
