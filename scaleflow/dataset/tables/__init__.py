"""Tables: their files, options, columns and values."""
