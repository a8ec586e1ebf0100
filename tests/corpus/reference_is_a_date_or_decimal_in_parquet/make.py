import datetime
import decimal

import pyarrow
import pyarrow.parquet


def make(folder):
    rows = {
        "prompt": ["a"],
        "answer": pyarrow.array([datetime.date(2024, 1, 5)]),
        "reward_model": [{"ground_truth": decimal.Decimal("12.50")}],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "p.parquet")
