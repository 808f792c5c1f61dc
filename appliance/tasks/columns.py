"""Columns of parquet and Arrow as the rows that JSON would have."""

from __future__ import annotations

import datetime
import decimal
import functools
import json
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]


def plain_rows(batches: Iterable[pa.RecordBatch | pa.Table], left_out: set[str]) -> Iterator[Row]:
    """Yield rows as JSON would have them: a date, a decimal number as text. A column of bytes, such as images, is left
    out."""
    for batch in batches:
        columns = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name in left_out or has_bytes(column.type):
                left_out.add(name)
                continue
            try:
                column = _with_short_floats(_decoded(column))
                if _is_json(column.type):
                    columns[name] = column.to_pylist()
                else:
                    columns[name] = [*map(_as_json, column.to_pylist(maps_as_pydicts="lossy"))]
                if _has_halves(column.type):
                    columns[name] = [_with_short_halves(value, column.type) for value in columns[name]]
            except (TypeError, ValueError, ArithmeticError, NotImplementedError, RecursionError):
                left_out.add(name)
        yield from ({name: columns[name][row] for name in columns} for row in range(batch.num_rows))


def _parts(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type and those that it is made of."""
    yield kind
    yield from (part for place in range(kind.num_fields) for part in _parts(kind.field(place).type))


def has_bytes(kind: pa.DataType) -> bool:
    from pyarrow import types

    of_bytes = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(is_such(part) for part in _parts(kind) for is_such in of_bytes)


def _is_json(kind: pa.DataType) -> bool:
    """Tell whether a plain `to_pylist` gives what JSON has: of millions of rows the long way takes minutes."""
    from pyarrow import types

    scalar = (types.is_string, types.is_large_string, types.is_boolean, types.is_integer, types.is_floating)
    of_json = (*scalar, types.is_struct, types.is_list, types.is_large_list)
    return all(any(is_such(part) for is_such in of_json) for part in _parts(kind))


def _decoded(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return a column of categories, as pandas makes them, as one of its values."""
    from pyarrow import types

    return column.cast(column.type.value_type) if types.is_dictionary(column.type) else column


def _with_short_floats(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Write numbers of 32 bits as the shortest decimal that is one: 0.1 is not 0.10000000149011612. By way of text,
    which Arrow makes as short as the type allows."""
    import pyarrow as pa

    if not any(pa.types.is_float32(part) for part in _parts(column.type)):
        return column
    as_texts = _with_floats_as(column.type, pa.string())
    return column.cast(as_texts).cast(_with_floats_as(column.type, pa.float64()))


def _with_floats_as(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the same type with another one in place of each float of 32 bits."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_float32(kind):
        return other
    if types.is_struct(kind):
        return pa.struct([field.with_type(_with_floats_as(field.type, other)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_with_floats_as(kind.key_type, other), _with_floats_as(kind.item_type, other))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        member = kind.value_field.with_type(_with_floats_as(kind.value_type, other))
        size = (kind.list_size,) if types.is_fixed_size_list(kind) else ()
        return (pa.large_list if types.is_large_list(kind) else pa.list_)(member, *size)
    return kind


def _has_halves(kind: pa.DataType) -> bool:
    from pyarrow import types

    return any(map(types.is_float16, _parts(kind)))


def _with_short_halves(value: Any, kind: pa.DataType) -> Any:
    """Return a value of such a type, each number of 16 bits as the shortest decimal that is one: Arrow has no text of
    it."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_float16(kind):
        return _short_half(value) if value == value else value
    if types.is_struct(kind):
        return {field.name: _with_short_halves(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return {key: _with_short_halves(member, kind.item_type) for key, member in value.items()}
    if kind.num_fields == 1:  # a list of some size
        return [_with_short_halves(member, kind.field(0).type) for member in value]
    return value


@functools.cache  # there are 65,536
def _short_half(value: float) -> float:
    import numpy

    return float(str(numpy.float16(value)))


def _as_json(value: Any) -> Any:
    """Turn a value into one of JSON. Raises TypeError for what JSON cannot have."""
    return json.loads(json.dumps(value, default=_text))


def _text(value: object) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"  # str(Decimal("0.0000001")) has an exponent
    if isinstance(value, datetime.timedelta | uuid.UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
