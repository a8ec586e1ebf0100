def f(step, answer):
    return 1.0
