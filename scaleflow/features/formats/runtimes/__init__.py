"""The formats, each in a module with its converter and its runtime."""
