"""Folds: a model for each, with scikit-learn's StratifiedKFold, and the mean of the scores."""

import keras
import numpy as np
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

NUM_FOLDS = 3
EPOCHS = 2
BATCH_SIZE = 32

keras.utils.set_random_seed(31)
rng = np.random.default_rng(31)
targets = rng.integers(0, 2, size=300)
inputs = rng.normal(loc=targets[:, np.newaxis] * 0.8, size=(300, 7)).astype("float32")

acc_per_fold = []
loss_per_fold = []
histories = []
kfold = StratifiedKFold(n_splits=NUM_FOLDS, shuffle=True, random_state=31)
for fold_no, (train, test) in enumerate(kfold.split(inputs, targets), start=1):
    scaler = StandardScaler().fit(inputs[train])
    model = keras.Sequential(
        [
            keras.Input((7,)),
            keras.layers.Dense(12, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
    print(f"Training for fold {fold_no} ...")
    history = model.fit(
        scaler.transform(inputs[train]), targets[train], batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0
    )
    histories.append(history.history)
    scores = model.evaluate(scaler.transform(inputs[test]), targets[test], verbose=0)
    print(f"Score for fold {fold_no}: loss {scores[0]:.4f}, accuracy {scores[1]:.2%}")
    loss_per_fold.append(scores[0])
    acc_per_fold.append(scores[1])

print(f"Average accuracy: {np.mean(acc_per_fold):.2%} (+- {np.std(acc_per_fold):.2%})")
print(f"Average loss: {np.mean(loss_per_fold):.4f}")
