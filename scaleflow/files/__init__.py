"""Files and object stores: addresses, formats, caches. Does not import TensorFlow."""
