"""Side by side with other software, on this machine, in one run: `megarl bench [NAME ...]`.

    run.py: the command --> names.py: what there is --> frame.py: cases, round by round
        --> contender.py: one contender in a fresh process --> table.py: the table and the JSON file

Each contender of a case is set up and timed in fresh processes, in alternating order (A B, B A, A B). Outputs are
compared first. The figure is the median over the processes, each of which gives the median of its calls; beside it
stand the fastest and the slowest process, the load of the machine and all versions.

How to add a bench:
1. A module here with `CASES: tuple[Case, ...]` and one function for each contender:
   `setup(**arguments) -> call`. `setup` imports, makes the inputs from a fixed seed and is not timed; `call()` is
   timed, and returns its output as a numpy array, or an `Outcome` where it has figures of its own (a packing
   efficiency) or measures itself (ranks that it starts), or None. Ours comes first: the others are compared with it.
2. A line in names.py.
3. A contender of other software gets it through peers.py, which says how to install what is missing; the bench
   then shows that as a row and goes on.
"""
