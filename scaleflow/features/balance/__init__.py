"""How often the classes of the training split are drawn."""
