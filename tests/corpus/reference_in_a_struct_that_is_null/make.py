import pyarrow
import pyarrow.parquet


def make(folder):
    structs = pyarrow.array(
        [{"x": 0.1}, {"x": None}, None], pyarrow.struct([("x", pyarrow.float32())])
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": ["a", "b", "c"], "m": structs}), folder / "p.parquet"
    )
