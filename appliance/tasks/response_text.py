"""The text of a response: what the model wrote, special tokens included, after what its prompt had begun of it.

Of many models `<think>`, `<answer>` or `<tool_call>` are special tokens, which a decoder leaves out on request
for plain text. So only the end of a response is left out here: padding, and all from the first token that ends the
sequence or the turn, behind which a model may write another turn. And many chat templates end a prompt with an opened
tag, such as `<think>`: the model writes what comes after it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

from appliance.tasks.templates import OF_A_PROGRAM

_QUESTION, _ANSWER = "what is asked here", "what is answered here"
_ANSWERED = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
_TAG = re.compile(r"</?([A-Za-z][\w:-]*)>")
_OF_AN_ANSWER = re.compile(r"(?i)think|thought|reason|analysis|answer|solution")  # in the name of a tag
_OF_TURNS = ("s", "bos", "eos", "system", "user", "human", "assistant", "model", "bot", "start_of_turn", "end_of_turn")


class ResponseReader:
    """Makes text of token ids."""

    begun: str
    """Beginning of the text of each response, for the prompt ends with it; mostly empty."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        self._ends = {tokenizer.eos_token_id, _end_of_turn(tokenizer)}
        self._padding = tokenizer.pad_token_id
        self.begun = begun_by_prompt(tokenizer)

    def text(self, token_ids: Sequence[int], *, finished: bool) -> str:
        """Return the text of a response. finished: whether the last token ended the response, whatever it is."""
        ids = list(token_ids[:-1] if finished else token_ids)
        ids = list(itertools.takewhile(lambda token: token not in self._ends, ids))
        while ids and ids[-1] == self._padding:
            ids.pop()
        return self.begun + self._decode(ids)


def begun_by_prompt(tokenizer: Any) -> str:
    """Return the tags of its answer that a prompt ends with: `<think>` and a line end, or an empty `<think></think>`.
    Empty for most models, and for one whose chat template fails: the making of the data says why."""
    prompt = _rendered(tokenizer, [{"role": "user", "content": _QUESTION}], add_generation_prompt=True)
    plain = _rendered(tokenizer, [{"role": "user", "content": _QUESTION}], add_generation_prompt=False)
    _, _, opening = prompt.rpartition(_QUESTION)
    if prompt == plain:  # the template always begins an answer
        plain = plain.removesuffix(opening)
    of_turns = {*_OF_TURNS, *_TAG.findall(plain), *_tags_around_answers(tokenizer)}
    tags = (match for match in _TAG.finditer(opening) if match[1] not in of_turns)
    return opening[first.start() :] if (first := next(tags, None)) else ""


def _tags_around_answers(tokenizer: Any) -> set[str]:
    """Find the names of tags that are open where an answer that is given begins, such as `<AI>`: the template has them
    before any answer. `<think>` may be one, and is begun all the same."""
    _, _, behind = _rendered(tokenizer, _ANSWERED, add_generation_prompt=False).rpartition(_QUESTION)
    before, _, _ = behind.partition(_ANSWER)
    names = {match[1] for match in _TAG.finditer(before) if not _OF_AN_ANSWER.search(match[1])}
    return {name for name in names if before.rfind(f"</{name}>") < before.rfind(f"<{name}>")}


def _end_of_turn(tokenizer: Any) -> int | None:
    """Return the special token that the chat template puts behind an answer; None where that is none."""
    _, _, behind = _rendered(tokenizer, _ANSWERED, add_generation_prompt=False).rpartition(_ANSWER)
    ids = tokenizer(behind.strip(), add_special_tokens=False)["input_ids"] if behind.strip() else []
    added = set(tokenizer.get_added_vocab().values())
    return ids[0] if ids and (ids[0] in added or ids[0] in tokenizer.all_special_ids) else None


def _rendered(tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    """Render messages; empty where the chat template does not take them."""
    import jinja2

    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    except (jinja2.TemplateError, *OF_A_PROGRAM):
        return ""
