"""D = alpha · A·B + beta · C in Triton; A is row-major, B column-major (`tn`), D row-major."""

import triton
import triton.language as tl


@triton.jit
def matmul(
    a, b, c, d, m, n, k, alpha, beta,
    row_a, column_b, row_c, row_d, batch_a, batch_b, batch_c, batch_d,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    # Eight rows of tiles at a time, so that tiles which run together share operands in L2.
    tiles_n = tl.cdiv(n, tile_n)
    band = tl.program_id(0) // (8 * tiles_n)
    height = min(tl.cdiv(m, tile_m) - band * 8, 8)
    place = tl.program_id(0) % (8 * tiles_n)
    rows = (band * 8 + place % height) * tile_m + tl.arange(0, tile_m)
    columns = place // height * tile_n + tl.arange(0, tile_n)
    depth = tl.arange(0, tile_k)
    batch = tl.program_id(2).to(tl.int64)
    from_a = a + batch * batch_a + (rows % m).to(tl.int64)[:, None] * row_a + depth[None, :]
    from_b = b + batch * batch_b + (columns % n).to(tl.int64)[None, :] * column_b + depth[:, None]
    sums = tl.zeros((tile_m, tile_n), dtype=tl.float32)
    for start in range(0, k, tile_k):
        left = k - start
        of_a = tl.load(from_a, mask=depth[None, :] < left, other=0.0)
        of_b = tl.load(from_b, mask=depth[:, None] < left, other=0.0)
        sums = tl.dot(of_a, of_b, sums)
        from_a += tile_k
        from_b += tile_k
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    rows = rows.to(tl.int64)[:, None]
    sums *= alpha
    if beta != 0:
        from_c = c + batch * batch_c + rows * row_c + columns[None, :]
        sums += beta * tl.load(from_c, mask=inside, other=0.0).to(tl.float32)
    to = d + batch * batch_d + rows * row_d + columns[None, :]
    tl.store(to, sums.to(d.dtype.element_ty), mask=inside)
