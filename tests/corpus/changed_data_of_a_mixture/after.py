open("f.jsonl", "a").write('{"prompt": "7?"}\n')
