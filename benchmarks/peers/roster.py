"""All peers, in the order of the table's columns."""

from __future__ import annotations

from benchmarks.peers.cublas import CuBlas
from benchmarks.peers.cublaslt import CuBlasLt
from benchmarks.peers.gemmsmith import Gemmsmith
from benchmarks.peers.peer import Peer
from benchmarks.peers.quack import Quack
from benchmarks.peers.triton import Triton

PEERS: tuple[Peer, ...] = (CuBlas(), CuBlasLt(), Triton(), Quack(), Gemmsmith())


def by_name(name: str) -> Peer:
    return {peer.name: peer for peer in PEERS}[name]
