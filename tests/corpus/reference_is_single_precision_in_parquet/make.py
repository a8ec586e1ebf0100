import pyarrow
import pyarrow.parquet


def make(folder):
    rows = {"prompt": ["a", "b", "c"], "answer": pyarrow.array([0.1, 3.0, None], pyarrow.float32())}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "p.parquet")
