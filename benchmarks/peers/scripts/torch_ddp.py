"""Two workers with a thread each in PyTorch: DistributedDataParallel over gloo, or two unconnected runs.

python torch_ddp.py cnn --file images.npz --epochs 8 [--unconnected]
"""

import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from contestant import load, parse_arguments
from torch import distributed, multiprocessing, nn
from torch_models import MODELS

WORKERS = 2


def work(rank, args, folder):
    """Trains on this worker's part of the examples, or on all; writes the speed and the accuracy of the last epoch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, load(args.file))
    x, y = x.permute(0, 3, 1, 2).contiguous(), y.long()
    model = MODELS[args.model]()
    if not args.unconnected:
        store = f"file://{folder}/store"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=WORKERS)
        x, y = x[rank::WORKERS], y[rank::WORKERS]
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loss_of = nn.CrossEntropyLoss()
    steps = len(x) // args.batch_size
    ends = []
    for _ in range(args.epochs):
        hits = torch.zeros(())
        for chosen in torch.randperm(len(x))[: steps * args.batch_size].split(args.batch_size):
            targets = y[chosen]
            logits = model(x[chosen])
            optimizer.zero_grad()
            loss_of(logits, targets).backward()
            optimizer.step()
            hits += (logits.detach().argmax(dim=1) == targets).float().mean()
        accuracy = float(hits / steps)
        ends.append(time.perf_counter())
    seconds = statistics.median(b - a for a, b in itertools.pairwise(ends))
    Path(folder, f"{rank}.json").write_text(json.dumps([steps * args.batch_size / seconds, accuracy]))
    if not args.unconnected:
        distributed.destroy_process_group()


def main():
    args = parse_arguments(lambda parser: parser.add_argument("--unconnected", action="store_true"))
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (args, folder), nprocs=WORKERS)
        speeds, accuracies = zip(*(json.loads(path.read_text()) for path in Path(folder).glob("*.json")), strict=True)
    print(json.dumps({"examples_per_second": sum(speeds), "accuracy": min(accuracies)}))


if __name__ == "__main__":
    main()
