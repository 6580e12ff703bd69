"""A recommender: embeddings of users and films, ratings scaled to [0, 1] as targets of a binary crossentropy."""

import keras
import numpy as np
import pandas as pd
from keras import layers, ops

EMBEDDING_SIZE = 8

keras.utils.set_random_seed(14)
rng = np.random.default_rng(14)
tastes = rng.normal(size=(50, 3))
traits = rng.normal(size=(80, 3))
ratings = pd.DataFrame({"userId": rng.integers(0, 50, 600), "movieId": 100 + rng.integers(0, 80, 600)})
scores = (tastes[ratings["userId"]] * traits[ratings["movieId"] - 100]).sum(axis=1) + 3
ratings["rating"] = np.clip(np.round(scores * 2) / 2, 0.5, 5.0)

user_ids = ratings["userId"].unique().tolist()
user2user_encoded = {user: index for index, user in enumerate(user_ids)}
movie_ids = ratings["movieId"].unique().tolist()
movie2movie_encoded = {movie: index for index, movie in enumerate(movie_ids)}
ratings["user"] = ratings["userId"].map(user2user_encoded)
ratings["movie"] = ratings["movieId"].map(movie2movie_encoded)
num_users, num_movies = len(user_ids), len(movie_ids)
min_rating, max_rating = ratings["rating"].min(), ratings["rating"].max()
print(f"Number of users: {num_users}, number of movies: {num_movies}")

ratings = ratings.sample(frac=1, random_state=42)
x = ratings[["user", "movie"]].values
y = ((ratings["rating"] - min_rating) / (max_rating - min_rating)).values
train_indices = int(0.9 * ratings.shape[0])
x_train, x_val, y_train, y_val = x[:train_indices], x[train_indices:], y[:train_indices], y[train_indices:]


class RecommenderNet(keras.Model):
    """The dot product of two embeddings, plus biases, through a sigmoid."""

    def __init__(self, num_users, num_movies, embedding_size, **kwargs):
        super().__init__(**kwargs)
        regularizer = keras.regularizers.l2(1e-6)
        self.user_embedding = layers.Embedding(num_users, embedding_size, embeddings_regularizer=regularizer)
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(num_movies, embedding_size, embeddings_regularizer=regularizer)
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user_vector = self.user_embedding(inputs[:, 0])
        movie_vector = self.movie_embedding(inputs[:, 1])
        match = ops.sum(user_vector * movie_vector, axis=1, keepdims=True)
        return ops.sigmoid(match + self.user_bias(inputs[:, 0]) + self.movie_bias(inputs[:, 1]))


model = RecommenderNet(num_users, num_movies, EMBEDDING_SIZE)
model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(learning_rate=0.001))
history = model.fit(x=x_train, y=y_train, batch_size=32, epochs=3, verbose=1, validation_data=(x_val, y_val))

unseen = np.array([[0, movie] for movie in range(num_movies)])
best = model.predict(unseen).flatten().argsort()[-5:][::-1]
print("Recommended:", [movie_ids[index] for index in best])
