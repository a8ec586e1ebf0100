import pyarrow
import pyarrow.parquet


def make(folder):
    rows = {"question": ["a", "b", "c"], "answer": pyarrow.array([5.0, float("nan"), 2.5])}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "p.parquet")
