import pyarrow
import pyarrow.parquet


def make(folder):
    kind = pyarrow.list_(pyarrow.float32())
    rows = {"prompt": ["a", "b", "c"], "answer": pyarrow.array([[0.1, 3.0], [None], None], kind)}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "p.parquet")
