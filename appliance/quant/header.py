"""The JSON header of a profile, held to its shape before anything reads it. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.terms.schemes import Scheme

Number_ = float  # also none that is finite: the error of a layer that answers nothing
Count_ = Annotated[int, Field(ge=0, le=2**62)]
Text_ = Annotated[str, Field(max_length=4096)]
Names_ = Annotated[list[Text_], Field(strict=True)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Settings(_Part):
    strength: Number_
    error_budget: Number_ | None
    ignore: Names_
    prompts: Count_
    max_tokens: Count_


class _Group(_Part):
    norm: Text_
    linears: Names_


class _Layer(_Part):
    layer: Names_
    linears: Annotated[list[Text_], Field(min_length=1)]
    weight_error: Number_
    output_error: Number_
    output_error_plain: Number_
    kept: bool


class _Predicted(_Part):
    tokens: Count_
    kl: Number_
    k3_kl: Number_
    kl_tokens: Number_
    probs_diff_mean: Number_
    weight_max: Number_


class _Memory(_Part):
    peak_bytes: Count_
    largest_layer_bytes: Count_
    model_bytes: Count_


class _Header(_Part):
    """As `quant.profile.Profile.header` writes it; a test holds the two together."""

    schema_version: int
    kind: Text_
    model: Text_
    revision: Text_
    model_hash: Text_
    data_hash: Text_
    donor: Text_
    versions: dict[str, Text_ | None]
    scheme: Annotated[Scheme, Field(strict=False)]
    settings: _Settings
    smoothing: list[_Group]
    layers: list[_Layer]
    suggested_ignore: Names_
    predicted: _Predicted | None
    memory: _Memory | None


def header_problem(header: dict[str, object]) -> str:
    """What is wrong with the first faulty part, or an empty text."""
    try:
        _Header.model_validate(header)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return ""
