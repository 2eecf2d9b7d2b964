"""Two shuffled epochs, each sample exactly once, in an order that any number of processes shares.

Run it with one, two and three processes: every run prints the same lines.
"""

from torch.utils.data import DataLoader, Dataset

import accelfn as af


class Squares(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


def main() -> None:
    with af.init_context(dataloader_config=af.DataLoaderConfiguration(data_seed=5)) as ctx:
        loader = af.prepare(ctx, DataLoader(Squares(), batch_size=3, shuffle=True, num_workers=1))
        for epoch in range(2):
            rows: list[int] = []
            total = 0
            for (index, square), micro in af.microbatches(ctx, loader):
                found = af.gather_for_metrics(ctx, {"index": index, "square": square}, micro)
                rows += [int(row) for row in found["index"]]
                total += int(found["square"].sum())
            if sorted(rows) != list(range(23)):
                raise RuntimeError(f"rank {ctx.rank} got {rows}")
            af.print_once(ctx, f"epoch {epoch}: sum {total}, order {rows}")


if __name__ == "__main__":
    main()
