open("e.jsonl", "a").write('{"prompt": "1?"}\n')
