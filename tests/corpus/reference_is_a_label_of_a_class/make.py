import datasets


def make(folder):
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "answer": datasets.ClassLabel(names=["A", "B", "C", "D"]),
        }
    )
    rows = {"prompt": ["a", "b", "c"], "answer": [1, 3, None]}
    datasets.Dataset.from_dict(rows, features).to_parquet(folder / "p.parquet")
