open("d.jsonl", "a").write('{"prompt": "7?"}\n')
