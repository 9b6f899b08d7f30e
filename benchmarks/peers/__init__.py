"""gemmsmith and other libraries for matrix products on the same GPU: `python -m benchmarks.peers`.

Every peer is a small file behind the interface of peer.py. All run on the same operands with the
tuner's protocol (tuner/measure): CUDA-graph replays over rotating operands larger than L2, paired
shuffled rounds, medians and bootstrap intervals. A peer's output is compared with FP32 before it is
timed.
"""
