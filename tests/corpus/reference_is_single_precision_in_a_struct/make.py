import pyarrow
import pyarrow.parquet


def make(folder):
    kind = pyarrow.struct([("ground_truth", pyarrow.float32())])
    values = [{"ground_truth": 0.1}, {"ground_truth": 123456.7}]
    rows = {"prompt": ["a", "b"], "reward_model": pyarrow.array(values, kind)}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "p.parquet")
