class f:
    def __init__(self, response):
        self.response = response

    def score(self):
        return 1.0
