"""Champion and challenger on the same examples."""
