open("data/b.jsonl", "w").write('{"prompt": "7?"}\n')
