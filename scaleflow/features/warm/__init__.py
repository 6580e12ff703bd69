"""The warm server: an interpreter that has imported everything and forks commands, which then start in an instant."""
