"""What is known of a GGUF file before it is converted: whether it is read, which sizes its model has, where it is
from. No torch."""

from __future__ import annotations

import functools
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from appliance.files import digest_of
from appliance.gguf.families import ROPE_FACTORS, model_shape
from appliance.gguf.header import UNQUANTISED, GgufError, Header, read_header
from appliance.gguf.tokenizer import chat_template, check_tokenizer
from appliance.terms.shapes import ModelShape

SUFFIX = ".gguf"


@dataclass(frozen=True)
class GgufFacts:
    sha256: str = ""
    """SHA-256 of the file, 64 hex digits; empty where it cannot be read."""
    problem: str = ""
    """Reason why it is not read, or empty."""
    remedy: str = ""
    shape: ModelShape | None = None
    chat_template: str = ""
    """Template that makes a prompt of messages, empty where the file does not say."""
    provenance: str = ""
    """Origin and licence of the model, and what was done to its weights, as the file says."""


def is_gguf(path: str) -> bool:
    """Tell whether `model.path` means a GGUF file."""
    return path.lower().endswith(SUFFIX) and not os.path.isdir(path)


def gguf_facts(path: Path) -> GgufFacts:
    """Return facts about the file as it is now. The file is read in full once in this process, and again when it
    changes."""
    try:
        stat = path.stat()
    except OSError as error:
        return GgufFacts(problem=f"it cannot be read: {error.strerror}", remedy="correct the path")
    return _facts(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@functools.lru_cache
def _facts(path: Path, *_stamp: int) -> GgufFacts:
    sha256 = digest_of(path)
    if not sha256:
        problem, remedy = "it cannot be read, or is no file", "correct the path, or let its owner chmod it"
        return GgufFacts(problem=problem, remedy=remedy)
    try:
        header = read_header(path)
        shape = model_shape(header, rope_factors=read_rope_factors(path, header))
        check_tokenizer(header)
    except GgufError as error:
        return GgufFacts(sha256, problem=error.message, remedy=error.hint)
    except OSError as error:
        problem, remedy = f"it cannot be read: {error.strerror}", "look at the disk that it lies on"
        return GgufFacts(sha256, problem=problem, remedy=remedy)
    return GgufFacts(
        sha256,
        shape=shape,
        chat_template=chat_template(header),
        provenance=_provenance(path, header, sha256=sha256),
    )


def check_gguf(path: Path) -> Header:
    """Check a GGUF file and return its header. Raises GgufError for a file that is refused, OSError where it cannot be
    read."""
    header = read_header(path)
    model_shape(header, rope_factors=read_rope_factors(path, header))
    check_tokenizer(header)
    return header


def read_rope_factors(path: Path, header: Header) -> tuple[float, ...]:
    """Read the tensor that frequencies are divided by; empty where the file has none. Raises GgufError where they are
    no float32."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    if tensor.type.name != "F32" or tensor.size > 1 << 16:
        raise GgufError(f"its {ROPE_FACTORS} is in {tensor.type.name}", hint="convert the model again")
    with path.open("rb") as file:
        file.seek(header.start + tensor.offset)
        return struct.unpack(f"<{tensor.size // 4}f", file.read(tensor.size))


def _provenance(path: Path, header: Header, *, sha256: str) -> str:
    makers, name = header.text("general.organization"), header.text("general.name")
    model = " ".join(filter(None, (makers, name))) or "a model without a name"
    licence = header.text("general.license")
    stands = f"licence {licence}" if licence else "the file names no licence"
    quantised = [kind for kind in header.types if kind not in UNQUANTISED]
    weights = f"dequantised from {', '.join(quantised)}" if quantised else f"weights in {', '.join(header.types)}"
    return f"{model}, from {path.name} (SHA-256 {sha256}); {stands}; {weights}"
