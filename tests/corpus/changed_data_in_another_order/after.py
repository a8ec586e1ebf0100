lines = open("d.jsonl").readlines()
open("d.jsonl", "w").writelines(lines[::-1])
