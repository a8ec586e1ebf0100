import datasets


def make(folder):
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())}
    )
    rows = {"prompt": ["<image>What?"], "images": [[{"bytes": b"png", "path": None}]]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "p.parquet")
