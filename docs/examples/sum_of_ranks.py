"""Every process adds its rank; each gets the sum. The smallest program to try a launch with."""

# pyright: basic
# Strict mode cannot type the collectives of torch.distributed, and an example stays free of ignores.

import os

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    try:
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        size = dist.get_world_size()
        if total.item() != size * (size - 1) / 2:
            raise RuntimeError(f"the ranks of {size} processes add up to {total.item()}")
        print(f"rank {os.environ['RANK']} of {size}: sum of ranks is {total.item():.0f}")
        # A process that leaves early can break the connections of one that is still starting.
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
