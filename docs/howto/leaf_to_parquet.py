"""A folder of LEAF's JSON files as Parquet: FOLDER FILE.parquet."""

import json
import sys
from pathlib import Path

import pandas as pd


def rows_of(folder):
    """Examples of all files of a folder, each with its user, who may have parts in several of them."""
    for file in sorted(Path(folder).glob("*.json")):
        for user, own in json.loads(file.read_text())["user_data"].items():
            for x, y in zip(own["x"], own["y"], strict=True):
                yield {"user": user, "x": x, "y": y}


if __name__ == "__main__":
    source, target = sys.argv[1:]
    pd.DataFrame(rows_of(source)).to_parquet(target)
