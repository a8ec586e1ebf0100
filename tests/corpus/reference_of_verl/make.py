import pyarrow
import pyarrow.parquet


def make(folder):
    rows = {
        "data_source": ["gsm8k"],
        "prompt": [[{"role": "user", "content": "1 + 1?"}]],
        "reward_model": [{"style": "rule", "ground_truth": "2"}],
        "extra_info": [{"index": 0}],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "p.parquet")
