"""What Nsight Compute counts of a winner and of the default, and torch's trace of both.

`records` is what a profile holds, `files` where profiles are kept; both need neither torch nor a
GPU. `recorder` makes a profile on a GPU, in processes of `launches` of their own: a profiler slows
what it watches, so nothing is timed there.
"""
