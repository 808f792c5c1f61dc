"""The tokenizer that a GGUF file has, as transformers loads one.

transformers' own conversion is not used: it takes GPT-2's way of cutting a text into words for every tokenizer of
`llama`, whatever the file says (`tokenizer.ggml.pre`), and swaps the tokens that begin and end a text, so that rollouts
would never end. What a file says is made of its own entries here, and what it does not say is refused.

Two kinds are known: `gpt2`, byte-level BPE with merges, and `llama`, SentencePiece's BPE, whose merges follow from the
scores of its pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.gguf.header import GgufError, Header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_BYTE_LEVEL, _PIECES = "gpt2", "llama"  # kinds of tokenizers, `tokenizer.ggml.model`
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # kinds of tokens, `tokenizer.ggml.token_type`
_PADDING_NAMES = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|endoftext|>", "<unk>")
_SPACE = "▁"
_WHOLE_MODEL = "use the model's own folder from the hub as model.path"

_GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By `tokenizer.ggml.pre`: the patterns that cut a text into words, one after the other.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_CL100K % "1",),
    "deepseek-r1-qwen": (_CL100K % "1",),
    "llama-bpe": (_CL100K % "1,3",),
    "llama3": (_CL100K % "1,3",),
    "llama-v3": (_CL100K % "1,3",),
}
_COMPOSED = frozenset({"qwen2"})  # whose text is composed (NFC) first
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})  # a word that is a token is not merged from parts


def chat_template(header: Header) -> str:
    """Return the chat template; empty where the file has none."""
    return header.text(_TEMPLATE)


def check_tokenizer(header: Header) -> None:
    """Check the tokenizer of a file. Raises GgufError where the file does not say, or not in a known form, how text
    becomes tokens."""
    kind = header.text(f"{_PREFIX}model")
    if kind not in (_BYTE_LEVEL, _PIECES):
        stands = f"is `{kind}`; `{_BYTE_LEVEL}` and `{_PIECES}` are read" if kind else "is not there"
        raise GgufError(f"its tokenizer ({_PREFIX}model) {stands}", hint=_WHOLE_MODEL)
    tokens, kinds = _list(header, "tokens", kind=str), _list(header, "token_type", kind=int)
    if len(kinds) != len(tokens):
        raise GgufError(f"it has {len(tokens)} tokens and {len(kinds)} kinds of tokens", hint=_WHOLE_MODEL)
    if len(set(tokens)) != len(tokens):
        raise GgufError(f"{len(tokens) - len(set(tokens))} of its tokens are there twice", hint=_WHOLE_MODEL)
    rows = embedding.shape[-1] if (embedding := header.tensors.get("token_embd.weight")) else len(tokens)
    if len(tokens) > rows:
        raise GgufError(f"it has {len(tokens)} tokens, and its model {rows} rows for them", hint=_WHOLE_MODEL)
    if kind == _BYTE_LEVEL:
        _check_merges(header, known=set(tokens))
    elif len(_list(header, "scores", kind=float)) != len(tokens):
        raise GgufError("it does not have one score for each of its tokens", hint=_WHOLE_MODEL)
    end = header.number(f"{_PREFIX}eos_token_id")
    if end is None or not 0 <= end < len(tokens):
        fact = f"it does not say which of its tokens ends an answer ({_PREFIX}eos_token_id)"
        raise GgufError(fact, hint=_WHOLE_MODEL)
    if (turn_end := header.metadata.get(f"{_PREFIX}eot_token_id", end)) != end:
        fact = (
            f"it names two tokens that end an answer ({_PREFIX}eos_token_id is {end}, {_PREFIX}eot_token_id "
            f"{turn_end!r:.40}); what is read has one"
        )
        raise GgufError(fact, hint=_WHOLE_MODEL)
    special_tokens(header)


def _check_merges(header: Header, *, known: set[str]) -> None:
    pre = header.text(f"{_PREFIX}pre")
    if pre not in _WORDS:
        stands = f"is `{pre}`; {', '.join(_WORDS)} are read" if pre else "is not there"
        raise GgufError(f"how it cuts a text into words ({_PREFIX}pre) {stands}", hint=_WHOLE_MODEL)
    for merge in _list(header, "merges", kind=str):
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= known:
            raise GgufError(f"its merge `{merge[:60]}` is not made of its tokens", hint=_WHOLE_MODEL)


def _list(header: Header, name: str, *, kind: type) -> list[Any]:
    value = header.metadata.get(f"{_PREFIX}{name}")
    if not isinstance(value, list) or not value or not all(type(item) is kind for item in value):
        raise GgufError(f"a part of its tokenizer is missing ({_PREFIX}{name})", hint=_WHOLE_MODEL)
    return value


def special_tokens(header: Header) -> dict[str, str]:
    """Return the special tokens by the names that transformers has for them. header: that check_tokenizer passed.
    Raises GgufError where no token is left for padding.

    Padding is a token that never ends an answer: otherwise padding would count as part of the answer. A file often has
    the same for both; then it is another of its control tokens: one of a usual name, else one that the chat template
    does not write.
    """
    tokens: list[str] = _list(header, "tokens", kind=str)
    kinds: list[int] = _list(header, "token_type", kind=int)
    by_role = {}
    for name, key in {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}.items():
        number = header.number(f"{_PREFIX}{key}_token_id")
        if number is not None and 0 <= number < len(tokens):
            by_role[name] = tokens[number]
    if by_role.get("pad_token", by_role["eos_token"]) == by_role["eos_token"]:
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _UNKNOWN)]
        free = [token for token in special if token not in (by_role["eos_token"], by_role.get("bos_token"))]
        usual = [name for name in _PADDING_NAMES if name in special and name != by_role["eos_token"]]
        unwritten = [token for token in free if token not in chat_template(header)]
        candidates = [*usual, *unwritten, *free]
        if not candidates:
            fact = "it has no control token for padding besides those that begin and end a text"
            raise GgufError(fact, hint=_WHOLE_MODEL)
        by_role["pad_token"] = candidates[0]
    return by_role


def load_tokenizer(header: Header) -> PreTrainedTokenizerFast:
    """Make the tokenizer as transformers has it, with its chat template. header: that check_tokenizer passed."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(header),
        **special_tokens(header),
        clean_up_tokenization_spaces=False,
        chat_template=chat_template(header) or None,
        model_max_length=header.number(f"{header.architecture}.context_length"),
    )


def make_tokenizer(header: Header) -> Tokenizer:
    """Build the tokenizer. header: that check_tokenizer passed."""
    from tokenizers import AddedToken

    is_byte_level = header.text(f"{_PREFIX}model") == _BYTE_LEVEL
    tokenizer = _byte_level(header) if is_byte_level else _of_pieces(header)
    kinds = _list(header, "token_type", kind=int)
    for token, kind in zip(_list(header, "tokens", kind=str), kinds, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    _frame(tokenizer, header, usual=not is_byte_level)
    return tokenizer


def _vocabulary(header: Header) -> dict[str, int]:
    kinds = _list(header, "token_type", kind=int)
    tokens = enumerate(zip(_list(header, "tokens", kind=str), kinds, strict=True))
    return {token: number for number, (token, kind) in tokens if kind != _UNUSED}


def _byte_level(header: Header) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = header.text(f"{_PREFIX}pre")
    pairs = [merge.partition(" ") for merge in _list(header, "merges", kind=str)]
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(models.BPE(_vocabulary(header), merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _WORDS[pre]]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_pieces(header: Header) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary, unknown = _vocabulary(header), special_tokens(header).get("unk_token")
    scores = _list(header, "scores", kind=float)
    merges = [
        ((piece[:cut], piece[cut:]), scores[number])
        for piece, number in vocabulary.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: -merge[1])  # the piece with the highest score is merged first
    pairs = [pair for pair, _ in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    is_prefixed = header.metadata.get(f"{_PREFIX}add_space_prefix", True) is True
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if is_prefixed else spaces
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if is_prefixed else [])])
    return tokenizer


def _frame(tokenizer: Tokenizer, header: Header, *, usual: bool) -> None:
    """Have a text begin and end as the file says. A chat template writes its own tokens, and is not framed. usual:
    whether a tokenizer of this kind begins a text with its first token where the file does not say."""
    from tokenizers import processors

    special = special_tokens(header)
    begins = header.metadata.get(f"{_PREFIX}add_bos_token", usual) is True and "bos_token" in special
    ends = header.metadata.get(f"{_PREFIX}add_eos_token", False) is True
    around = [*([special["bos_token"]] if begins else []), "$A", *([special["eos_token"]] if ends else [])]
    if len(around) > 1:
        ids = [(token, tokenizer.token_to_id(token)) for token in around if token != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
