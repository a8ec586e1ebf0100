import pyarrow
import pyarrow.parquet


def make(folder):
    table = pyarrow.table({"prompt": ["1 - 1?", "2 - 2?"], "answer": [b"0", b"0"]})
    pyarrow.parquet.write_table(table, folder / "p.parquet")
