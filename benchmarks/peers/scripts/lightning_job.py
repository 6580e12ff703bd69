"""PyTorch Lightning with Hydra and its logger for MLflow.

MLFLOW_TRACKING_URI=sqlite:///mlflow.db python lightning_job.py
MLFLOW_TRACKING_URI=sqlite:///mlflow.db python lightning_job.py is_timed=true data.file=images.npz ...

The first is the default job: digits, an MLP, 20 epochs, a checkpoint after each, the test, the checkpoint as an
artifact.
"""

import json
import time

import hydra
import lightning
import numpy as np
import torch
from contestant import load, report
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, model, make_optimizer):
        super().__init__()
        self.model = model
        self.make_optimizer = make_optimizer
        self.loss_of = nn.CrossEntropyLoss()

    def share_results(self, batch, split):
        inputs, targets = batch
        logits = self.model(inputs)
        loss = self.loss_of(logits, targets)
        accuracy = (logits.detach().argmax(dim=1) == targets).float().mean()
        results = {f"{split}_loss": loss, f"{split}_accuracy": accuracy}
        self.log_dict(results, on_step=False, on_epoch=True, batch_size=len(targets))
        return loss

    def training_step(self, batch, index):
        return self.share_results(batch, "train")

    def validation_step(self, batch, index):
        self.share_results(batch, "validation")

    def test_step(self, batch, index):
        self.share_results(batch, "test")

    def configure_optimizers(self):
        return self.make_optimizer(self.model.parameters())


class Clock(Callback):
    def __init__(self):
        self.ends = []

    def on_train_epoch_end(self, trainer, module):
        self.ends.append(time.perf_counter())


def load_digits():
    """Train, validation and test split: images [n, 1, 8, 8] float32 and classes [n]."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(20).permutation(len(digits.target))
    test, validation, train = np.split(order, [359, 359 + 144])
    images = digits.images[:, None].astype(np.float32)
    return [(images[chosen], digits.target[chosen]) for chosen in (train, validation, test)]


def load_images(file):
    """The training split: images [n, channels, height, width] uint8 and classes [n]."""
    x, y = load(file)
    return [(np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y.astype(np.int64))]


def make_loader(arrays, batch_size, is_shuffled):
    """Reads whole batches by their indices: several times faster than one example at a time."""
    dataset = TensorDataset(*map(torch.from_numpy, arrays))
    sampler = RandomSampler(dataset) if is_shuffled else SequentialSampler(dataset)
    return DataLoader(dataset, sampler=BatchSampler(sampler, batch_size, drop_last=False), batch_size=None)


@hydra.main(version_base=None, config_path="conf", config_name="lightning_job")
def main(config):
    lightning.seed_everything(config.seed)
    splits = load_images(config.data.file) if config.data.file else load_digits()
    train, *others = (make_loader(split, config.data.batch_size, n == 0) for n, split in enumerate(splits))
    module = Classifier(hydra.utils.instantiate(config.model), hydra.utils.instantiate(config.optimizer))
    logger = hydra.utils.instantiate(config.logger)
    logger.log_hyperparams(OmegaConf.to_container(config))
    clock = Clock()
    options = {"callbacks": [clock], "enable_checkpointing": False}
    if not config.is_timed:
        options = {"callbacks": [ModelCheckpoint("checkpoints", every_n_epochs=1)]}
    trainer = hydra.utils.instantiate(config.trainer, logger=logger, **options)
    trainer.fit(module, train, others[0] if others else None)
    if config.is_timed:
        examples = len(splits[0][1])
        report(clock.ends, examples, float(trainer.callback_metrics["train_accuracy"]))
    else:
        (results,) = trainer.test(module, others[1], verbose=False)
        print(json.dumps({"accuracy": results["test_accuracy"]}))


if __name__ == "__main__":
    main()
