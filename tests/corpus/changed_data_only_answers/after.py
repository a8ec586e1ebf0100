text = open("d.jsonl").read()
open("d.jsonl", "w").write(text.replace('"answer": "2"', '"answer": "3"'))
