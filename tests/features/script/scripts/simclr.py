"""Contrastive pretraining with a linear probe: two optimizers, own steps, zipped labelled and unlabelled data."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

UNLABELED_BATCH_SIZE = 48
LABELED_BATCH_SIZE = 16
NUM_EPOCHS = 2
TEMPERATURE = 0.1
WIDTH = 16

keras.utils.set_random_seed(4)
rng = np.random.default_rng(4)
shades = rng.uniform(0, 255, size=(4, 1, 1, 3))
labels = rng.integers(0, 4, size=320)
images = np.clip(shades[labels] + rng.normal(0, 30, size=(320, 24, 24, 3)), 0, 255).astype("float32")

unlabeled_dataset = tf.data.Dataset.from_tensor_slices(images[:192]).shuffle(192).batch(UNLABELED_BATCH_SIZE)
labeled_dataset = tf.data.Dataset.from_tensor_slices((images[192:256], labels[192:256]))
labeled_dataset = labeled_dataset.shuffle(64).batch(LABELED_BATCH_SIZE)
test_dataset = tf.data.Dataset.from_tensor_slices((images[256:], labels[256:])).batch(32)
train_dataset = tf.data.Dataset.zip((unlabeled_dataset, labeled_dataset)).prefetch(tf.data.AUTOTUNE)


def get_augmenter(zoom, brightness):
    return keras.Sequential(
        [
            layers.Rescaling(1 / 255),
            layers.RandomFlip("horizontal"),
            layers.RandomTranslation(zoom / 2, zoom / 2),
            layers.RandomBrightness(brightness, value_range=(0, 1)),
        ]
    )


def get_encoder():
    return keras.Sequential(
        [
            layers.Conv2D(WIDTH, 3, strides=2, activation="relu"),
            layers.Conv2D(WIDTH, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(WIDTH, activation="relu"),
        ],
        name="encoder",
    )


class ContrastiveModel(keras.Model):
    """An encoder that learns from pairs of views, and a linear probe that learns from labels."""

    def __init__(self):
        super().__init__()
        self.contrastive_augmenter = get_augmenter(0.25, 0.5)
        self.classification_augmenter = get_augmenter(0.1, 0.2)
        self.encoder = get_encoder()
        self.projection_head = keras.Sequential([layers.Dense(WIDTH, activation="relu"), layers.Dense(WIDTH)])
        self.linear_probe = keras.Sequential([layers.Dense(4)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [
            self.contrastive_loss_tracker,
            self.contrastive_accuracy,
            self.probe_loss_tracker,
            self.probe_accuracy,
        ]

    def contrastive_loss(self, projections_1, projections_2):
        projections_1 = ops.normalize(projections_1, axis=1)
        projections_2 = ops.normalize(projections_2, axis=1)
        similarities = ops.matmul(projections_1, ops.transpose(projections_2)) / TEMPERATURE
        contrastive_labels = ops.arange(ops.shape(projections_1)[0])
        self.contrastive_accuracy.update_state(contrastive_labels, similarities)
        self.contrastive_accuracy.update_state(contrastive_labels, ops.transpose(similarities))
        loss_1_2 = keras.losses.sparse_categorical_crossentropy(contrastive_labels, similarities, from_logits=True)
        loss_2_1 = keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, ops.transpose(similarities), from_logits=True
        )
        return ops.mean(loss_1_2 + loss_2_1) / 2

    def train_step(self, data):
        unlabeled_images, (labeled_images, labels) = data
        both = ops.concatenate((unlabeled_images, labeled_images), axis=0)
        views_1 = self.contrastive_augmenter(both, training=True)
        views_2 = self.contrastive_augmenter(both, training=True)
        with tf.GradientTape() as tape:
            projections_1 = self.projection_head(self.encoder(views_1, training=True), training=True)
            projections_2 = self.projection_head(self.encoder(views_2, training=True), training=True)
            contrastive_loss = self.contrastive_loss(projections_1, projections_2)
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(contrastive_loss, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.contrastive_loss_tracker.update_state(contrastive_loss)

        preprocessed = self.classification_augmenter(labeled_images, training=True)
        with tf.GradientTape() as tape:
            class_logits = self.linear_probe(self.encoder(preprocessed, training=False), training=True)
            probe_loss = self.probe_loss(labels, class_logits)
        gradients = tape.gradient(probe_loss, self.linear_probe.trainable_weights)
        self.probe_optimizer.apply_gradients(zip(gradients, self.linear_probe.trainable_weights, strict=True))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, class_logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        labeled_images, labels = data
        preprocessed = self.classification_augmenter(labeled_images, training=False)
        class_logits = self.linear_probe(self.encoder(preprocessed, training=False), training=False)
        self.probe_loss_tracker.update_state(self.probe_loss(labels, class_logits))
        self.probe_accuracy.update_state(labels, class_logits)
        return {metric.name: metric.result() for metric in self.metrics[2:]}


pretraining_model = ContrastiveModel()
pretraining_model.compile(
    contrastive_optimizer=keras.optimizers.Adam(),
    probe_optimizer=keras.optimizers.Adam(),
)
pretraining_history = pretraining_model.fit(train_dataset, epochs=NUM_EPOCHS, validation_data=test_dataset)
print("Best validation accuracy:", max(pretraining_history.history["val_p_acc"]))

finetuning_model = keras.Sequential(
    [get_augmenter(0.1, 0.2), pretraining_model.encoder, layers.Dense(4)],
    name="finetuning_model",
)
finetuning_model.compile(
    optimizer=keras.optimizers.Adam(),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
)
finetuning_history = finetuning_model.fit(labeled_dataset, epochs=NUM_EPOCHS, validation_data=test_dataset)
