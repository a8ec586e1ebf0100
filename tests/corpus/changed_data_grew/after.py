with open("d.jsonl", "a") as file:
    file.write('{"prompt": "9?"}\n')
