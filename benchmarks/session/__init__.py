"""What benchmarks/gpu_session.py is made of. Standard library only: nothing is installed yet."""
