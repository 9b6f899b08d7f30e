"""What a training program leaves outside its products' kernels, and what would be faster.

Each rule reads an observed step and names parts of it that have a faster form. Every part is then
run in both forms, with the program's own sizes, on this machine.
"""
