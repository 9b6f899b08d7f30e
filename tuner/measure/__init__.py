"""Times candidates against what torch runs today, and has them verified.

`statistics` is plain Python; nearly everything else runs in the measuring child process, the only
one that imports torch and holds a CUDA context.
"""
