import pyarrow
import pyarrow.parquet


def make(folder):
    rows = {
        "prompt": ["q"],
        "chosen": [
            [
                {"role": "system", "content": "s", "name": None},
                {"role": "user", "content": "q", "name": "Ada"},
                {"role": "assistant", "content": "a", "name": None},
            ]
        ],
        "rejected": [[{"role": "assistant", "content": "b"}]],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "p.parquet")
