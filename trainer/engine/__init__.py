"""What a run computes: the experiment, its plan, and the compiled train step.

Everything here is a function of a state and a batch, or of their shapes; nothing reads clocks or
files or handles signals. Read experiment.py first, then step.py and program.py.
"""
