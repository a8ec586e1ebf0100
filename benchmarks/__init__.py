"""Parts of megarl timed side by side with other software on one machine: `python -m benchmarks [NAME ...]`.

    run.py: the command --> names.py: the list of benchmarks --> frame.py: cases, round by round
        --> contender.py: one contender in a fresh process --> table.py: the table and the JSON file

Each contender of a case is set up and timed in fresh processes, in alternating order (A B, B A, A B). Outputs are
compared first. The result is the median over the processes, each of which reports the median of its calls, with the
fastest and the slowest process, the load of the machine and all versions.

To add a benchmark:
1. Write a module here with `CASES: tuple[Case, ...]` and one function for each contender:
   `setup(**arguments) -> call`. `setup` imports, makes the inputs from a fixed seed and is not timed. `call()` is timed
   and returns its output as a numpy array, None, or an `Outcome` where it reports more figures (a packing efficiency)
   or its own time (of ranks that it starts). megarl comes first: the others are compared with it.
2. Add a line to names.py.
3. Import other software through peers.py. If it is missing, the benchmark shows how to install it as a row and
   continues.
"""
