def f(response):
    if response == "6":
        return {"acc": True}
    return {"score": 0.25, "acc": False, "pred": response}
