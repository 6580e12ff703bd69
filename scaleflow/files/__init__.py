"""Files and object stores: addresses, formats, caches. Without TensorFlow."""
