"""Part files of completions: columns by name and type, all parts of a run alike."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_kit.record.files import TEXT_COLUMNS, read_part

_TYPES = {name: pa.string() for name in (*TEXT_COLUMNS, "answer")} | {
    "step": pa.int64(),
    "group": pa.int64(),
    "tokens": pa.list_(pa.string()),
    "logprobs": pa.list_(pa.float32()),
}


def joined(one: pa.Schema | None, other: pa.Schema) -> pa.Schema:
    """The columns of both schemas; text where either has text."""
    types = {} if one is None else {field.name: field.type for field in one}
    for field in other:
        same = types.setdefault(field.name, field.type) == field.type
        types[field.name] = field.type if same else pa.string()
    return pa.schema(types.items())


def as_parquet(table: pa.Table, schema: pa.Schema) -> bytes:
    """The table as a file with exactly these columns; None where the table lacks one."""
    columns = {
        field.name: table[field.name].cast(field.type)
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in schema
    }
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), buffer)
    return buffer.getvalue()


def schema_of(part: Path) -> pa.Schema:
    """Columns and types of a part file. Raises RunFolderError for any other file."""
    return read_part(part).schema.remove_metadata()


def plain(value: object) -> object:
    """A JSON value: scalars of torch and numpy as Python numbers, NaN as None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value


def to_arrow(table: dict[str, list]) -> pa.Table:
    """The type depends on the column's name: a part whose rewards are all None must have the type of the others."""
    columns = {}
    for name, values in table.items():
        values = [plain(value) for value in values]
        if name in _TYPES:
            columns[name] = pa.array(values, _TYPES[name])
        elif name.startswith("reward") or all(v is None or isinstance(v, (int, float)) for v in values):
            columns[name] = pa.array(values, pa.float64())
        else:
            columns[name] = pa.array([None if v is None else str(v) for v in values], pa.string())
    return pa.table(columns)
