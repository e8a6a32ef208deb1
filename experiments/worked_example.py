"""The paper's Figure 4 with the algorithm's own numbers: one all-reduce at P = 4, step by step.

    python experiments/worked_example.py

Two values a segment and a group, symmetric 4 bits (Eq. 8). The input is that of `tests/test_reference.py`; every line is read from the
reference's record, nothing is computed here.
"""

from __future__ import annotations

import torch

from echoreduce import QuantConfig
from echoreduce import reference as ref

INPUT = torch.tensor(
    [
        [1.3, -0.4, 0.2, 2.1, -1.7, 0.6, 0.9, -0.8],
        [-0.6, 1.9, 1.1, -0.3, 0.4, -2.2, 0.7, 1.5],
        [2.4, 0.5, -1.2, 0.8, 1.6, 0.1, -0.9, 0.3],
        [0.2, -1.1, 0.7, 1.4, -0.5, 0.9, 2.0, -1.6],
    ]
)


def row(values: torch.Tensor, digits: int = 3) -> str:
    """Numbers in columns."""
    return " ".join(f"{value:8.{digits}f}" for value in values.reshape(-1).tolist())


def main() -> None:
    """Print the record."""
    quant = QuantConfig(group_size=2, policy="symmetric")
    record = ref.trace(INPUT, quant)
    assert record.gathered is not None, "two-shot gathers"
    print("contributions, rank by rank (segment j: columns 2j and 2j + 1, owned by rank j)")
    for rank in range(4):
        print(f"  rank {rank}   {row(INPUT[rank], 1)}")
    print("push: codes (sent with 7 added) and scale of each segment that the rank does not own")
    for rank in range(4):
        for segment in range(4):
            if segment != rank:
                codes = (record.pushed.codes()[rank, segment, 0].int() - 7).tolist()
                scale = record.pushed.grid.scale[rank, segment, 0]
                print(f"  rank {rank} -> owner {segment}   codes {codes[0]:2d} {codes[1]:2d}   scale {scale:.8f}")
    print("reduce: what each owner adds, in rank order, its own segment in full precision")
    for segment in range(4):
        copies = " + ".join(f"({row(record.received[rank, segment, 0]).strip()})" for rank in range(4))
        print(f"  owner {segment}   {copies} = ({row(record.sums[segment, 0]).strip()})")
    print("gather: the rounded sum that every rank receives")
    for segment in range(4):
        codes = (record.gathered.codes()[segment, 0].int() - 7).tolist()
        print(f"  owner {segment} -> all   codes {codes[0]:2d} {codes[1]:2d}   scale {record.gathered.grid.scale[segment, 0]:.8f}")
    print("tail: what every rank, owner included, reads")
    print(f"  output     {row(record.values)}")
    print(f"  exact sum  {row(INPUT.sum(0))}")
    print(f"  delta      {row(ref.injected_error(record))}")
    residuals, _ = ref.local_residuals(record)
    print("local residuals: the rounding errors that each rank made; they sum to -delta")
    for rank in range(4):
        print(f"  rank {rank}   {row(residuals[rank])}")
    print(f"  sum      {row(residuals.sum(0))}")


if __name__ == "__main__":
    main()
