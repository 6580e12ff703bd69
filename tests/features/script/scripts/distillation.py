"""A teacher that is trained first, then a student with its own `train_step` that learns from the teacher."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(40)
rng = np.random.default_rng(40)
y = rng.integers(0, 4, size=360)
x = (rng.normal(size=(4, 16))[y] + rng.normal(size=(360, 16))).astype("float32")
x_train, y_train, x_test, y_test = x[:300], y[:300], x[300:], y[300:]


class Distiller(keras.Model):
    """Mixes the compiled loss of the student with the distance to the teacher."""

    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(self, distillation_loss_fn, alpha=0.1, temperature=3, **kwargs):
        super().compile(**kwargs)
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        teacher_pred = self.teacher(x, training=False)
        student_loss = super().compute_loss(x, y, y_pred, sample_weight, allow_empty)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature), ops.softmax(y_pred / self.temperature)
        )
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss * self.temperature**2

    def call(self, x):
        return self.student(x)


def build_network(units, name):
    return keras.Sequential([keras.Input((16,)), layers.Dense(units, "relu"), layers.Dense(4)], name=name)


teacher = build_network(48, "teacher")
student = build_network(6, "student")
student_scratch = keras.models.clone_model(student)

compile_args = {
    "optimizer": "adam",
    "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "metrics": ["sparse_categorical_accuracy"],
}
teacher.compile(**compile_args)
teacher_history = teacher.fit(x_train, y_train, epochs=2)
teacher.evaluate(x_test, y_test)

distiller = Distiller(student=student, teacher=teacher)
distiller.compile(
    distillation_loss_fn=keras.losses.KLDivergence(), **{**compile_args, "optimizer": keras.optimizers.Adam()}
)
distiller_history = distiller.fit(x_train, y_train, epochs=2)
distiller.evaluate(x_test, y_test)

student_scratch.compile(**{**compile_args, "optimizer": keras.optimizers.Adam()})
scratch_history = student_scratch.fit(x_train, y_train, epochs=2)
student_scratch.evaluate(x_test, y_test)
