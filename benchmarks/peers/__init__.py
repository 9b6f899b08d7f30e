"""gemmsmith beside what else runs a matrix product on the same GPU: `python -m benchmarks.peers`.

Every peer is one small file behind the interface of peer.py. All run on the same operands under
the tuner's own protocol (tuner/measure): CUDA-graph replays over rotating operands larger than L2,
paired shuffled rounds, medians and bootstrap intervals. An output is compared with FP32 before its
peer is timed.
"""
