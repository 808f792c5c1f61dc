"""Every message's text is in the prompt, the day is the run's, and what the prompt leaves to the model is told."""

from __future__ import annotations

import datetime
import json
import shutil
import time
from pathlib import Path

import mistral_common
import pytest
from plans import HOST
from transformers import PreTrainedTokenizerFast

from appliance.errors import RecipeError
from appliance.plan.build import build_plan
from appliance.preflight.template import TemplateChild
from appliance.recipe.load import load_recipe
from appliance.recipe.schema import Recipe
from appliance.record.plan import RunPlan
from appliance.tasks import templates
from appliance.tasks.prepare import prompt_ids
from appliance.tasks.rows import Problem
from appliance.tasks.templates import TemplateFacts, conversation, examine, text_problem
from appliance.tasks.tiny_model import byte_tokenizer, save_tokenizer
from appliance.terms.clock import clock_of

BEGIN, END = "<|im_start|>{{ m.role }}\n", "<|im_end|>\n"
ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
USER, SYSTEM, TURNS = ("user",), ("system", "user"), ("system", "user", "assistant", "user")
OTHER_HINT = "mend it in a chat_template.jinja in the model's folder, which comes before the tokenizer's own"
SYSTEM_HINT = "a model without system messages needs task.system null, and none in the rows"
PARTS_HINT = (
    "the template reads messages in parts, and those of a task are text: write {{ message.content }} in it, in a "
    "chat_template.jinja in the model's folder"
)


def chat(content: str, *, before: str = "", each: str = "m in messages") -> str:
    return f"{before}{{% for {each} %}}{BEGIN}{content}{END}{{% endfor %}}{ANSWER}"


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(max_positions=64)
    tokenizer.chat_template = template
    return tokenizer


# Templates as models bring them: what they do to messages is meant.
THINKS = "{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip() }}"
THINKS += "{% else %}{{ m.content }}{% endif %}"
SYSTEM_LAST = (
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] {% if loop.last and "
    "messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GOOD = {
    "plain": chat("{{ m.content }}"),
    "trims": chat("{{ m.content | trim }}"),
    "drops thinking": chat(THINKS),
    "moves the system message": SYSTEM_LAST,
    "names the date": chat("{{ m.content }}", before="Today: {{ strftime_now('%d %b %Y %H:%M:%S.%f') }}\n"),
    "text alone": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "both forms": chat("{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"),
}
# (a template, the roles of the messages, why it is refused, the remedy): each loses or changes a text.
LOSES = [
    (chat("{% for p in m.content %}{{ p.text }}{% endfor %}"), USER, "it leaves out the user message", PARTS_HINT),
    (chat("{{ m.text }}"), USER, "it leaves out the user message", OTHER_HINT),
    (chat("{{ m.content[:2000] }}"), USER, "it does not have all of the user message", OTHER_HINT),
    (chat("{{ m.content | truncate(255) }}"), USER, "it does not have all of the user message", OTHER_HINT),
    (chat("{{ m.content.split('\n')[0] }}"), USER, "it does not have all of the user message", OTHER_HINT),
    (chat("{{ m.content | lower }}"), USER, "it changes the case of the user message", OTHER_HINT),
    (chat("{{ m.content | replace('\n', ' ') }}"), USER, "it changes the spaces in the user message", OTHER_HINT),
    (chat("{{ m.content.split() | join(' ') }}"), USER, "it changes the spaces in the user message", OTHER_HINT),
    (chat("{{ m.content | e }}"), USER, "it leaves out the user message", OTHER_HINT),
    (chat("{{ m.content | striptags }}"), USER, "it leaves out the user message", OTHER_HINT),
    (chat("{{ m.content | tojson }}"), USER, "it leaves out the user message", OTHER_HINT),
    (chat("{{ m.content }}", each="m in messages[1:]"), USER, "it leaves out the user message", OTHER_HINT),
    (chat("{{ m.content }}", each="m in messages[-1:]"), TURNS, "it leaves out the system message", SYSTEM_HINT),
    (
        chat("{{ m.content }}", each="m in [messages[0], messages[-1]]"),
        TURNS,
        "it leaves out message 2 of 4 (user)",
        OTHER_HINT,
    ),
    (chat("{{ m.content if m.role != 'assistant' }}"), TURNS, "it leaves out the assistant message", ""),
    (chat("{{ m.content }}", each="m in messages | reverse"), TURNS, "it puts in another place", ""),
    (
        chat("{{ m.content }}", each="m in messages if m.role != 'system'"),
        SYSTEM,
        "it leaves out the system message",
        "",
    ),
    (chat("{{ raise_exception('no system') if m.role == 'system' }}{{ m.content }}"), SYSTEM, "no system", SYSTEM_HINT),
    (
        chat("{{ raise_exception('roles must alternate') if messages | length > 2 }}{{ m.content }}"),
        ("user", "assistant", "user"),
        "roles must alternate",
        OTHER_HINT,
    ),
    (chat("{{ m.content }}{{ 1 / 0 }}"), USER, "division by zero", OTHER_HINT),
    (
        chat("{{ m.content }}{{ range(10 ** 4) | random }}"),
        USER,
        "it makes another prompt of the same messages each time",
        OTHER_HINT,
    ),
]


def test_templates_that_lose_a_text_are_refused(record_property: pytest.RecordProperty) -> None:
    refused = 0
    for template, roles, why, remedy in LOSES:
        found = examine(tokenizer_with(template), conversations=[USER, roles], date="")
        assert why in found.problem, (template, found)
        assert not remedy or found.remedy == remedy, (template, found)
        refused += 1
    record_property("said", f"templates that lose or change a text: {len(LOSES)}, refused: {refused}")
    assert refused == len(LOSES) == 21


@pytest.mark.parametrize("name", GOOD)
def test_what_templates_are_made_for_is_taken(name: str) -> None:
    found = examine(tokenizer_with(GOOD[name]), conversations=[USER, SYSTEM, TURNS], date="2026-11-28")
    assert (found.problem, found.begin_of_answer, found.tokens) == ("", "", 259)


def test_thinking_of_an_earlier_answer_may_go_and_its_text_may_not() -> None:
    said = (("user", "a"), ("assistant", "<think>\nwhy\n</think>\n\nb b"), ("user", "c"))
    assert text_problem(said, "a / b b / c") == ""
    assert text_problem(said, "a / c") == "it leaves out the assistant message"
    assert text_problem((("user", "<think>x</think> y"),), "y") == "it leaves out the user message"


def test_each_row_is_looked_at_where_it_is_counted() -> None:
    """What a tried message does not show: this template cuts long texts only, and one row is long."""
    cuts = tokenizer_with(chat("{{ m.content[:30000] }}"))
    assert examine(cuts, conversations=[USER], date="").problem == ""
    assert prompt_ids(Problem("short", "1"), tokenizer=cuts)
    with pytest.raises(RecipeError) as raised:
        prompt_ids(Problem("x" * 30001, "1"), tokenizer=cuts)
    message = f"the model's chat template does not take `{'x' * 60}` (user): it does not have all of the user message"
    assert raised.value.problems == [(f"model.path: {message}", OTHER_HINT)]


def test_a_prompt_without_a_generation_prompt_is_told() -> None:
    without = chat("{{ m.content }}").removesuffix(ANSWER)
    found = examine(tokenizer_with(without), conversations=[USER], date="")
    assert (found.problem, found.begin_of_answer) == ("", "<|im_start|>assistant")
    assert found.no_generation_prompt == (
        "the chat template has no generation prompt: it renders the same with and without add_generation_prompt, so "
        "the model has to write `<|im_start|>assistant` itself before it answers"
    )


def test_a_date_is_the_same_at_any_second_and_another_on_another_day() -> None:
    tokenizer = tokenizer_with(GOOD["names the date"])
    ids = [prompt_ids(Problem("1 + 2?", "3"), tokenizer=tokenizer, date="2026-11-28")]
    time.sleep(0.002)
    ids += [prompt_ids(Problem("1 + 2?", "3"), tokenizer=tokenizer, date=date) for date in ("2026-11-28", "2026-11-29")]
    assert ids[0] == ids[1] != ids[2]
    assert "Today: 28 Nov 2026 00:00:00.000000" in tokenizer.decode(ids[0])
    assert clock_of(tokenizer_with(GOOD["plain"]), date="2026-11-28") == {}, "others get nothing that they do not know"


def model_folder(folder: Path, template: str) -> Path:
    tokenizer = save_tokenizer(folder, max_positions=512)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def heard(recipe: Recipe, *, run_dir: Path) -> TemplateFacts:
    with TemplateChild() as child:
        child.start(build_plan(recipe, run_dir=run_dir, host=HOST))
        return child.hear()


def test_the_child_of_preflight_looks_at_the_rows_conversations(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", chat("{{ m.content }}", each="m in messages if m.role != 'system'"))
    rows = [
        {"prompt": "1 + 2?"},
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2"}]},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps({**row, 'answer': '3'})}\n" for row in rows))
    recipe = load_recipe(
        "arithmetic-tiny-int8",
        sets=(
            *("model.builtin=null", f"model.path={model}", "task.kind=own", f"task.train_file={data}"),
            *("task.prompt=prompt", "task.truth=answer", "task.rewards=[{name: number}]"),
        ),
    )
    facts = heard(recipe, run_dir=tmp_path / "run")
    why = "the model's chat template does not take messages of system, user: it leaves out the system message"
    assert (facts.problem, facts.remedy, facts.tokens) == (why, SYSTEM_HINT, 259)


@pytest.mark.parametrize(
    ("rewards", "most", "message"),
    [
        (
            "[{name: number}]",
            2,
            "in 1 of the first 5 problems the right answer has more tokens than a response may have, 2",
        ),
        (
            "[{name: math}]",
            1,
            "in 2 of the first 5 problems the right answer has more tokens than a response may have, 1",
        ),
        ("[{name: number}]", 3, ""),
        ("[{name: format}]", 1, ""),  # it reads no truth
        ("[{name: code}]", 1, ""),
        ("[{name: exact, weight: 0}, {name: format}]", 1, ""),
        (
            "[{name: exact}]",
            20,
            "in 1 of the first 5 problems the right answer has more tokens than a response may have, 20",
        ),
    ],
)
def test_right_answers_that_no_response_can_hold_are_told(
    tmp_path: Path, rewards: str, most: int, message: str
) -> None:
    """A byte is a token here. Of several right answers the shortest counts. A solution is no answer but for `exact`."""
    data = tmp_path / "rows.jsonl"
    answers = ["3", "83", "100", ["4", "1000"], "So many words before it.\n#### 100"]
    data.write_text("".join(f"{json.dumps({'q': f'{n}?', 'a': a})}\n" for n, a in enumerate(answers)))
    sets = ("task.kind=own", f"task.train_file={data}", "task.prompt=q", "task.truth=a", f"task.rewards={rewards}")
    recipe = load_recipe("arithmetic-tiny-int8", sets=(*sets, f"task.max_response_tokens={most}"))
    plan = build_plan(recipe, run_dir=tmp_path / "run", host=HOST)
    longer = {1: "`83` has 2", 2: "`100` has 3", 20: "`So many words before it.\n#### 100` has 33"}
    assert templates._facts(plan).long_truths == (f"{message}: {longer[most]}" if message else "")


@pytest.mark.parametrize(
    ("most", "more", "message"),
    [
        (
            4,
            (),
            "3 of the first 4 problems have prompts of more than 4 tokens, the chat template's included, and are left "
            "out",
        ),
        (5, (), ""),  # two of four are too long
        (4, ("task.long_prompts=truncate",), ""),
    ],
)
def test_prompts_most_of_which_are_too_long_are_told(
    tmp_path: Path, most: int, more: tuple[str, ...], message: str
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps({'q': 'x' * (3 + n), 'a': '1'})}\n" for n in range(4)))  # 4 to 7 tokens
    sets = (
        "task.kind=own",
        f"task.train_file={data}",
        "task.prompt=q",
        "task.truth=a",
        "task.rewards=[{name: number}]",
    )
    recipe = load_recipe("arithmetic-tiny-int8", sets=(*sets, f"task.max_prompt_tokens={most}", *more))
    plan = build_plan(recipe, run_dir=tmp_path / "run", host=HOST)
    found = templates._facts(plan).long_prompts
    assert found == (f"{message}; the longest has 7" if message else "")


def test_a_row_that_the_template_refuses_is_left_to_the_making_of_the_data(tmp_path: Path) -> None:
    model = model_folder(
        tmp_path / "model", chat("{{ raise_exception('no') if 'nought' in m.content }}{{ m.content }}")
    )
    data = tmp_path / "rows.jsonl"
    data.write_text('{"q": "nought", "a": "1"}\n{"q": "n1", "a": "2"}\n')
    sets = ("task.kind=own", f"task.train_file={data}", "task.prompt=q", "task.truth=a", "task.rewards=[{name: exact}]")
    sizes = ("task.max_prompt_tokens=4", "model.builtin=null", f"model.path={model}")
    recipe = load_recipe("arithmetic-tiny-int8", sets=(*sets, *sizes))
    facts = templates._facts(build_plan(recipe, run_dir=tmp_path / "run", host=HOST))
    assert facts.problem == ""
    assert facts.long_prompts.startswith("1 of the first 1 problem have prompts of more than 4 tokens")


@pytest.mark.parametrize("content", ["{}", "<!doctype html>", '{"model": 3, "added_tokens": []}'])
def test_a_tokenizer_that_cannot_be_loaded_is_told(content: str, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", GOOD["plain"])
    (model / "tokenizer.json").write_text(content)
    recipe = load_recipe("arithmetic-tiny-int8", sets=("model.builtin=null", f"model.path={model}"))
    facts = heard(recipe, run_dir=tmp_path / "run")
    assert facts.problem.startswith(f"{model}: its tokenizer cannot be loaded: ")
    assert facts.remedy == "copy or download the tokenizer's files again"


def test_a_built_in_models_tokenizer_that_cannot_be_loaded_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build_plan(load_recipe("arithmetic-tiny-int8", sets=()), run_dir=tmp_path / "run", host=HOST)

    def refuse(_: RunPlan) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(templates, "load_tokenizer", refuse)
    message = "tiny-arithmetic: its tokenizer cannot be loaded: OSError: no such file"
    assert templates._facts(plan).problem == message


def test_mistrals_own_tokenizer_is_refused_before_the_start(tmp_path: Path) -> None:
    """The file lies beside tokenizer.json and a chat template, and transformers takes it all the same."""
    model = model_folder(tmp_path / "model", GOOD["plain"])
    config = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (model / "config.json").write_text(json.dumps(config))
    shutil.copyfile(Path(mistral_common.__file__).parent / "data" / "tekken_240718.json", model / "tekken.json")
    recipe = load_recipe("arithmetic-tiny-int8", sets=("model.builtin=null", f"model.path={model}"))
    facts = heard(recipe, run_dir=tmp_path / "run")
    assert facts.problem == (
        "tekken.json: transformers reads it by mistral-common, which puts prompts together in code of its own and "
        "takes no chat template: what the model gets cannot be checked"
    )
    (model / "tekken.json").unlink()  # as the remedy says
    assert heard(recipe, run_dir=tmp_path / "run").problem == ""


def test_tried_messages_are_told_apart() -> None:
    texts = [text for _, text in conversation(TURNS)]
    assert len({*texts}) == len(TURNS) and min(map(len, texts)) > 20_000
    assert datetime.date.today().isoformat() not in texts[0]
