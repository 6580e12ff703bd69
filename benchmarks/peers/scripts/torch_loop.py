"""A PyTorch loop as one writes it for data in memory.

python torch_loop.py mlp --file images.npz --epochs 8
"""

import torch
from contestant import load, parse_arguments, train
from torch import nn
from torch_models import MODELS


def main():
    args = parse_arguments()
    torch.manual_seed(0)
    x, y = map(torch.from_numpy, load(args.file))
    x, y = x.permute(0, 3, 1, 2).contiguous(), y.long()
    model = MODELS[args.model]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loss_of = nn.CrossEntropyLoss()
    steps = len(x) // args.batch_size

    def take_epoch():
        hits = torch.zeros(())
        for chosen in torch.randperm(len(x))[: steps * args.batch_size].split(args.batch_size):
            targets = y[chosen]
            logits = model(x[chosen])
            loss = loss_of(logits, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits += (logits.detach().argmax(dim=1) == targets).float().mean()
        return hits / steps

    train(args.epochs, steps * args.batch_size, take_epoch)


if __name__ == "__main__":
    main()
