"""A split of one of TensorFlow Federated's SQLite files as Parquet: FILE.sqlite SPLIT FILE.parquet."""

import sqlite3
import sys

import pandas as pd
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FIELD = descriptor_pb2.FieldDescriptorProto
# tf.train.Example: message, field, number, type, message type, repeated
LAYOUT = [
    ("Bytes", "value", 1, FIELD.TYPE_BYTES, None, True),
    ("Floats", "value", 1, FIELD.TYPE_FLOAT, None, True),
    ("Ints", "value", 1, FIELD.TYPE_INT64, None, True),
    ("Feature", "bytes", 1, FIELD.TYPE_MESSAGE, "Bytes", False),
    ("Feature", "floats", 2, FIELD.TYPE_MESSAGE, "Floats", False),
    ("Feature", "ints", 3, FIELD.TYPE_MESSAGE, "Ints", False),
    ("Entry", "key", 1, FIELD.TYPE_STRING, None, False),
    ("Entry", "value", 2, FIELD.TYPE_MESSAGE, "Feature", False),
    ("Features", "feature", 1, FIELD.TYPE_MESSAGE, "Entry", True),
    ("Example", "features", 1, FIELD.TYPE_MESSAGE, "Features", False),
]


def example_class():
    """tf.train.Example, without TensorFlow."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tff", syntax="proto3")
    messages = {}
    for owner, name, number, kind, of, repeated in LAYOUT:
        if owner not in messages:
            messages[owner] = file.message_type.add(name=owner)
        label = FIELD.LABEL_REPEATED if repeated else FIELD.LABEL_OPTIONAL
        field = messages[owner].field.add(name=name, number=number, type=kind, label=label)
        if of:
            field.type_name = f".tff.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tff.Example"))


Example = example_class()


def row_of(user, message):
    """Features of one serialized example, by name."""
    row = {"user": str(user)}
    for entry in Example.FromString(message).features.feature:
        if entry.value.bytes.value:
            values = [value.decode() for value in entry.value.bytes.value]
        else:
            values = [*entry.value.floats.value, *entry.value.ints.value]
        row[entry.key] = values[0] if len(values) == 1 else values
    return row


if __name__ == "__main__":
    source, split, target = sys.argv[1:]
    query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ?"
    rows = [row_of(*row) for row in sqlite3.connect(source).execute(query, (split,))]
    pd.DataFrame(rows).to_parquet(target)
