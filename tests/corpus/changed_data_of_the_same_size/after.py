text = open("d.jsonl").read()
open("d.jsonl", "w").write(text.replace("2?", "two?"))
