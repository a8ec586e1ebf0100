def f(response, cases):
    return float(response in cases)
