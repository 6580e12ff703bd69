"""`python -m scaleflow predict`: predictions of a tracked model for the rows of a table."""
